"""Making requests and writing down how they end: by a client, from within a handler, by a call of the RPC kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent_sdk.client import Mesh
from agent_sdk.context import Context
from agent_sdk.errors import ReachError
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.wire import payload as payloads
from reach.core.ports import Identity, MeshFailure
from reach.node.engine import Engine

from .ledger import Ask, Run

if TYPE_CHECKING:
    from .process import Process
    from .world import World

RPC = Identity(principal="rpc")  # whoever calls Invoke: another principal than those who come by links


class Asking:
    """The requests of one process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def ask(self, mesh: Mesh, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        """One request by a client."""
        if ask.kind == "stream":
            await self._noted(ask, lambda: self._stream(mesh, ask, data, options))
        else:
            await self._noted(ask, lambda: self._request(mesh, ask, data, options))

    async def nested(self, ctx: Context, data: dict[str, Any], target: str, run: Run) -> None:
        """One request from within a handler; its failure is the handler's."""
        number = self._world.number()
        ask = Ask(number, number, self._process, target, "nested", ctx.time_left(), nested=True, parent=run)
        inner = {**data, "ask": number}
        failure: list[ReachError] = []
        # The business step is the same in each lap of a circle, so that the mesh can see it.
        step = f"step {data['root']}"
        await self._noted(ask, lambda: self._within(ctx, ask, inner, target, step), failure)
        if failure:
            raise failure[0]

    async def invoke(self, engine: Engine, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        """One request by Invoke, as grpcurl makes it."""
        envelope = pb.Envelope(type=pb.REQUEST, payload=payloads.encode(data), timeout_ms=int(ask.timeout_s * 1000))
        envelope.message_id, envelope.session_id = ask.message_id, ask.session
        envelope.idempotent = ask.idempotent
        if "agent_id" in options:
            envelope.target.agent_id = options["agent_id"]
        else:
            envelope.target.agent_type = options["agent_type"]
        if ask.profile:
            envelope.profile = pb.CallProfile.Value(ask.profile)
        await self._noted(ask, lambda: self._call(engine, ask, envelope))

    # ---- inside ----

    async def _noted(self, ask: Ask, make: Callable[[], Any], failure: list[ReachError] | None = None) -> None:
        ledger = self._world.ledger
        ledger.asked(ask)
        try:
            await make()
        except ReachError as error:
            ask.may_have_executed, ask.attempts = error.may_have_executed, error.attempts
            ask.told_items = int(error.details["items"]) if "items" in error.details else None
            if failure is not None:
                failure.append(error)
            ledger.ended(ask, str(error.code), error.message[:160])
        except MeshFailure as failed:
            told = failed.error
            ask.may_have_executed, ask.attempts = told.may_have_executed, told.attempts
            ledger.ended(ask, codes.ErrorCode.Name(told.code), told.message[:160])
        except asyncio.CancelledError:
            if not self._world.over:
                ledger.ended(ask, "cancelled")
            raise
        else:
            ledger.ended(ask, "left" if ask.left else "OK")

    async def _request(self, mesh: Mesh, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        reply = await mesh.request(data, **options)
        _note_reply(ask, reply.data)

    async def _within(self, ctx: Context, ask: Ask, data: dict[str, Any], target: str, step: str) -> None:
        reply = await ctx.request(data, agent_type=target, dedup_key=step)
        _note_reply(ask, reply.data)

    async def _stream(self, mesh: Mesh, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        async with mesh.stream(data, **options) as items:
            async for item in items:
                ask.run, ask.run_group = item["run"], item["ask"]
                ask.items.append(item["i"])
                if len(ask.items) == data.get("leave"):
                    ask.left = True
                    return
                if data["pace"]:
                    await asyncio.sleep(data["pace"])

    async def _call(self, engine: Engine, ask: Ask, envelope: pb.Envelope) -> None:
        reply = await engine.invoke(envelope, RPC, None)
        _note_reply(ask, payloads.decode(reply.payload))


def _note_reply(ask: Ask, data: Any) -> None:
    """What a success says: which run of which message made it."""
    if isinstance(data, list):
        ask.items = [item["i"] for item in data]
        if not data:
            return
        data = data[-1]
    ask.run, ask.run_group = data["run"], data["ask"]
