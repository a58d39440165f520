"""Replacing every process of a mesh under load, one after another: no request fails, none runs twice.

The counter of side effects is outside of the mesh: each run of a handler appends its number to a file before anything
else. A number that stands there twice was run twice; one that is missing was answered without having been run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from agent_sdk import Mesh, connect
from agentreach.v1.admin_pb2 import DrainNodeRequest
from reach.adapters.admin_client import AdminClient
from tests.support.agents import AgentProcess, agent_process, eventually, nothing_in_flight, outcome, usable
from tests.support.node import NodeProcess, start_node

RATE_PER_S = 200
RATE_LEAST_PER_S = 40  # a machine that cannot do this is not measured, it is broken
WORK_S = 0.05
BUSY_S = 5.0  # what a loaded machine may add to a wait
START_S = 60.0  # for a process to start there


class Load:
    """Requests at a steady rate over several callers, each with a number of its own, and what became of them."""

    def __init__(self, kind: str, meshes: Sequence[Mesh], rate_per_s: float) -> None:
        self.kind, self.meshes, self.rate_per_s = kind, meshes, rate_per_s
        self.asked: list[asyncio.Task[Any]] = []
        self.took_s = 0.0
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._run(), name="load")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        assert self._task is not None
        await self._task

    async def _run(self) -> None:
        """Open loop: what is due by the clock is sent, however long answers take."""
        began = time.monotonic()
        while not self._over.is_set():
            for _ in range(int((time.monotonic() - began) * self.rate_per_s) - len(self.asked)):
                self._ask(len(self.asked))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await self._over.wait()
        self.took_s = time.monotonic() - began

    def _ask(self, n: int) -> None:
        """Every tenth belongs to one of twenty conversations."""
        session = f"{self.kind}-{n % 20}" if n % 10 == 0 else None
        data = {"n": n, "sleep": WORK_S}
        mesh = self.meshes[n % len(self.meshes)]
        self.asked.append(asyncio.create_task(mesh.request(data, agent_type=self.kind, timeout=30, session=session)))

    async def check(self, workers: Sequence[AgentProcess]) -> None:
        """Every request was answered well, with its own answer, and was run exactly once."""
        found: list[Any] = await asyncio.wait_for(asyncio.gather(*self.asked, return_exceptions=True), 60)
        failed = Counter(repr(each) for each in found if isinstance(each, BaseException))
        assert not failed, f"{failed.total()} of {len(found)} failed: {failed.most_common(3)}"
        assert [each.data for each in found] == list(range(len(found)))
        runs = Counter(int(n) for worker in workers for n in worker.runs())
        twice = [n for n, count in runs.items() if count != 1]
        assert not twice, f"run more than once: {twice[:10]}"
        assert sorted(runs) == list(range(len(found))), "answered without having been run"


@contextlib.asynccontextmanager
async def callers(node: NodeProcess, count: int) -> AsyncIterator[list[Mesh]]:
    """Callers, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(node.grpc, own_link=True)) for _ in range(count)]


@contextlib.asynccontextmanager
async def fleet(node: NodeProcess, mesh: Mesh, count: int) -> AsyncIterator[tuple[str, list[AgentProcess]]]:
    """So many agent processes of one type, ready for work."""
    kind = f"rolling{secrets.token_hex(2)}"
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(agent_process(node.grpc, f"{kind}/{n}")) for n in range(count)]
        for n in range(count):
            await usable(mesh, START_S, agent_id=f"{kind}/{n}")
        yield kind, workers


async def affordable_rate(mesh: Mesh, kind: str) -> float:
    """RATE_PER_S, or what leaves a busy machine two thirds of its time for the restarts themselves."""
    began = time.monotonic()
    await asyncio.gather(*(mesh.request("how fast?", agent_type=kind, timeout=30) for _ in range(200)))
    rate = min(RATE_PER_S, 200 / (time.monotonic() - began) / 3)
    assert rate >= RATE_LEAST_PER_S, f"{rate:.0f} requests/s"
    return rate


async def restart_all(mesh: Mesh, kind: str, workers: Sequence[AgentProcess], pause_s: float = 0.0) -> None:
    """SIGTERM each worker in turn, and start its successor when it has ended."""
    for n, worker in enumerate(workers):
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0, worker.log[-2_000:]
        worker.restart()
        await usable(mesh, START_S, agent_id=f"{kind}/{n}")
        await asyncio.sleep(pause_s)  # the pace of the restarts


