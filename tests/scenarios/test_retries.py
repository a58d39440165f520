"""Plays: what follows a failed attempt, by the outcome table, the profiles, the budget and the breaker."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import AgentStatus
from agentreach.wire.errors import failure
from reach.core.breaker import BreakerState
from reach.core.ports import ANYBODY
from reach.node.queries import Queries
from tests.support.core import CoreMesh, Process


def _two(core: CoreMesh, **fields: object) -> tuple[Process, Process]:
    return core.agent("echo/1", **fields), core.agent("echo/2", **fields)


def _who_got(message: str, *agents: Process) -> list[Process]:
    return [agent for agent in agents if agent.has(message)]


def test_what_was_never_handed_over_goes_to_another_instance_at_once_even_if_not_idempotent() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    for agent in (one, two):
        agent.frozen = True
    message = caller.request()
    held = next(a for a in (one, two) if core.attachment(next(iter(a.agents))).attempts)
    other = two if held is one else one
    other.frozen = False
    held.cut()
    assert other.has(message) and not held.has(message)
    assert other.got(message).attempt == 2
    other.answer(message, "from the other")
    assert caller.text_of(message) == "from the other"
    assert core.state.stats.retries == 1
    core.advance(30)
    core.assert_settled()


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_request_whose_agent_was_lost_goes_elsewhere_only_if_running_it_twice_does_no_harm(idempotent: bool) -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    message = caller.request(idempotent=idempotent, timeout_ms=10_000)
    (first,) = _who_got(message, one, two)
    other = two if first is one else one
    first.cut()
    core.advance(2.0)
    if not idempotent:
        error = caller.error_of(message)
        assert error.code == codes.AGENT_LOST and error.may_have_executed and not other.has(message)
    else:
        assert not caller.replies_to(message)
        other.answer(message)
        assert caller.text_of(message) == "ok"
    core.advance(30)
    core.assert_settled()


def test_an_attempt_that_was_given_up_keeps_its_slot_until_its_agent_is_done_with_it() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    for agent in (one, two):
        agent.confirms_cancels = False
    message = caller.request(idempotent=True, timeout_ms=6000)
    (first,) = _who_got(message, one, two)
    other = two if first is one else one
    core.advance(2.5)  # a third of 6 s, and the back-off
    assert other.has(message)
    assert [cancel.correlation_id for cancel in first.cancels] == [message]
    name = next(iter(first.agents))
    assert core.attachment(name).agent.in_flight == 1
    first.answer(message, "too late")
    assert core.attachment(name).agent.in_flight == 0
    assert not caller.replies_to(message), "the late answer of an attempt that was given up is nobody's"
    other.answer(message, "in time")
    assert caller.text_of(message) == "in time"
    core.assert_settled()


def test_the_time_of_one_attempt_is_a_part_of_the_time_left() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(idempotent=True, timeout_ms=3000, profile=pb.RPC)
    agent.confirms_cancels = True
    core.advance(3.1)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and error.attempts == 3 and error.may_have_executed
    assert len([each for each in agent.requests if each.message_id == message]) == 3
    assert [each.attempt for each in agent.requests] == [1, 2, 3]
    assert not any(each.fresh for each in agent.requests[1:])
    core.assert_settled()


def test_a_request_that_is_not_idempotent_has_all_its_time_for_one_attempt() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=3000, profile=pb.RPC)
    core.advance(2.9)
    assert not caller.replies_to(message)
    core.advance(0.2)
    assert caller.error_of(message).attempts == 1 and len(agent.requests) == 1
    core.assert_settled()


def test_an_error_that_says_it_can_be_retried_is_retried_elsewhere_after_the_back_off() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    message = caller.request(timeout_ms=5000)
    (first,) = _who_got(message, one, two)
    other = two if first is one else one
    first.answer(message, error=failure(codes.AGENT_ERROR, "try again", retryable=True))
    assert not other.has(message)
    core.advance(0.3)
    other.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_refusal_is_never_retried() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    message = caller.request(idempotent=True)
    (first,) = _who_got(message, one, two)
    first.refuse(message)
    assert caller.error_of(message).code == codes.REJECTED and core.state.stats.retries == 0
    core.assert_settled()


def test_a_rate_limited_agent_is_asked_again_after_its_time_if_nobody_else_can() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=5000, trace_id="t1")
    agent.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=1500))
    core.advance(1.4)
    assert len(agent.requests) == 1
    core.advance(0.2)
    assert len(agent.requests) == 2
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    (traced,) = Queries(core.state).get_trace("t1", ANYBODY).messages
    (retried,) = [stage.detail for stage in traced.stages if stage.name == "retried"]
    assert retried.startswith("overloaded: next attempt in ") and retried.endswith(", at the same agent in 1500 ms")
    core.assert_settled()


def test_a_retry_never_passes_the_deadline() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=1000)
    agent.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=1500))
    core.advance(0.9)
    error = caller.error_of(message)
    assert error.code == codes.OVERLOADED and error.retry_after_ms == 1500
    core.assert_settled()


def test_a_killed_agents_requests_end_within_two_seconds_when_nobody_else_is_there() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(idempotent=True, timeout_ms=10_000)
    agent.cut()
    core.advance(2.0)
    assert caller.error_of(message).code == codes.AGENT_LOST
    core.advance(30)
    core.assert_settled()


def test_a_cancelled_request_is_not_tried_again() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=5000)
    agent.answer(message, error=failure(codes.AGENT_ERROR, "try again", retryable=True))
    caller.cancel(message)
    assert caller.error_of(message).code == codes.CANCELLED
    core.advance(5)
    assert len(agent.requests) == 1
    core.assert_settled()


def test_a_streamed_reply_that_has_begun_is_not_begun_again() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    message = caller.request(idempotent=True, timeout_ms=20_000)
    (first,) = _who_got(message, one, two)
    first.answer(message, "one", more=True)
    first.cut()
    core.advance(3)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_LOST and error.details["items"] == "1"
    core.advance(30)
    core.assert_settled()


def test_an_unacknowledged_idempotent_request_goes_to_another_instance() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    one.frozen = two.frozen = True
    message = caller.request(idempotent=True, timeout_ms=16_000, profile=pb.EXTERNAL)
    held = next(a for a in (one, two) if core.attachment(next(iter(a.agents))).attempts)
    other = two if held is one else one
    other.frozen = False
    peer = held.peer
    assert (
        peer is not None and peer.link.next_frame(core.state.now) is not None
    )  # it is on its way into a frozen process
    core.advance(6.5)
    assert other.has(message), "no acknowledgement within a quarter of its time"
    other.answer(message)
    assert caller.text_of(message) == "ok"
    core.advance(60)
    core.assert_settled()


def test_retries_of_a_type_that_only_fails_stay_within_the_budget() -> None:
    core = CoreMesh()
    caller = core.caller()
    agents = [core.agent(f"echo/{number}") for number in range(4)]

    def refuse(process: Process, envelope: pb.Envelope) -> None:
        process.answer(envelope, error=failure(codes.AGENT_ERROR, "no", retryable=True), pump=False)

    for agent in agents:
        agent.handler = refuse
    for _ in range(1000):
        caller.request(timeout_ms=3000)
        core.advance(0.01)
    core.advance(5)
    reached = sum(len(agent.requests) for agent in agents)
    assert 1000 < reached <= 1250
    assert core.state.stats.retries_suppressed > 0
    core.assert_settled()


def test_five_failures_in_a_row_trip_the_breaker_and_a_probe_after_its_time_begins_the_ramp() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    for _ in range(5):
        caller.request(timeout_ms=1500)
        core.advance(1.6)
    (opened,) = core.logged("breaker")
    assert opened.fields["state"] == "OPEN"
    refused = caller.error_of(caller.request())
    assert refused.code == codes.BREAKER_OPEN and 0 < refused.retry_after_ms <= 30_000 and "echo/1" in refused.message
    core.advance(30)
    probe = caller.request(timeout_ms=2000)
    assert agent.has(probe)
    second = caller.error_of(caller.request())
    assert second.code == codes.BREAKER_OPEN, "one probe at a time"
    agent.answer(probe)
    breaker = core.attachment("echo/1").agent.breaker
    assert breaker is not None and breaker.state(core.state.now) is BreakerState.RAMPING
    third = caller.request()
    agent.answer(third)
    core.advance(30)
    assert breaker.state(core.state.now) is BreakerState.CLOSED and not core.attachment("echo/1").agent.suspect
    core.assert_settled()


def test_a_failed_probe_opens_the_breaker_for_twice_as_long() -> None:
    core = CoreMesh()
    caller = core.caller()
    core.agent()
    for _ in range(5):
        caller.request(timeout_ms=1500)
        core.advance(1.6)
    core.advance(30)
    caller.request(timeout_ms=1500)
    core.advance(1.6)
    error = caller.error_of(caller.request())
    assert error.code == codes.BREAKER_OPEN and error.retry_after_ms > 50_000
    core.advance(10)
    core.assert_settled()


def test_a_breaker_goes_with_the_process_over_a_new_attachment() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    for _ in range(5):
        caller.request(timeout_ms=1500)
        core.advance(1.6)
    agent.leave()
    agent.forget()
    agent.connect()
    core.advance(0.1)
    assert core.attachment("echo/1").agent.shut
    assert caller.error_of(caller.request()).code == codes.BREAKER_OPEN


def test_short_timeouts_of_one_caller_trip_nobody() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    for _ in range(50):
        caller.request(timeout_ms=50)
        core.advance(0.06)
    assert not core.attachment("echo/1").agent.shut and len(agent.requests) == 50
    core.assert_settled()


def test_a_healthy_agent_takes_the_requests_while_the_other_one_is_shut_out() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    two.handler = lambda process, envelope: process.answer(envelope, pump=False)
    for _ in range(40):
        caller.request(timeout_ms=1100, agent_type="echo", policy=pb.ROUND_ROBIN)
        core.advance(1.2)
        if core.attachment("echo/1").agent.shut:
            break
    assert core.attachment("echo/1").agent.shut
    before = len(one.requests)
    for _ in range(20):
        assert caller.text_of(caller.request(agent_type="echo", policy=pb.ROUND_ROBIN)) == "ok"
    assert len(one.requests) == before
    core.advance(10)
    core.assert_settled()


def test_a_sessions_retry_keeps_its_place_and_its_owner() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    first = caller.request(session_id="s", timeout_ms=5000)
    (owner,) = _who_got(first, one, two)
    second = caller.request(session_id="s", timeout_ms=5000)
    owner.answer(first, error=failure(codes.AGENT_ERROR, "again", retryable=True))
    assert not owner.has(second)
    core.advance(0.3)
    assert owner.got(first).attempt == 2 and not owner.has(second)
    owner.answer(first)
    assert owner.has(second)
    owner.answer(second)
    assert caller.text_of(first) == caller.text_of(second) == "ok"
    assert not (two if owner is one else one).requests
    core.assert_settled()


def test_a_nested_call_is_tried_again_with_its_whole_path() -> None:
    core = CoreMesh()
    caller, front = core.caller(), core.agent("front/1")
    one, two = _two(core)
    outer = caller.request(agent_type="front", timeout_ms=5000)
    inner = front.call_from(outer, timeout_ms=4000)
    (first,) = _who_got(inner, one, two)
    other = two if first is one else one
    first.answer(inner, error=failure(codes.AGENT_ERROR, "again", retryable=True))
    core.advance(0.3)
    again = other.got(inner)
    assert [hop.agent_id.split("/")[0] for hop in again.path] == ["front", "echo"] and again.hop_count == 2
    other.answer(inner)
    front.answer(outer)
    assert caller.text_of(outer) == "ok"
    core.assert_settled()


def test_a_task_that_failed_as_often_as_it_may_is_kept_as_a_dead_letter() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    agent.handler = lambda process, envelope: process.answer(
        envelope, error=failure(codes.AGENT_ERROR, "no", retryable=True), pump=False
    )
    message = caller.request(profile=pb.TASK, timeout_ms=60_000)
    core.advance(30)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_ERROR and error.attempts == 4, "nobody else to re-route it to"
    assert len(agent.requests) == 4 and len(core.state.dead_letters) == 1
    core.assert_settled()


def test_a_tasks_last_attempt_goes_to_somebody_who_has_not_failed_it() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    agent.handler = lambda process, envelope: process.answer(
        envelope, error=failure(codes.AGENT_ERROR, "no", retryable=True), pump=False
    )
    message = caller.request(profile=pb.TASK, timeout_ms=60_000)
    core.advance(5)
    other = core.agent("echo/2", max_concurrency=1)
    core.advance(5)
    other.answer(message, "at last")
    assert caller.text_of(message) == "at last" and not len(core.state.dead_letters)
    core.assert_settled()


def test_a_retry_for_which_only_broken_agents_are_left_ends_at_once() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    two.say(AgentStatus.DRAINING)
    for _ in range(5):
        caller.request(timeout_ms=1500)
        core.advance(1.6)
    assert core.attachment("echo/1").agent.shut
    two.say(AgentStatus.HEALTHY)
    message = caller.request(timeout_ms=9000)
    two.answer(message, error=failure(codes.AGENT_ERROR, "again", retryable=True))
    two.leave()
    core.advance(0.3)
    assert caller.error_of(message).code == codes.AGENT_ERROR, "nobody waits for a breaker"
    assert len(one.requests) == 5
    core.advance(10)
    core.assert_settled()


def test_a_request_that_waited_long_in_the_outbox_is_not_overdue_the_moment_it_is_sent() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    agent.frozen = True
    message = caller.request(timeout_ms=60_000)
    core.advance(6)
    assert agent.peer is not None
    held = []
    while (data := agent.peer.link.next_frame(core.state.now)) is not None:
        held.append(data)
    core.advance(1.5)
    assert core.attachment("echo/1").overdue is None
    agent.frozen = False
    for data in held:
        agent.take(data)
    agent.answer(message)
    core.assert_settled()


def test_a_task_that_is_refused_is_answered_and_no_dead_letter() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(profile=pb.TASK, timeout_ms=60_000)
    agent.answer(message, error=failure(codes.AGENT_ERROR, "again", retryable=True))
    core.advance(2)
    agent.refuse(message)
    assert caller.error_of(message).code == codes.REJECTED and not len(core.state.dead_letters)
    core.assert_settled()
