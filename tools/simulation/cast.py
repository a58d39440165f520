"""The agents of the simulation: real `Agent`s whose handlers are slow, nested, failing or stubborn by order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_sdk import Agent, AgentError, Overloaded, Rejected, connection
from agent_sdk.context import Context
from agent_sdk.errors import ReachError
from agent_sdk.messages import Event
from agent_sdk.settings import Access

from .asking import Asking
from .ledger import Run
from .network import SimTransport

if TYPE_CHECKING:
    from .process import Process
    from .world import World

TOPICS = ("news", "prices")


@dataclass(frozen=True, slots=True)
class Role:
    """One agent of a process."""

    kind: str
    instance: str = ""
    """Empty: a new one for each process; else the same over restarts, which take the former's place."""
    max_concurrency: int = 0
    reentrant: bool = False
    topic: str = ""
    """It also handles this topic's events."""

    @property
    def name(self) -> str:
        """What `Agent` is given."""
        return f"{self.kind}/{self.instance}" if self.instance else self.kind


class Troupe:
    """The agents of one process."""

    def __init__(self, world: World, process: Process, roles: tuple[Role, ...]) -> None:
        self.world = world
        self.process = process
        self.roles = roles
        self.agents: list[tuple[Role, Agent, str]] = []
        """Each with its agent_id."""
        self.turns: dict[str, int] = {}
        """By session: its state."""
        self.failed: dict[int, int] = {}
        self.lease: connection.Lease | None = None
        self.asking = Asking(world, process)
        process.things["troupe"] = self

    async def serve(self) -> None:
        """Attach them all; they stay until the process is killed or told to leave."""
        address = Access(self.world.known_addresses(self.process))
        self.lease = connection.take(address, own_link=True, transport=SimTransport(self.world, self.process))
        starts = []
        for role in self.roles:
            agent = self._make(role)
            self.agents.append((role, agent, agent.agent_id))
            starts.append(self._start(agent))
        await asyncio.gather(*starts)

    async def _start(self, agent: Agent) -> None:
        try:
            await agent.start(None, self.lease)
        except ReachError as error:
            self.world.ledger.event("refused", self.process, f"{agent.agent_id}: {error.code}")
            return
        self.world.ledger.event("attached", self.process, agent.agent_id)

    async def leave(self) -> None:
        """Drain, as SIGTERM does, and end the process."""
        self.world.ledger.event("drains", self.process)
        await asyncio.gather(*(agent.drain() for _, agent, _ in self.agents))
        if self.lease is not None:
            await connection.release(self.lease)
        self.world.scheduler.after(0.0, self.process.kill)

    def _make(self, role: Role) -> Agent:
        agent = Agent(
            role.name,
            capabilities=[f"can-{role.kind}"],
            max_concurrency=role.max_concurrency,
            reentrant=role.reentrant,
            drain_timeout=5.0,
        )
        if role.topic:
            self._listen(agent, role.topic)
        limit = role.max_concurrency if not role.reentrant else 0

        if role.kind == "story":

            @agent.handler
            async def tell(data: dict[str, Any], ctx: Context) -> AsyncIterator[dict[str, Any]]:
                with self._recorded(data, ctx, limit) as run:
                    for index in range(data["items"]):
                        await asyncio.sleep(data["gap"])
                        yield {"ask": data["ask"], "run": run.number, "i": index}

        else:

            @agent.handler
            async def answer(data: dict[str, Any], ctx: Context) -> dict[str, Any]:
                with self._recorded(data, ctx, limit) as run:
                    await self._act(role.kind, data, ctx, run)
                    return {"ask": data["ask"], "run": run.number}

        return agent

    def _listen(self, agent: Agent, topic: str) -> None:
        @agent.on_event(topic)
        async def hear(event: dict[str, Any], ctx: Context) -> None:
            self.world.ledger.hears(self.process, topic, event["by"], event["n"])
            await asyncio.sleep(event["s"])

    async def _act(self, kind: str, data: dict[str, Any], ctx: Context, run: Run) -> None:
        if data["s"]:
            await self._sleep(kind, data["s"])
        if kind == "chat":
            self.turns[ctx.session_id] = self.turns.get(ctx.session_id, 0) + 1
        elif kind == "relay":
            await self._pass_on(data, ctx, run)
        elif kind == "flaky":
            self._fail(data)

    async def _sleep(self, kind: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if kind == "stubborn":  # it outlives its cancel
                await asyncio.sleep(2 * seconds)
            raise

    async def _pass_on(self, data: dict[str, Any], ctx: Context, run: Run) -> None:
        """Ask the next agent of the chain, or of the circle."""
        hops = data["hops"]
        if hops:
            target = "relay" if hops > 1 else data["next"]
            inner = {**data, "hops": hops - 1}
            await self.asking.nested(ctx, inner, target, run)

    def _fail(self, data: dict[str, Any]) -> None:
        """Raise what was ordered, as often as was ordered."""
        group, fault = data["ask"], data["fault"]
        self.failed[group] = self.failed.get(group, 0) + 1
        if self.failed[group] > data["times"]:
            return
        if fault == "retryable":
            raise AgentError("not now", retryable=True)
        if fault == "fatal":
            raise AgentError("never", retryable=False)
        if fault == "rejected":
            raise Rejected("not this")
        if fault == "overloaded":
            raise Overloaded("rate limit", retry_after=0.5)
        raise ValueError("a bug of the handler")

    @contextlib.contextmanager
    def _recorded(self, data: dict[str, Any], ctx: Context, limit: int) -> Iterator[Run]:
        """Write the call into the ledger: its start, and how it really ended."""
        envelope = ctx._work.envelope
        run = Run(
            self.world.number(),
            data["ask"],
            ctx.message_id,
            self.process,
            ctx.agent_id,
            ctx.agent_id.partition("/")[0],
            self.world.now,
            ctx.attempt,
            ctx.session_id,
            envelope.epoch,
            envelope.hop_count,
            len(envelope.path),
            bytes(envelope.entry[:8]),
            limit,
        )
        self.world.ledger.began(run)
        state = "cancelled"
        try:
            yield run
            state = "done"
        except Exception as error:
            state = _told(error)
            raise
        finally:
            if self.process.alive and not self.world.over:
                self.world.ledger.finished(run, state)


def _told(error: Exception) -> str:
    """How a run ended that raised; `said no` where the handler itself allows that the message runs again."""
    own = isinstance(error, Rejected | Overloaded | AgentError) and not error.trace_id
    if own and (isinstance(error, Rejected) or error.retryable):  # type: ignore[attr-defined]
        return f"said no: {type(error).__name__}"
    return type(error).__name__


async def inbox(world: World, process: Process, mesh: Any, topic: str, pace_s: float) -> None:
    """A subscriber that takes a topic's events one by one, until its process ends."""
    async with mesh.subscribe(topic) as events:
        world.ledger.event("subscribed", process, topic)
        event: Event
        async for event in events:
            world.ledger.hears(process, topic, event.data["by"], event.data["n"])
            await asyncio.sleep(pace_s)
