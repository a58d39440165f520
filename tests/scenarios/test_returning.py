"""Plays: a node has lost its memory; agents come back with what they hold, callers ask again."""

from __future__ import annotations

from typing import Any

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentLoad
from agentreach.wire.ids import uuid7
from reach.core import returning
from reach.core.ports import ANYBODY, Identity
from tests.support.core import CoreMesh, Process, record

AGAIN: dict[str, Any] = {"fresh": False, "resent": True, "timeout_ms": 60_000}
STARTED_UNIX_MS = 1_800_000_000_000
NONE_YET = b"formerly" + bytes(8)
"""An entry of the node's former life."""


def holding(message_id: str, *, running: bool = True, who: Identity = ANYBODY) -> frames.Holding:
    """As an SDK says it: the env as it stood in the envelope, empty for production."""
    key = frames.MessageKey(tenant=who.tenant, principal=who.principal, message_id=message_id)
    return frames.Holding(key=key, state=frames.Holding.RUNNING if running else frames.Holding.REPLIED)


def comes_back(core: CoreMesh, *held: frames.Holding, agent_id: str = "echo/1", **fields: object) -> Process:
    """A process that was there before the node started attaches with what it holds."""
    process = Process(core, agent_id.replace("/", "-"), ANYBODY, "")
    core.processes.append(process)
    process.connect(record(agent_id, **fields), holding=held)
    return process


def ends(process: Process, message_id: str) -> None:
    """The agent answers what it was given in the node's former life."""
    agent_id = next(iter(process.agents))
    reply = pb.Envelope(type=pb.RESPONSE, correlation_id=message_id, entry=NONE_YET, attempt=1, source=agent_id)
    reply.payload.text = "done"
    process.send(reply)
    process.core.pump()


def from_before(number: int = 1) -> str:
    """An id that was made two seconds before the node started."""
    return uuid7(STARTED_UNIX_MS - 2000, number)


def in_flight(core: CoreMesh, agent_id: str = "echo/1") -> int:
    return core.attachment(agent_id).agent.in_flight


class TestSlots:
    def test_what_an_agent_brings_along_takes_its_slots_until_it_says_that_it_ended(self) -> None:
        core = CoreMesh()
        agent, caller = comes_back(core, holding("a"), holding("b"), max_concurrency=2), core.caller()
        assert in_flight(core) == 2
        waits = caller.request()
        assert not agent.has(waits)
        ends(agent, "a")
        assert in_flight(core) == 2 and agent.has(waits)  # the freed slot found it
        agent.answer(waits)
        ends(agent, "b")
        core.assert_settled()

    def test_an_end_that_is_told_twice_frees_one_slot(self) -> None:
        core = CoreMesh()
        agent = comes_back(core, holding("a"), holding("b"), max_concurrency=3)
        ends(agent, "a")
        ends(agent, "a")
        assert in_flight(core) == 1
        ends(agent, "b")
        core.assert_settled()

    def test_what_it_has_answered_takes_none(self) -> None:
        core = CoreMesh()
        comes_back(core, holding("a", running=False), max_concurrency=1)
        core.assert_settled()

    def test_a_heartbeat_that_says_that_nothing_runs_frees_them_all(self) -> None:
        core = CoreMesh()
        agent = comes_back(core, holding("a"), holding("b"))
        agent.beating = False
        for running, left in ((1, 2), (0, 0)):
            loads = [AgentLoad(agent_id="echo/1", in_flight=running)]
            agent.signal(Signal(heartbeat=frames.Heartbeat(agents=loads)))
            core.pump()
            assert in_flight(core) == left
        core.assert_settled()

    def test_nothing_is_held_longer_than_any_request_may_live(self) -> None:
        core = CoreMesh()
        agent = comes_back(core, holding("a"))
        agent.beating = False
        for _ in range(61):
            core.advance(9)
            agent.signal(Signal())
        assert in_flight(core) == 1
        for _ in range(7):
            core.advance(9)
            agent.signal(Signal())
        assert in_flight(core) == 0 and not core.attachment("echo/1").held

    def test_an_agent_that_leaves_takes_what_it_brought_along_with_it(self) -> None:
        core = CoreMesh()
        agent = comes_back(core, holding("a"), max_concurrency=1)
        agent.leave()
        again = comes_back(core, holding("a"), max_concurrency=1)
        assert in_flight(core) == 1
        ends(again, "a")
        core.assert_settled()

    def test_a_link_that_begins_anew_counts_what_is_in_flight_here_once(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=2), core.caller()
        message = caller.request(timeout_ms=60_000)
        agent.cut()
        agent.forget()
        agent.connect(holding=[holding(message)])
        assert in_flight(core) == 1
        agent.answer(message)
        core.assert_settled()

    def test_an_agent_whose_link_was_given_up_counts_what_it_still_runs_and_its_answer_is_believed(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=1), core.caller()
        message = caller.request(timeout_ms=60_000)
        agent.cut()
        core.advance(30)
        assert caller.error_of(message).code == codes.AGENT_LOST
        agent.forget()
        agent.connect(holding=[holding(message)])
        assert in_flight(core) == 1
        caller.replies.clear()
        assert caller.request(message_id=message, fresh=False, timeout_ms=60_000) == message
        assert len(agent.requests) == 2  # to the one who has it, and not the stored failure
        agent.answer(agent.requests[-1])
        assert caller.reply_to(message).payload.text
        ends(agent, message)
        core.assert_settled()

    @pytest.mark.parametrize("wrong", ["tenant", "env"])
    def test_what_cannot_be_its_own_is_not_believed(self, wrong: str) -> None:
        core = CoreMesh()
        claim = holding("a")
        setattr(claim.key, wrong, "other")
        comes_back(core, claim)
        assert in_flight(core) == 0 and not len(core.state.returning.held)


