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
from reach.node.pins import PinBook
from reach.node.registrar import Registrar

from .storelink import StoreLink

if TYPE_CHECKING:
    from .network import End
    from .process import Process
    from .world import World

HALF_CLOSE_LIMIT_S = 2.0  # as reach.adapters.grpc_server.connect
START_AGAIN_S = 1.0  # a supervisor's pause before it starts a node again that found no registry
LEAVE_WITHIN_S = 5.0


class SimNode:
    """What `reach.node.app.running` composes, with a simulated network around it."""

    def __init__(self, world: World, process: Process, address: str, flags: dict[str, Any]) -> None:
        self._process = process
        self._world = world
        self._address = address
        config = load(environment={}, flags={"node_id": address.partition(":")[0], **flags})
        self.store: Store = MemoryStore() if world.registry is None else StoreLink(world.registry, process)
        record = NodeRecord(node_id=config.node_id, address=address, incarnation=process.incarnation)
        self.engine = make_engine(config, process.unix)
        self.registrar = Registrar(
            self.store,
            record,
            lease_ttl_s=config.node_lease_ttl_s,
            register_wait_s=config.register_wait_s,
            replaced=self.engine.replaced,
        )
        contact = self.registrar.contact
        self.engine.use(self.registrar, PinBook(self.store, config.node_id, config.session_ttl_s, lambda: contact.away))
        self.engine.node, self.engine.registry_name = record, config.registry
        self.engine.registry_age, self.engine.registry_grace_s = lambda: contact.age_s, config.registry_grace_s
        self._duties: asyncio.Task[None] | None = None
        self.serving = False
        process.things.update(node=self, engine=self.engine, state=self.engine._state)
        world.lives[self.engine._state.nonce] = process

    async def serve(self) -> None:
        """Show the node in the registry. One that finds no registry ends, and is started again."""
        process, world = self._process, self._world
        process.accept = self._accept
        try:
            await self.registrar.start()
        except StoreUnavailable:
            world.ledger.event("no registry", process)
            world.scheduler.after(0.0, process.kill)
            world.scheduler.after(START_AGAIN_S, world.restart, process)
            return
        with self.engine.step() as state:
            returning.opened(state)
        self._duties = process.loop.run_inside(self.registrar.run(), "registrar")
        self.serving = True
        world.ledger.event("serves", process, self._address)

    async def leave(self) -> None:
        """Drain, as SIGTERM does, and end the process."""
        process, world = self._process, self._world
        world.ledger.event("drains", process)
        await self.engine.drain(LEAVE_WITHIN_S)
        if self._duties is not None:
            self._duties.cancel()
            await asyncio.wait([self._duties])
        await self.registrar.stop()
        process.accept = None
        await self.store.close()
        await self.engine.close()
        world.scheduler.after(0.0, process.kill)
        world.scheduler.after(START_AGAIN_S, world.restart, process)

    def _accept(self, end: End) -> None:
        try:
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
