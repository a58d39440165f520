"""Plays: events to topics and selectors, counted, in order, at nobody's cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Signal, Subscribe, Unsubscribe
from agentreach.v1.registry_pb2 import DRAINING
from reach.core import events, mesh
from reach.core.calls import Call
from reach.core.ports import ANYBODY, Identity
from tests.support.core import CoreMesh, Process, record


def _counts(process: Process, message: str) -> tuple[int, int, int, int]:
    counts = events.counts_of(process.reply_to(message))
    return counts.matched, counts.accepted, counts.dropped, counts.unknown


def test_an_event_reaches_every_subscriber_of_its_topic_once_and_in_order() -> None:
    core = CoreMesh()
    publisher = core.caller("publisher")
    readers = [core.caller(f"r{number}") for number in range(3)]
    for reader in readers:
        reader.subscribe("news", "other")
        reader.subscribe("news")
    messages = [publisher.publish("news") for _ in range(5)]
    assert [_counts(publisher, message) for message in messages] == [(3, 3, 0, 0)] * 5
    for reader in readers:
        assert [event.message_id for event in reader.events] == messages
        assert not reader.replies
    core.assert_settled()


def test_nobody_there_is_no_error() -> None:
    core = CoreMesh()
    publisher = core.caller()
    assert _counts(publisher, publisher.publish("news")) == (0, 0, 0, 0)
    message = publisher.publish(agent_type="nobody", broadcast=True)
    assert _counts(publisher, message) == (0, 0, 0, 0)
    core.assert_settled()


def test_to_a_selector_one_match_or_all_of_them() -> None:
    core = CoreMesh()
    agents = [core.agent(f"echo/{number}", max_concurrency=1) for number in range(3)]
    publisher = core.caller()
    assert _counts(publisher, publisher.publish(agent_type="echo")) == (1, 1, 0, 0)
    assert sum(len(agent.events) for agent in agents) == 1
    assert _counts(publisher, publisher.publish(agent_type="echo", broadcast=True)) == (3, 3, 0, 0)
    busy = [publisher.request() for _ in agents]
    assert _counts(publisher, publisher.publish(agent_type="echo")) == (1, 1, 0, 0)  # an event takes no slot
    for message in busy:
        next(agent for agent in agents if agent.has(message)).answer(message)
    core.assert_settled()


def test_tenants_and_envs_hear_nothing_of_one_another() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    stranger = core.caller("stranger", who=Identity("elsewhere", "x"))
    stranger.subscribe("news")
    reader.signal(Signal(subscribe=Subscribe(topics=["news"], env="staging")))
    core.pump()
    assert _counts(publisher, publisher.publish("news")) == (0, 0, 0, 0)
    assert _counts(publisher, publisher.publish("news", env="staging")) == (1, 1, 0, 0)
    core.assert_settled()


def test_what_is_not_acknowledged_in_time_is_unknown_and_counted_once() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    reader.frozen = True
    message = publisher.publish("news")
    core.advance(1.9)
    assert not publisher.replies
    core.advance(0.2)
    assert _counts(publisher, message) == (1, 0, 0, 1)
    reader.frozen = False
    core.advance(5)
    assert _counts(publisher, message) == (1, 0, 0, 1)  # exactly one reply, whatever comes later
    assert len(reader.events) == 1
    core.assert_settled()


def test_a_cut_loses_no_event() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    reader.cut()
    messages = [publisher.publish("news", timeout_ms=20_000) for _ in range(3)]
    core.advance(5)
    reader.connect()
    assert [event.message_id for event in reader.events] == messages
    assert [_counts(publisher, message) for message in messages] == [(1, 1, 0, 0)] * 3
    core.assert_settled()


def test_a_link_that_begins_anew_still_brings_the_events_that_waited() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    reader.cut()
    message = publisher.publish("news", timeout_ms=20_000)
    reader.restart_numbering()
    reader.connect()
    assert [event.message_id for event in reader.events] == [message]
    assert core.state.topics.count == 0  # declared anew by its process
    assert _counts(publisher, message) == (1, 1, 0, 0)


def test_a_subscriber_that_does_not_come_back_drops_what_it_never_got() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    reader.cut()
    message = publisher.publish("news", timeout_ms=60_000)
    core.advance(11)
    assert _counts(publisher, message) == (1, 0, 1, 0)
    assert core.state.topics.count == 0
    core.assert_settled()


def test_a_slow_subscriber_loses_its_oldest_events_and_is_told_how_many() -> None:
    core = CoreMesh()
    publisher, slow, brisk = core.caller(), core.caller("slow"), core.caller("brisk")
    for reader in (slow, brisk):
        reader.subscribe("news")
    slow.frozen = True
    messages = [publisher.publish("news", timeout_ms=20_000) for _ in range(1100)]
    assert [event.message_id for event in brisk.events] == messages
    dropped = [m for m in messages if publisher.replies_to(m)]
    assert dropped == messages[: 1100 - 1024]  # known at once
    assert _counts(publisher, dropped[0]) == (2, 1, 1, 0)
    slow.frozen = False
    core.pump()
    assert [event.message_id for event in slow.events] == messages[-1024:]
    slow.beat()  # any frame of it: there is room again
    gaps = [(gap.gap.topic, gap.gap.dropped) for gap in slow.got_signals("gap")]
    assert gaps == [("news", 1100 - 1024)]
    assert len(publisher.replies) == 1100
    core.assert_settled()


def test_events_to_a_subscriber_that_takes_nothing_do_not_pile_up() -> None:
    core = CoreMesh()
    publisher, slow = core.caller(), core.caller("slow")
    slow.subscribe("news")
    slow.frozen = True
    for _ in range(3000):
        publisher.publish("news", timeout_ms=600_000)
    assert slow.peer is not None
    assert slow.peer.link.waiting <= 1024 and len(slow.peer.event_items) <= 1024
    assert len(publisher.replies) == 3000 - 1024
    slow.frozen = False
    core.assert_settled()


def test_unsubscribed_means_no_more_events() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("a", "b")
    reader.signal(Signal(unsubscribe=Unsubscribe(topics=["a"])))
    core.pump()
    assert _counts(publisher, publisher.publish("a")) == (0, 0, 0, 0)
    assert _counts(publisher, publisher.publish("b")) == (1, 1, 0, 0)
    reader.leave()
    assert core.state.topics.count == 0


def test_an_agents_subscription_goes_with_the_agent() -> None:
    core = CoreMesh()
    process = core.process("p", record("echo/1"), record("echo/2"))
    process.subscribe("news", agent_id="echo/1")
    process.subscribe("news", agent_id="ghost/1")
    assert core.state.topics.count == 1
    publisher = core.caller()
    message = publisher.publish("news")
    assert process.events[0].recipient == "echo/1" and _counts(publisher, message) == (1, 1, 0, 0)
    core.agent("echo/1")  # another process takes it over
    assert core.state.topics.count == 0


def test_topics_are_bounded_and_illegal_ones_refused() -> None:
    core = CoreMesh(topics_max=5)
    reader = core.caller()
    reader.subscribe("bad topic", *(f"t{number}" for number in range(10)))
    assert core.state.topics.count == 5
    assert len(core.logged("subscription refused")) == 6


def _bad() -> Iterator[dict[str, object]]:
    yield {"topic": "bad topic"}
    yield {"topic": "news", "agent_type": "echo"}
    yield {"topic": "news", "timeout_ms": 700_000}
    yield {"topic": "news", "protocol_version": 2}
    yield {"topic": "news", "reply_topic": "back"}
    yield {"topic": "news", "signature": b"x" * (3 << 20)}


@pytest.mark.parametrize("fields", list(_bad()))
def test_a_bad_event_is_refused(fields: dict[str, object]) -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    assert publisher.error_of(publisher.publish(**fields)).code == codes.INVALID_ENVELOPE  # type: ignore[arg-type]
    assert not reader.events
    core.assert_settled()


def test_an_event_says_only_what_the_node_vouches_for() -> None:
    core = CoreMesh()
    publisher, reader = core.caller(), core.caller("reader")
    reader.subscribe("news")
    publisher.publish("news", source="echo/1", tenant="other", principal="root", actors=["root"], hop_count=8)
    event = reader.events[0]
    assert publisher.welcome is not None
    assert (event.source, event.tenant, event.principal) == (publisher.welcome.caller_id, "default", "anonymous")
    assert event.hop_count == 1 and not event.actors


def test_publish_by_a_call_gives_the_counts() -> None:
    core = CoreMesh()
    reader = core.caller("reader")
    reader.subscribe("news")
    envelope = core.envelope("event", topic="news", timeout_ms=0)
    envelope.type = pb.MESSAGE_TYPE_UNSPECIFIED
    call = Call(core.state, streaming=False)
    with core.step() as state:
        mesh.publish(state, call, ANYBODY, envelope)
    core.pump()
    assert events.counts_of(call.replies[0]).accepted == 1
    core.assert_settled()


def test_events_that_beget_events_end_at_the_hop_limit() -> None:
    core = CoreMesh()
    process = core.agent()
    process.subscribe("again")
    process.publish("again", source="echo/1")
    for _ in range(20):
        process.publish("again", source="echo/1", lineage=process.events[-1].lineage)
    assert len(process.events) == 10
    assert core.state.stats.loops["hop_limit"] == 11
    core.assert_settled()


def test_a_broadcast_does_not_go_to_agents_that_are_leaving() -> None:
    core = CoreMesh()
    core.agent("echo/1")
    leaving, publisher = core.agent("echo/2"), core.caller()
    leaving.say(DRAINING)
    assert _counts(publisher, publisher.publish(agent_type="echo", broadcast=True)) == (1, 1, 0, 0)
    core.assert_settled()
