"""One suite for both carriers of a link, against a real node: the in-process one of `agent_sdk.testing`, and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import pytest

from agent_sdk import Agent, Cancelled, ConnectedMesh, NoAgentAvailable, NoRoute, connect
from agent_sdk.testing import InProcessMesh, InProcessNode
from agentreach.aio.grpc_transport import GrpcTransport
from agentreach.aio.transport import Stream, Transport
from reach.adapters.grpc_server.server import GrpcServer
from tests.support.fake_node import eventually
from tests.support.node import config

SETTINGS = {"resume_window_s": 5.0, "settle_min_s": 2.0, "warm_up_s": 0.0, "drain_timeout_s": 0.5}


class Tap:
    """A transport whose streams a test can cut and spoil; what is under way when it cuts is lost."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.streams: list[Stream] = []
        self.spoil_next_write = False

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> TappedStream:
        stream = await self._inner.open(address, metadata)
        self.streams.append(stream)
        return TappedStream(self, stream)

    def cut(self) -> None:
        for stream in self.streams:
            stream.cancel()


class TappedStream:
    def __init__(self, tap: Tap, stream: Stream) -> None:
        self._tap = tap
        self._stream = stream
        self.read, self.half_close = stream.read, stream.half_close
        self.cancel, self.close = stream.cancel, stream.close

    async def write(self, data: bytes) -> None:
        spoilt, self._tap.spoil_next_write = self._tap.spoil_next_write, False
        await self._stream.write(b"\xff\xff garbage" if spoilt else data)

    @property
    def why_ended(self) -> str:
        return self._stream.why_ended


class Carrier(Protocol):
    """A node and the way to it."""

    address: str

    def way(self) -> Transport:
        """A transport of one more process."""
        ...

    async def restart(self) -> None:
        """A new node at the same address, which knows nothing."""
        ...


class InProcess:
    address = "in-process:1"

    def __init__(self, mesh: InProcessMesh) -> None:
        self._mesh = mesh
        self.way = mesh.new_transport
        self.restart = mesh.restart_node


class OverGrpc:
    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self.way = GrpcTransport

    async def start(self) -> None:
        self._node = InProcessNode(config(**SETTINGS))
        await self._node.start()
        self._server = GrpcServer(self._node.engine, listen=self.address)
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._node.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@pytest.fixture(params=["in-process", "grpc"])
async def carrier(request: pytest.FixtureRequest) -> AsyncIterator[Carrier]:
    if request.param == "in-process":
        async with InProcessMesh(**SETTINGS) as mesh:
            yield InProcess(mesh)
    else:
        over_grpc = OverGrpc()
        await over_grpc.start()
        yield over_grpc
        await over_grpc.stop()


class Ends:
    """A caller and an agent, each with a link of its own that can be cut."""

    def __init__(self, carrier: Carrier) -> None:
        self.callers, self.agents = Tap(carrier.way()), Tap(carrier.way())
        self.agent = Agent(
            "worker", capabilities=["work"], url=carrier.address, transport=self.agents, own_link=True, drain_timeout=1
        )
        self.calling = connect(carrier.address, transport=self.callers, own_link=True)
        self.ran: list[Any] = []
        self.events: list[Any] = []
        self.cut_when: dict[Any, Tap] = {}
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()

        @self.agent.handler
        async def work(data: Any) -> Any:
            self.ran.append(data)
            if isinstance(data, int) and data in self.cut_when:
                self.cut_when[data].cut()
            if data == "wait":
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            return data

        @self.agent.on("count")
        async def count(number: int) -> AsyncIterator[int]:
            for n in range(number):
                yield n

        @self.agent.on_event("news")
        async def news(data: Any) -> None:
            self.events.append(data)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[ConnectedMesh]:
        async with self.agent, self.calling as mesh:
            yield mesh


@pytest.fixture
async def ends(carrier: Carrier) -> Ends:
    return Ends(carrier)


@pytest.fixture
async def mesh(ends: Ends) -> AsyncIterator[ConnectedMesh]:
    async with ends.up() as mesh:
        yield mesh


async def work(mesh: ConnectedMesh, data: Any, timeout: float = 20) -> Any:
    return (await mesh.request(data, capabilities=["work"], timeout=timeout)).data


async def test_a_request_is_answered_and_an_unknown_target_refused(mesh: ConnectedMesh) -> None:
    assert await work(mesh, {"a": [1, None]}) == {"a": [1, None]}
    with pytest.raises(NoRoute):
        await mesh.request(1, capabilities=["nobody"], timeout=5)


async def test_many_at_once_each_get_their_own_answer(mesh: ConnectedMesh) -> None:
    assert await asyncio.gather(*(work(mesh, n) for n in range(500))) == list(range(500))


async def test_a_streamed_reply_comes_in_order_beyond_its_first_credit(mesh: ConnectedMesh) -> None:
    async with mesh.stream(300, capabilities=["count"], timeout=20) as items:
        assert [item async for item in items] == list(range(300))


async def test_an_event_reaches_the_agent_that_has_just_attached_and_the_caller(
    mesh: ConnectedMesh, ends: Ends
) -> None:
    async with mesh.subscribe("news") as events:
        assert (await mesh.publish("news", "x")).accepted == 2
        assert (await asyncio.wait_for(anext(events), 5)).data == "x"
    await eventually(lambda: ends.events == ["x"])


