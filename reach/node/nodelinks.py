"""The streams between nodes: those that other nodes dialled, and those that this one dials and keeps.

Each pair of nodes has one link, dialled by the node with the smaller id. Streams carry bytes between it and the core
(`reach.core.nodes`, `reach.core.between`), which knows what they mean.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

from agentreach.aio.outlet import Outlet
from agentreach.aio.transport import Refused, StreamBroken, Transport
from agentreach.aio.transport import Stream as TransportStream
from agentreach.v1.frame_pb2 import Frame, Goodbye, NodeHello, Signal, Welcome
from agentreach.wire.link import LinkError
from reach.core import between, nodes
from reach.node.silence import SOME_NODE, Silence
from reach.node.streams import Carrier

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.node.engine import Engine

log = structlog.get_logger("reach.nodes")

OPEN_TIMEOUT_S = 5.0
LOOK_EVERY_S = 0.5
LOOK_TIMEOUT_S = 1.0
WELCOME_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 2.0
REDIAL_FIRST_S, REDIAL_MOST_S = 0.1, 2.0


class NodeCarrier(Carrier):
    """One stream between two nodes, whichever end dialled it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.node: NodePeer | None = None

    def _carries(self, node: NodePeer) -> None:
        """The stream is the link's from now on; a former one of it is not."""
        former = node.stream
        if isinstance(former, Carrier) and former is not self:
            former.supersede()
        node.stream = self
        self.node = node
        self.outlet = Outlet(node.link, self._engine.standstill.before_writing)

    def _frame(self, data: bytes) -> None:
        node, engine = self.node, self._engine
        assert node is not None
        try:
            received = Frame.FromString(data)
            with engine.step() as state:
                between.frame(state, node, received, engine.standstill.ms(state.now))
        except (LinkError, DecodeError) as error:
            self._broken(node, str(error) or "bytes that are not a Frame")
        except Exception:
            reference = engine.reference()
            log.exception("a frame of a node could not be handled", node=node.node_id, reference=reference)
            self._broken(node, f"internal error, reference {reference} in the log of {engine.node_id}")
        else:
            if self.outlet is not None:
                self.outlet.received()

    def part(self, why: str) -> None:
        """End the stream; the link goes on with the next one, which its nodes have to be let in for anew."""
        self.over = self.severed = True
        self._lost(why)

    def _broken(self, node: NodePeer, why: str) -> None:
        log.warning("node link broken", node=node.node_id, why=why)
        with self._engine.step() as state:
            nodes.end(state, node, Goodbye.PROTOCOL_ERROR, why)

    def _lost(self, why: str) -> None:
        node = self.node
        if node is not None and node.stream is self:
            node.stream = None
            with self._engine.step() as state:
                nodes.cut(state, node, why)
        if self.outlet is not None:
            self.outlet.abandon()


class AcceptedNode(NodeCarrier):
    """A stream that another node dialled; a `NodeStream` for the server."""

    def __init__(self, engine: Engine, address: str, hello_timeout_s: float) -> None:
        super().__init__(engine)
        self._address = address
        self._silence = Silence(engine, SOME_NODE)
        self._last_words: bytes | None = None
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._limit = loop.call_later(hello_timeout_s, self._refuse, f"no node_hello within {hello_timeout_s:g} s")

    def received(self, data: bytes) -> None:
        """See `NodeStream.received`."""
        if self.over:
            return
        if self.node is not None:
            self._frame(data)
            return
        try:
            frame = Frame.FromString(data)
        except DecodeError:
            self._refuse("bytes that are not a Frame")
            return
        hello = next((signal.node_hello for signal in frame.signals if signal.HasField("node_hello")), None)
        if hello is None:
            self._refuse("the first frame between nodes must hold node_hello")
        else:
            self._open(hello)

    def _open(self, hello: NodeHello) -> None:
        self._limit.cancel()
        with self._engine.step() as state:
            why = nodes.refusal(state, hello)
            if why:
                self._refuse(why)
                return
            self._carries(nodes.hello(state, hello))
        self._admitted()

    def _refuse(self, why: str) -> None:
        self.over = True
        log.info("node stream refused", peer=self._address, why=why)
        goodbye = Signal(goodbye=Goodbye(code=Goodbye.PROTOCOL_ERROR, reason=why))
        self._last_words = Frame(signals=[goodbye]).SerializeToString()
        self._admitted()

    def _admitted(self) -> None:
        self._limit.cancel()
        self._silence.over()
        if not self._opened.done():
            self._opened.set_result(None)

    def ended(self) -> None:
        """See `NodeStream.ended`."""
        self._admitted()
        self.over = True
        self._lost("")

    async def next_frame(self) -> bytes | None:
        """See `NodeStream.next_frame`."""
        if self.outlet is None:
            await asyncio.shield(self._opened)
        if self.outlet is not None:
            return await self.outlet.next_frame()
        words, self._last_words = self._last_words, None
        return words


