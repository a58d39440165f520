"""Plays: call trees that are too deep, go round, or would wait for themselves."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.peer_pb2 import Lineage
from reach.core.lineage import LineageKeys
from reach.core.ports import Identity
from tests.support.core import CoreMesh, Process


def _chain(core: CoreMesh, length: int) -> tuple[list[Process], str]:
    agents = [core.agent(f"t{number}/1") for number in range(length)]
    message = core.caller().request(agent_type="t0")
    for number in range(1, length):
        message = agents[number - 1].call_from(message, agent_type=f"t{number}")
    return agents, message


def _settle(core: CoreMesh) -> None:
    for process in core.processes:
        for request in list(process.running.values()):
            process.answer(request)
    core.assert_settled()


def test_ten_agents_in_a_line_work_and_the_eleventh_is_refused() -> None:
    core = CoreMesh()
    agents, message = _chain(core, 11)
    assert agents[9].requests[0].hop_count == 10
    error = agents[9].error_of(message)
    assert error.code == codes.HOP_LIMIT and "t0/1 → t1/1" in error.details["path"]
    assert not agents[10].requests and core.logged("loop cut")
    _settle(core)


@pytest.mark.parametrize("cycle", [1, 2, 3, 4])
def test_a_cycle_is_cut_at_its_third_lap(cycle: int) -> None:
    core = CoreMesh()
    agents = [core.agent(f"t{number}/1") for number in range(cycle)]
    message = core.caller().request(agent_type="t0", dedup_key="step")
    for step in range(1, 2 * cycle):
        message = agents[(step - 1) % cycle].call_from(message, agent_type=f"t{step % cycle}", dedup_key="step")
        assert agents[step % cycle].has(message)
    error_at = agents[-1]
    message = error_at.call_from(message, agent_type="t0", dedup_key="step")
    assert error_at.error_of(message).code == codes.LOOP_DETECTED
    assert core.state.stats.loops["loop_detected"] == 1
    _settle(core)


def test_what_an_agent_claims_of_hops_is_overwritten_by_its_lineage() -> None:
    core = CoreMesh()
    one, two = core.agent("one/1"), core.agent("two/1")
    message = core.caller().request(agent_type="one", trace_id="trace")
    nested = one.call_from(message, agent_type="two", hop_count=0, trace_id="mine")
    got = two.got(nested)
    assert (got.hop_count, got.trace_id, got.parent_message_id) == (2, "trace", message)
    assert [hop.agent_id for hop in got.path] == ["one/1", "two/1"]
    _settle(core)


def test_a_nested_call_has_no_more_time_than_its_parent() -> None:
    core = CoreMesh()
    one, two = core.agent("one/1"), core.agent("two/1")
    message = core.caller().request(agent_type="one", timeout_ms=1000)
    core.advance(0.5)
    nested = one.call_from(message, agent_type="two", timeout_ms=60_000)
    assert two.got(nested).timeout_ms <= 500
    core.advance(0.495)
    late = one.call_from(message, agent_type="two", timeout_ms=60_000)
    assert one.error_of(late).code == codes.TIMEOUT
    core.advance(1)
    core.assert_settled()


def test_a_forged_lineage_is_refused() -> None:
    core = CoreMesh()
    one = core.agent("one/1")
    message = core.caller().request(agent_type="one")
    lineage = bytearray(one.got(message).lineage)
    lineage[40] ^= 1
    forged = one.request(agent_type="one", lineage=bytes(lineage))
    assert one.error_of(forged).code == codes.PERMISSION_DENIED
    _settle(core)


def test_another_tenants_lineage_is_refused() -> None:
    core = CoreMesh()
    one = core.agent("one/1")
    message = core.caller().request(agent_type="one")
    stranger = core.caller("stranger", who=Identity("elsewhere", "x"))
    stolen = stranger.request(agent_type="one", lineage=one.got(message).lineage)
    assert stranger.error_of(stolen).code == codes.PERMISSION_DENIED
    _settle(core)


def test_a_lineage_signed_in_another_life_makes_a_new_root() -> None:
    core = CoreMesh()
    one = core.agent("one/1")
    other = LineageKeys((9, b"o" * 32)).sign(Lineage(hop_count=9, valid_until_unix_ms=1 << 60))
    message = core.caller().request(agent_type="one", lineage=other)
    assert one.got(message).hop_count == 1
    _settle(core)


def test_a_lineage_that_is_too_old_is_refused() -> None:
    core = CoreMesh()
    one = core.agent("one/1")
    message = core.caller().request(agent_type="one", timeout_ms=1000)
    core.advance(1 + 15 * 60 + 1)
    late = one.call_from(message, agent_type="one")
    assert one.error_of(late).code == codes.PERMISSION_DENIED
    core.assert_settled()


def test_a_call_into_its_own_sessions_lane_would_deadlock() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1")
    message = core.caller().request(session_id="s")
    nested = agent.call_from(message, session_id="s")
    error = agent.error_of(nested)
    assert error.code == codes.WOULD_DEADLOCK and "session s" in error.message
    _settle(core)


def test_a_call_for_which_every_slot_is_held_by_its_ancestors_would_deadlock() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", max_concurrency=1)
    message = core.caller().request()
    assert agent.error_of(agent.call_from(message)).code == codes.WOULD_DEADLOCK
    in_session = agent.call_from(message, session_id="s")
    assert agent.error_of(in_session).code == codes.WOULD_DEADLOCK
    assert core.state.stats.loops["would_deadlock"] == 2
    _settle(core)


def test_a_call_beside_a_stranger_in_the_other_slot_only_waits() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", max_concurrency=2)
    message = core.caller().request()
    stranger = core.caller().request()
    waits = agent.call_from(message)
    assert not agent.replies_to(waits)
    agent.answer(stranger)
    assert agent.has(waits)
    _settle(core)


def test_two_trees_that_wait_for_one_anothers_slots_would_deadlock() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", max_concurrency=2)
    first, second = core.caller().request(), core.caller().request()
    waits = agent.call_from(first, session_id="a")
    assert not agent.replies_to(waits)  # the other holder may end
    assert agent.error_of(agent.call_from(second, session_id="b")).code == codes.WOULD_DEADLOCK
    agent.answer(second)
    assert agent.has(waits)
    _settle(core)


def test_a_reentrant_agent_may_use_its_own_slot_and_lane_again() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", max_concurrency=1, reentrant=True)
    message = core.caller().request(session_id="s")
    nested = agent.call_from(message, session_id="s")
    assert agent.has(nested)
    plain = agent.call_from(nested)
    assert agent.has(plain)
    assert core.attachment("echo/1").agent.in_flight == 1
    for each in (plain, nested, message):
        agent.answer(each)
    core.assert_settled()


def test_a_reentrant_agent_serves_another_session_of_its_own_call_tree() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", max_concurrency=1, reentrant=True)
    message = core.caller().request()
    nested, next_one = (agent.call_from(message, session_id="s") for _ in range(2))
    assert agent.has(nested) and not agent.has(next_one)
    agent.answer(nested)
    assert agent.has(next_one)
    agent.answer(next_one)
    agent.answer(message)
    core.assert_settled()


def test_a_reentrant_agent_takes_no_strangers_beyond_its_slots() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1", max_concurrency=1, reentrant=True), core.caller()
    message = caller.request()
    stranger = caller.request()
    assert not agent.has(stranger)
    agent.answer(message)
    agent.answer(stranger)
    core.assert_settled()


def test_an_error_that_a_nested_call_ended_with_travels_up() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("one/1"), core.agent("two/1"), core.caller()
    message = caller.request(agent_type="one")
    nested = one.call_from(message, agent_type="two")
    two.refuse(nested)
    error = one.error_of(nested)
    one.answer(message, error=error)
    assert caller.error_of(message).code == codes.REJECTED
    assert caller.error_of(message).agent_id == "two/1"
    core.assert_settled()
