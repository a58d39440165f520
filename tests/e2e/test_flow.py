"""Slow, frozen and flooding peers: they cost nobody else anything, and the node no memory (groups C and D)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent_sdk import Agent, Context, Mesh, ReachError, connect
from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.frame_pb2 import Signal, Subscribe
from tests.support.agents import eventually, make, name, nothing_in_flight, usable
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import raw_link, raw_stream, request
from tools.faultproxy import DOWN, FaultProxy

RSS_GROWTH_MAX = 64 << 20
BUSY_S = 3.0


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node(log_level="info") as node:
        yield node


def rss(node: NodeProcess) -> int:
    """Bytes of memory that the node has."""
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@contextlib.asynccontextmanager
async def listening(node: NodeProcess, topic: str, count: int) -> AsyncIterator[list[asyncio.Task[list[int]]]]:
    """Subscribers of the topic, each on its own link; each task gives the numbers it got, up to -1."""
    async with contextlib.AsyncExitStack() as all_of_them:
        tasks = []
        for _ in range(count):
            mesh = await all_of_them.enter_async_context(connect(node.grpc, own_link=True, timeout=20))
            events = await all_of_them.enter_async_context(mesh.subscribe(topic))

            async def listen(events: Any = events) -> list[int]:
                got = []
                async for event in events:
                    number = int.from_bytes(event.data[:4], "big", signed=True)
                    if number < 0:
                        break
                    got.append(number)
                return got

            tasks.append(asyncio.create_task(listen()))
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()


async def publish(mesh: Mesh, topic: str, numbers: range, size: int) -> Counter[str]:
    """Publish these in their order, without waiting for one to be acknowledged; the sums of the counts."""
    sums: Counter[str] = Counter()

    async def one(number: int) -> None:
        data = number.to_bytes(4, "big", signed=True) + bytes(size)
        counts = await mesh.publish(topic, data, timeout=2)
        for kind in ("matched", "accepted", "dropped", "unknown"):
            sums[kind] += getattr(counts, kind)

    await asyncio.gather(*(one(number) for number in numbers))
    return sums


class TestOneIsSlow:
    async def test_nineteen_subscribers_get_everything_in_order_beside_a_frozen_one(self) -> None:
        """D1. The frozen one's transport lives and takes bytes; its process takes nothing, and is ended for it."""
        count, size = 80, 16 << 10
        async with (
            start_node(slow_consumer_s=3, heartbeat_interval_s=10, lease_ttl_s=30) as node,
            connect(node.grpc, own_link=True) as publisher, listening(node, "news", 19) as healthy,
        ):  # fmt: skip
            began = time.monotonic()
            await publish(publisher, "news", range(count), size)
            alone_s = time.monotonic() - began
            async with raw_link(node.grpc) as frozen:
                await frozen.send(signals=[Signal(subscribe=Subscribe(topics=["news"]))])
                frozen.acks = False

                async def twenty() -> bool:
                    return (await publisher.publish("news", (0).to_bytes(4, "big"), timeout=0.5)).matched == 20

                await eventually(twenty, "the frozen one has subscribed")
                before = rss(node)
                began = time.monotonic()
                sums = await publish(publisher, "news", range(count, 2 * count), size)
                assert time.monotonic() - began < 1.5 * alone_s + 2 + BUSY_S  # 2 s: waiting for the frozen one's word
                assert sums["accepted"] == 19 * count and sums["unknown"] == count
                assert rss(node) - before < RSS_GROWTH_MAX

                async def ended() -> bool:
                    return "SLOW_CONSUMER" in node.log

                await eventually(ended, "it is ended, with its reason")
                await publish(publisher, "news", range(-1, 0), 0)
                for task in healthy:
                    got = await asyncio.wait_for(task, 20)
                    assert [n for n in got if n] == list(range(1, 2 * count))

    async def test_a_stream_that_is_never_read_costs_the_node_no_memory(self, node: NodeProcess) -> None:
        agent = Agent(name("fountain"), url=node.grpc, own_link=True, drain_timeout=0.2)

        @agent.handler
        async def forever(data: object, ctx: Context):  # type: ignore[no-untyped-def]  # a generator
            while True:
                yield bytes(64 << 10)

        async with agent, raw_stream(node.grpc):
            before = rss(node)
            asked = request(target=pb.Target(agent_id=agent.agent_id), timeout_ms=30_000)
            async with grpc.aio.insecure_channel(node.grpc, options=[*CLIENT_OPTIONS]) as channel:
                calls = [
                    channel.unary_stream("/agentreach.v1.MeshService/InvokeStream")(asked.SerializeToString())
                    for _ in range(5)
                ]

                async def served() -> bool:
                    return await node.metric("reach_requests_in_flight") == 5

                async with connect(node.grpc, own_link=True) as mesh:
                    await eventually(served, "all five are under way")
                    for _ in range(20):
                        assert rss(node) - before < RSS_GROWTH_MAX
                        with contextlib.suppress(ReachError):
                            await mesh.request("x", agent_type="nobody", timeout=1)
                        await asyncio.sleep(0.02)  # time in which it would grow
                for call in calls:
                    call.cancel()
            await nothing_in_flight(node)

    async def test_a_moment_of_silence_costs_one_wait_and_never_the_stream(self, node: NodeProcess) -> None:
        """C2: nothing passes for a while, then all of it: same link, nothing lost, only the impatient call is told."""
        agent_id = name("pausing")
        async with FaultProxy(node.grpc) as proxy, connect(node.grpc, own_link=True) as mesh:
            agent = make(agent_id, proxy.address, own_link=True)
            async with agent:
                await usable(mesh, agent_id=agent_id)
                token = agent._link().resume_token
                resumes = await node.metric("reach_link_resumes_total")
                proxy.hold(DOWN)
                with pytest.raises(ReachError) as caught:
                    await mesh.request({"n": 1}, agent_id=agent_id, timeout=0.3)
                assert caught.value.code == "TIMEOUT"
                patient = asyncio.create_task(mesh.request({"n": 2}, agent_id=agent_id, timeout=10))
                proxy.heal()
                try:
                    assert (await patient).data == 2
                except ReachError as error:  # refused at once: it had not acknowledged the first one yet
                    assert error.code == "OVERLOADED" and not error.may_have_executed
                await usable(mesh, agent_id=agent_id)
                assert (await mesh.request({"n": 3, "sleep": 3 * 0.5 * 1.2}, agent_id=agent_id, timeout=20)).data == 3
                assert agent._link().resume_token == token
                assert await node.metric("reach_link_resumes_total") == resumes

    async def test_two_hundred_parallel_requests_heartbeats_and_events_share_one_stream(
        self, node: NodeProcess
    ) -> None:
        """D3."""
        agent = make(name("popular"), node.grpc, own_link=True)
        heard: list[object] = []

        @agent.on_event("popular/news")
        async def take(data: object) -> None:
            heard.append(data)

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            token = agent._link().resume_token
            for _ in range(3):
                found, _ = await asyncio.gather(
                    asyncio.gather(*(mesh.request({"n": n}, agent_id=agent.agent_id, timeout=20) for n in range(200))),
                    asyncio.gather(*(mesh.publish("popular/news", n) for n in range(20))),
                )
                assert [reply.data for reply in found] == list(range(200))

            async def all_handled() -> bool:
                return len(heard) == 60

            await eventually(all_handled, "what was accepted is handled")
            assert heard == list(range(20)) * 3
            assert agent._link().resume_token == token
        assert "link broken" not in node.log


