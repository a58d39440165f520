"""The rows with faults: recovery after a kill, neighbours of a frozen agent, what reaches a target that only fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .processes import HOST, Child, Children, Failed, free_port, python_path

RATE = 200
"""Requests per second of the rows recovery and frozen."""
AMPLIFIED_RATE = 500
PAIRS = 5
"""Measurements without and with the frozen agent, in turn."""
NEIGHBOURS = 9
_SETTLE_S = 60.0
_KILL_AFTER_S = 1.0
_START_S = 5.0  # a node that was killed starts again within this, on a machine that is not busy
_OK = "OK"


class Mesh:
    """A node with agents and callers, each in a process of its own."""

    def __init__(self, tree: Path | None, children: Children) -> None:
        self._path = python_path(tree)
        self._children = children
        self._port, self._http = free_port(), free_port()
        self.url = f"{HOST}:{self._port}"

    async def node(self) -> Child:
        """Start the node, at the same address each time."""
        listen = ["--listen", self.url, "--http", f"{HOST}:{self._http}", "--log-format", "json"]
        settings = {"arguments": ["serve", *listen]}
        node = self._children.add(await Child.worker("node", "node", settings, self._path))
        await node.listens(self._port)
        return node

    async def agents(self, names: Sequence[str], *, fails: bool = False) -> Child:
        """A process with these agents, once they are attached."""
        return await self._worker("agents", {"names": list(names), "fails": fails})

    async def caller(self) -> Child:
        """A process that sends requests."""
        return await self._worker("caller", {})

    async def _worker(self, role: str, settings: dict[str, Any]) -> Child:
        child = await Child.worker(role, role, {"url": self.url, **settings}, self._path)
        await self._children.add(child).answer()
        return child


async def recovery(seconds: float, tree: Path | None) -> dict[str, Any]:
    """Seconds until answers come again after SIGKILL of one of two agents, and of the node. Raises `Failed`."""
    run_s = _KILL_AFTER_S + max(6.0, seconds)
    async with Children() as children:
        mesh = Mesh(tree, children)
        node = await mesh.node()
        one, _, caller = await mesh.agents(["echo/one"]), await mesh.agents(["echo/two"]), await mesh.caller()
        of_agent = await _after_kill(caller, one, run_s)
        await mesh.agents(["echo/one"])

        async def start_again() -> None:
            await node.process.wait()
            await mesh.node()

        of_node = await _after_kill(caller, node, run_s + _START_S, start_again)
    return {"agent": of_agent, "node": of_node}


async def _after_kill(
    caller: Child, victim: Child, run_s: float, then: Callable[[], Awaitable[None]] | None = None
) -> dict[str, Any]:
    command = {"do": "steady", "targets": [{"agent_type": "echo"}], "rate": RATE, "seconds": run_s}
    asked = asyncio.ensure_future(caller.ask(command, run_s + _SETTLE_S))
    await asyncio.sleep(_KILL_AFTER_S)
    killed_at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    if then is not None:
        await then()
    started_s = time.monotonic() - killed_at
    requests = (await asked)["requests"]
    answered = sorted(done for _, done, outcome, _ in requests if outcome == _OK and done >= killed_at)
    if not answered:
        raise Failed("nothing was answered after the kill")
    gaps = [after - before for before, after in zip([killed_at, *answered], answered, strict=False)]
    slowest = max((done - killed_at for due, done, *_ in requests if due < killed_at <= done), default=0.0)
    return {
        "silence_s": max(gaps),
        "started_s": started_s if then is not None else 0.0,
        "in_flight_settled_s": slowest,
        "failed": sum(1 for _, _, outcome, _ in requests if outcome != _OK),
        "requests": len(requests),
    }


async def frozen(seconds: float, tree: Path | None) -> dict[str, Any]:
    """p99 of nine agents at a steady load while the tenth is frozen and asked too, as a ratio to without it."""
    async with Children() as children:
        mesh = Mesh(tree, children)
        await mesh.node()
        names = [f"echo/{number}" for number in range(NEIGHBOURS)]
        await mesh.agents(names)
        tenth, caller, other = await mesh.agents(["echo/tenth"]), await mesh.caller(), await mesh.caller()
        load = {"do": "steady", "targets": [{"agent_id": name} for name in names], "rate": RATE, "seconds": seconds}
        extra = load | {"targets": [{"agent_id": "echo/tenth"}], "rate": RATE / NEIGHBOURS, "timeout": 1.0}
        await caller.ask(load, seconds + _SETTLE_S)
        pairs = []
        for _ in range(PAIRS):
            without = p99_ms(await caller.ask(load, seconds + _SETTLE_S))
            os.kill(tenth.pid, signal.SIGSTOP)
            try:
                asked = asyncio.ensure_future(other.ask(extra, seconds + _SETTLE_S))
                beside = p99_ms(await caller.ask(load, seconds + _SETTLE_S))
                await asked
            finally:
                os.kill(tenth.pid, signal.SIGCONT)
            pairs.append((without, beside))
            await asyncio.sleep(1.0)
    return {
        "without_ms": median(pair[0] for pair in pairs),
        "beside_ms": median(pair[1] for pair in pairs),
        "ratio": median(beside / without for without, beside in pairs),
        "pairs": pairs,
    }


def p99_ms(found: dict[str, Any]) -> float:
    """The 99th percentile of a steady load's latencies. Raises `Failed` if a request failed."""
    requests = found["requests"]
    failed = [outcome for _, _, outcome, _ in requests if outcome != _OK]
    if failed:
        raise Failed(f"{len(failed)} requests to healthy agents failed, the first with {failed[0]}")
    latencies = sorted(done - due for due, done, *_ in requests)
    return float(latencies[int(0.99 * len(latencies))] * 1e3)


async def amplification(seconds: float, tree: Path | None) -> dict[str, Any]:
    """Requests that reach a target that fails every one, by requests made, at 500 a second."""
    async with Children() as children:
        mesh = Mesh(tree, children)
        await mesh.node()
        target = await mesh.agents([f"broken/{number}" for number in range(4)], fails=True)
        caller = await mesh.caller()
        run_s = max(3.0, seconds)
        load = {"do": "steady", "targets": [{"agent_type": "broken"}], "rate": AMPLIFIED_RATE, "seconds": run_s}
        requests = (await caller.ask(load, run_s + _SETTLE_S))["requests"]
        others = {outcome for _, _, outcome, _ in requests} - {"AGENT_ERROR"}
        if others:
            raise Failed(f"requests to a target that fails ended with {', '.join(sorted(others))}")
        reached = (await target.ask({"do": "count"}, _SETTLE_S))["count"]
    return {"made": len(requests), "reached": reached, "ratio": reached / len(requests)}
