"""Plays: calls and events that nobody waits for are no part of a deadlock, whatever slots their senders hold."""

from __future__ import annotations

from agentreach.v1.envelope_pb2 import RESPONSE
from tests.support.core import CoreMesh, record

TOPIC = "results/mine"


def test_submitting_to_oneself_is_no_deadlock_because_nobody_waits() -> None:
    core = CoreMesh()
    agent, caller = core.process("echo-1", record(max_concurrency=1)), core.caller()
    outer = caller.request(timeout_ms=10_000)
    inner = agent.call_from(outer, reply_topic=TOPIC)
    assert agent.reply_to(inner).type == RESPONSE and not agent.reply_to(inner).HasField("error")
    agent.answer(outer)
    assert agent.has(inner)
    agent.answer(inner)
    core.assert_settled()


def test_what_a_submitted_call_asks_of_its_submitter_is_no_deadlock_either() -> None:
    core = CoreMesh()
    first, second, caller = core.process("echo-1", record(max_concurrency=1)), core.agent("other/1"), core.caller()
    outer = caller.request(timeout_ms=10_000)
    middle = first.call_from(outer, agent_type="other", reply_topic=TOPIC)
    back = second.call_from(middle)
    first.answer(outer)
    first.answer(back, "free again")
    assert second.text_of(back) == "free again"
    second.answer(middle)
    core.assert_settled()


def test_what_an_events_handler_asks_of_the_publisher_is_no_deadlock_either() -> None:
    core = CoreMesh()
    first, second, caller = core.process("echo-1", record(max_concurrency=1)), core.agent("other/1"), core.caller()
    second.subscribe("news", agent_id="other/1")
    outer = caller.request(timeout_ms=10_000)
    first.publish("news", lineage=first.got(outer).lineage, source="echo/1")
    event = second.events[0]
    back = second.request(lineage=event.lineage, source="other/1")
    first.answer(outer)
    first.answer(back)
    assert second.text_of(back) == "ok"
    core.assert_settled()
