"""An agent that fails is shut out, seen, and let in again by an operator: with a real node and the real command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

from agent_sdk import connect
from tests.support.agents import eventually, make, nothing_in_flight, outcome, usable
from tests.support.node import start_node


async def reach(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "reach.cli", *arguments],
        capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip


async def test_an_agent_that_fails_is_shut_out_listed_metered_and_let_in_again() -> None:
    async with start_node() as node, connect(node.grpc, own_link=True) as mesh:
        agent = make("worker/1", node.grpc, own_link=True, drain_timeout=0.2)
        async with agent:
            await usable(mesh, agent_id="worker/1")
            assert "every breaker is closed" in (await reach("breakers", "--url", node.grpc)).stderr
            hanging = [outcome(mesh, {"forever": True}, agent_id="worker/1", timeout=1.5) for _ in range(5)]
            assert set(await asyncio.gather(*hanging)) == {"TIMEOUT"}
            assert await outcome(mesh, "x", agent_id="worker/1", timeout=2) == "BREAKER_OPEN"
            assert await node.metric("reach_breaker_state", agent_id="worker/1") == 2
            shown = await reach("breakers", "--json", "--url", node.grpc)
            (breaker,) = json.loads(shown.stdout)["breakers"]
            assert (breaker["agentId"], breaker["state"], breaker["trips"]) == ("worker/1", "OPEN", 1)
            assert 0 < int(breaker["nextProbeMs"]) <= 30_000
            assert (await reach("breakers", "reset", "worker/9", "--url", node.grpc)).returncode == 1
            assert (await reach("breakers", "reset", "worker/1", "--url", node.grpc)).returncode == 0
            assert await outcome(mesh, "x", agent_id="worker/1", timeout=5) == "OK"
            assert await node.metric("reach_breaker_state", agent_id="worker/1") == 0
            await nothing_in_flight(node)

        async def series_is_gone() -> bool:
            return "reach_breaker_state{" not in (await asyncio.to_thread(node.get, "/metrics"))[1]

        await eventually(series_is_gone, "the series goes with its agent")
