"""Plays: a conversation has one owner, one message at a time, and is told when its state is gone."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from reach.core import owners
from reach.core.moving import Holder
from tests.support.core import CoreMesh, Process, record


def test_a_session_is_started_once_and_stays_with_its_owner() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    first = caller.request(session_id="s")
    owner = one if one.has(first) else two
    owner.answer(first)
    assert caller.reply_to(first).session_event == pb.STARTED
    epoch = caller.reply_to(first).epoch
    assert epoch > 0
    for _ in range(5):
        message = caller.request(session_id="s", epoch=epoch)
        owner.answer(message)
        assert caller.reply_to(message).session_event == pb.SESSION_EVENT_UNSPECIFIED
        assert caller.reply_to(message).epoch == epoch
    core.assert_settled()


def test_messages_of_a_session_run_one_at_a_time_in_order() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    messages = [caller.request(session_id="s") for _ in range(5)]
    for number, message in enumerate(messages):
        assert [each.message_id for each in agent.requests] == messages[: number + 1]
        agent.answer(message)
    core.assert_settled()


def test_sessions_of_one_agent_take_turns_for_its_slot() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    order = [caller.request(session_id=name) for name in ("a", "a", "a", "b", "b")]
    for _ in order:
        agent.answer(agent.requests[-1])
    sessions_run = [each.session_id for each in agent.requests]
    assert sessions_run == ["a", "b", "a", "b", "a"]
    core.assert_settled()


def test_of_many_sessions_the_one_that_waits_longest_for_the_slot_has_its_turn() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    order = [caller.request(session_id=name) for name in ("a", "b", "c", "d", "a", "b", "c", "d")]
    for _ in order:
        agent.answer(agent.requests[-1])
    assert [each.session_id for each in agent.requests] == ["a", "b", "c", "d", "a", "b", "c", "d"]
    core.assert_settled()


def test_a_slot_that_a_lane_has_no_use_for_goes_to_the_next_one() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    running = caller.request(session_id="a")
    withdrawn = caller.request(session_id="b")
    last = caller.request(session_id="c")
    caller.cancel(withdrawn)  # its lane still stands in the queue for the slot
    agent.answer(running)
    assert agent.has(last)
    agent.answer(last)
    core.assert_settled()


def test_slots_that_come_back_all_at_once_are_all_used_and_none_is_lost() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=2), core.caller()
    agent.beat(leftovers=2)
    waiting = [caller.request(session_id=name) for name in "abcd"]
    assert not agent.requests
    agent.beat(leftovers=0)
    assert len(agent.requests) == 2
    for _ in waiting:
        agent.answer(agent.requests[-1] if agent.requests[-1].entry in agent.running else agent.requests[-2])
    assert {each.message_id for each in agent.requests} == set(waiting)
    for each in list(agent.running.values()):
        agent.answer(each)
    core.assert_settled()


def test_a_lane_has_a_bound() -> None:
    core = CoreMesh(lane_max=3)
    agent, caller = core.agent(), core.caller()
    messages = [caller.request(session_id="s") for _ in range(5)]
    assert caller.error_of(messages[-1]).code == codes.OVERLOADED
    for message in messages[:4]:
        agent.answer(message)
    core.assert_settled()


def test_a_message_that_waits_in_its_lane_times_out_as_queued() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first = caller.request(session_id="s", timeout_ms=60_000)
    second = caller.request(session_id="s", timeout_ms=1000)
    core.advance(1.1)
    error = caller.error_of(second)
    assert error.code == codes.TIMEOUT and "queued" in error.message and not error.may_have_executed
    agent.answer(first)
    assert not agent.has(second)
    core.assert_settled()


def test_a_session_whose_owner_left_gets_a_new_one_and_is_told_that_the_state_is_lost() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    first = caller.request(session_id="s")
    owner, other = (one, two) if one.has(first) else (two, one)
    owner.answer(first)
    epoch = caller.reply_to(first).epoch
    owner.leave()

    strict = caller.request(session_id="s", epoch=epoch, strict_session=True)
    assert caller.error_of(strict).code == codes.SESSION_LOST
    message = caller.request(session_id="s", epoch=epoch)
    other.answer(message)
    assert caller.reply_to(message).session_event == pb.LOST
    assert caller.reply_to(message).epoch > epoch
    again = caller.request(session_id="s", epoch=caller.reply_to(message).epoch, strict_session=True)
    other.answer(again)
    assert caller.reply_to(again).session_event == pb.SESSION_EVENT_UNSPECIFIED
    core.assert_settled()


def test_an_epoch_named_where_there_is_no_pin_means_lost_never_started() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(session_id="s", epoch=77)
    agent.answer(message)
    assert caller.reply_to(message).session_event == pb.LOST

    strict = caller.request(session_id="t", epoch=77, strict_session=True)
    assert caller.error_of(strict).code == codes.SESSION_LOST
    core.assert_settled()


def test_messages_wait_for_an_owner_whose_link_is_cut_and_go_on_when_it_is_back() -> None:
    core = CoreMesh()
    agent, other, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    first = caller.request(session_id="s")
    owner = agent if agent.has(first) else other
    owner.answer(first)
    owner.cut()
    message = caller.request(session_id="s")
    core.advance(2.0)
    assert not caller.replies_to(message)
    owner.connect()
    owner.answer(message)
    assert caller.reply_to(message).session_event == pb.SESSION_EVENT_UNSPECIFIED
    core.assert_settled()


def test_an_owner_that_is_unreachable_for_thirty_seconds_is_judged_dead() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    first = caller.request(session_id="s")
    owner, other = (one, two) if one.has(first) else (two, one)
    owner.answer(first)
    owner.answers_probes = False
    message = caller.request(session_id="s", timeout_ms=100)
    core.advance(1.0)  # it is given one that it does not answer: probes follow
    message = caller.request(session_id="s", timeout_ms=120_000)
    owner.answer(owner.requests[-1])
    core.advance(100.0)
    assert other.has(message) or owner.has(message)
    message = caller.request(session_id="s", timeout_ms=120_000)
    assert other.has(message)
    other.answer(message)
    core.advance(130.0)
    core.assert_settled()


def test_the_registry_away_refuses_new_sessions_and_keeps_the_old_ones() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.answer(caller.request(session_id="old"))
    core.registry_up = False
    error = caller.error_of(caller.request(session_id="new"))
    assert error.code == codes.REGISTRY_UNAVAILABLE and error.retryable
    old = caller.request(session_id="old")
    agent.answer(old)
    assert caller.text_of(old) == "ok"
    core.assert_settled()
    assert len(core.state.lanes) == 1


def test_sessions_that_never_got_an_owner_leave_nothing_behind() -> None:
    core = CoreMesh(sessions_max=10)
    agent, caller = core.agent(), core.caller()
    for number in range(30):
        caller.request(agent_type="nobody", session_id=f"s{number}")
        caller.request(agent_id="echo/9", session_id=f"s{number}")
    assert not core.state.lanes
    for number in range(12):
        caller.request(session_id=f"t{number}")
    assert len(core.state.lanes) == 10
    assert [reply.error.code for reply in caller.replies[-2:]] == [codes.OVERLOADED] * 2
    existing = caller.request(session_id="t0")
    for _ in range(11):
        agent.answer(next(iter(agent.running.values())))
    assert caller.text_of(existing) == "ok"
    core.assert_settled()


def test_a_session_is_forgotten_when_it_was_idle_for_its_time_to_live() -> None:
    core = CoreMesh(session_ttl_s=100.0)
    agent, caller = core.agent(), core.caller()
    agent.answer(caller.request(session_id="s"))
    core.advance(99.0)
    agent.answer(caller.request(session_id="s"))
    core.advance(90.0)
    assert core.state.lanes
    core.advance(20.0)
    assert not core.state.lanes
    core.assert_settled()


def _pinned_to_a_stranger(core: CoreMesh) -> None:
    core.pins["default", "production", "echo", "s"] = Holder("echo/old", b"another life", 500)


def test_a_pin_of_a_process_that_is_not_back_yet_is_awaited_and_then_replaced() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    _pinned_to_a_stranger(core)
    message = caller.request(session_id="s", timeout_ms=60_000)
    core.advance(9.0)
    assert not agent.has(message)
    core.advance(2.0)
    agent.answer(message)
    assert caller.reply_to(message).session_event == pb.LOST
    core.assert_settled()


def test_a_lane_whose_only_message_left_while_the_owner_was_awaited_is_forgotten_in_time() -> None:
    core = CoreMesh(session_ttl_s=100.0)
    core.agent()
    caller = core.caller()
    _pinned_to_a_stranger(core)
    caller.cancel(caller.request(session_id="s"))
    core.advance(250.0)
    assert not core.state.lanes
    core.assert_settled()


def test_a_process_that_comes_back_with_its_sessions_keeps_them() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first = caller.request(session_id="s")
    agent.answer(first)
    epoch = caller.reply_to(first).epoch
    agent.cut()
    core.advance(11.0)  # the link expired, the agent is gone
    assert core.state.directory.get("default", "production", "echo/1") is None
    agent.forget()
    agent.connect(holds=[("s", epoch)])
    message = caller.request(session_id="s", epoch=epoch)
    agent.answer(message)
    assert caller.reply_to(message).session_event == pb.SESSION_EVENT_UNSPECIFIED
    assert caller.reply_to(message).epoch == epoch
    core.assert_settled()


def test_claimed_sessions_are_bounded() -> None:
    core = CoreMesh(sessions_max=5)
    process = Process(core, "p", core.caller().who, "")
    core.processes.append(process)
    process.connect(record("echo/1"), holds=[(f"s{number}", 3) for number in range(50)])
    assert len(core.state.lanes) == 5


@pytest.mark.parametrize("gone", [True, False])
def test_an_owner_that_leaves_while_its_pin_is_written(gone: bool) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    core.holds_pins = True
    message = caller.request(session_id="s")
    if gone:
        agent.leave()
    core.holds_pins = False
    core.answer_store()
    core.pump()
    if gone:
        assert caller.error_of(message).code == codes.NO_ROUTE
    else:
        agent.answer(message)
    core.assert_settled()


def test_a_session_sticks_to_its_owner_for_a_target_by_capability() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1", capabilities=["talk"]), core.caller()
    other = core.agent("other/1", capabilities=["talk"])
    first = caller.request(capabilities=["talk"], session_id="s")
    owner = agent if agent.has(first) else other
    owner.answer(first)
    second = caller.request(capabilities=["talk"], session_id="s")
    owner.answer(second)
    assert caller.text_of(second) == "ok"
    core.assert_settled()


def test_an_owner_that_does_not_match_the_target_is_no_reason_to_move_the_session() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1"), core.caller()
    agent.answer(caller.request(session_id="s"))
    core.agent("echo/2", version="2.0")
    error = caller.error_of(caller.request(agent_type="echo", version="2.0", session_id="s"))
    assert error.code == codes.NO_AGENT_AVAILABLE and error.agent_id == "echo/1"
    core.assert_settled()


def test_pins_in_use_are_refreshed() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    for _ in range(10):
        agent.answer(caller.request(session_id="s"))
        core.advance(owners.REFRESH_S / 4)
    assert 1 <= len(core.refreshed) <= 3


def test_a_session_goes_on_without_an_owner_that_is_judged_dead_over_a_message() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    stuck = caller.request(session_id="s", timeout_ms=300_000, fresh=False)
    owner, other = (one, two) if one.has(stuck) else (two, one)
    behind = caller.request(session_id="s", timeout_ms=300_000)
    owner.answers_probes = False
    core.advance(50)
    error = caller.error_of(stuck)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    other.answer(behind)
    assert caller.reply_to(behind).session_event == pb.LOST
    owner.answer(stuck, "late")  # nobody waits for it, but who asks again gets it
    caller.send(core.envelope(message_id=stuck, session_id="s", fresh=False))
    core.pump()
    assert caller.replies[-1].payload.text == "late"
    core.assert_settled()


def test_a_new_owner_is_told_of_until_somebody_heard_it() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first = caller.request(session_id="s")
    caller.cancel(first)
    agent.refuse(first, codes.CANCELLED)
    second = caller.request(session_id="s")
    agent.answer(second)
    assert caller.reply_to(second).session_event == pb.STARTED
    third = caller.request(session_id="s")
    agent.answer(third)
    assert caller.reply_to(third).session_event == pb.SESSION_EVENT_UNSPECIFIED
    core.assert_settled()
