"""Stopping real processes: in time, quietly, and with everybody told (groups B and J1)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from agent_sdk import Mesh, connect
from agentreach.aio.options import CLIENT_OPTIONS
from tests.support.agents import agent_process, eventually, make, outcome, usable
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import raw_link

BUSY_S = 3.0  # what a loaded machine may add to a wait


async def in_flight(node: NodeProcess, count: int) -> None:
    """Wait until so many requests are under way."""

    async def so_many() -> bool:
        return await node.metric("reach_requests_in_flight") == count

    await eventually(so_many, f"{count} in flight")


@contextlib.asynccontextmanager
async def crowd(node: NodeProcess, count: int) -> AsyncIterator[None]:
    """Idle agents, each on its own connection."""
    async with contextlib.AsyncExitStack() as links:
        for n in range(count):
            await links.enter_async_context(raw_link(node.grpc, agents=[f"idle/{n}"]))
        yield


def quiet(log: str) -> None:
    """A log without a word that should worry anybody."""
    for word in ("Traceback", '"level": "error"', "was never retrieved", "Task was destroyed"):
        assert word not in log, log[-2_000:]


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it when the node has ended: agents of this process need not wait for it to acknowledge their leaving."""
    return lambda: monkeypatch.setattr("agent_sdk.draining._ACKNOWLEDGED_S", 0.1)


class TestANode:
    async def test_idle_agents_and_an_open_watch_do_not_hold_it_up(self) -> None:
        async with (
            start_node(drain_timeout_s=30) as node, crowd(node, 50),
            grpc.aio.insecure_channel(node.grpc, options=[*CLIENT_OPTIONS]) as channel,
        ):  # fmt: skip
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            unknown = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x01x")
            assert health_pb2.HealthCheckResponse.FromString(await watch.read()).status == 1
            await unknown.read()
            began = time.monotonic()
            assert await node.end() == 0
            assert time.monotonic() - began < 3 + BUSY_S
            assert health_pb2.HealthCheckResponse.FromString(await watch.read()).status == 2
            assert await watch.read() is grpc.aio.EOF
            quiet(node.log)

    @pytest.mark.parametrize(
        ("slept_s", "limit_s", "told"),
        [
            pytest.param(3.0, 20.0, "OK", id="one-task"),
            pytest.param(60.0, 3.0, "AGENT_LOST", id="a-stuck-one"),
        ],
    )
    async def test_what_runs_is_waited_for_until_the_limit(
        self, slept_s: float, limit_s: float, told: str, left_alone: Callable[[], None]
    ) -> None:
        async with start_node(drain_timeout_s=limit_s) as node:
            agent = make("worker/1", node.grpc, own_link=True, drain_timeout=0.2)
            async with agent, connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_id="worker/1")
                asked = asyncio.create_task(outcome(mesh, {"n": 1, "sleep": slept_s}, agent_id="worker/1", timeout=90))
                await in_flight(node, 1)
                began = time.monotonic()
                node.process.send_signal(signal.SIGTERM)

                async def not_ready() -> bool:
                    return (await asyncio.to_thread(node.get, "/readyz"))[0] != 200

                await eventually(not_ready, "it says that it is leaving")
                assert await outcome(mesh, "x", agent_id="worker/1", timeout=0.3) == "SHUTTING_DOWN"
                assert (await asyncio.to_thread(node.get, "/healthz"))[0] == 200, "it lives, and drains"
                assert await asyncio.to_thread(node.process.wait, 15) == 0
                took_s = time.monotonic() - began
                left_alone()
                assert min(slept_s, limit_s) - 0.7 < took_s < min(slept_s, limit_s) + BUSY_S
                assert await asyncio.wait_for(asked, 5) == told
                quiet(node.log)

    async def test_a_second_signal_ends_it_at_once(self, left_alone: Callable[[], None]) -> None:
        async with start_node(drain_timeout_s=30) as node:
            agent = make("worker/1", node.grpc, own_link=True, drain_timeout=0.2)
            async with agent, connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_id="worker/1")
                asked = asyncio.create_task(outcome(mesh, {"n": 1, "sleep": 60}, agent_id="worker/1", timeout=90))
                await in_flight(node, 1)
                node.process.send_signal(signal.SIGINT)

                async def leaving() -> bool:
                    return (await asyncio.to_thread(node.get, "/readyz"))[0] != 200

                await eventually(leaving, "it drains")
                began = time.monotonic()
                await node.end(signal.SIGTERM)
                assert time.monotonic() - began < 1 + BUSY_S
                left_alone()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    @pytest.mark.parametrize("after_s", [0.05, 0.3, 0.8])
    async def test_a_signal_while_it_starts_ends_it_promptly(self, after_s: float) -> None:
        node = start_node()
        try:
            node.start()
            await asyncio.sleep(after_s)  # into the midst of its start
            began = time.monotonic()
            assert await node.end() in (0, -signal.SIGTERM, 143)
            assert time.monotonic() - began < 3 + BUSY_S
            quiet(node.log)
        finally:
            node.close()

    async def stops_under_load(self, rounds: int) -> None:
        """Ctrl-C at any moment of full traffic: in time and without a word of trouble."""
        rng = random.Random(1)
        for _ in range(rounds):
            async with start_node(drain_timeout_s=5) as node:
                agent = make("worker/1", node.grpc, own_link=True, drain_timeout=0.2)
                async with agent, connect(node.grpc, own_link=True) as mesh:
                    await usable(mesh, agent_id="worker/1")
                    over = asyncio.Event()

                    async def ask(n: int, mesh: Mesh = mesh, over: asyncio.Event = over) -> None:
                        while not over.is_set():
                            await outcome(mesh, {"n": n, "sleep": 0.01}, agent_id="worker/1", timeout=3)

                    asking = [asyncio.create_task(ask(n)) for n in range(20)]
                    await asyncio.sleep(rng.random() * 0.5)
                    began = time.monotonic()
                    assert await node.end(signal.SIGINT) == 0
                    assert time.monotonic() - began < 3 + BUSY_S
                    over.set()
                    for task in asking:
                        task.cancel()
                    await asyncio.gather(*asking, return_exceptions=True)
                    quiet(node.log)

    async def test_ctrl_c_under_load_is_prompt_and_quiet(self) -> None:
        await self.stops_under_load(2)

    @pytest.mark.soak
    @pytest.mark.timeout(3000)
    async def test_ctrl_c_under_load_is_prompt_and_quiet_200_times(self) -> None:
        await self.stops_under_load(200)


