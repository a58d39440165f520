"""A node of the simulation: the real engine and registry of `reach serve`, behind a simulated server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agentreach.aio.transport import Refused, StreamBroken
from agentreach.v1.admin_pb2 import NodeRecord
from reach.adapters.memory_store import MemoryStore
from reach.core import returning
from reach.core.ports import ANYBODY, MeshFailure, NodeStream
from reach.core.store import Store, StoreUnavailable
from reach.node.app import make_engine
from reach.node.config import load
from reach.node.lineage_key import lineage_secrets
from reach.node.parts import Parts

from .network import SimTransport
from .storelink import StoreLink

if TYPE_CHECKING:
    from .network import End
    from .process import Process
    from .world import World

HALF_CLOSE_LIMIT_S = 2.0  # as reach.adapters.grpc_server.connect
START_AGAIN_S = 1.0  # a supervisor's pause before it starts a node again that found no registry
LEAVE_WITHIN_S = 5.0


class SimNode:
    """What `reach.node.app.running` runs, with a simulated network around it. Made in the node's own loop."""

    def __init__(self, world: World, process: Process, address: str, flags: dict[str, Any]) -> None:
        self._process = process
        self._world = world
        self._address = address
        self._config = load(environment={}, flags={"node_id": address.partition(":")[0], **flags})
        self.store: Store = MemoryStore() if world.registry is None else StoreLink(world.registry, process)
        self._duties: asyncio.Task[None] | None = None
        self.parts: Parts | None = None
        self.serving = False
        process.things["node"] = self

    async def serve(self) -> None:
        """Show the node in the registry. One that finds no registry ends, and is started again."""
        process, world = self._process, self._world
        try:
            await self._start()
        except StoreUnavailable:
            world.ledger.event("no registry", process)
            world.scheduler.after(0.0, process.kill)
            world.scheduler.after(START_AGAIN_S, world.restart, process)
            return
        self.serving = True
        world.ledger.event("serves", process, self._address)

    async def _start(self) -> None:
        process, config, store = self._process, self._config, self.store
        record = NodeRecord(node_id=config.node_id, address=self._address, incarnation=process.incarnation)
        key = await lineage_secrets(store)
        self.engine = engine = make_engine(config, process.unix, process.incarnation, key)
        process.things.update(engine=engine, state=engine.state)
        self._world.lives[engine.state.nonce] = process
        between = SimTransport(self._world, process, between_nodes=True)
        self.parts = parts = Parts(engine, config, store, record, between)
        process.accept = self._accept
        await parts.start()
        with engine.step() as state:
            returning.opened(state)
        self._duties = process.loop.run_inside(parts.run(), "duties")

    async def leave(self) -> None:
        """Drain, as SIGTERM does, and end the process."""
        process, world = self._process, self._world
        assert self._duties is not None and self.parts is not None
        world.ledger.event("drains", process)
        self.parts.resign()
        await self.engine.drain(LEAVE_WITHIN_S)
        self._duties.cancel()
        await asyncio.wait([self._duties])
        await self.parts.leave()
        process.accept = None
        await self.store.close()
        await self.parts.close()
        await self.engine.close()
        world.scheduler.after(0.0, process.kill)
        world.scheduler.after(START_AGAIN_S, world.restart, process)

    def _accept(self, end: End) -> None:
        try:
            stream: NodeStream
            if end.connection.between_nodes:
                stream = self.engine.open_node_stream(str(end.connection))
            else:
                stream = self.engine.open_stream(ANYBODY, str(end.connection))
        except MeshFailure as failure:
            raise Refused("UNAVAILABLE", failure.error.message, False) from failure
        _Carrier(self._process, end, stream)


async def serve(world: World, process: Process, address: str, flags: dict[str, Any]) -> None:
    """Start the node of a process and let it listen."""
    await SimNode(world, process, address, flags).serve()


class _Carrier:
    """What `reach.adapters.grpc_server.connect` does for one stream, over a simulated connection."""

    def __init__(self, process: Process, end: End, stream: NodeStream) -> None:
        self._end = end
        self._stream = stream
        self._reader_over: asyncio.Future[None] = process.loop.create_future()
        end.incoming = self._arrived
        self._writer = process.loop.create_task(self._write(), name="connect")

    def _arrived(self, data: bytes | None) -> None:
        if data is not None:
            self._stream.received(data)
            return
        self._stream.ended()
        if not self._reader_over.done():
            self._reader_over.set_result(None)
        if self._end.broken:
            self._writer.cancel()

    async def _write(self) -> None:
        try:
            while (frame := await self._stream.next_frame()) is not None:
                await self._end.write(frame)
            await asyncio.wait((self._reader_over,), timeout=HALF_CLOSE_LIMIT_S)
        except StreamBroken:
            return
        finally:
            self._stream.ended()
            self._end.finish()
