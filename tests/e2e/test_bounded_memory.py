"""Peers behind live transports that take nothing, and floods at them: the node's memory stays bounded (D2)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from agent_sdk import ReachError, connect
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.frame_pb2 import Signal, Subscribe
from tests.support.agents import eventually, usable
from tests.support.neighbour import neighbour
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import RawLink, raw_link, response

GROWTH_MAX = 64 << 20
PATIENT = {  # the node waits long before it judges: what is measured is what it holds meanwhile
    "heartbeat_interval_s": 60, "lease_ttl_s": 180, "accept_timeout_s": 60, "probe_timeout_s": 60,
    "probe_interval_busy_s": 60, "slow_consumer_s": 600, "trace_recent_max": 1000, "trace_kept_max": 1000,
}  # fmt: skip


def _answer(envelope: Envelope) -> Envelope | None:
    return response(envelope, "ok") if envelope.type == pb.REQUEST else None


@contextlib.asynccontextmanager
async def stalled(node: NodeProcess, *agent_ids: str) -> AsyncIterator[list[RawLink]]:
    """Agents, each on its own link, that were healthy and read nothing any more; their transports live."""
    async with contextlib.AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(raw_link(node.grpc, agents=[agent_id], taker=_answer))
            for agent_id in agent_ids
        ]

        async def healthy() -> bool:
            return await node.metric("reach_agents", status="HEALTHY", agent_type="stalled") == len(links)

        await eventually(healthy, "they are healthy", limit_s=60)
        for link in links:
            link.reading.clear()
        yield links


async def flood(node: NodeProcess, agent_ids: list[str], size: int, count: int) -> tuple[Counter[str], int]:
    """So many requests of so many bytes at these agents, 500 at a time: (how they ended, the most the node grew)."""
    found: Counter[str] = Counter()
    before = most = node.rss_bytes()
    data = bytes(size)
    numbers = iter(range(count))
    async with connect(node.grpc, own_link=True, timeout=20) as mesh:

        async def ask() -> None:
            nonlocal most
            for number in numbers:
                try:
                    await mesh.request(data, agent_id=agent_ids[number % len(agent_ids)], timeout=4)
                    found["OK"] += 1  # in the frame that each link reads before it stops
                except ReachError as error:
                    found[str(error.code)] += 1
                if number % 50 == 0:
                    most = max(most, node.rss_bytes())

        await asyncio.gather(*(ask() for _ in range(500)))
    return found, max(most, node.rss_bytes()) - before


async def test_two_hundred_stalled_streams_together_hold_what_all_may() -> None:
    """D2, repeated: each alone is within its own bound, all of them would be gigabytes."""
    settings = {"outboxes_bytes_max": 12 << 20, "queue_bytes_max": 4 << 20}
    async with start_node(**PATIENT, **settings) as node, neighbour(node):
        agent_ids = [f"stalled/{number}" for number in range(200)]
        async with stalled(node, *agent_ids):
            found, grown = await flood(node, agent_ids, 64 << 10, 4000)  # 250 MiB
            assert found["OVERLOADED"] > 1000, found
            assert found.keys() <= {"OK", "OVERLOADED", "TIMEOUT", "NO_AGENT_AVAILABLE", "BREAKER_OPEN"}
            assert grown < GROWTH_MAX, f"{grown >> 20} MiB"


async def test_twenty_thousand_requests_to_one_stalled_agent_cost_a_bound() -> None:
    async with start_node(**PATIENT) as node, neighbour(node), stalled(node, "stalled/1"):
        found, grown = await flood(node, ["stalled/1"], 1 << 10, 20_000)
        assert sum(found.values()) == 20_000, found
        assert found.keys() <= {"OK", "OVERLOADED", "TIMEOUT", "NO_AGENT_AVAILABLE", "BREAKER_OPEN"}
        assert grown < GROWTH_MAX, f"{grown >> 20} MiB"


async def test_a_frozen_subscriber_of_100000_events_costs_a_bound_and_is_told_how_many_it_missed() -> None:
    count, text = 100_000, "x" * 400
    async with (
        start_node(**PATIENT) as node, neighbour(node),
        raw_link(node.grpc) as subscriber, raw_link(node.grpc) as publisher,
    ):  # fmt: skip
        await subscriber.send(signals=[Signal(subscribe=Subscribe(topics=["flood"]))])
        async with connect(node.grpc, own_link=True) as mesh:

            async def subscribed() -> bool:
                return (await mesh.publish("flood", "first")).matched == 1

            await eventually(subscribed, "it is subscribed")
        subscriber.reading.clear()
        before = most = node.rss_bytes()
        for number in range(0, count, 250):
            await publisher.send(*(_event(f"event-{one}", text) for one in range(number, number + 250)))
            most = max(most, node.rss_bytes())

        async def all_taken() -> bool:
            nonlocal most
            most = max(most, node.rss_bytes())
            return await node.metric("reach_events_total", kind="published") >= count

        await eventually(all_taken, "the node has taken them all", limit_s=150, every_s=0.1)
        assert most - before < GROWTH_MAX, f"{(most - before) >> 20} MiB"
        subscriber.answering(lambda envelope: None)
        subscriber.reading.set()
        gap = await subscriber.until("gap", limit_s=30)
        assert gap.topic == "flood" and 0 < gap.dropped < count


def _event(message_id: str, text: str) -> Envelope:
    return Envelope(type=pb.EVENT, message_id=message_id, target=Target(topic="flood"), payload=Payload(text=text))


async def test_a_stalled_agent_is_usable_again_when_it_reads_on() -> None:
    async with (
        start_node(**PATIENT) as node, connect(node.grpc, own_link=True) as mesh,
        stalled(node, "stalled/1") as (link,),
    ):  # fmt: skip
        asked = [asyncio.create_task(mesh.request("x", agent_id="stalled/1", timeout=60)) for _ in range(6000)]

        async def full() -> bool:
            return await node.metric("reach_queue_depth") > 0

        await eventually(full, "its outbox is full, and more wait", limit_s=30)
        link.reading.set()
        await usable(mesh, agent_id="stalled/1", limit_s=60)
        found = await asyncio.gather(*asked, return_exceptions=True)
        told = Counter(str(each.code) for each in found if isinstance(each, ReachError))
        assert told.keys() <= {"OVERLOADED"}, told
        assert len(found) - told["OVERLOADED"] > 1024
