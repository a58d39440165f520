"""Streamed replies, item by item."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agent_sdk import Agent, AgentError, ConnectedMesh, Internal, ReachError, Timeout
from agentreach.v1 import envelope_pb2 as pb
from tests.support.fake_node import FakeNode, eventually


class Producer:
    """An agent that yields, and what became of its generator."""

    def __init__(self, node: FakeNode) -> None:
        self.agent = Agent("worker", transport=node, own_link=True, drain_timeout=1.0)
        self.yielded = 0
        self.closed = asyncio.Event()

        @self.agent.on("count")
        async def count(n: int) -> AsyncIterator[int]:
            try:
                for i in range(n):
                    yield i
                    self.yielded += 1
            finally:
                self.closed.set()

        @self.agent.on("break")
        async def breaking(n: int) -> AsyncIterator[int]:
            for i in range(n):
                yield i
            raise AgentError("out of words")

        @self.agent.on("stick")
        async def sticking(n: int) -> AsyncIterator[int]:
            for i in range(n):
                yield i
            await asyncio.Event().wait()

        @self.agent.on("plain")
        async def plain(data: Any) -> Any:
            return data


async def test_items_come_in_order_and_a_plain_answer_is_one_item(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent:
        async with mesh.stream(500, capabilities=["count"], timeout=10) as items:
            assert [item async for item in items] == list(range(500))
            assert items.source == producer.agent.agent_id
        assert [item async for item in mesh.stream("one", capabilities=["plain"], timeout=10)] == ["one"]
        assert [item async for item in mesh.stream(0, capabilities=["count"], timeout=10)] == []


async def test_the_request_is_sent_on_entry(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.hold_requests = True
    stream = mesh.stream(1, capabilities=["count"], timeout=10)
    await asyncio.sleep(0.01)
    assert not node.session.envelopes
    async with stream:
        await eventually(lambda: len(node.session.envelopes) == 1)


async def test_the_producer_waits_for_credit(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent, mesh.stream(1000, capabilities=["count"], timeout=10) as items:
        await anext(items)
        await asyncio.sleep(0.1)
        assert producer.yielded <= 65
        rest = [item async for item in items]
        assert rest == list(range(1, 1000))


async def test_an_error_in_the_midst_says_after_how_many_items(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent, mesh.stream(3, capabilities=["break"], timeout=10) as items:
        got = []
        with pytest.raises(AgentError, match="out of words") as caught:
            async for item in items:
                got.append(item)
    assert got == [0, 1, 2]
    assert caught.value.details["items"] == "3"


async def test_a_stream_that_comes_to_nothing_says_after_how_many_items(node: FakeNode, mesh: ConnectedMesh) -> None:
    """Also where the node says nothing: it is away, or deaf."""
    producer = Producer(node)
    async with producer.agent, mesh.stream(3, capabilities=["stick"], timeout=1.0) as items:
        got = []
        with pytest.raises(Timeout) as caught:
            async for item in items:
                got.append(item)
    assert got == [0, 1, 2] and caught.value.details["items"] == "3"


async def test_leaving_early_ends_the_generator(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent:
        async with mesh.stream(10**9, capabilities=["count"], timeout=60) as items:
            await anext(items)
        await asyncio.wait_for(producer.closed.wait(), 5)


async def test_leaving_early_ends_a_def_generator_that_waits_for_credit(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = Agent("worker", transport=node, own_link=True, drain_timeout=1.0)
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    @agent.on("count")
    def count(n: int) -> Iterator[int]:
        try:
            yield from range(n)
        finally:
            loop.call_soon_threadsafe(closed.set)

    async with agent:
        async with mesh.stream(10**9, capabilities=["count"], timeout=60) as items:
            await anext(items)
            host = agent._host
            assert host is not None
            await eventually(lambda: any(work.credit_waiter is not None for work in host.works()))
        await asyncio.wait_for(closed.wait(), 5)
        await eventually(lambda: not host.busy)


async def test_dropping_the_iterator_ends_the_generator(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent:
        items = mesh.stream(10**9, capabilities=["count"], timeout=60)
        await anext(items)
        del items
        gc.collect()
        await asyncio.wait_for(producer.closed.wait(), 5)


async def test_a_stream_survives_cuts_without_losing_or_repeating_an_item(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent, mesh.stream(400, capabilities=["count"], timeout=30) as items:
        got = []
        async for item in items:
            got.append(item)
            if item % 100 == 50:
                node.cut()
    assert got == list(range(400))


async def test_a_missing_item_is_an_error_and_not_a_silent_gap(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.hold_requests = True
    async with mesh.stream(1, capabilities=["count"], timeout=10) as items:
        await eventually(lambda: bool(node.session.envelopes))
        request = node.session.envelopes[0]
        reply = pb.Envelope(type=pb.RESPONSE, correlation_id=request.message_id, more=True, sequence=3)
        reply.payload.text = "x"
        node.session.send(reply)
        with pytest.raises(Internal, match="missing"):
            await anext(items)


async def test_one_slow_reader_delays_nobody_else(node: FakeNode, mesh: ConnectedMesh) -> None:
    producer = Producer(node)
    async with producer.agent, mesh.stream(10**6, capabilities=["count"], timeout=60) as slow:
        await anext(slow)
        async with asyncio.timeout(5):
            async with mesh.stream(300, capabilities=["count"], timeout=10) as quick:
                assert len([item async for item in quick]) == 300
            assert (await mesh.request(1, capabilities=["plain"], timeout=5)).data == 1


async def test_a_stream_nobody_can_serve_raises_when_iterated(mesh: ConnectedMesh) -> None:
    async with mesh.stream(1, capabilities=["nobody"], timeout=5) as items:
        with pytest.raises(ReachError):
            await anext(items)