class DialledNode(NodeCarrier):
    """A stream that this node dialled. A reader (`run`) and a writer, neither cancelled in a read or write."""

    def __init__(self, engine: Engine, node: NodePeer, stream: TransportStream) -> None:
        super().__init__(engine)
        self._dialled = node
        self._stream = stream
        self._limit: asyncio.TimerHandle | None = None
        self.why = ""

    async def run(self) -> None:
        """Speak until the stream ends. Cancelling it ends the stream."""
        writer: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        try:
            self._limit = loop.call_later(WELCOME_TIMEOUT_S, self._stream.cancel)
            hello = Signal(node_hello=nodes.hello_for(self._engine.state, self._dialled))
            await self._stream.write(Frame(signals=[hello]).SerializeToString())
            first = await self._welcome()
            if first is None or not self._begin(first):
                return
            self._limit.cancel()
            self._limit = None
            writer = loop.create_task(self._write(), name=f"node-writer {self._dialled.node_id}")
            while (data := await self._stream.read()) is not None:
                if not self.over:
                    self._frame(data)
                await asyncio.sleep(0)  # what it has brought about is written before the next is asked for
            self.why = self.why or self._stream.why_ended
        except StreamBroken as broken:
            self.why = self.why or str(broken)
        finally:
            if self._limit is not None:
                self._limit.cancel()
            self._stream.cancel()
            self.over = True
            self._lost(self.why)
            if writer is not None:
                await asyncio.wait([writer])
            await self._stream.close()

    def finish(self, *, flush: bool) -> None:
        """Say what is left to say; the peer is given a while to close its half."""
        super().finish(flush=flush)
        if self._limit is None:
            self._limit = asyncio.get_running_loop().call_later(GOODBYE_TIMEOUT_S, self._stream.cancel)

    def part(self, why: str) -> None:
        """See `NodeCarrier.part`."""
        super().part(why)
        self._stream.cancel()

    def supersede(self) -> None:
        """A newer stream carries the link."""
        super().supersede()
        self._stream.cancel()

    async def _welcome(self) -> Welcome | None:
        while (data := await self._stream.read()) is not None:
            for signal in Frame.FromString(data).signals:
                if signal.HasField("welcome"):
                    return signal.welcome
                if signal.HasField("goodbye"):
                    self.why = signal.goodbye.reason
        self.why = self.why or self._stream.why_ended or "the stream ended before welcome"
        return None

    def _begin(self, welcome: Welcome) -> bool:
        node = self._dialled
        if welcome.node_id != node.node_id:
            self.why = f"node {welcome.node_id} answered at the address of {node.node_id}"
            return False
        with self._engine.step() as state:
            if state.nodes.get(node.node_id) is not node:
                self.why = "its key had gone from the registry before it answered"
                return False
            if not nodes.welcomed(state, node, welcome):
                self.why = "its numbers do not fit ours"
                return False
            self._carries(node)
        return True

    async def _write(self) -> None:
        stream = self._stream
        assert self.outlet is not None
        try:
            while (frame := await self.outlet.next_frame()) is not None:
                await stream.write(frame)
            await stream.half_close()
        except StreamBroken:
            return  # the reader sees the end as well
        except Exception:
            log.exception("the writer of a node link failed", node=self._dialled.node_id)
            stream.cancel()


