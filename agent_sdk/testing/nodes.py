"""Nodes and streams inside one process, for `agent_sdk.testing`: what `reach serve` runs, without its servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from agentreach.aio.transport import Refused, StreamBroken
from agentreach.v1.admin_pb2 import NodeRecord
from reach.adapters.memory_store import MemoryStore
from reach.adapters.snapshots import MemorySnapshots
from reach.core import returning
from reach.core.ports import NodeStream
from reach.node.app import make_engine
from reach.node.engine import Engine
from reach.node.lineage_key import lineage_secrets
from reach.node.parts import Parts
from reach.node.settings import Config


class InProcessNode:
    """What `reach serve` runs, without its servers. `store` is its own connection to the registry."""

    def __init__(
        self,
        config: Config,
        place: int = 0,
        store: MemoryStore | None = None,
        snapshots: MemorySnapshots | None = None,
    ) -> None:
        self.address = f"in-process:{place + 1}"
        self.store = store or MemoryStore()
        self.streams = Streams()
        self.engine: Engine
        self._config = config
        self._snapshots = snapshots
        self._duties: asyncio.Task[None] | None = None

    async def start(self, others: Others | None = None) -> None:
        """Begin; then streams can be opened. `others` leads to other nodes."""
        record = NodeRecord(node_id=self._config.node_id, address=self.address, incarnation=os.urandom(16))
        key = await lineage_secrets(self.store)
        self.engine = engine = make_engine(self._config, time.time(), record.incarnation, key)
        self._parts = Parts(engine, self._config, self.store, record, others or Others([]), self._snapshots)
        await self._parts.start()
        with engine.step() as state:
            returning.opened(state)
        self._duties = asyncio.create_task(self._parts.run(), name=f"node at {self.address}")

    async def drain(self) -> None:
        """Leave as on SIGTERM: take nothing new, let what runs end, say goodbye."""
        self._parts.resign()
        await self.engine.drain(self._config.drain_timeout_s)
        await self._end(kill=False)

    async def stop(self, *, kill: bool = False) -> None:
        """End at once, without a goodbye; with `kill` the registry keeps what it wrote until its leases end."""
        self.streams.cut()
        await self._end(kill)

    async def _end(self, kill: bool) -> None:
        if self._duties is not None:
            self._duties.cancel()
            await asyncio.gather(self._duties, return_exceptions=True)
        if not kill:
            await self._parts.leave()
        await self.store.close()
        await self._parts.close()
        await self.engine.close()
        self.streams.cut()


class Others:
    """The way of one node to the other ones: a transport."""

    def __init__(self, nodes: Sequence[InProcessNode | None]) -> None:
        self._nodes = nodes
        self._streams: dict[str, Streams] = {}
        self.without: set[str] = set()
        """Addresses to which no network leads at present."""

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> InProcessStream:
        """A stream to the node of that address. Raises `Refused` if it is down or unreachable."""
        await asyncio.sleep(0)
        node = node_at(self._nodes, address)
        if node is None or address in self.without:
            raise Refused("UNAVAILABLE", f"no node at {address} in this process", False)
        stream = InProcessStream(node.engine.open_node_stream("in-process"), asyncio.Event())
        return node.streams.keep(self._streams.setdefault(address, Streams()).keep(stream))

    def part(self, address: str) -> None:
        """Nothing leads to that address any more."""
        self.without.add(address)
        if address in self._streams:
            self._streams[address].cut()


def node_at(nodes: Sequence[InProcessNode | None], address: str) -> InProcessNode | None:
    """The running node of that address, if there is one."""
    return next((node for node in nodes if node is not None and node.address == address), None)


class Streams:
    """The streams that run; those that are over are forgotten with the next."""

    def __init__(self) -> None:
        self._running: list[InProcessStream] = []

    def keep(self, stream: InProcessStream) -> InProcessStream:
        """One more."""
        self._running = [each for each in self._running if not each.over]
        self._running.append(stream)
        return stream

    def cut(self) -> None:
        """Break all of them."""
        for stream in self._running:
            stream.cut()


class InProcessStream:
    """One stream: a frame is one loop turn under way in each direction, and a cut loses what is."""

    def __init__(self, node: NodeStream, carries: asyncio.Event) -> None:
        self._node = node
        self.over = False
        self._carries = carries
        self.why_ended = ""

    async def write(self, data: bytes) -> None:
        """Give one message to the node."""
        await asyncio.sleep(0)
        if self.over:
            raise StreamBroken(self.why_ended or "the stream has ended")
        self._node.received(data)

    async def read(self) -> bytes | None:
        """The node's next message; None when the stream has ended."""
        frame = await self._node.next_frame()
        await asyncio.sleep(0)
        if self.over:
            return None
        if not self._carries.is_set():
            self._carries.set()  # the first one is the welcome
        return frame

    async def half_close(self) -> None:
        """Nothing more is written."""
        self._node.ended()

    def cancel(self) -> None:
        """End the stream both ways."""
        if not self.over:
            self.over = True
            self._carries.clear()
            self._node.ended()

    def cut(self) -> None:
        """End it as a broken network does."""
        self.why_ended = self.why_ended or "UNAVAILABLE: cut"
        self.cancel()

    async def close(self) -> None:
        """The same as `cancel`: there is nothing to give back."""
        self.cancel()
