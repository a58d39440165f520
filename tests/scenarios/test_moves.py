"""Plays: a session changes hands with its state; whatever fails, it has one owner and each message one answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import DRAINING
from agentreach.wire import limits
from reach.core import drains, leaving, moves, unstored
from reach.core.lanes import Lane
from reach.core.moving import CANDIDATES_MAX, Step
from tests.support.core import CoreMesh, Process
from tests.support.keepers import Keeper


def keepers(core: CoreMesh, count: int) -> list[Keeper]:
    return [Keeper(core, str(number)) for number in range(count)]


def ask(core: CoreMesh, caller: Process, session: str = "s", **fields: Any) -> str:
    return caller.request(agent_type="keeper", session_id=session, timeout_ms=60_000, **fields)


def owner_of(core: CoreMesh, found: Iterable[Keeper], session: str = "s") -> Keeper:
    lane = lane_of(core, session)
    assert lane.owner is not None
    return next(each for each in found if each.agent_id == lane.owner.agent.agent_id)


def lane_of(core: CoreMesh, session: str = "s") -> Lane:
    return core.state.lanes["default", "production", "keeper", session]


def begin(core: CoreMesh, caller: Process, found: list[Keeper], session: str = "s") -> tuple[Keeper, list[Keeper], str]:
    """A session of one turn: its owner, the others, the message."""
    message = ask(core, caller, session)
    owner = owner_of(core, found, session)
    owner.handle_all()
    return owner, [each for each in found if each is not owner], message


def release(core: CoreMesh, session: str = "s") -> codes.Error | None:
    with core.step() as state:
        fault = leaving.release(state, lane_of(core, session))
    core.pump()
    return fault


def drain(core: CoreMesh, keeper: Keeper, limit_s: float = 55.0) -> None:
    with core.step() as state:
        drains.agent(state, core.attachment(keeper.agent_id), limit_s, "")
    core.pump()


def notes_of(caller: Process, message: str) -> list[str]:
    found: list[str] = json.loads(caller.text_of(message))
    return found


def test_a_released_session_goes_on_elsewhere_with_its_state_under_a_new_epoch() -> None:
    core, caller = CoreMesh(), None
    found, caller = keepers(core, 2), core.caller()
    owner, (other,), first = begin(core, caller, found)
    epoch = caller.reply_to(first).epoch
    assert release(core) is None
    assert owner_of(core, found) is other and other.state["s"] == [first] and not owner.state
    second = ask(core, caller, epoch=epoch, strict_session=True)
    other.handle_all()
    reply = caller.reply_to(second)
    assert reply.session_event == pb.MOVED and reply.epoch > epoch and notes_of(caller, second) == [first, second]
    third = ask(core, caller, epoch=reply.epoch)
    other.handle_all()
    assert not caller.reply_to(third).session_event
    late = ask(core, caller, epoch=epoch)  # another caller, who has not heard of the move
    other.handle_all()
    assert caller.reply_to(late).session_event == pb.MOVED
    assert core.state.stats.moves["moved"] == 1
    core.assert_settled()


def test_messages_wait_while_their_session_moves_and_keep_their_order() -> None:
    core = CoreMesh()
    found, caller = keepers(core, 2), core.caller()
    owner, (other,), first = begin(core, caller, found)
    running = ask(core, caller)
    waiting = [ask(core, caller) for _ in range(3)]
    release(core)
    assert lane_of(core).move is not None and not owner.state["s"][1:] and "release" not in owner.asked
    owner.handle_all()
    assert not caller.reply_to(running).session_event
    other.handle_all()
    assert [caller.reply_to(each).session_event for each in waiting] == [pb.MOVED, 0, 0]
    assert notes_of(caller, waiting[-1]) == [first, running, *waiting]
    core.assert_settled()


def test_a_turn_that_outlives_its_time_is_cancelled_and_the_session_moves_without_it() -> None:
    core = CoreMesh(drain_timeout_s=3.0, cancel_grace_s=1.0)
    found, caller = keepers(core, 2), core.caller()
    owner, (other,), first = begin(core, caller, found)
    stuck = ask(core, caller)
    release(core)
    core.advance(2.9)
    assert not owner.process.cancels
    core.advance(0.3)
    assert [each.correlation_id for each in owner.process.cancels] == [stuck]
    assert caller.error_of(stuck).code == codes.AGENT_LOST and caller.error_of(stuck).may_have_executed
    message = ask(core, caller)
    other.handle_all()
    assert notes_of(caller, message) == [first, message]
    core.advance(2)
    core.assert_settled()


def test_a_turn_that_does_not_even_end_when_cancelled_answers_in_vain() -> None:
    core = CoreMesh(drain_timeout_s=3.0, cancel_grace_s=1.0)
    found, caller = keepers(core, 2), core.caller()
    owner, (other,), _ = begin(core, caller, found)
    owner.process.confirms_cancels = False
    stuck = ask(core, caller)
    release(core)
    core.advance(6)
    assert owner_of(core, found) is other
    assert caller.error_of(stuck).code == codes.AGENT_LOST
    owner.process.answer(stuck)
    assert len(caller.replies_to(stuck)) == 1
    core.assert_settled()


def test_what_a_former_owner_still_says_is_fenced_and_counted() -> None:
    core = CoreMesh()
    found, caller = keepers(core, 2), core.caller()
    owner, (other,), _first = begin(core, caller, found)
    release(core)
    fenced = core.state.stats.duplicates["fenced"]
    owner.state["s"] = ["what", "it", "should", "not", "have"]
    owner.checkpoint()
    ready = frames.SessionReady(agent_id=owner.agent_id, session_id="s", epoch=owner.epochs["s"])
    owner.process.signal(Signal(session_ready=ready))
    core.pump()
    assert core.state.stats.duplicates["fenced"] == fenced + 2
    assert owner_of(core, found) is other
    message = ask(core, caller)
    other.handle_all()
    assert len(notes_of(caller, message)) == 2
    core.assert_settled()


class TestOwnerDied:
    """The owner is gone without a word."""

    def test_a_stored_state_is_restored_elsewhere_also_for_strict_callers(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        owner.process.leave()
        message = ask(core, caller, strict_session=True)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED
        assert notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_without_one_the_state_is_lost(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        owner.process.leave()
        strict = ask(core, caller, strict_session=True)
        assert caller.error_of(strict).code == codes.SESSION_LOST
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.LOST and notes_of(caller, message) == [message]
        core.assert_settled()

    def test_the_last_state_counts_and_an_older_one_that_comes_later_does_not(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        second = ask(core, caller)
        owner.handle_all()
        owner.checkpoint()
        owner.state["s"].pop()
        owner.checkpoint(turn=1)
        assert lane_of(core).turn == 2 and len(core.snapshots) == 1
        owner.process.leave()
        message = ask(core, caller)
        other.handle_all()
        assert notes_of(caller, message) == [first, second, message]
        core.assert_settled()

    def test_a_state_that_is_still_being_stored_is_waited_for(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        core.holds_pins = True
        owner.checkpoint()
        owner.process.leave()
        message = ask(core, caller)
        assert not other.process.requests
        core.holds_pins = False
        core.answer_store()
        core.pump()
        other.handle_all()
        assert notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_while_it_is_asked_for_the_state_what_was_stored_before_counts(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        owner.answers = False
        release(core)
        owner.process.leave()
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_once_it_has_handed_it_over_that_counts(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        core.holds_pins = True
        release(core)
        assert lane_of(core).move.step is Step.STORING  # type: ignore[union-attr]
        owner.process.leave()
        core.holds_pins = False
        core.answer_store()
        core.pump()
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_the_pin_of_a_process_that_does_not_come_back_names_a_state_too(self) -> None:
        """Another life of the node, or another node, has written it."""
        core = CoreMesh()
        found, caller = keepers(core, 1), core.caller()
        owner, _, first = begin(core, caller, found)
        owner.checkpoint()
        former = core.pins["default", "production", "keeper", "s"]
        again = CoreMesh(seed=7)
        again.pins["default", "production", "keeper", "s"] = former
        again.snapshots, again.revision = core.snapshots, core.revision
        (heir,), caller = keepers(again, 1), again.caller()
        message = ask(again, caller, epoch=former.epoch)
        again.advance(12)
        heir.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        again.assert_settled()


class TestStepsThatFail:
    """Back to the former owner where it stays, then to two others, then LOST."""

    @pytest.mark.parametrize("answers", [True, False])
    def test_an_owner_that_stays_and_cannot_hand_it_over_keeps_it(self, answers: bool) -> None:
        core = CoreMesh(session_hook_s=2.0)
        found, caller = keepers(core, 2), core.caller()
        owner, _, first = begin(core, caller, found)
        core.attachment(owner.agent_id).hooks = 1
        owner.fails, owner.answers = {"release"}, answers
        release(core)
        message = ask(core, caller)
        core.advance(3)
        owner.handle_all()
        assert not caller.reply_to(message).session_event and notes_of(caller, message) == [first, message]
        assert core.state.stats.moves["kept"] == 1
        core.assert_settled()

    @pytest.mark.parametrize("answers", [True, False])
    def test_one_that_leaves_and_cannot_hand_it_over_has_lost_it(self, answers: bool) -> None:
        core = CoreMesh(session_hook_s=2.0)
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        owner.fails, owner.answers = {"release"}, answers
        drain(core, owner)
        message = ask(core, caller)
        core.advance(3)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.LOST
        core.assert_settled()

    def test_or_leaves_what_was_stored_before(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        owner.fails = {"release"}
        drain(core, owner)
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.advance(1)
        core.assert_settled()

    @pytest.mark.parametrize("answers", [True, False])
    def test_a_next_owner_that_cannot_take_it_gives_it_back(self, answers: bool) -> None:
        core = CoreMesh(session_hook_s=2.0)
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        other.fails, other.answers = {"restore"}, answers
        release(core)
        message = ask(core, caller)
        core.advance(3)
        owner.handle_all()
        assert owner_of(core, found) is owner and notes_of(caller, message) == [first, message]
        assert other.asked == ["restore"] and owner.asked == ["release", "restore"]
        core.assert_settled()

    def test_what_it_says_of_the_time_before_counts_no_more(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        former = owner.epochs["s"]
        other.fails = {"restore"}
        release(core)
        assert owner_of(core, found) is owner and lane_of(core).epoch > former
        held = dict(core.snapshots)
        owner.epochs["s"] = former
        owner.checkpoint(turn=99)
        assert core.snapshots == held and lane_of(core).turn < 99
        core.assert_settled()

    def test_if_that_fails_too_two_others_are_asked_and_then_it_is_lost(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 6), core.caller()
        owner, others, _first = begin(core, caller, found)
        for each in found:
            each.fails = {"restore"}
        release(core)
        assert owner.asked == ["release", "restore"]
        assert sum(len(each.asked) for each in others) == CANDIDATES_MAX
        message = ask(core, caller)
        owner_of(core, found).handle_all()
        assert caller.reply_to(message).session_event == pb.LOST
        assert core.state.stats.moves["lost"] == 1
        core.assert_settled()

    def test_one_that_leaves_is_not_asked_to_take_it_back(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 3), core.caller()
        owner, others, first = begin(core, caller, found)
        others[0].fails = others[1].fails = {"restore"}
        drain(core, owner)
        assert owner.asked == ["release"] and [each.asked for each in others] == [["restore"]] * 2
        message = ask(core, caller)
        owner_of(core, found).handle_all()
        assert caller.reply_to(message).session_event == pb.LOST
        core.advance(1)
        core.assert_settled()
        del first

    def test_a_next_owner_that_dies_is_followed_by_another(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 3), core.caller()
        owner, others, first = begin(core, caller, found)
        for each in others:
            each.answers = False
        release(core)
        taking = owner_of(core, found)
        owner.answers = True
        taking.process.leave()
        message = ask(core, caller)
        owner.handle_all()
        assert notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_a_state_that_cannot_be_stored_goes_back_under_the_same_epoch(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, _, first = begin(core, caller, found)
        epoch = lane_of(core).epoch
        core.snapshots_up = False
        release(core)
        assert lane_of(core).move is None and lane_of(core).epoch == epoch
        message = ask(core, caller)
        owner.handle_all()
        assert not caller.reply_to(message).session_event and notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_for_one_that_leaves_it_is_stored_as_soon_as_that_can_be_done(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        core.snapshots_up = False
        drain(core, owner)
        message = ask(core, caller)
        core.advance(5)
        assert not caller.replies_to(message)
        core.snapshots_up = True
        core.advance(2)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.advance(1)
        core.assert_settled()

    def test_a_pin_that_is_somebody_elses_meanwhile_ends_the_owners_time(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        held = core.pins["default", "production", "keeper", "s"]
        attachment = core.attachment(other.agent_id)
        core.pins["default", "production", "keeper", "s"] = type(held)(
            other.agent_id, attachment.agent.incarnation, held.epoch + 10
        )
        owner.checkpoint()
        assert lane_of(core).owner is None
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).epoch == held.epoch + 10
        core.assert_settled()

    def test_a_checkpoint_that_could_not_be_stored_is_tried_again_and_the_newest_counts(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        core.snapshots_up = False
        told = [first]
        for _ in range(3):
            told.append(ask(core, caller))
            owner.handle_all()
            owner.checkpoint()
        core.advance(5)
        assert len(core.state.unstored.kept) == 1 and lane_of(core).turn == 1
        core.snapshots_up = True
        core.advance(1.5)
        assert lane_of(core).turn == 4 and not core.state.unstored.kept and not core.state.snapshots_held
        owner.process.leave()
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [*told, message]
        core.assert_settled()

    def test_nobody_takes_over_an_older_state_while_a_newer_one_is_to_be_stored(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        core.snapshots_up = False
        second = ask(core, caller)
        owner.handle_all()
        owner.checkpoint()
        owner.process.leave()
        early = ask(core, caller)
        core.advance(2)
        assert caller.error_of(early).code == codes.REGISTRY_UNAVAILABLE and not other.process.requests
        core.snapshots_up = True
        message = ask(core, caller)
        core.advance(2)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED
        assert notes_of(caller, message) == [first, second, message]
        core.assert_settled()

    def test_a_state_that_can_never_be_stored_is_lost_and_no_older_one_passes_for_it(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        owner.checkpoint()
        core.snapshots_up = False
        ask(core, caller)
        owner.handle_all()
        owner.checkpoint()
        owner.process.leave()
        core.advance(unstored.OWNERLESS_S + 3)
        assert not core.state.unstored.kept
        core.snapshots_up = True
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.LOST and notes_of(caller, message) == [message]
        core.assert_settled()

    def test_when_the_registry_is_away_what_is_stored_waits_for_it(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.checkpoint()
        owner.process.leave()
        core.registry_up = False
        assert caller.error_of(ask(core, caller)).code == codes.REGISTRY_UNAVAILABLE
        core.registry_up = True
        message = ask(core, caller)
        other.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_a_link_that_began_anew_is_told_again(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        owner.answers = False
        release(core)
        owner.process.cut()
        owner.process.restart_numbering()
        owner.answers = True
        owner.process.connect()
        message = ask(core, caller)
        other.handle_all()
        assert owner.asked == ["release", "release"] and notes_of(caller, message) == [first, message]
        core.assert_settled()


class TestAgentsThatLeave:
    """A tenth of an agent's sessions at a time, those first for which somebody waits."""

    def test_at_most_a_tenth_move_at_once_until_all_have(self) -> None:
        core = CoreMesh()
        leaver, caller = Keeper(core, "leaver"), core.caller()
        for number in range(30):
            ask(core, caller, f"s{number}")
        leaver.handle_all()
        heir = Keeper(core, "heir")
        heir.answers = False
        drain(core, leaver)
        attachment = core.attachment(leaver.agent_id)
        assert len(attachment.moving) == 3 == leaving.at_once(attachment)
        heir.answers = True
        heir.process.cut()
        heir.process.restart_numbering()
        heir.process.connect()
        assert len(heir.state) == 30 and not attachment.pinned and not attachment.moving
        core.advance(1)
        assert core.state.directory.get("default", "production", leaver.agent_id) is None
        assert core.state.stats.moves["moved"] == 30
        core.assert_settled()

    def test_one_that_says_so_by_itself_is_let_go_when_its_sessions_have_gone(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), first = begin(core, caller, found)
        other.answers = False
        owner.process.say(DRAINING)
        owner.process.signal(Signal(detach=frames.Detach(agent_id=owner.agent_id, reason="drained", after_moves=True)))
        core.pump()
        assert not owner.process.got_signals("detached")
        other.answers = True
        other._restore(other.process, other.process.got_signals("session_restore")[-1].session_restore)
        core.pump()
        assert owner.process.got_signals("detached")[0].detached.code == frames.Goodbye.NORMAL
        message = ask(core, caller)
        other.handle_all()
        assert notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_without_anybody_else_its_states_are_stored_for_whoever_comes(self) -> None:
        core = CoreMesh()
        (last,), caller = keepers(core, 1), core.caller()
        _, _, first = begin(core, caller, [last])
        last.process.say(DRAINING)
        assert not last.asked, "a successor may come while it finishes its work"
        last.process.signal(Signal(detach=frames.Detach(agent_id=last.agent_id, after_moves=True)))
        core.pump()
        assert last.process.got_signals("detached") and len(core.snapshots) == 1
        assert caller.error_of(ask(core, caller)).code == codes.NO_ROUTE
        heir = Keeper(core, "heir")
        message = ask(core, caller)
        heir.handle_all()
        assert caller.reply_to(message).session_event == pb.MOVED and notes_of(caller, message) == [first, message]
        core.assert_settled()

    def test_a_process_that_takes_its_sessions_to_another_node_loses_none(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, _, _first = begin(core, caller, found)
        change = frames.StatusChange(agent_id=owner.agent_id, status=DRAINING, keeps_sessions=True)
        owner.process.signal(Signal(status_change=change))
        core.pump()
        message = ask(core, caller)
        core.advance(1)
        assert not owner.asked and owner_of(core, found) is owner and not caller.replies_to(message)
        caller.cancel(message)
        core.assert_settled()

    def test_the_state_of_a_forgotten_session_is_dropped(self) -> None:
        core = CoreMesh(session_ttl_s=100.0)
        found, caller = keepers(core, 1), core.caller()
        owner, _, _first = begin(core, caller, found)
        owner.checkpoint()
        assert core.snapshots
        core.advance(110)
        assert not core.snapshots and not core.state.lanes
        core.assert_settled()


class TestOrders:
    """What an operator is told."""

    def test_a_session_that_nobody_else_could_take_stays(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 1), core.caller()
        begin(core, caller, found)
        fault = release(core)
        assert fault is not None and fault.code == codes.NO_AGENT_AVAILABLE and "keeper/0" in fault.message
        core.assert_settled()

    def test_one_that_moves_already_is_not_moved_twice(self) -> None:
        core = CoreMesh()
        found, caller = keepers(core, 2), core.caller()
        owner, (other,), _first = begin(core, caller, found)
        ask(core, caller)
        assert release(core) is None
        fault = release(core)
        assert fault is not None and fault.code == codes.OVERLOADED
        owner.handle_all()
        other.handle_all()
        core.assert_settled()


def test_an_oversized_state_is_refused_and_told() -> None:
    core = CoreMesh()
    found, caller = keepers(core, 2), core.caller()
    owner, _, first = begin(core, caller, found)
    owner.state["s"] = ["x" * limits.SNAPSHOT_BYTES_MAX]
    owner.checkpoint(turn=9)
    assert core.logged("checkpoint refused") and lane_of(core).turn == 0 and not core.snapshots
    core.assert_settled()
    del first


def test_states_that_the_store_does_not_take_fast_enough_are_dropped_before_they_fill_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moves, "HELD_BYTES_MAX", 300)
    core = CoreMesh()
    found, caller = keepers(core, 1), core.caller()
    owner, _, _first = begin(core, caller, found)
    core.holds_pins = True
    for turn in range(1, 20):
        owner.checkpoint(turn=turn)
    assert 0 < core.state.snapshots_held <= 300 and core.state.stats.moves["dropped"] > 10
    core.holds_pins = False
    core.answer_store()
    core.pump()
    core.assert_settled()


