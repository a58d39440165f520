"""Plays: somebody watches the agents, is told all of them once, then what changes, and can go on where it left off."""

from __future__ import annotations

import pytest

from agentreach.v1.envelope_pb2 import Target
from agentreach.v1.registry_pb2 import DEGRADED, DRAINING, HEALTHY, WatchAgentsReply
from reach.core import watching
from reach.core.agents import Agent
from reach.core.directory import CHANGES_MAX
from reach.core.selector import Aliases, parse_selector
from reach.core.watching import AGENTS_A_REPLY_MAX, Watcher
from tests.support.core import CoreMesh

TENANT = "default"


def watcher(core: CoreMesh, env: str = "", revision: int = 0, **target: object) -> Watcher:
    """Of the tests' tenant."""
    wanted = parse_selector(Target(**target), TENANT, "", Aliases()) if target else None  # type: ignore[arg-type]
    return Watcher(core.state, TENANT, env, wanted, revision)


def took(one: Watcher) -> WatchAgentsReply:
    reply = one.take()
    assert reply is not None
    return reply


def names(reply: WatchAgentsReply) -> list[str]:
    return sorted(record.agent_id for record in reply.snapshot)


def changes(reply: WatchAgentsReply) -> list[tuple[str, int, bool]]:
    return [(change.agent.agent_id, change.agent.status, change.removed) for change in reply.changes]


def crowd(core: CoreMesh, count: int, agent_type: str = "a") -> list[Agent]:
    """Agents straight into the directory."""
    made = []
    for number in range(count):
        agent = Agent(f"{agent_type}/{number}", tenant=TENANT)
        agent.status = HEALTHY
        core.state.directory.add(agent)
        made.append(agent)
    return made


def test_first_all_then_who_comes_changes_and_leaves() -> None:
    core = CoreMesh()
    one = core.agent("echo/1")
    watch = watcher(core)
    first = took(watch)
    assert first.begins and names(first) == ["echo/1"] and first.snapshot[0].status == HEALTHY and first.revision
    assert watch.waits and watch.take() is None
    core.agent("echo/2")
    assert changes(took(watch)) == [("echo/2", HEALTHY, False)]
    one.say(DEGRADED)
    assert changes(took(watch)) == [("echo/1", DEGRADED, False)]
    one.leave()
    reply = took(watch)
    assert changes(reply) == [("echo/1", 0, True)] and not reply.begins
    assert watch.waits


def test_an_empty_mesh_is_told_as_such() -> None:
    reply = took(watcher(CoreMesh()))
    assert reply.begins and reply.revision and not reply.snapshot


def test_many_changes_of_one_agent_are_told_as_it_stands_now() -> None:
    core = CoreMesh()
    one = core.agent("echo/1")
    watch = watcher(core)
    took(watch)
    for status in (DEGRADED, HEALTHY, DEGRADED, HEALTHY, DRAINING):
        one.say(status)
    assert changes(took(watch)) == [("echo/1", DRAINING, False)]


def test_whoever_comes_back_with_its_revision_is_told_what_it_missed_and_no_more() -> None:
    core = CoreMesh()
    core.agent("echo/1")
    two = core.agent("echo/2")
    revision = took(watcher(core)).revision
    two.leave()
    core.agent("echo/3")
    reply = took(watcher(core, revision=revision))
    assert not reply.begins and not reply.snapshot
    assert changes(reply) == [("echo/2", 0, True), ("echo/3", HEALTHY, False)]
    again = took(watcher(core, revision=reply.revision))  # nothing was missed: it is told so at once
    assert not again.begins and not again.changes and again.revision == reply.revision


@pytest.mark.parametrize("revision", [1, 2**40 + 1, 2**63, 2**64 - 1])
def test_a_revision_that_is_no_place_in_this_nodes_log_begins_anew(revision: int) -> None:
    core = CoreMesh()
    core.agent("echo/1")
    assert took(watcher(core, revision=revision)).begins


