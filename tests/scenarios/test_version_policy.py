"""Plays: a new version comes, gets its share, and falls back visibly; conversations stay where they are."""

from __future__ import annotations

from collections import Counter

from agentreach.v1.registry_pb2 import DRAINING
from agentreach.v1.registry_pb2 import VersionPolicy as Message
from reach.core import version_policy
from reach.core.agents import HEALTHY
from reach.core.trace import to_proto
from tests.support.core import CoreMesh, Process


def steer(core: CoreMesh, preferred: str = "", **weights: int) -> None:
    """Set the policy of type `echo`."""
    named = {name[1:].replace("_", "."): weight for name, weight in weights.items()}
    message = Message(agent_type="echo", preferred=preferred, weights=named)
    core.state.version_policies[version_policy.key_of(message)] = version_policy.from_proto(message, 1)


def fallbacks(core: CoreMesh) -> int:
    return sum(record.version_fallbacks for _, record in core.state.stats.types())


def two_versions(**fields: object) -> tuple[CoreMesh, Process, Process, Process]:
    """A mesh with echo/1 of version 1.0, echo/2 of 2.0, and a caller."""
    core = CoreMesh()
    old = core.agent("echo/1", version="1.0", **fields)
    new = core.agent("echo/2", version="2.0", **fields)
    return core, old, new, core.caller()


def test_requests_go_to_the_preferred_version_from_the_next_one_on() -> None:
    core, old, new, caller = two_versions()
    steer(core, "1.0")
    first = caller.request()
    steer(core, "2.0")
    second = caller.request()
    assert old.has(first) and new.has(second) and not new.has(first)
    old.answer(first)
    new.answer(second)
    assert fallbacks(core) == 0
    core.assert_settled()


def test_a_hash_key_draws_the_same_version_each_time() -> None:
    core, old, new, caller = two_versions()
    steer(core, v1_0=1, v2_0=1)
    for process in (old, new):
        process.handler = lambda at, envelope: at.answer(envelope, pump=False)
    for number in range(40):
        caller.request(f"k{number % 4}", agent_type="echo", hash_key=f"k{number % 4}")
    by_key = {
        key: {process.name for process in (old, new) for one in process.requests if one.payload.text == key}
        for key in ("k0", "k1", "k2", "k3")
    }
    assert all(len(where) == 1 for where in by_key.values()), by_key
    core.assert_settled()


def test_weights_split_requests_that_stand_alone() -> None:
    core, old, new, caller = two_versions()
    steer(core, v1_0=80, v2_0=20)
    for process in (old, new):
        process.handler = lambda at, envelope: at.answer(envelope, pump=False)
    for _ in range(400):
        caller.request()
    got = Counter({"old": len(old.requests), "new": len(new.requests)})
    assert 45 < got["new"] < 125 and got.total() == 400
    core.assert_settled()


def test_what_falls_back_is_counted_and_stands_in_the_trace() -> None:
    core, old, new, caller = two_versions(max_concurrency=1)
    steer(core, "2.0")
    first = caller.request()
    second = caller.request(trace_id="t" * 32)
    assert new.has(first) and old.has(second)
    assert fallbacks(core) == 1
    old.answer(second)
    new.answer(first)
    (message,) = to_proto(core.state.traces.find("t" * 32), "node").messages
    told = [stage.detail for stage in message.stages if stage.name == "version policy"]
    assert told == ["version 2.0 has nobody usable: 1.0 instead"]
    core.assert_settled()


def test_a_conversation_keeps_its_agent_when_the_policy_changes_and_new_ones_obey_it() -> None:
    core, old, new, caller = two_versions()
    for process in (old, new):
        process.handler = lambda at, envelope: at.answer(envelope, pump=False)
    steer(core, "1.0")
    for number in range(10):
        caller.request(session_id=f"s{number}")
    assert len(old.requests) == 10
    steer(core, "2.0")
    for number in range(20):
        caller.request(session_id=f"s{number}")
    assert len(old.requests) == 20 and len(new.requests) == 10
    assert {one.session_id for one in new.requests} == {f"s{number}" for number in range(10, 20)}
    core.assert_settled()


def test_sessions_are_drawn_by_their_hash_so_that_each_comes_to_its_version_again() -> None:
    homes: list[dict[str, str]] = []
    for _ in range(2):
        core, old, new, caller = two_versions()
        steer(core, v1_0=50, v2_0=50)
        for process in (old, new):
            process.handler = lambda at, envelope: at.answer(envelope, pump=False)
        for number in range(30):
            caller.request(session_id=f"s{number}")
        homes.append({one.session_id: process.name for process in (old, new) for one in process.requests})
        core.assert_settled()
    assert homes[0] == homes[1]
    assert 5 < list(homes[0].values()).count("echo-1") < 25


def test_a_session_whose_owner_drains_goes_to_the_version_that_the_policy_wants() -> None:
    core, old, new, caller = two_versions()
    for process in (old, new):
        process.handler = lambda at, envelope: at.answer(envelope, pump=False)
    steer(core, "1.0")
    caller.request(session_id="s")
    core.agent("echo/3", version="1.0").handler = lambda at, envelope: at.answer(envelope, pump=False)
    steer(core, "2.0")
    old.say(DRAINING)
    last = caller.request(session_id="s")
    assert new.has(last)
    assert core.status("echo/2") == HEALTHY
    core.assert_settled()


def test_a_retry_obeys_the_policy_too_and_goes_elsewhere_before_it_goes_back() -> None:
    core, old, new, caller = two_versions()
    steer(core, "2.0")
    message = caller.request(idempotent=True)
    assert new.has(message)
    new.leave()
    core.advance(1)
    assert old.has(message)
    old.answer(message)
    assert fallbacks(core) == 1
    core.assert_settled()


def test_without_a_policy_for_the_type_nothing_changes() -> None:
    core, old, new, caller = two_versions()
    for process in (old, new):
        process.handler = lambda at, envelope: at.answer(envelope, pump=False)
    message = Message(agent_type="other", preferred="2.0")
    core.state.version_policies[version_policy.key_of(message)] = version_policy.from_proto(message, 1)
    for _ in range(40):
        caller.request()
    assert old.requests and new.requests and fallbacks(core) == 0
    core.assert_settled()