async def rolling_restarts(rounds: int, pause_s: float) -> None:
    """B3: constant load on three workers of which one after another is told to stop: nothing fails, nothing twice."""
    async with start_node() as node, connect(node.grpc, own_link=True) as mesh:
        kind = f"rolling{secrets.token_hex(2)}"
        with contextlib.ExitStack() as workers:
            fleet = [workers.enter_context(agent_process(node.grpc, f"{kind}/{n}")) for n in range(3)]
            for n in range(3):
                await usable(mesh, agent_id=f"{kind}/{n}")
            over = asyncio.Event()
            asked: list[asyncio.Task[Any]] = []

            async def load() -> None:
                while not over.is_set():
                    data = {"n": len(asked), "sleep": 0.1}
                    asked.append(asyncio.create_task(mesh.request(data, agent_type=kind, timeout=20)))
                    await asyncio.sleep(0.02)

            loading = asyncio.create_task(load())
            for n in range(rounds):
                worker = fleet[n % 3]
                worker.process.send_signal(signal.SIGTERM)
                assert await worker.ended() == 0
                worker.restart()
                await usable(mesh, agent_id=f"{kind}/{n % 3}")
                await asyncio.sleep(pause_s)
            over.set()
            await loading
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [each for each in found if isinstance(each, BaseException)] == []
            runs = sorted(int(n) for worker in fleet for n in worker.runs())
            assert runs == list(range(len(asked)))


@pytest.mark.soak  # under more load and in every run: test_rolling_restart.py
async def test_workers_restarted_one_after_another_fail_no_request() -> None:
    await rolling_restarts(3, 0)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_workers_restarted_for_five_minutes_fail_no_request() -> None:
    await rolling_restarts(30, 10)
