"""The links that a node dials, over a transport that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from agentreach.aio.transport import Refused
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.frame_pb2 import Frame, NodeHello, Signal, Welcome
from reach.core import nodes, remote
from reach.core.nodes import NodePeer
from reach.node.app import make_engine
from reach.node.config import load
from reach.node.engine import Engine
from reach.node.nodelinks import NodeLinks
from tests.support.agents import eventually

LIMIT_S = 5.0


class PlayedStream:
    """A stream to a node that welcomes, and says nothing more."""

    why_ended = ""

    def __init__(self, node_id: str = "node-2") -> None:
        welcome = Welcome(node_id=node_id, incarnation=b"two", resume_token=b"t")
        self._said = [Frame(signals=[Signal(welcome=welcome)]).SerializeToString()]
        self.over = asyncio.Event()
        self.welcomed = asyncio.Event()
        """More is awaited than the welcome."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes | None:
        if self._said:
            return self._said.pop()
        self.welcomed.set()
        await self.over.wait()
        return None

    async def half_close(self) -> None: ...

    def cancel(self) -> None:
        self.over.set()

    async def close(self) -> None:
        self.over.set()


class PlayedTransport:
    """Answers each dial when, and as, the test says."""

    def __init__(self) -> None:
        self.dials: asyncio.Queue[asyncio.Future[PlayedStream]] = asyncio.Queue()

    async def open(self, address: str, metadata: object) -> PlayedStream:
        answer: asyncio.Future[PlayedStream] = asyncio.get_running_loop().create_future()
        self.dials.put_nowait(answer)
        return await answer

    async def dial(self) -> asyncio.Future[PlayedStream]:
        async with asyncio.timeout(LIMIT_S):
            return await self.dials.get()


class Dialling:
    """Node 1, which dials node 2."""

    def __init__(self, **flags: str) -> None:
        self.engine: Engine = make_engine(load(environment={}, flags={"node_id": "node-1", **flags}), 0.0)
        self.transport = PlayedTransport()
        self.engine.node_links = self.links = NodeLinks(self.engine, self.transport)
        self.see()

    def see(self, auth: str = "none") -> NodePeer:
        """Node 2 stands in the registry."""
        with self.engine.step() as state:
            remote.node_seen(state, NodeRecord(node_id="node-2", address="node-2:1", auth=auth))
        self.links.changed()
        return self.engine.state.nodes["node-2"]

    def lose(self) -> None:
        """Its key is gone."""
        with self.engine.step() as state:
            remote.node_gone(state, "node-2")


@pytest.fixture
async def dialling() -> AsyncIterator[Dialling]:
    played = Dialling()
    links = asyncio.create_task(played.links.run())
    yield played
    links.cancel()
    await asyncio.wait([links])
    await played.engine.close()


async def test_a_node_that_was_gone_and_came_back_while_it_was_dialled_is_dialled_again(dialling: Dialling) -> None:
    answer = await dialling.transport.dial()
    dialling.lose()
    assert "node-2" not in dialling.engine.state.nodes
    dialling.see()
    answer.set_exception(Refused("UNAVAILABLE", "nobody listens there", False))
    await dialling.transport.dial()


async def test_why_a_node_cannot_be_linked_is_logged_once_for_each_reason(dialling: Dialling) -> None:
    with capture_logs() as logs:
        for why in ("speaks TLS", "speaks TLS", "its certificate is not ours"):
            (await dialling.transport.dial()).set_exception(Refused("UNAVAILABLE", why, False))
        await dialling.transport.dial()
    told = [line["why"].rpartition(": ")[2] for line in logs if line["event"] == "node not linked"]
    assert told == ["speaks TLS", "its certificate is not ours"]


async def test_a_stream_to_a_node_that_is_another_by_now_is_not_kept(dialling: Dialling) -> None:
    answer = await dialling.transport.dial()
    dialling.lose()
    node = dialling.see()
    stale = PlayedStream()
    answer.set_result(stale)
    async with asyncio.timeout(LIMIT_S):
        await stale.over.wait()
    stream = PlayedStream()
    (await dialling.transport.dial()).set_result(stream)
    async with asyncio.timeout(LIMIT_S):
        await stream.welcomed.wait()
    assert node.connected


async def test_whoever_answers_at_a_nodes_address_and_is_another_is_not_taken_for_it(dialling: Dialling) -> None:
    other = PlayedStream("node-7")
    (await dialling.transport.dial()).set_result(other)
    async with asyncio.timeout(LIMIT_S):
        await other.over.wait()
    await dialling.transport.dial()
    node = dialling.engine.state.nodes["node-2"]
    assert not node.connected and "node-7 answered at the address of node-2" in node.why_down


async def test_a_node_that_lets_in_anybody_is_not_dialled_by_one_that_does_not() -> None:
    """Else whoever reaches the open one reaches all."""
    played = Dialling(auth="keys", keys_file="unread")
    links = asyncio.create_task(played.links.run())
    node = played.engine.state.nodes["node-2"]

    async def is_told() -> bool:
        return "node-2 lets in anybody (auth = none) and node node-1 does not" in node.why_down

    try:
        await eventually(is_told, "it is said why")
        assert played.transport.dials.empty()
        played.see(auth="keys")
        await played.transport.dial()
    finally:
        links.cancel()
        await asyncio.wait([links])
        await played.engine.close()


async def test_nor_is_its_hello_taken() -> None:
    played = Dialling(auth="keys", keys_file="unread")
    try:
        with played.engine.step() as state:
            remote.node_seen(state, NodeRecord(node_id="node-0", address="node-0:1", incarnation=b"i" * 16))
            hello = NodeHello(node_id="node-0", incarnation=b"i" * 16, to_node_id="node-1", protocol_version=1)
            assert "lets in anybody" in nodes.refusal(state, hello)
            remote.node_seen(
                state, NodeRecord(node_id="node-0", address="node-0:1", incarnation=b"i" * 16, auth="mtls")
            )
            assert nodes.refusal(state, hello) == ""
    finally:
        await played.engine.close()