def test_one_of_another_start_of_the_node_begins_anew() -> None:
    former, core = CoreMesh(), CoreMesh()
    former.state.nonce = b"another1"
    for mesh in (former, core):
        mesh.agent("echo/1")
    assert took(watcher(core, revision=took(watcher(former)).revision)).begins


def test_who_takes_nothing_for_longer_than_the_log_reaches_is_told_all_again() -> None:
    core = CoreMesh()
    (agent,) = crowd(core, 1)
    watch, other = watcher(core), watcher(core)
    took(watch)
    revision = took(other).revision
    for number in range(CHANGES_MAX + 2):
        agent.status = (HEALTHY, DEGRADED)[number % 2]
        core.state.directory.changed(agent)
    assert len(core.state.directory.log) == CHANGES_MAX
    reply = took(watch)
    assert reply.begins and names(reply) == ["a/0"]
    assert took(watcher(core, revision=revision)).begins


def test_a_large_snapshot_comes_in_parts_and_what_changes_meanwhile_comes_after_it() -> None:
    core = CoreMesh()
    agents = crowd(core, 2 * AGENTS_A_REPLY_MAX + 1)
    watch = watcher(core)
    parts = [took(watch)]
    core.state.directory.remove(agents[0])
    core.state.directory.remove(agents[-1])
    crowd(core, 1, "late")
    while not parts[-1].revision:
        parts.append(took(watch))
    assert [part.begins for part in parts] == [True, False, False]
    assert [part.revision > 0 for part in parts] == [False, False, True]
    known = {record.agent_id for part in parts for record in part.snapshot}
    for change in took(watch).changes:
        (known.discard if change.removed else known.add)(change.agent.agent_id)
    assert known == {agent.agent_id for agent in core.state.directory}
    assert watch.waits


def test_a_long_log_is_told_in_parts() -> None:
    core = CoreMesh()
    watch = watcher(core)
    took(watch)
    crowd(core, watching.LOG_A_REPLY_MAX + 10)
    assert len(took(watch).changes) == watching.LOG_A_REPLY_MAX
    assert len(took(watch).changes) == 10 and watch.waits


class TestFilters:
    """Only what was asked for is told."""

    def test_by_type_env_and_tenant(self) -> None:
        core = CoreMesh()
        crowd(core, 1, "a")
        crowd(core, 1, "b")
        staged = Agent("a/s", tenant=TENANT, env="staging")
        core.state.directory.add(staged)
        core.state.directory.add(Agent("a/x", tenant="other"))
        assert names(took(watcher(core))) == ["a/0", "a/s", "b/0"]
        assert names(took(watcher(core, env="staging"))) == ["a/s"]
        by_type = watcher(core, env="production", agent_type="a")
        assert names(took(by_type)) == ["a/0"]
        crowd(core, 2, "c")
        core.state.directory.remove(staged)
        core.state.directory.add(Agent("a/y", tenant="other"))
        assert by_type.take() is None

    def test_one_that_comes_back_without_what_was_asked_for_is_told_as_gone(self) -> None:
        core = CoreMesh()
        agent = Agent("a/1", tenant=TENANT)
        agent.capabilities = frozenset({"ner"})
        core.state.directory.add(agent)
        watch = watcher(core, capabilities=["ner"])
        assert names(took(watch)) == ["a/1"]
        core.state.directory.add(Agent("a/1", tenant=TENANT))
        assert changes(took(watch)) == [("a/1", 0, True)]
        core.state.directory.add(Agent("b/1", tenant=TENANT))
        assert watch.take() is None

    def test_a_watcher_whom_nothing_concerns_is_told_now_and_then_how_far_it_is(self) -> None:
        core = CoreMesh()
        watch = watcher(core, agent_type="b")
        first = took(watch)
        crowd(core, watching.TOLD_EVERY - 1)
        assert watch.take() is None
        crowd(core, 1, "c")
        told = took(watch)
        assert not told.changes and told.revision == first.revision + watching.TOLD_EVERY
