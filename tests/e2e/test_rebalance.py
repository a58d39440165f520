"""After a rolling restart every node gets its part of the agents again, and nobody notices (failures G4)."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from agent_sdk import Agent, connect
from tests.support.cluster import NodeCluster, node_cluster
from tests.support.etcd import start_etcd

AGENTS = 30
SHARE_MOST = 0.45
WITHIN_S = 120.0


async def parts(nodes: NodeCluster) -> list[int]:
    counts = []
    for node in nodes:
        _, text = await asyncio.to_thread(node.get, "/metrics")
        lines = [line for line in text.splitlines() if line.startswith("reach_agents{")]
        counts.append(sum(int(float(line.split()[-1])) for line in lines))
    return counts


@pytest.mark.soak
async def test_no_node_keeps_most_agents_after_a_rolling_restart() -> None:
    async with start_etcd() as etcd, node_cluster(etcd) as nodes, contextlib.AsyncExitStack() as stack:
        for number in range(AGENTS):
            agent = Agent("echo", url=nodes[number % 3].grpc)

            @agent.handler
            async def echo(data: dict[str, int]) -> dict[str, int]:
                return data

            await stack.enter_async_context(agent)
        failed: list[Exception] = []
        over = asyncio.Event()

        async def load() -> None:
            async with connect(nodes.url) as mesh:
                while not over.is_set():
                    try:
                        await mesh.request({"n": 1}, agent_type="echo", timeout=10)
                    except Exception as error:
                        failed.append(error)

        loads = asyncio.create_task(load())
        for node in nodes:
            await node.term()
            await node.restart()
            await node.ready()
        began = time.monotonic()
        while max(await parts(nodes)) > SHARE_MOST * AGENTS:
            assert time.monotonic() - began < WITHIN_S, await parts(nodes)
            await asyncio.sleep(1)
        assert sum(await parts(nodes)) == AGENTS
        over.set()
        await loads
        assert not failed
