"""A node of the simulation: the real engine and registry of `reach serve`, behind a simulated server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agent_sdk.testing import InProcessNode
from agentreach.aio.transport import Refused, StreamBroken
from reach.core.ports import ANYBODY, MeshFailure, NodeStream
from reach.node.config import load

if TYPE_CHECKING:
    from .network import End
    from .process import Process
    from .world import World

HALF_CLOSE_LIMIT_S = 2.0  # as reach.adapters.grpc_server.connect


async def serve(world: World, process: Process, address: str, flags: dict[str, Any]) -> None:
    """Start the node of a process and let it listen."""
    node = InProcessNode(load(environment={}, flags={"node_id": "node-1", **flags}))
    process.things["node"] = node
    process.things["engine"] = node.engine
    process.things["state"] = node.engine._state
    await node.start()

    def accept(end: End) -> None:
        try:
            stream = node.engine.open_stream(ANYBODY, str(end.connection))
        except MeshFailure as failure:
            raise Refused("UNAVAILABLE", failure.error.message, False) from failure
        _Carrier(process, end, stream)

    process.accept = accept
    world.ledger.event("serves", process, address)


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
