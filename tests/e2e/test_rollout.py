"""A new version under load, by operators' commands: no request fails, conversations stay on their version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sdk import Mesh, connect
from tests.support.agents import AgentProcess, agent_process, eventually, nothing_in_flight, usable
from tests.support.node import NodeProcess, start_node

RATE_PER_S = 60
SESSION_EVERY = 5  # one of so many requests belongs to a conversation
START_S = 60.0
LIMIT_S = 60.0


@dataclass(frozen=True)
class Answered:
    """One request of the load: its number, its conversation if it had one, by whom it was answered, when."""

    n: int
    session: str | None
    by: str
    asked_at: float


class Load:
    """Requests at a steady rate. Conversations begin in the generation that `generation` names at the time."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.mesh, self.kind = mesh, kind
        self.generation = "old"
        self.answered: list[Answered] = []
        self._asked: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    async def run(self) -> None:
        began = time.monotonic()
        while not self._over.is_set():
            for n in range(len(self._asked), int((time.monotonic() - began) * RATE_PER_S)):
                talks = n % SESSION_EVERY == 0
                session = f"{self.generation}-{n // SESSION_EVERY % 6}" if talks else None
                self._asked.append(asyncio.create_task(self._ask(n, session)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await self._over.wait()
        await asyncio.gather(*self._asked)  # the first one that failed is raised

    async def _ask(self, n: int, session: str | None) -> None:
        asked_at = time.monotonic()
        data = {"n": n, "sleep": 0.02, "who": True}
        reply = await self.mesh.request(data, agent_type=self.kind, timeout=20, session=session)
        self.answered.append(Answered(n, session, reply.data, asked_at))

    def end(self) -> int:
        """Ask no more; how many were asked."""
        self._over.set()
        return len(self._asked)

    def since(self, moment: float, *, talk: str = "") -> list[str]:
        """Who answered what was asked since then: of conversations of a generation, or what stands alone."""
        return [
            each.by
            for each in self.answered
            if each.asked_at > moment and (each.session or "").startswith(talk) and bool(each.session) == bool(talk)
        ]


async def reach(node: NodeProcess, *arguments: str) -> str:
    """A command in a process of its own; what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "reach.cli", *arguments],
        env=environment | {"REACH_URL": node.grpc},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"reach {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout


async def states(node: NodeProcess, kind: str) -> dict[str, str]:
    """What `reach versions` says of each version."""
    rows: list[dict[str, Any]] = json.loads(await reach(node, "versions", kind, "--json"))
    return {row["version"]: row["state"] for row in rows}


@contextlib.asynccontextmanager
async def generation(
    node: NodeProcess, mesh: Mesh, kind: str, name: str, version: str
) -> AsyncIterator[list[AgentProcess]]:
    """Two agents of a version, ready."""
    with contextlib.ExitStack() as stack:
        names = [f"{kind}/{name}-{number}" for number in range(2)]
        workers = [stack.enter_context(agent_process(node.grpc, each, "--version", version)) for each in names]
        for each in names:
            await usable(mesh, START_S, agent_id=each)
        yield workers


async def test_a_rollout_under_load_fails_nothing_and_keeps_conversations_on_their_version() -> None:
    kind = f"roll{secrets.token_hex(2)}"
    async with (
        start_node() as node,
        connect(node.grpc) as mesh,
        generation(node, mesh, kind, "old", "1.0") as old,
    ):
        await reach(node, "rollout", kind, "--prefer", "1.0")
        load = Load(mesh, kind)
        running = asyncio.create_task(load.run(), name="load")
        try:
            async with generation(node, mesh, kind, "new", "2.0") as new:
                await steer(node, kind, load)
                await leave(node, kind, load, old)
                asked = load.end()
                await running
                assert len(load.answered) == asked > 200
                runs = sorted(int(n) for worker in (*old, *new) for n in worker.runs() if n)
                assert runs == list(range(asked)), "each was run exactly once"
                await nothing_in_flight(node)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def steer(node: NodeProcess, kind: str, load: Load) -> None:
    """A canary first, then all."""
    began = time.monotonic()
    assert set(by_version(load.since(0))) <= {"old"}, "nobody comes to a version that is not preferred"

    await reach(node, "rollout", kind, "--weights", "2.0=20,1.0=80")
    weighed = time.monotonic()

    async def both() -> bool:
        found = by_version(load.since(weighed))
        return found.count("new") > 3 and len(found) > 60

    await eventually(both, "the canary gets its share", LIMIT_S)
    found = by_version(load.since(weighed))
    assert found.count("new") < len(found) / 2, "20 %, not half"
    assert (await states(node, kind)) == {"1.0": "active", "2.0": "canary"}

    await reach(node, "rollout", kind, "--prefer", "2.0")
    preferred = time.monotonic()
    former = {each.session for each in load.answered if each.session}
    load.generation = "young"

    async def talked() -> bool:
        return len(load.since(preferred, talk="young")) > 20 and len(load.since(preferred)) > 60

    await eventually(talked, "new conversations began", LIMIT_S)
    assert set(by_version(load.since(preferred))) == {"new"}
    assert set(by_version(load.since(preferred, talk="young"))) == {"new"}
    load.generation = "old"
    again = time.monotonic()

    async def went_on() -> bool:
        return len(load.since(again, talk="old")) > 20

    await eventually(went_on, "the former conversations went on", LIMIT_S)
    for session in former:
        owners = {each.by for each in load.answered if each.session == session}
        assert len(owners) == 1, f"{session} went from one agent to another: {owners}"
    assert began < preferred
    assert (await states(node, kind))["1.0"] == "draining", "its conversations are still there"


async def leave(node: NodeProcess, kind: str, load: Load, old: list[AgentProcess]) -> None:
    """The former version is drained, one agent after another, and its processes end."""
    watch = asyncio.create_task(reach(node, "rollout", kind, "--watch"), name="watch")
    await reach(node, "rollout", kind, "--drain", "1.0")
    drained = time.monotonic()
    shown = await watch  # it ends by itself when nothing is left to drain
    assert "SHARE" in shown  # how much of the way it saw depends on which of the two commands was quicker
    for worker in old:
        assert await worker.ended() == 0, worker.log[-2_000:]

    async def went_on() -> bool:
        return len(load.since(drained, talk="old")) > 10 and len(load.since(drained)) > 30

    await eventually(went_on, "all goes on without the former version", LIMIT_S)
    assert set(by_version(load.since(drained))) == {"new"}
    assert await states(node, kind) == {"2.0": "active"}
    assert await node.metric("reach_version_fallbacks_total", agent_type=kind) == 0
    await reach(node, "rollout", kind, "--clear")


def by_version(agents: list[str]) -> list[str]:
    """`old` or `new` of each agent's name."""
    return [agent.partition("/")[2].partition("-")[0] for agent in agents]