# ---- whatever fails, at whatever point ----


ACTIONS = st.sampled_from(
    ["ask", "ask", "ask", "handle", "handle", "release", "drain", "checkpoint", "die", "cut", "back", "come", "hang",
     "fail release", "fail restore", "mend", "store away", "store back", "hold", "answer", "wait", "wait"]
)  # fmt: skip


class Play:
    """Agents, a caller and a store in which anything may fail, and what must hold all the same."""

    def __init__(self, seed: int) -> None:
        self.core = CoreMesh(seed, session_hook_s=1.0, drain_timeout_s=2.0, cancel_grace_s=0.5, resume_window_s=2.0)
        self.caller = self.core.caller()
        self.keepers: list[Keeper] = []
        self.messages: list[str] = []
        self.ran: dict[str, str] = {}
        for _ in range(3):
            self.do("come", 0)

    def do(self, action: str, which: int) -> None:
        core = self.core
        alive = [each for each in self.keepers if each.process.peer is not None]
        one = alive[which % len(alive)] if alive else None
        match action:
            case "ask":
                self.messages.append(ask(core, self.caller, f"s{which % 2}"))
            case "come":
                self.keepers.append(Keeper(core, f"k{len(self.keepers)}"))
            case "release":
                if ("default", "production", "keeper", f"s{which % 2}") in core.state.lanes:
                    release(core, f"s{which % 2}")
            case "store away":
                core.snapshots_up = False
            case "store back":
                core.snapshots_up = True
            case "hold":
                core.holds_pins = True
            case "answer":
                self._answer()
            case "wait":
                core.advance(0.7)
            case _ if one is not None:
                self._with(one, action, which)
        self.check()

    def _with(self, one: Keeper, action: str, which: int) -> None:
        core = self.core
        match action:
            case "handle":
                self.handle(one)
            case "drain":
                if core.state.directory.get("default", "production", one.agent_id) is not None:
                    drain(core, one, 2.0)
            case "checkpoint":
                for session_id in [name for name in (f"s{which % 2}",) if name in one.state and one.process.connected]:
                    one.checkpoint(session_id)
            case "die":
                if one.process.connected:
                    one.process.cut()
                one.process.peer = None
            case "cut":
                if one.process.connected:
                    one.process.cut()
            case "back":
                if not one.process.connected:
                    one.process.connect()
            case "hang":
                one.answers = False
            case "fail release" | "fail restore":
                one.fails.add(action.partition(" ")[2])
            case "mend":
                one.answers, one.fails = True, set()

    def handle(self, one: Keeper) -> None:
        """Everything that waits at a process."""
        while one.process.running and one.process.connected:
            envelope = next(iter(one.process.running.values()))
            assert envelope.message_id not in self.ran, "a message ran twice"
            self.ran[envelope.message_id] = one.agent_id
            one.handle(envelope)

    def _answer(self) -> None:
        self.core.holds_pins = False
        self.core.answer_store()
        self.core.pump()

    def check(self) -> None:
        """At every moment a session has one owner by the store, and nobody else is at work on it."""
        for key, lane in self.core.state.lanes.items():
            at_work = {request.attachment for request in lane.running if not request.is_settled}
            assert len(at_work) <= 1, "two agents are at work on one session"
            if lane.owner is None:
                continue
            assert at_work <= {lane.owner}
            pin = self.core.pins[key]
            assert (pin.epoch, pin.agent_id) == (lane.epoch, lane.owner.agent.agent_id), "it owns what the pin denies"

    def end(self) -> None:
        """Faults stop: everything ends, and every message had one outcome."""
        self.core.snapshots_up = True
        self._answer()
        self.keepers.append(Keeper(self.core, "last"))
        for each in self.keepers:
            each.answers, each.fails = True, set()
        for _ in range(100):
            for each in self.keepers:
                if each.process.peer is not None:
                    self.handle(each)
            self.core.advance(1.0)
        for message in self.messages:
            replies = [each for each in self.caller.replies_to(message) if not each.more]
            assert len(replies) == 1, f"{message} ended {len(replies)} times"
        self.core.assert_settled()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**16), st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=40))
def test_whatever_fails_a_session_has_one_owner_and_every_message_one_outcome_and_one_run(
    seed: int, actions: list[tuple[str, int]]
) -> None:
    play = Play(seed)
    for action, which in actions:
        play.do(action, which)
    play.end()
