"""A network that misbehaves between real processes (A2, A4, A13): what was under way arrives, and arrives once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agent_sdk import Mesh, NoAgentAvailable, connect
from tests.support.agents import BUSY_S, LINK_DEAD_S, RESUME_S, agent_process, eventually, name, outcome, usable
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import raw_link, response
from tools.faultproxy import BOTH, DOWN, UP, FaultProxy, Way


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node


class TestHalfOpen:
    @pytest.mark.parametrize("ways", [UP, DOWN, BOTH], ids=["up", "down", "both"])
    async def test_a_deaf_link_leaves_routing_in_time_and_comes_back_by_itself(
        self, node: NodeProcess, ways: Way
    ) -> None:
        agent_id = name("deaf")
        async with FaultProxy(node.grpc) as proxy, connect(node.grpc, own_link=True) as mesh:
            with agent_process(proxy.address, agent_id) as worker:
                await usable(mesh, agent_id=agent_id)
                proxy.blackhole(ways)
                fell_at = time.monotonic()

                async def refused() -> bool:
                    code = await outcome(mesh, "x", agent_id=agent_id, timeout=0.3)
                    return code in ("NO_ROUTE", "NO_AGENT_AVAILABLE")

                await eventually(refused, "it is out of routing", limit_s=LINK_DEAD_S + RESUME_S + BUSY_S)
                began = time.monotonic()
                assert await outcome(mesh, "x", agent_id=agent_id, timeout=10) in ("NO_ROUTE", "NO_AGENT_AVAILABLE")
                assert time.monotonic() - began < 1, "a request to it must fail fast"
                proxy.heal()
                await usable(mesh, agent_id=agent_id, limit_s=25)
                assert worker.process.poll() is None
                assert time.monotonic() - fell_at < 40

    async def test_a_worker_that_was_frozen_is_out_and_back_when_it_thaws(self, node: NodeProcess) -> None:
        agent_id = name("frozen")
        async with connect(node.grpc, own_link=True) as mesh:
            with agent_process(node.grpc, agent_id) as worker:
                await usable(mesh, agent_id=agent_id)
                worker.process.send_signal(signal.SIGSTOP)

                async def refused() -> bool:
                    code = await outcome(mesh, "x", agent_id=agent_id, timeout=0.3)
                    return code in ("NO_ROUTE", "NO_AGENT_AVAILABLE")

                await eventually(refused, "it is out of routing", limit_s=LINK_DEAD_S + RESUME_S + BUSY_S)
                worker.process.send_signal(signal.SIGCONT)
                await usable(mesh, agent_id=agent_id, limit_s=20)


class TestTakeover:
    """A4: the cleanup of an old connection never touches the new one."""

    async def once(self, node: NodeProcess, mesh: Mesh, seed: int, *, same_process: bool) -> None:
        rng = random.Random(seed)
        agent_id = name("moving")
        incarnations = [secrets.token_bytes(16)] * 2 if same_process else [secrets.token_bytes(16) for _ in range(2)]
        async with contextlib.AsyncExitStack() as links, FaultProxy(node.grpc) as proxy:
            old = await links.enter_async_context(
                raw_link(
                    proxy.address, agents=[agent_id], taker=lambda each: response(each, "old"),
                    incarnation=incarnations[0],
                )
            )  # fmt: skip
            await usable(mesh, agent_id=agent_id)
            proxy.hold()
            new = await links.enter_async_context(
                raw_link(
                    node.grpc, agents=[agent_id], taker=lambda each: response(each, "new"), incarnation=incarnations[1]
                )
            )
            assert not new.welcome.agents[0].HasField("error")
            await usable(mesh, agent_id=agent_id)
            asked = asyncio.create_task(mesh.request("x", agent_id=agent_id, timeout=10))
            await asyncio.sleep(rng.random() * 0.05)
            rng.choice((proxy.heal, proxy.reset, lambda: proxy.half_close(UP)))()
            assert (await asked).data == "new"
            for _ in range(int(1.5 * RESUME_S / 0.1)):  # longer than the old link's resume window
                assert (await mesh.request("x", agent_id=agent_id, timeout=10)).data == "new"
                await asyncio.sleep(0.1)
            assert not old.welcome.agents[0].HasField("error")

    @pytest.mark.parametrize("same_process", [True, False], ids=["same-process", "another-process"])
    async def test_the_second_link_stays_whatever_becomes_of_the_first(
        self, node: NodeProcess, same_process: bool
    ) -> None:
        async with connect(node.grpc, own_link=True) as mesh, asyncio.TaskGroup() as rounds:
            for seed in range(8):
                rounds.create_task(self.once(node, mesh, seed, same_process=same_process))

    @pytest.mark.soak
    @pytest.mark.timeout(600)
    async def test_the_second_link_stays_fifty_times(self, node: NodeProcess) -> None:
        async with connect(node.grpc, own_link=True) as mesh:
            for seed in range(50):
                await self.once(node, mesh, seed, same_process=seed % 2 == 0)


async def resets_cost_nothing(
    node: NodeProcess, for_s: float, every_s: float, message_every_s: float, *, sessions: int, agent_too: bool
) -> None:
    """A13: a relay resets every stream; every message is handled once and answered.

    A message of a session waits for its owner's link. Any other is answered NO_AGENT_AVAILABLE while the only agent's
    link is cut (nothing has run, and a caller may ask again): the caller here does so with the same message_id.
    """
    agent_id = name("steady")
    async with FaultProxy(node.grpc) as proxy:
        agent_url = proxy.address if agent_too else node.grpc
        with agent_process(agent_url, agent_id) as worker:
            async with connect(proxy.address, own_link=True) as mesh:
                await usable(mesh, agent_id=agent_id)
                over = asyncio.Event()

                async def reset() -> None:
                    while not over.is_set():
                        await asyncio.sleep(every_s)
                        proxy.reset()

                async def ask(n: int) -> Any:
                    how: dict[str, Any] = (
                        {"session": f"s{n % sessions}"} if sessions else {"message_id": f"{agent_id}-{n}"}
                    )
                    while True:
                        try:
                            return (await mesh.request({"n": n}, agent_id=agent_id, timeout=30, **how)).data
                        except NoAgentAvailable as error:
                            assert agent_too and not sessions, error
                            assert error.retryable and not error.may_have_executed
                            await asyncio.sleep(0.05)

                resets = asyncio.create_task(reset())
                count = int(for_s / message_every_s)
                asked = []
                for n in range(count):
                    asked.append(asyncio.create_task(ask(n)))
                    await asyncio.sleep(message_every_s)
                found = await asyncio.gather(*asked, return_exceptions=True)
                over.set()
                await resets
                assert found == list(range(count))
                assert sorted(map(int, worker.runs())) == list(range(count)), "lost or doubled"
                assert proxy.connections >= for_s / every_s * 0.5
    assert await node.metric("reach_link_resumes_total") > 0


async def test_a_relay_that_resets_every_second_costs_no_message() -> None:
    """Of sessions, of whoever is behind a relay alone, and of both ends: each on a way of its own, at the same time."""
    async with start_node(resume_window_s=5, settle_min_s=2) as node, asyncio.TaskGroup() as ways:
        for what, sessions, agent_too in (("sessions", 3, True), ("the caller's", 0, False), ("everybody's", 0, True)):
            way = resets_cost_nothing(node, 5, 1, 0.05, sessions=sessions, agent_too=agent_too)
            ways.create_task(way, name=what)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_relay_that_resets_every_20_s_costs_no_message_in_10_minutes() -> None:
    with start_node(resume_window_s=10, heartbeat_interval_s=10, lease_ttl_s=30, settle_min_s=1) as node:
        await resets_cost_nothing(node, 600, 20, 1, sessions=3, agent_too=True)


async def test_a_node_far_away_is_reached_and_stays_reached() -> None:
    """A way of 0.7 s in each direction: longer than a loaded or distant node may take to say its first word."""
    async with (
        start_node(heartbeat_interval_s=5, lease_ttl_s=20) as node, FaultProxy(node.grpc, delay_s=0.7) as proxy,
        connect(proxy.address, own_link=True, timeout=20) as mesh,
    ):  # fmt: skip
        assert await outcome(mesh, "x", agent_type="nobody", timeout=20) == "NO_ROUTE"
        assert proxy.connections == 1
