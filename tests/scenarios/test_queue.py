"""Plays: requests for which only a slot is missing wait for it, in their order, within bounds."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import AgentStatus
from reach.core.ports import Identity
from tests.support.core import CoreMesh, record


def test_a_request_waits_for_a_slot_and_gets_the_first_that_is_free() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    first, second = caller.request("one"), caller.request("two")
    assert agent.has(first) and not agent.has(second) and len(core.state.queue) == 1
    agent.answer(first)
    assert agent.has(second)
    agent.answer(second)
    assert caller.text_of(second) == "ok"
    core.assert_settled()


def test_two_hundred_requests_over_four_agents_never_exceed_a_limit_and_all_are_answered() -> None:
    core = CoreMesh()
    caller = core.caller()
    agents = [core.agent(f"echo/{number}", max_concurrency=3) for number in range(4)]
    messages = [caller.request(timeout_ms=60_000) for _ in range(200)]
    while any(agent.running for agent in agents):
        for agent in agents:
            assert len(agent.running) <= 3
            for envelope in list(agent.running.values())[:1]:
                agent.answer(envelope)
    assert all(caller.text_of(message) == "ok" for message in messages)
    assert all(len(agent.requests) == 50 for agent in agents), [len(agent.requests) for agent in agents]
    core.assert_settled()


def test_higher_priority_goes_first_and_waiting_ages() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    running = caller.request(timeout_ms=60_000)
    low = caller.request(timeout_ms=20_000, priority=pb.LOW)
    core.advance(11)  # a quarter of 20 s each: it has come two levels up
    normal, high = caller.request(timeout_ms=60_000), caller.request(timeout_ms=60_000, priority=pb.HIGH)
    for message in (running, low, high, normal):
        assert agent.has(message) and len(agent.running) == 1
        agent.answer(message)
    core.assert_settled()


def test_one_principals_many_do_not_bury_anothers_one() -> None:
    core = CoreMesh()
    agent = core.agent(max_concurrency=1)
    many, few = core.caller("many"), core.caller("few", who=Identity("default", "few"))
    running = many.request(timeout_ms=60_000)
    for _ in range(100):
        many.request(timeout_ms=60_000)
    one = few.request(timeout_ms=60_000)
    agent.answer(running)
    for _ in range(2):
        if agent.has(one):
            break
        agent.answer(next(iter(agent.running.values())))
    assert agent.has(one)


def test_who_waits_goes_before_who_comes() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    first, waits = caller.request(), caller.request()
    agent.answer(first)
    assert agent.has(waits)
    core.advance(20)
    core.assert_settled()


def test_a_queued_request_leaves_at_its_deadline_and_was_never_started() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    caller.request(timeout_ms=60_000)
    waits = caller.request(timeout_ms=500)
    core.advance(0.6)
    error = caller.error_of(waits)
    assert error.code == codes.TIMEOUT and "queued" in error.message and not error.may_have_executed
    assert not agent.has(waits) and not core.state.queue


def test_a_queued_request_leaves_when_its_caller_cancels_or_goes() -> None:
    core = CoreMesh()
    agent, caller, other = core.agent(max_concurrency=1), core.caller(), core.caller("other")
    held = caller.request(timeout_ms=60_000)
    waits = caller.request(timeout_ms=60_000)
    other.request(timeout_ms=60_000)
    caller.cancel(waits)
    assert caller.error_of(waits).code == codes.CANCELLED and len(core.state.queue) == 1
    other.leave()
    assert not core.state.queue
    agent.answer(held)
    core.assert_settled()


def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    core = CoreMesh(queue_selector_max=2)
    agent, caller = core.agent(max_concurrency=1), core.caller()
    messages = [caller.request(timeout_ms=60_000) for _ in range(4)]
    error = caller.error_of(messages[3])
    assert error.code == codes.OVERLOADED and error.retry_after_ms > 0 and not error.may_have_executed
    for message in messages[:3]:
        agent.answer(message)
    core.assert_settled()


def test_bytes_that_wait_are_bounded_over_queue_and_lanes() -> None:
    core = CoreMesh(queue_bytes_max=100_000)
    agent, caller = core.agent(max_concurrency=1), core.caller()
    core.agent("talk/1", max_concurrency=1)
    held = caller.request("x" * 60_000, timeout_ms=60_000)
    caller.request("x" * 60_000, timeout_ms=2_000)
    refused = caller.request("x" * 60_000, timeout_ms=60_000)
    assert caller.error_of(refused).code == codes.OVERLOADED
    caller.request("s", agent_type="talk", session_id="s", timeout_ms=2_000)
    in_lane = caller.request("y" * 60_000, agent_type="talk", session_id="s", timeout_ms=2_000)
    assert caller.error_of(in_lane).code == codes.OVERLOADED
    agent.answer(held)
    core.advance(10)
    core.assert_settled()


def test_a_new_instance_takes_from_those_who_wait() -> None:
    core = CoreMesh()
    core.agent("echo/1", max_concurrency=1)
    caller = core.caller()
    caller.request(timeout_ms=60_000)
    waiting = [caller.request(timeout_ms=60_000) for _ in range(3)]
    new = core.agent("echo/2", max_concurrency=2)
    assert sum(new.has(message) for message in waiting) == 2


def test_who_waits_for_nobody_any_more_is_told_at_once() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    held = caller.request(timeout_ms=60_000)
    waits = caller.request(timeout_ms=60_000)
    agent.say(AgentStatus.DRAINING)
    assert caller.error_of(waits).code == codes.NO_AGENT_AVAILABLE
    agent.answer(held)
    core.assert_settled()


def test_a_cut_link_that_comes_back_serves_those_who_waited() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    held, waits = caller.request(timeout_ms=60_000), caller.request(timeout_ms=60_000)
    agent.cut()
    core.advance(0.2)
    agent.connect()
    agent.answer(held)
    agent.answer(waits)
    assert caller.text_of(waits) == "ok"
    core.assert_settled()


def test_a_freed_slot_goes_to_the_oldest_of_all_selectors_that_match() -> None:
    core = CoreMesh()
    agent, caller = core.process("p", record("echo/1", max_concurrency=1, capabilities=["a", "b"])), core.caller()
    held = caller.request(timeout_ms=60_000)
    by_a = caller.request(capabilities=["a"], timeout_ms=60_000)
    by_b = caller.request(capabilities=["b"], timeout_ms=60_000)
    agent.answer(held)
    assert agent.has(by_a) and not agent.has(by_b)
    agent.answer(by_a)
    agent.answer(by_b)
    core.assert_settled()


def test_copies_of_a_queued_message_join_it() -> None:
    core = CoreMesh()
    agent, caller, other = core.agent(max_concurrency=1), core.caller(), core.caller("other")
    held = caller.request(timeout_ms=60_000)
    caller.request("same", message_id="m", fresh=False, timeout_ms=60_000)
    other.request("same", message_id="m", fresh=False, timeout_ms=60_000)
    agent.answer(held)
    agent.answer("m")
    assert caller.text_of("m") == other.text_of("m") == "ok"
    assert len([each for each in agent.requests if each.message_id == "m"]) == 1


def test_agents_that_wait_for_each_other_in_the_queue_are_told_so() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=2), core.caller()
    first, second = caller.request(timeout_ms=60_000), caller.request(timeout_ms=60_000)
    waits = agent.call_from(first, timeout_ms=50_000)
    assert not agent.replies_to(waits), "the other slot will be free"
    closes = agent.call_from(second, timeout_ms=50_000)
    assert agent.error_of(closes).code == codes.WOULD_DEADLOCK
    agent.answer(second)
    agent.answer(waits)
    agent.answer(first)
    core.assert_settled()