async def test_restarting_every_agent_under_load_loses_and_doubles_nothing() -> None:
    async with start_node() as node, callers(node, 4) as meshes, fleet(node, meshes[0], 4) as (kind, workers):
        rate = await affordable_rate(meshes[0], kind)
        async with Load(kind, meshes, rate) as load:
            await restart_all(meshes[0], kind, workers)
        await load.check(workers)
        assert len(load.asked) > 0.9 * rate * load.took_s, "the load was kept up all the time"
        print(f"{len(load.asked)} requests in {load.took_s:.1f} s, {len(load.asked) / load.took_s:.0f}/s")
        await nothing_in_flight(node)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_restarting_every_agent_for_ten_minutes_loses_and_doubles_nothing() -> None:
    async with start_node() as node, callers(node, 4) as meshes, fleet(node, meshes[0], 4) as (kind, workers):
        async with Load(kind, meshes, RATE_PER_S) as load:
            until = time.monotonic() + 600
            while time.monotonic() < until:
                await restart_all(meshes[0], kind, workers, pause_s=2)
        await load.check(workers)


async def test_restarting_the_node_under_light_load_loses_and_doubles_nothing() -> None:
    """What is under way when it is told to stop ends; what is asked meanwhile waits for its successor and agents."""
    async with (
        start_node(resume_window_s=10.0) as node,
        callers(node, 3) as meshes,
        fleet(node, meshes[0], 2) as (kind, workers),
    ):
        async with Load(kind, meshes, 30) as load:
            for _ in range(2):
                asked = len(load.asked)

                async def some(asked: int = asked) -> bool:
                    return len(load.asked) > asked + 15

                await eventually(some, "requests are under way")
                assert await node.end() == 0, node.log[-2_000:]
                await node.restart()
                for n in range(2):
                    await usable(meshes[0], START_S, agent_id=f"{kind}/{n}")
        await load.check(workers)
        print(f"{len(load.asked)} requests in {load.took_s:.1f} s over 2 restarts of the node")
        await nothing_in_flight(node)


async def reach(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "reach.cli", *arguments],
        capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip


async def test_an_operator_drains_an_agent_under_load_and_its_process_ends_well() -> None:
    async with start_node() as node, callers(node, 2) as meshes, fleet(node, meshes[0], 2) as (kind, workers):
        async with Load(kind, meshes, 40) as load:
            drained = await reach(
                "drain", f"{kind}/0", "--url", node.grpc, "--reason", "new version", "--timeout", "20"
            )
            assert drained.returncode == 0, drained.stderr
            assert f"{kind}/0 has drained and left" in drained.stdout
            assert await workers[0].ended() == 0
            assert "new version" in workers[0].log
            workers[0].restart()
            await usable(meshes[0], START_S, agent_id=f"{kind}/0")
        await load.check(workers)


async def test_an_operator_drains_the_node_and_a_first_sigterm_meanwhile_cuts_nothing() -> None:
    async with start_node(drain_timeout_s=30) as node, callers(node, 1) as (mesh,), fleet(node, mesh, 1) as (kind, _):
        asked = asyncio.create_task(outcome(mesh, {"n": 1, "sleep": 4.0}, agent_type=kind, timeout=30))

        async def under_way() -> bool:
            return await node.metric("reach_requests_in_flight") == 1

        await eventually(under_way, "it is under way")
        async with AdminClient([node.grpc]) as client:
            begun = await client.drain_node(DrainNodeRequest(timeout_ms=20_000))
        assert (begun.in_flight, begun.timeout_ms) == (1, 20_000)
        node.process.send_signal(signal.SIGTERM)  # a supervisor that stops it after its hook has drained it
        await asyncio.sleep(0.5)  # what it cuts would be cut by now
        assert not asked.done()
        assert await asyncio.wait_for(asked, 10) == "OK"
        assert await asyncio.to_thread(node.process.wait, 10 + BUSY_S) == 0
        again = await reach("drain", "--node", "--url", node.grpc)
        assert again.returncode == 3, "nobody is there"


async def test_draining_the_node_by_command_waits_for_its_end() -> None:
    async with start_node() as node:
        drained = await reach("drain", "--node", "--url", node.grpc)
        assert drained.returncode == 0, drained.stderr
        assert "has drained and left" in drained.stdout
        assert await asyncio.to_thread(node.process.wait, BUSY_S) == 0
