"""Plays of copies, late answers and lost callers: what one of several hears when something happens to another."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import failure
from reach.core.ports import ANYBODY
from tests.support.core import CoreMesh

AGAIN = failure(codes.AGENT_ERROR, "again", retryable=True)
LARGE = "x" * (100 << 10)


def test_a_caller_that_is_lost_ends_its_own_wait_and_not_that_of_who_joined() -> None:
    core = CoreMesh()
    agent, first, second = core.agent(), core.caller("first"), core.caller("second")
    first.request("same", message_id="m", fresh=False, timeout_ms=60_000)
    second.request("same", message_id="m", fresh=False, timeout_ms=60_000)
    first.cut()
    core.advance(12)
    assert not second.replies_to("m") and not agent.cancels
    agent.answer("m")
    assert second.text_of("m") == "ok" and len(agent.requests) == 1
    core.assert_settled()


def test_the_answer_of_an_agent_that_was_told_to_be_lost_is_kept_for_a_copy() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=10_000)
    agent.cut()
    core.advance(3)
    assert caller.error_of(message).code == codes.AGENT_LOST
    agent.connect()
    agent.answer(message, "after all")
    core.assert_settled()
    other = core.caller("other")
    other.request(message_id=message, fresh=False)
    assert other.text_of(message) == "after all" and len(agent.requests) == 1


def test_a_copy_of_what_was_told_to_be_lost_goes_to_the_agent_that_came_back_with_it() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(fresh=False, timeout_ms=10_000)
    agent.cut()
    core.advance(40)
    assert caller.error_of(message).code == codes.AGENT_LOST
    agent.forget()
    key = frames.MessageKey(tenant=ANYBODY.tenant, principal=ANYBODY.principal, message_id=message)
    agent.connect(holding=[frames.Holding(key=key, state=frames.Holding.RUNNING)])
    other = core.caller("other")
    other.request(message_id=message, fresh=False)
    assert len(agent.requests) == 2, "its own table joins"
    agent.answer(message, "after all")
    assert other.text_of(message) == "after all"
    agent.answer(agent.requests[0], "after all")  # each who waits is answered, the former sending too
    core.assert_settled()


def test_a_copy_of_what_one_agent_alone_can_answer_goes_to_nobody_else() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = core.agent("echo/1"), core.agent("echo/2")
    caller.request(message_id="m", fresh=False, timeout_ms=10_000)
    holder, other = (one, two) if one.has("m") else (two, one)
    holder.answer("m", LARGE)
    again = core.caller("again")
    again.request(message_id="m", fresh=False, timeout_ms=10_000)
    assert len(holder.requests) == 2, "it has the answer, which is too large to be kept here"
    holder.answer("m", error=AGAIN)
    core.advance(3)
    assert again.error_of("m").code == codes.AGENT_ERROR and not other.has("m")
    core.assert_settled()


def test_copies_with_two_topics_are_called_back_on_both() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    caller.subscribe("one", "two")
    for topic in ("one", "two", "one"):
        caller.request("same", message_id="m", fresh=False, reply_topic=topic, timeout_ms=10_000)
    agent.answer("m")
    assert sorted(each.target.topic for each in caller.callbacks) == ["one", "two"]
    core.assert_settled()


def test_what_was_cancelled_on_its_way_and_never_came_takes_no_slot_when_the_link_is_back() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    agent.frozen = True
    message = caller.request(timeout_ms=10_000)
    assert agent.peer is not None and agent.peer.link.next_frame(core.state.now) is not None  # it went, and got lost
    agent.cut()
    caller.cancel(message)
    assert core.attachment("echo/1").agent.in_flight == 1
    agent.connect()
    assert core.attachment("echo/1").agent.in_flight == 0 and not agent.has(message)
    core.advance(10)
    assert core.state.stats.forced_releases == 0
    core.assert_settled()


def test_what_is_said_of_one_attempt_is_not_said_of_the_next() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(idempotent=True, timeout_ms=6000, profile=pb.RPC)
    first = agent.got(message)
    progress = frames.Progress(message_id=message, entry=first.entry, started=True)
    agent.signal(Signal(progress=progress))
    core.advance(6.5)
    error = caller.error_of(message)
    assert error.attempts == 3 and "delivered at echo/1" in error.message, "the first was being handled, not the last"
    breaker = core.attachment("echo/1").agent.breaker
    assert breaker is not None and breaker.failures(core.state.now) == 3, "each attempt counts"
    core.assert_settled()


def test_a_conversations_retry_keeps_its_back_off_when_another_message_comes() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    first = caller.request(session_id="s", timeout_ms=10_000)
    agent.answer(first, error=failure(codes.OVERLOADED, "busy", retry_after_ms=1500))
    second = caller.request(session_id="s", timeout_ms=10_000)
    core.advance(1.4)
    assert len(agent.requests) == 1
    core.advance(0.2)
    assert agent.got(first).attempt == 2 and not agent.has(second)
    agent.answer(first)
    agent.answer(second)
    core.assert_settled()


def test_a_conversation_whose_message_is_withdrawn_no_longer_waits_for_a_slot() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    running = caller.request(timeout_ms=10_000)
    waits = caller.request(session_id="s", timeout_ms=10_000)
    attachment = core.attachment("echo/1")
    assert len(attachment.lanes_waiting) == 1
    caller.cancel(waits)
    assert not attachment.lanes_waiting
    agent.answer(running)
    core.assert_settled()
