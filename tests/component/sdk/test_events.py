"""Events of topics."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from agent_sdk import Agent, ConnectedMesh, Context, InvalidEnvelope, PublishCounts, connect
from agentreach.v1 import envelope_pb2 as pb
from tests.support.fake_node import FakeNode, eventually


async def test_a_subscription_is_active_on_entry_and_counts_come_back(node: FakeNode, mesh: ConnectedMesh) -> None:
    assert await mesh.publish("orders/new", 1) == PublishCounts()
    async with connect(transport=node, own_link=True) as other, other.subscribe("orders/new") as events:
        assert await mesh.publish("orders/new", {"id": 7}) == PublishCounts(matched=1, accepted=1)
        event = await anext(events)
    assert event.data == {"id": 7} and event == {"id": 7}
    assert (event.topic, event.source) == ("orders/new", "caller/fake")


async def test_events_of_one_publisher_reach_an_agent_in_order_one_at_a_time(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = Agent("worker", transport=node, own_link=True, drain_timeout=1.0)
    got: list[int] = []
    done, active = asyncio.Event(), 0

    @agent.on_event("news")
    async def on_news(number: int, ctx: Context) -> None:
        nonlocal active
        active += 1
        assert active == 1 and ctx.topic == "news"
        await asyncio.sleep(0)
        got.append(number)
        active -= 1
        if number == 99:
            done.set()

    async with agent:
        for number in range(100):
            await mesh.publish("news", number)
        await asyncio.wait_for(done.wait(), 5)
    assert got == list(range(100))


async def test_a_repeated_event_is_shown_once(node: FakeNode, mesh: ConnectedMesh) -> None:
    async with mesh.subscribe("news") as events:
        event = pb.Envelope(type=pb.EVENT, message_id="m", recipient="caller/fake")
        event.target.topic, event.payload.text = "news", "x"
        for name in ("m", "m", "n"):
            event.message_id = name
            node.session.send(event)
        assert [(await anext(events)).message_id for _ in range(2)] == ["m", "n"]


async def test_a_subscription_ends_when_left_or_collected(node: FakeNode, mesh: ConnectedMesh) -> None:
    async with mesh.subscribe("a"):
        assert ("", "production", "a") in node.session.topics
    await eventually(lambda: not node.session.topics)
    dropped = mesh.subscribe("b")
    await dropped.__aenter__()
    assert node.session.topics
    del dropped
    gc.collect()
    await eventually(lambda: not node.session.topics)


async def test_subscriptions_are_declared_again_to_a_node_that_forgot_them(node: FakeNode, mesh: ConnectedMesh) -> None:
    async with mesh.subscribe("news") as events:
        node.forget()
        await eventually(lambda: len(node.sessions) == 1 and bool(node.session.topics))
        await mesh.publish("news", 5)
        assert (await anext(events)).data == 5


async def test_a_reader_that_is_too_slow_loses_the_oldest_and_is_told(node: FakeNode, mesh: ConnectedMesh) -> None:
    async with mesh.subscribe("news") as events:
        event = pb.Envelope(type=pb.EVENT, recipient="caller/fake")
        event.target.topic = "news"
        for number in range(1100):
            event.message_id, event.payload.text = str(number), str(number)
            node.session.send(event)
        await eventually(lambda: events.dropped == 76)
        assert (await anext(events)).data == "76"


@pytest.mark.parametrize("topic", ["", "a b", "/a", "x" * 300])
async def test_a_topic_that_cannot_be_is_refused(mesh: ConnectedMesh, topic: str) -> None:
    with pytest.raises(InvalidEnvelope):
        mesh.subscribe(topic)
    with pytest.raises(InvalidEnvelope):
        await mesh.publish(topic, 1)


async def test_an_event_to_a_selector_runs_the_handler_and_nobody_answers(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = Agent("worker", capabilities=["work"], transport=node, own_link=True, drain_timeout=1.0)
    got: list[Any] = []

    @agent.handler
    async def work(data: Any) -> str:
        got.append(data)
        return "unheard"

    async with agent:
        home = node.session_of(agent.agent_id)
        event = pb.Envelope(type=pb.EVENT, message_id="m", timeout_ms=1000)
        event.payload.text = "go"
        node.deliver(home, home, agent.agent_id, event)
        await eventually(lambda: got == ["go"])
        await asyncio.sleep(0.02)
        assert not home.envelopes