class TestPlaces:
    async def test_a_cap_of_two_holds_whatever_ends_the_work_and_two_can_run_afterwards(
        self, node: NodeProcess
    ) -> None:
        """D6: waves of successes, errors, cancels and refusals."""
        agent = Agent(name("capped"), url=node.grpc, own_link=True, max_concurrency=2, drain_timeout=1)
        running = most = 0

        @agent.handler
        async def work(data: str) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.02 if data != "slow" else 5)
                if data == "error":
                    raise ValueError(data)
                return data
            finally:
                running -= 1

        async def one(mesh: Mesh, kind: str) -> str:
            call = asyncio.create_task(mesh.request(kind, agent_id=agent.agent_id, timeout=5))
            if kind == "slow":
                await asyncio.sleep(0.03)
                call.cancel()
            try:
                return str((await call).data)
            except ReachError as error:
                return str(error.code)
            except asyncio.CancelledError:
                if not call.cancelled():
                    raise
                return "cancelled"

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            seen: Counter[str] = Counter()
            for _ in range(10):
                kinds = ["ok", "error", "slow", "ok", "error", "slow", "ok", "ok", "error", "slow"]
                seen.update(await asyncio.gather(*(one(mesh, kind) for kind in kinds)))
            assert most == 2
            assert seen["ok"] and seen.keys() <= {"ok", "AGENT_ERROR", "cancelled"}, seen

            async def two_run() -> bool:
                return await asyncio.gather(one(mesh, "ok"), one(mesh, "ok")) == ["ok", "ok"]

            await eventually(two_run, "both places are free again", limit_s=5)
            assert most == 2
        await nothing_in_flight(node)

    async def abandoned_streams(self, node: NodeProcess, count: int) -> None:
        """C3: read the first item of many and drop the rest; or hang up by hand."""
        agent = make(name("chatty"), node.grpc, own_link=True)
        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)

            async def drop() -> None:
                async with mesh.stream({"stream": 1000, "pause": 0.01}, capabilities=["stream"], timeout=30) as items:
                    assert (await anext(items)) is not None

            async def hang_up(channel: grpc.aio.Channel) -> None:
                asked = request(target=pb.Target(capabilities=["stream"]), timeout_ms=30_000)
                asked.payload.json.struct_value.update({"stream": 1000, "pause": 0.01})
                call = channel.unary_stream("/agentreach.v1.MeshService/InvokeStream")(asked.SerializeToString())
                assert await call.read()
                call.cancel()

            async with grpc.aio.insecure_channel(node.grpc, options=[*CLIENT_OPTIONS]) as channel:
                for _ in range(count // 20):
                    await asyncio.gather(*(drop() for _ in range(10)), *(hang_up(channel) for _ in range(10)))
            await nothing_in_flight(node)

            async def ended() -> bool:
                return agent._host is not None and not agent._host.busy

            await eventually(ended, "every generator has ended")

    async def test_abandoned_streams_leave_nothing_running(self, node: NodeProcess) -> None:
        await self.abandoned_streams(node, 100)

    @pytest.mark.soak
    @pytest.mark.timeout(1800)
    async def test_twenty_thousand_abandoned_streams_leave_no_memory(self, node: NodeProcess) -> None:
        """D5."""
        await self.abandoned_streams(node, 2_000)
        before = rss(node)
        await self.abandoned_streams(node, 20_000)
        assert rss(node) - before < 4 << 20


class TestCancelling:
    @pytest.mark.parametrize("method", ["Invoke", "InvokeStream"])
    async def test_a_caller_without_a_deadline_is_told_when_its_agent_leaves_or_is_cut(
        self, node: NodeProcess, method: str
    ) -> None:
        """C1."""
        asked = request(timeout_ms=60_000)
        asked.payload.json.struct_value.update({"forever": True})
        async with grpc.aio.insecure_channel(node.grpc, options=[*CLIENT_OPTIONS]) as channel:
            for leaves in (True, False):
                agent = make(name("leaving"), node.grpc, own_link=True, drain_timeout=0.1)
                asked.target.agent_id = agent.agent_id
                async with agent, connect(node.grpc, own_link=True) as mesh:
                    await usable(mesh, agent_id=agent.agent_id)
                    path, data = f"/agentreach.v1.MeshService/{method}", asked.SerializeToString()
                    call: Any = (channel.unary_unary if method == "Invoke" else channel.unary_stream)(path)(data)

                    async def under_way() -> bool:
                        return await node.metric("reach_requests_in_flight") == 1

                    await eventually(under_way, "it is under way")
                    if leaves:
                        await agent.drain()
                    else:  # another process takes its place
                        async with raw_link(node.grpc, agents=[agent.agent_id]):
                            await asyncio.wait_for(call.code(), 5)
                    async with asyncio.timeout(1 + BUSY_S):
                        code = await call.code()
                    assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), code
                    assert (await call.details()).split(":")[0] in ("AGENT_LOST", "CANCELLED")
        await nothing_in_flight(node)

    async def test_a_handler_that_retries_for_ever_stops_when_its_caller_gives_up(self, node: NodeProcess) -> None:
        """C7."""
        agent = Agent(name("stubborn"), url=node.grpc, own_link=True, drain_timeout=1)
        tries, ended = 0, asyncio.Event()

        @agent.handler
        async def work(data: object, ctx: Context) -> None:
            nonlocal tries
            try:
                while data == "go":
                    try:
                        await ctx.request("x", agent_type="nobody")
                    except ReachError:
                        tries += 1
                    await asyncio.sleep(0.02)
            finally:
                ended.set()

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            ended.clear()
            call = asyncio.create_task(mesh.request("go", agent_id=agent.agent_id, timeout=30))

            async def trying() -> bool:
                return tries > 2

            await eventually(trying, "it tries")
            call.cancel()
            await asyncio.wait_for(ended.wait(), 1 + BUSY_S)
            stopped_at = tries
            await usable(mesh, agent_id=agent.agent_id)
            assert tries == stopped_at
        await nothing_in_flight(node)

    async def test_cancelling_whoever_waits_for_events_loses_none(self, node: NodeProcess) -> None:
        """S5."""
        rng = random.Random(2)
        async with connect(node.grpc, own_link=True) as mesh, mesh.subscribe("pump") as events:
            publishing = asyncio.create_task(publish(mesh, "pump", range(500), 10))
            got: list[int] = []
            async with asyncio.timeout(30):
                while len(got) < 500:
                    waiting = asyncio.create_task(anext(events))  # type: ignore[arg-type]  # a coroutine
                    done, _ = await asyncio.wait([waiting], timeout=rng.random() * 0.002)
                    if not done:
                        waiting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        got.append(int.from_bytes((await waiting).data[:4], "big"))
            await publishing
            assert got == list(range(500))