class NodeLinks:
    """Dials every node with a larger id, and again whenever a stream ends, as long as its key stands in the store."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self._changed = asyncio.Event()
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._leaving = False

    def changed(self) -> None:
        """Nodes came, went, or have other addresses."""
        self._changed.set()

    def part(self, why: str) -> None:
        """End every stream, whoever dialled it: each node is checked anew when it, or this one, dials again."""
        for node in list(self._engine.state.nodes.values()):
            if isinstance(node.stream, NodeCarrier):
                node.stream.part(why)

    async def left(self) -> None:
        """This node has said goodbye: wait, within a limit, until it was heard on the streams that were dialled here.

        To cancel them before would cut them short.
        """
        self._leaving = True
        nodes_linked = [node for node in self._engine.state.nodes.values() if node.connected]
        heard = [task for node in nodes_linked if (task := self._dialling.get(node.node_id)) is not None]
        if heard:
            await asyncio.wait(heard, timeout=GOODBYE_TIMEOUT_S)

    async def run(self) -> None:
        """Keep the links until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_the_dead(), name="node-links-lost")
            while True:
                self._changed.clear()
                own = self._engine.node_id
                for node in list(self._engine.state.nodes.values()):
                    known = self._dialling.get(node.node_id)
                    if node.address and node.node_id > own and (known is None or known.done()):
                        task = group.create_task(self._keep(node), name=f"node-link {node.node_id}")
                        self._dialling[node.node_id] = task
                await self._changed.wait()

    async def _look_for_the_dead(self) -> None:
        """See whether anybody listens where a node that is not linked should: if not, nobody needs to wait for it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            lost = [each for each in self._engine.state.nodes.values() if each.address and not each.connected]
            for node in lost:
                dead = await refuses(node.address)
                if dead != node.dead and not node.connected:
                    with self._engine.step():
                        node.dead = dead

    async def _keep(self, node: NodePeer) -> None:
        failures = 0
        while node.address and self._engine.state.nodes.get(node.node_id) is node and not self._leaving:
            began = asyncio.get_running_loop().time()
            try:
                why = await self._once(node)
            except Exception as fault:  # one link's fault is neither the node's nor another link's
                log.exception("a node link failed; it is dialled again", node=node.node_id)
                why = f"a fault of this node: {type(fault).__name__}"
            if node.node_id not in self._engine.state.nodes or self._leaving:
                break
            lived_s = asyncio.get_running_loop().time() - began
            failures = 0 if lived_s > REDIAL_MOST_S else failures + 1
            if why and node.why_down != why:
                if not node.connected:
                    log.warning("node not linked", node=node.node_id, why=why)
                with self._engine.step() as state:
                    nodes.cut(state, node, why)
            await asyncio.sleep(random.random() * min(REDIAL_MOST_S, REDIAL_FIRST_S * 2 ** min(failures, 8)))
        self._dialling.pop(node.node_id, None)
        self.changed()  # it may have come back meanwhile, as another

    async def _once(self, node: NodePeer) -> str:
        why = nodes.unlike(self._engine.state, node)
        if why:
            return why
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                stream = await self._transport.open(node.address, self._engine.introduce(node.address, None))
        except Refused as refused:
            return f"{node.address}: {refused}"
        except TimeoutError:
            return f"{node.address} did not answer within {OPEN_TIMEOUT_S:g} s"
        carrier = DialledNode(self._engine, node, stream)
        await carrier.run()
        return carrier.why


async def refuses(address: str) -> bool:
    """True if the machine of an address says that nobody listens there. A silent one says nothing."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return False