async def test_leaving_a_call_cancels_its_handler(mesh: ConnectedMesh, ends: Ends) -> None:
    call = asyncio.create_task(work(mesh, "wait"))
    await eventually(lambda: ends.ran == ["wait"])
    call.cancel()
    await asyncio.wait_for(ends.cancelled.wait(), 5)
    with pytest.raises((asyncio.CancelledError, Cancelled)):
        await call


async def test_a_payload_of_the_largest_size_goes_both_ways(mesh: ConnectedMesh) -> None:
    data = b"x" * (1 << 20)
    assert await work(mesh, data) == data


async def test_garbage_ends_only_the_link_that_sent_it_and_costs_no_request(
    mesh: ConnectedMesh, ends: Ends, carrier: Carrier
) -> None:
    async with connect(carrier.address, transport=carrier.way(), own_link=True) as other:
        waiting = asyncio.create_task(work(other, "wait"))
        await eventually(lambda: ends.ran == ["wait"])
        ends.callers.spoil_next_write = True
        assert await asyncio.gather(*(work(mesh, n) for n in range(50))) == list(range(50))
        assert len(ends.callers.streams) == 2
        assert len(ends.agents.streams) == 1
        ends.go.set()
        assert await waiting == "wait"
    assert sorted(ends.ran[1:]) == list(range(50))


@pytest.mark.parametrize("side", ["callers", "agents"])
async def test_requests_under_way_survive_cuts_and_run_once(mesh: ConnectedMesh, ends: Ends, side: str) -> None:
    cut = getattr(ends, side)
    ends.cut_when = dict.fromkeys(range(39, 120, 40), cut)  # when the last of forty runs, the answers are under way
    for start in range(0, 120, 40):
        assert await asyncio.gather(*(work(mesh, n) for n in range(start, start + 40))) == list(
            range(start, start + 40)
        )
        await reachable(mesh)
    assert len(cut.streams) == 4
    assert [n for n in ends.ran if n != "reachable?"] == list(range(120))


async def reachable(mesh: ConnectedMesh) -> None:
    """Wait until the agent gets new work: from a cut on it gets none until its link is back."""
    async with asyncio.timeout(10):
        while True:
            try:
                await work(mesh, "reachable?")
                return
            except (NoAgentAvailable, NoRoute):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("side", ["callers", "agents"])
async def test_items_of_a_stream_come_once_and_in_order_over_cuts(mesh: ConnectedMesh, ends: Ends, side: str) -> None:
    got = []
    async with mesh.stream(1000, capabilities=["count"], timeout=30) as items:
        async for item in items:
            got.append(item)
            if item in (10, 400, 700):
                getattr(ends, side).cut()
    assert got == list(range(1000))


@pytest.mark.parametrize("side", ["callers", "agents"])
async def test_events_come_once_and_in_order_over_cuts(mesh: ConnectedMesh, ends: Ends, side: str) -> None:
    published = []
    for n in range(120):
        published.append(asyncio.create_task(mesh.publish("news", n)))
        await asyncio.sleep(0)
        if n in (30, 60, 90):
            getattr(ends, side).cut()
    await asyncio.gather(*published)
    await eventually(lambda: len(ends.events) >= 120)
    assert ends.events == list(range(120))


async def test_a_restarted_node_gets_agents_and_subscriptions_anew_and_runs_nothing_twice(
    mesh: ConnectedMesh, ends: Ends, carrier: Carrier
) -> None:
    waiting = asyncio.create_task(work(mesh, "wait", timeout=30))
    await eventually(lambda: ends.ran == ["wait"])
    async with mesh.subscribe("later") as events:
        await carrier.restart()
        await reachable(mesh)
        ends.go.set()
        try:
            assert await asyncio.wait_for(waiting, 10) == "wait"
        except (NoRoute, NoAgentAvailable):
            pass  # it came before the agent was back
        assert ends.ran.count("wait") == 1
        await mesh.publish("later", 1)
        assert (await asyncio.wait_for(anext(events), 5)).data == 1


async def test_an_agent_can_be_called_as_soon_as_it_is_attached(carrier: Carrier) -> None:
    way = carrier.way()
    async with connect(carrier.address, transport=way, own_link=True) as mesh:

        async def rounds(name: str) -> None:
            for n in range(20):
                agent = Agent(name, url=carrier.address, transport=way)
                agent.handler(echo)
                async with agent:
                    assert (await mesh.request(n, agent_type=name, timeout=5)).data == n

        await asyncio.gather(*(rounds(f"quick-{n}") for n in range(10)))


async def test_a_pool_of_threads_is_ready_when_it_is_attached(carrier: Carrier) -> None:
    way = carrier.way()
    async with connect(carrier.address, transport=way, own_link=True) as mesh:
        for _ in range(20):
            agent = Agent("threads", url=carrier.address, transport=way)
            agent.handler(blocking_echo)
            async with agent:
                assert (await mesh.request(1, agent_type="threads", timeout=5)).data == 1


async def echo(data: Any) -> Any:
    return data


def blocking_echo(data: Any) -> Any:
    return data