class TestCopies:
    @pytest.mark.parametrize("running", [True, False])
    def test_a_copy_goes_to_the_agent_that_has_the_message_and_takes_no_slot(self, running: bool) -> None:
        core = CoreMesh()
        other = core.agent("echo/2")
        holder = comes_back(core, holding("m", running=running), max_concurrency=1)
        caller = core.caller()
        caller.request(message_id="m", **AGAIN)
        assert holder.has("m") and not other.requests
        assert not holder.got("m").fresh
        assert in_flight(core) == int(running)
        holder.answer("m")
        if running:
            ends(holder, "m")
        assert caller.reply_to("m").payload.text
        core.assert_settled()

    def test_a_copy_waits_for_the_agent_that_has_it_and_finds_it_when_it_is_back(self) -> None:
        core = CoreMesh()
        other, caller = core.agent("echo/2"), core.caller()
        message = caller.request(message_id=from_before(), **AGAIN)
        core.advance(2)
        assert not other.requests and not caller.replies
        holder = comes_back(core, holding(message))
        core.advance(0.2)
        assert holder.has(message) and not other.requests
        holder.answer(message)
        ends(holder, message)
        assert caller.reply_to(message).payload.text
        core.assert_settled()

    def test_an_agent_cannot_draw_messages_that_are_not_meant_for_it(self) -> None:
        core = CoreMesh()
        thief = comes_back(core, holding("m"), agent_id="thief/1")
        agent, caller = core.agent("echo/2"), core.caller()
        caller.request(message_id="m", idempotent=True, **AGAIN)
        assert agent.has("m") and not thief.requests
        agent.answer("m")
        ends(thief, "m")
        core.assert_settled()

    def test_a_streamed_reply_that_runs_on_is_granted_what_its_new_consumer_takes(self) -> None:
        core = CoreMesh()
        holder, caller = comes_back(core, holding("m")), core.caller()
        caller.request(message_id="m", **AGAIN)
        for number in range(80):  # more than a consumer takes at the start: they were kept
            holder.answer("m", sequence=number, more=True)
        entry = caller.replies_to("m")[-1].entry
        caller.signal(Signal(stream_credit=frames.StreamCredit(correlation_id="m", entry=entry, up_to=144)))
        core.pump()
        assert [each.stream_credit.up_to for each in holder.got_signals("stream_credit")] == [144]
        holder.answer("m", sequence=80)
        ends(holder, "m")
        core.assert_settled()


