"""A node that stood still reads what came meanwhile before it judges anybody by time."""

from __future__ import annotations

import asyncio
import secrets
import signal

from agent_sdk import connect
from tests.support.agents import make, nothing_in_flight, outcome, usable
from tests.support.node import start_node

STILL_S = 4.0


async def test_agents_that_answered_while_the_node_stood_still_are_not_counted_as_failed() -> None:
    agent_id = f"prompt{secrets.token_hex(2)}/1"
    async with (
        start_node() as node,
        connect(node.grpc, own_link=True) as mesh,
        make(agent_id, node.grpc, own_link=True) as agent,
    ):
        await usable(mesh, agent_id=agent_id)
        asked = [
            asyncio.create_task(outcome(mesh, {"n": n, "sleep": 1.0}, agent_id=agent_id, timeout=2.5))
            for n in range(12)
        ]
        await asyncio.sleep(0.5)  # they are with the agent, which will answer within the freeze
        assert agent.agent_id == agent_id
        node.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STILL_S)  # the freeze
        finally:
            node.process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*asked), 30)
        assert await outcome(mesh, "now", agent_id=agent_id, timeout=10) == "OK"
        assert await node.metric("reach_breaker_state", agent_id=agent_id) == 0
        await nothing_in_flight(node)
