"""A storm: faults drawn by a seed, on agents, ways and the node, while callers ask without a pause.

    async with Storm(node, book, seed=1) as storm:
        await storm.rage(20)                                # seconds
    assert storm.book.faults() == []

Each target has one fault at a time, and every fault ends by itself. What was done stands in `storm.log`. The seed fixes
the faults and what is asked; processes and sockets have times of their own, so a run repeats only about.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from agent_sdk import Mesh, connect
from tests.support.agents import AgentProcess, agent_process, usable
from tests.support.chaos import Book
from tests.support.node import NodeProcess
from tools.faultproxy import BOTH, DOWN, UP, FaultProxy

KIND = "stormed"
AGENTS = 4
ASK_EVERY_S = 0.02
STRIKE_EVERY_S = (0.2, 0.8)
TIMEOUT_S = 10.0
BACK_S = 60.0  # until a restarted node is ready; after the last fault, until everybody is usable again

TOLD = frozenset(
    ("OK", "AGENT_LOST", "TIMEOUT", "CONNECT_FAILED", "NO_ROUTE", "NO_AGENT_AVAILABLE", "BREAKER_OPEN", "OVERLOADED")
)
"""What a well-made request may be told in a storm; anything else blames the wrong one."""

Fault = Callable[[], Awaitable[None]]


class Storm:
    """Agents behind relays, callers direct and behind relays, and what befalls them."""

    def __init__(self, node: NodeProcess, book: Book, seed: int) -> None:
        self.node, self.book = node, book
        self.log: list[str] = [f"seed {seed}"]
        self._rng = random.Random(seed)
        self._asked_rng = random.Random(~seed)  # of its own: how many are asked must not change the faults
        self._began = time.monotonic()
        self._agents: list[AgentProcess] = []
        self._ways: list[FaultProxy] = []
        self._meshes: list[Mesh] = []
        self._stricken: set[str] = set()
        self._held = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Storm:
        try:
            for number in range(AGENTS):
                way = await self._held.enter_async_context(FaultProxy(self.node.grpc))
                process = agent_process(way.address, f"{KIND}/{number}", "--written", str(self.book.ledger))
                self._agents.append(self._held.enter_context(process))
                self._ways.append(way)
            for behind in (False, True, True):
                way = await self._held.enter_async_context(FaultProxy(self.node.grpc))
                url = way.address if behind else self.node.grpc
                self._ways.append(way)
                self._meshes.append(await self._held.enter_async_context(connect(url, own_link=True, timeout=20)))
            await self._all_usable()
        except BaseException:
            await self._held.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    async def rage(self, for_s: float) -> None:
        """Ask and strike for so long; then wait until all faults have ended, all are answered and all usable again."""
        over_at = time.monotonic() + for_s
        async with asyncio.TaskGroup() as running:
            running.create_task(self._ask_on(over_at), name="storm: ask")
            strikes = running.create_task(self._strike_on(over_at), name="storm: strike")
        assert strikes.done()
        await self.book.answered()
        await self._all_usable()

    async def _all_usable(self) -> None:
        for mesh in self._meshes:
            for number in range(AGENTS):
                await usable(mesh, limit_s=BACK_S, agent_id=f"{KIND}/{number}")

    async def _ask_on(self, over_at: float) -> None:
        rng = self._asked_rng
        while time.monotonic() < over_at:
            mesh, sleep_s = rng.choice(self._meshes), rng.choice((0.0, 0.0, 0.05, 0.3, 1.0))
            match rng.randrange(5):
                case 0 | 1:
                    self.book.begin(mesh, KIND, timeout=TIMEOUT_S, sleep=sleep_s)
                case 2:
                    self.book.begin(mesh, KIND, timeout=TIMEOUT_S, sleep=sleep_s, idempotent=True)
                case 3:
                    session = f"s{rng.randrange(5)}"
                    self.book.begin(mesh, KIND, timeout=TIMEOUT_S, sleep=min(sleep_s, 0.05), session=session)
                case _:
                    self.book.begin(mesh, KIND, timeout=TIMEOUT_S, sleep=sleep_s, stream=10)
            await asyncio.sleep(ASK_EVERY_S)

    async def _strike_on(self, over_at: float) -> None:
        async with asyncio.TaskGroup() as faults:
            while time.monotonic() < over_at:
                target, fault, what = self._next_fault()
                if target not in self._stricken:
                    self._stricken.add(target)
                    faults.create_task(self._strike(target, fault, what), name=f"storm: {what} {target}")
                await asyncio.sleep(self._rng.uniform(*STRIKE_EVERY_S))

    async def _strike(self, target: str, fault: Fault, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:6.2f} {what} {target}")
        await fault()
        self.log.append(f"{time.monotonic() - self._began:6.2f} {what} {target} ended")
        self._stricken.discard(target)

    def _next_fault(self) -> tuple[str, Fault, str]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.04:
            return "node", self._restart_node, "kill"
        if draw < 0.12:
            for_s = rng.uniform(0.1, 2.5)
            return "node", lambda: freeze(self.node.process.send_signal, for_s), f"freeze for {for_s:.1f} s"
        if draw < 0.35:
            number = rng.randrange(AGENTS)
            agent = self._agents[number]
            if draw < 0.22:
                return f"agent {number}", lambda: self._restart_agent(agent), "kill"
            for_s = rng.uniform(0.1, 3.0)
            return f"agent {number}", lambda: freeze(agent.process.send_signal, for_s), f"freeze for {for_s:.1f} s"
        number = rng.randrange(len(self._ways))
        return f"way {number}", *self._way_fault(self._ways[number])

    def _way_fault(self, way: FaultProxy) -> tuple[Fault, str]:
        rng = self._rng
        for_s, (named, ways) = rng.uniform(0.1, 2.5), rng.choice((("up", UP), ("down", DOWN), ("both ways", BOTH)))
        faults: dict[str, Callable[[], None]] = {
            "reset": way.reset,
            "half-close": lambda: way.half_close(ways),
            "black hole": lambda: way.blackhole(ways),
            "hold": lambda: way.hold(ways),
            "delay": lambda: setattr(way, "delay_s", for_s / 5),
            "slow": lambda: setattr(way, "bytes_per_s", 30_000),
        }
        what = rng.choice(list(faults))

        async def fault() -> None:
            faults[what]()
            await asyncio.sleep(for_s)
            way.heal()

        return fault, f"{what} ({named}) for {for_s:.1f} s"

    async def _restart_node(self) -> None:
        await self.node.end(signal.SIGKILL)
        self.node.start()
        await self.node.ready(limit_s=BACK_S)

    async def _restart_agent(self, agent: AgentProcess) -> None:
        agent.process.kill()
        await agent.ended()
        agent.restart()


async def freeze(send: Callable[[signal.Signals], None], for_s: float) -> None:
    """Stop a process for so long."""
    send(signal.SIGSTOP)
    try:
        await asyncio.sleep(for_s)
    finally:
        send(signal.SIGCONT)
