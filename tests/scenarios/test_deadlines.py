"""Plays: every request ends before its deadline, and says where it was."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Frame, Progress, Signal
from reach.core import mesh
from tests.support.core import CoreMesh


def test_a_deadline_ends_the_request_tells_the_agent_and_gives_the_slot_back_on_its_word() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    agent.confirms_cancels = False
    message = caller.request(timeout_ms=1000)
    core.advance(1.1)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and error.may_have_executed and "delivered" in error.message
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    assert core.attachment("echo/1").agent.in_flight == 1
    agent.answer(message, "late")
    assert core.attachment("echo/1").agent.in_flight == 0
    assert len(caller.replies_to(message)) == 1
    core.assert_settled()


def test_a_handler_that_does_not_end_has_its_slot_taken_back_after_the_grace() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    agent.confirms_cancels = False
    caller.request(timeout_ms=1000)
    core.advance(1.1 + 5.1)
    assert core.state.stats.forced_releases == 1
    core.assert_settled()


def test_the_error_says_that_the_handler_had_started() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=1000)
    agent.signal(Signal(progress=Progress(message_id=message, entry=agent.got(message).entry, started=True)))
    core.advance(1.1)
    assert "being handled" in caller.error_of(message).message
    core.assert_settled()


def test_progress_of_somebody_elses_request_counts_for_nothing() -> None:
    core = CoreMesh()
    agent, mallory, caller = core.agent(), core.agent("mal/1"), core.caller()
    message = caller.request(timeout_ms=1000)
    mallory.signal(Signal(progress=Progress(message_id=message, entry=agent.got(message).entry, started=True)))
    core.advance(1.1)
    assert "being handled" not in caller.error_of(message).message
    core.assert_settled()


def test_what_never_left_the_outbox_has_not_run() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = True
    message = caller.request(timeout_ms=1000)
    core.advance(1.1)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and not error.may_have_executed and error.retryable
    agent.frozen = False
    core.pump()
    assert not agent.requests
    core.assert_settled()


@pytest.mark.parametrize("idempotent", [True, False])
def test_what_was_sent_and_not_acknowledged_may_have_run(idempotent: bool) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = True
    message = caller.request(timeout_ms=1000, idempotent=idempotent)
    assert agent.peer is not None
    held = agent.peer.link.next_frame(core.state.now)
    assert held is not None
    core.advance(1.1)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and error.may_have_executed and error.retryable is idempotent
    second = caller.request(timeout_ms=2000)  # no new work until it acknowledges
    core.advance(8)
    assert caller.error_of(second).code == codes.TIMEOUT and "queued" in caller.error_of(second).message
    third = caller.request(timeout_ms=9000)
    agent.frozen = False
    agent.take(held)
    core.advance(2)
    assert not agent.has(second)
    agent.answer(third)
    core.assert_settled()


def test_time_spent_on_the_way_counts() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    envelope = core.envelope(timeout_ms=1000)
    item = caller.send(envelope)
    item.stamped -= 0.9
    core.pump()
    assert agent.got(envelope.message_id).timeout_ms <= 100
    late = core.envelope(timeout_ms=1000)
    assert caller.peer is not None
    caller.send(late).stamped -= 1.5
    core.pump()
    error = caller.error_of(late.message_id)
    assert error.code == codes.TIMEOUT and not error.may_have_executed
    core.advance(1)
    core.assert_settled()


def test_the_nodes_own_stall_counts() -> None:
    core = CoreMesh()
    core.agent()
    caller = core.caller()
    envelope = core.envelope(timeout_ms=1000)
    assert caller.peer is not None
    with core.step():
        mesh.frame(core.state, caller.peer, Frame(seq=1, envelopes=[envelope]), 2000)
    caller.link._next_seq = 2  # it was this process that sent it
    core.pump()
    assert caller.error_of(envelope.message_id).code == codes.TIMEOUT
    core.assert_settled()


def test_cancel_ends_the_request_down_to_the_handler() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    caller.cancel(message)
    error = caller.error_of(message)
    assert error.code == codes.CANCELLED and error.may_have_executed
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    core.assert_settled()


def test_a_call_that_hangs_up_cancels_its_request() -> None:
    core = CoreMesh()
    agent = core.agent()
    call, envelope = core.call()
    with core.step() as state:
        mesh.hang_up(state, call, core.caller().who)
    core.pump()
    assert agent.cancels[0].correlation_id == envelope.message_id
    core.assert_settled()


def test_cancel_of_a_queued_message_takes_it_out_of_its_lane() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first, second, third = (caller.request(session_id="s") for _ in range(3))
    caller.cancel(second)
    error = caller.error_of(second)
    assert error.code == codes.CANCELLED and not error.may_have_executed
    agent.answer(first)
    assert agent.has(third) and not agent.has(second)
    agent.answer(third)
    core.assert_settled()


def test_nobody_cancels_somebody_elses_request() -> None:
    core = CoreMesh()
    agent, caller, mallory = core.agent(), core.caller(), core.caller("mallory")
    message = caller.request()
    mallory.cancel(message)
    mallory.send(Envelope(type=pb.CANCEL, correlation_id=message, entry=agent.got(message).entry, attempt=1))
    core.pump()
    assert not agent.cancels
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_cancel_of_what_is_finished_or_unknown_changes_nothing() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    agent.answer(message)
    caller.cancel(message)
    caller.cancel("never heard of")
    assert caller.text_of(message) == "ok"
    core.assert_settled()


@pytest.mark.parametrize("sent", [True, False])
def test_a_lost_link_settles_its_requests_after_the_settle_window(sent: bool) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = not sent
    message = caller.request(timeout_ms=5000)
    agent.cut()
    core.advance(0.9)
    assert not caller.replies
    core.advance(1.1)
    error = caller.error_of(message)
    assert error.code == (codes.AGENT_LOST if sent else codes.CONNECT_FAILED)
    assert error.may_have_executed is sent
    core.advance(12)
    core.assert_settled()


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_request_lost_with_its_agent_may_be_retried_only_if_running_twice_does_no_harm(idempotent: bool) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(idempotent=idempotent)
    agent.cut()
    core.advance(2.0)
    error = caller.error_of(message)
    assert (error.code, error.retryable, error.may_have_executed) == (codes.AGENT_LOST, idempotent, True)
    assert error.attempts == 1 and error.agent_id == "echo/1"


def test_a_reply_after_the_loss_is_stored_for_who_asks_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=5000)
    agent.cut()
    core.advance(1.2)
    assert caller.error_of(message).code == codes.AGENT_LOST
    agent.connect()
    agent.answer(message, "after all")
    again = core.envelope(message_id=message, fresh=False)
    caller.send(again)
    core.pump()
    assert caller.replies[-1].payload.text == "after all"
    assert len(agent.requests) == 1
    core.assert_settled()


def test_a_reply_after_the_loss_counts_even_if_the_caller_has_not_seen_the_error() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=5000)
    caller.frozen = True
    agent.cut()
    core.advance(1.2)
    agent.connect()
    agent.answer(message, "after all")
    other = core.caller("other")
    other.send(core.envelope(message_id=message, fresh=False))
    core.pump()
    assert other.text_of(message) == "after all"
    caller.frozen = False
    core.assert_settled()


def test_a_late_answer_after_a_timeout_does_not_replace_the_timeout() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.confirms_cancels = False
    message = caller.request(timeout_ms=12_000, fresh=False)
    core.advance(11.5)
    agent.cut()
    core.advance(0.6)
    assert caller.error_of(message).code == codes.TIMEOUT
    agent.connect()
    agent.answer(message, "late")
    caller.send(core.envelope(message_id=message, fresh=False))
    core.pump()
    assert caller.replies[-1].error.code == codes.TIMEOUT
    core.assert_settled()


def test_a_queued_message_whose_time_passed_in_a_stall_of_the_node_is_not_started() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first = caller.request(session_id="s", timeout_ms=60_000)
    second = caller.request(session_id="s", timeout_ms=1000)
    core.state.now += 3  # no timer has run
    agent.answer(first)
    assert not agent.has(second)
    error = caller.error_of(second)
    assert error.code == codes.TIMEOUT and not error.may_have_executed
    core.advance(1)
    core.assert_settled()
