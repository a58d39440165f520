"""Plays: once means once, whatever is sent again."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Signal, StreamCredit
from agentreach.wire.errors import failure
from tests.support.core import CoreMesh, Process


def _again(core: CoreMesh, caller: Process, message_id: str, text: str = "hi", **fields: object) -> None:
    caller.send(core.envelope(text, message_id=message_id, fresh=False, **fields))
    core.pump()


def test_fifty_copies_at_once_run_once_and_all_get_the_answer() -> None:
    core = CoreMesh()
    agent = core.agent()
    callers = [core.caller(f"c{number}") for number in range(50)]
    for caller in callers:
        caller.send(core.envelope(message_id="one", fresh=False))
    core.pump()
    assert len(agent.requests) == 1
    agent.answer("one", "once")
    assert [caller.text_of("one") for caller in callers] == ["once"] * 50
    assert core.state.stats.duplicates["joined"] == 49
    core.assert_settled()


def test_a_repeat_on_the_same_link_rebinds_and_gets_one_reply() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=1000)
    _again(core, caller, message, timeout_ms=5000)
    core.advance(2)
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_finished_message_is_replayed() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(fresh=False)
    agent.answer(message, "first")
    _again(core, caller, message)
    assert [reply.payload.text for reply in caller.replies] == ["first", "first"]
    assert len(agent.requests) == 1
    core.advance(301)
    _again(core, caller, message)
    assert len(agent.requests) == 2
    agent.answer(message)
    core.assert_settled()


def test_a_fresh_message_is_replayed_until_its_reply_is_acknowledged() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    caller.frozen = True
    agent.answer(message, "first")
    other = core.caller("reconnected")
    _again(core, other, message)
    assert other.text_of(message) == "first"
    assert len(agent.requests) == 1
    caller.frozen = False
    core.assert_settled()


def test_a_fresh_message_whose_link_went_before_the_reply_was_taken_is_replayed() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    caller.cut()
    agent.answer(message, "first")
    core.advance(11)
    caller.forget()
    caller.connect()
    _again(core, caller, message)
    assert caller.text_of(message) == "first"
    assert len(agent.requests) == 1
    core.assert_settled()


def test_a_joined_copy_is_kept_although_the_first_was_fresh() -> None:
    core = CoreMesh()
    agent, caller, other = core.agent(), core.caller(), core.caller("other")
    message = caller.request()
    _again(core, other, message)
    agent.answer(message, "first")
    _again(core, other, message)
    assert [reply.payload.text for reply in other.replies] == ["first", "first"]
    assert len(agent.requests) == 1
    core.assert_settled()


def test_other_content_under_the_same_id_is_a_conflict_in_flight_and_afterwards() -> None:
    core = CoreMesh()
    agent, caller, other = core.agent(), core.caller(), core.caller("other")
    message = caller.request("one", fresh=False)
    _again(core, other, message, "two")
    assert other.error_of(message).code == codes.IDEMPOTENCY_CONFLICT
    agent.answer(message)
    _again(core, other, message, "two")
    assert [reply.error.code for reply in other.replies] == [codes.IDEMPOTENCY_CONFLICT] * 2
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_conflict_on_the_same_link_leaves_the_first_request_alone() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request("one", session_id="s")
    _again(core, caller, message, "two", session_id="s")
    assert caller.replies[0].error.code == codes.IDEMPOTENCY_CONFLICT
    agent.answer(message)
    assert caller.replies[1].payload.text == "ok"
    core.assert_settled()


def test_each_waiter_has_its_own_deadline_and_its_own_cancel() -> None:
    core = CoreMesh()
    agent, first, second, third = core.agent(), core.caller("1"), core.caller("2"), core.caller("3")
    message = first.request(timeout_ms=1000)
    _again(core, second, message, timeout_ms=20_000)
    _again(core, third, message, timeout_ms=20_000)
    core.advance(1.1)
    assert first.error_of(message).code == codes.TIMEOUT
    third.cancel(message)
    assert third.error_of(message).code == codes.CANCELLED
    assert not agent.cancels
    agent.answer(message)
    assert second.text_of(message) == "ok"
    core.assert_settled()


def test_errors_that_may_have_executed_are_replayed_and_others_run_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    broken = caller.request(fresh=False)
    agent.answer(broken, error=failure(codes.AGENT_ERROR, "boom"))
    _again(core, caller, broken)
    assert [reply.error.code for reply in caller.replies] == [codes.AGENT_ERROR] * 2
    assert len(agent.requests) == 1
    busy = caller.request(fresh=False)
    agent.answer(busy, error=failure(codes.OVERLOADED, "busy", retry_after_ms=60_000))
    core.advance(2)
    assert caller.error_of(busy).code == codes.OVERLOADED
    _again(core, caller, busy)
    assert len(agent.requests) == 3
    agent.answer(busy)
    core.assert_settled()


def test_a_large_outcome_is_asked_of_the_agent_that_has_it_without_a_slot() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    message = caller.request(fresh=False)
    agent.answer(message, "x" * 100_000)
    occupied = caller.request()
    _again(core, caller, message)
    assert agent.got(message).fresh is False and agent.requests[-1].message_id == message
    assert core.attachment("echo/1").agent.in_flight == 1
    agent.answer(message, "x" * 100_000)
    assert len(caller.replies_to(message)) == 2
    agent.answer(occupied)
    agent.leave()
    _again(core, caller, message)
    assert caller.replies[-1].error.code == codes.AGENT_LOST
    assert caller.replies[-1].error.may_have_executed
    core.assert_settled()


def test_a_finished_stream_is_replayed_whole_by_its_agent() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(fresh=False)
    for number in range(100):
        agent.answer(message, str(number), more=True)
        if number == 50:
            _grant(core, caller, message, 200)
    agent.answer(message, "end")
    _again(core, caller, message)
    assert len(agent.requests) == 2
    for number in range(100):
        agent.answer(agent.requests[-1], str(number), more=True, pump=False)
    agent.answer(agent.requests[-1], "end")
    texts = [reply.payload.text for reply in caller.replies]
    assert texts == [*map(str, range(100)), "end"] * 2
    core.assert_settled()


def _grant(core: CoreMesh, caller: Process, message: str, up_to: int) -> None:
    entry = caller.replies_to(message)[0].entry
    caller.signal(Signal(stream_credit=StreamCredit(correlation_id=message, entry=entry, up_to=up_to)))
    core.pump()


def test_who_joins_a_stream_that_has_begun_is_told_so_and_gets_no_hole() -> None:
    core = CoreMesh()
    agent, first, late = core.agent(), core.caller("first"), core.caller("late")
    message = first.request()
    early = core.caller("early")
    _again(core, early, message)
    agent.answer(message, "0", more=True)
    _again(core, late, message)
    error = late.error_of(message)
    assert error.code == codes.AGENT_LOST and error.may_have_executed and "stream" in error.message
    agent.answer(message, "1")
    assert [reply.payload.text for reply in first.replies] == ["0", "1"]
    assert [reply.payload.text for reply in early.replies] == ["0", "1"]
    core.assert_settled()


def test_a_cancelled_message_may_run_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(fresh=False)
    caller.cancel(message)
    _again(core, caller, message)
    assert len(agent.requests) == 2
    agent.answer(message)
    core.assert_settled()


def test_ids_made_by_the_node_are_not_kept() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    envelope = core.envelope(fresh=False)
    envelope.message_id = ""
    caller.send(envelope)
    core.pump()
    agent.answer(agent.requests[0])
    assert len(core.state.replay) == 0
    core.assert_settled()


def test_a_caller_that_was_away_too_long_does_not_make_its_message_run_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.confirms_cancels = False
    message, other = caller.request(timeout_ms=60_000), caller.request(timeout_ms=60_000)
    caller.cut()
    core.advance(11)
    assert len(agent.cancels) == 2
    agent.answer(message, "after all")
    caller.forget()
    caller.connect()
    _again(core, caller, message)
    _again(core, caller, other)
    assert caller.text_of(message) == "after all"
    error = caller.error_of(other)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert len(agent.requests) == 2
    core.advance(6)
    core.assert_settled()


def test_a_joined_message_that_waits_in_its_lane_has_the_longest_of_its_deadlines() -> None:
    core = CoreMesh()
    agent, caller, other = core.agent(), core.caller(), core.caller("other")
    first = caller.request(session_id="s", timeout_ms=60_000)
    second = caller.request(session_id="s", timeout_ms=1000)
    _again(core, other, second, session_id="s", timeout_ms=20_000)
    core.advance(2)
    assert caller.error_of(second).code == codes.TIMEOUT
    agent.answer(first)
    assert 17_000 <= agent.got(second).timeout_ms <= 18_000
    agent.answer(second)
    assert other.text_of(second) == "ok"
    core.assert_settled()