class TestTheTimeAfterAStart:
    def test_a_new_request_for_nobody_is_told_so_at_once_and_a_resent_one_waits_for_its_agent(self) -> None:
        core = CoreMesh()
        caller = core.caller()
        assert caller.error_of(caller.request()).code == codes.NO_ROUTE
        message = caller.request(idempotent=True, **AGAIN)
        core.advance(3)
        assert not caller.replies_to(message)
        agent = core.agent()
        core.advance(0.2)
        agent.answer(message)
        assert caller.reply_to(message).payload.text
        core.assert_settled()

    def test_one_that_was_never_given_to_the_former_node_waits_too_and_runs_anywhere(self) -> None:
        core = CoreMesh()
        caller = core.caller()
        message = caller.request(fresh=True, resent=True, message_id=from_before())
        core.advance(1)
        agent = core.agent()
        core.advance(0.2)
        assert agent.got(message).fresh
        agent.answer(message)
        core.assert_settled()

    def test_it_waits_for_an_agent_that_is_there_and_not_ready(self) -> None:
        core = CoreMesh()
        agent = Process(core, "p", ANYBODY, "")
        agent.answers_probes = False
        core.processes.append(agent)
        agent.connect(record("echo/1"))
        caller = core.caller()
        message = caller.request(idempotent=True, **AGAIN)
        assert not caller.replies_to(message)
        agent.answers_probes = True
        core.advance(6)
        agent.answer(message)
        core.assert_settled()

    def test_when_nobody_has_come_it_is_told_that_nothing_matches(self) -> None:
        core = CoreMesh()
        caller = core.caller()
        message = caller.request(idempotent=True, **AGAIN)
        core.advance(9.5)
        assert not caller.replies_to(message)
        core.advance(1)
        assert caller.error_of(message).code == codes.NO_ROUTE
        core.assert_settled()

    @pytest.mark.parametrize("kind", ["uuid7", "the application's"])
    def test_what_may_have_run_and_nobody_claims_is_not_run_again(self, kind: str) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        message = caller.request(message_id=from_before() if kind == "uuid7" else "order-17", **AGAIN)
        core.advance(11)
        error = caller.error_of(message)
        assert error.code == codes.AGENT_LOST and error.may_have_executed and not error.retryable
        assert not agent.requests
        core.assert_settled()

    def test_that_holds_for_callers_that_come_later_too_as_far_as_their_ids_tell(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        core.advance(40)
        assert caller.error_of(caller.request(message_id=from_before(), **AGAIN)).code == codes.AGENT_LOST
        made_here = uuid7(STARTED_UNIX_MS + 30_000, 1)
        for message in (made_here, "order-17"):
            agent.answer(caller.request(message_id=message, **AGAIN))
        core.assert_settled()

    def test_ids_that_applications_choose_and_send_for_the_first_time_wait_for_nothing(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        agent.answer(caller.request(message_id="order-17", fresh=False))
        core.assert_settled()

    def test_a_resent_one_that_does_no_harm_goes_to_any_agent_that_is_there(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        agent.answer(caller.request(message_id=from_before(), idempotent=True, **AGAIN))
        core.assert_settled()

    def test_its_deadline_and_its_callers_cancel_end_the_wait(self) -> None:
        core = CoreMesh()
        caller = core.caller()
        late = caller.request(message_id=from_before(1), **AGAIN | {"timeout_ms": 2000})
        left = caller.request(message_id=from_before(2), **AGAIN)
        caller.cancel(left)
        core.advance(3)
        error = caller.error_of(late)
        assert error.code == codes.TIMEOUT and error.may_have_executed
        assert caller.error_of(left).code == codes.CANCELLED
        core.agent()
        core.advance(10)
        core.assert_settled()

    def test_copies_of_one_that_waits_join_it(self) -> None:
        core = CoreMesh()
        one, two = core.caller("one"), core.caller("two")
        message = one.request(idempotent=True, **AGAIN)
        two.request(message_id=message, idempotent=True, **AGAIN)
        agent = core.agent()
        core.advance(0.2)
        assert len(agent.requests) == 1
        agent.answer(message)
        assert one.reply_to(message).payload.text == two.reply_to(message).payload.text
        core.assert_settled()

    def test_a_resent_message_of_a_session_waits_too(self) -> None:
        core = CoreMesh()
        caller = core.caller()
        message = caller.request(session_id="s", idempotent=True, **AGAIN)
        core.advance(1)
        agent = core.agent()
        core.advance(0.2)
        agent.answer(message)
        core.assert_settled()

    def test_only_so_many_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(returning, "PARKED_MAX", 3)
        core = CoreMesh()
        caller = core.caller()
        messages = [caller.request(idempotent=True, **AGAIN) for _ in range(4)]
        assert caller.error_of(messages[3]).code == codes.NO_ROUTE
        core.advance(11)
        core.assert_settled()
