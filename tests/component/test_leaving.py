"""A node leaves: its agents are let go when nothing is under way, and not when nothing was a moment ago."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_sdk import Agent, connect
from tests.support.agents import eventually
from tests.support.node import config, running

LIMIT_S = 20.0


async def test_what_other_nodes_sent_since_all_was_settled_is_waited_for() -> None:
    """Between the step that settled the last request and the next look, there may be another one."""
    begun, go = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(LIMIT_S), running(config()) as node:
        agent = Agent("worker", url=node.grpc_address, own_link=True)

        @agent.handler
        async def work(data: Any) -> str:
            begun.set()
            await go.wait()
            return "whole"

        async with agent, connect(node.grpc_address, own_link=True) as mesh:
            call = asyncio.create_task(mesh.request("x", agent_type="worker", timeout=LIMIT_S))
            await begun.wait()
            leaving = asyncio.create_task(node.engine.drain(LIMIT_S))

            async def waits() -> bool:
                return node.engine._state.draining and not node.engine._settled.is_set()

            await eventually(waits, "the node leaves, and waits for the request")
            for _ in range(3):
                node.engine._settled.set()
                await eventually(waits, "it has looked again")
            go.set()
            assert (await call).data == "whole"
            await leaving
