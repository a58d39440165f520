"""What the simulator found: a CANCEL in the frame of its REQUEST (tools/sim.py, a process that stood still)."""

from __future__ import annotations

import asyncio

from agent_sdk import Agent
from agent_sdk.testing import InProcessMesh
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope


async def test_a_request_that_is_cancelled_before_its_task_began_gives_its_slot_back() -> None:
    agent, ran = Agent("echo", max_concurrency=1), asyncio.Event()

    @agent.handler
    async def echo(data: str) -> str:
        ran.set()
        return data

    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        host = agent._host
        assert host is not None
        request = Envelope(message_id="m1", entry=b"e", attempt=1, timeout_ms=5000, recipient=agent.agent_id)
        request.payload.text = "hi"
        host.deliver(request, asyncio.get_running_loop().time(), 0, pb.REQUEST)
        cancel = Envelope(type=pb.CANCEL, correlation_id="m1", entry=b"e", attempt=1, recipient=agent.agent_id)
        host.deliver(cancel, asyncio.get_running_loop().time(), 0, pb.CANCEL)
        async with asyncio.timeout(5):
            await host.idle()
        assert not ran.is_set()
        assert not host._lanes.active
        assert (await mesh.request("next", agent_type="echo", timeout=5)).data == "next"
