"""A node whose loop stood still counts that time against what arrived meanwhile: nobody's clock saw it pass."""

from __future__ import annotations

import asyncio
import time

from agent_sdk import Agent
from agent_sdk.testing import InProcessMesh
from agentreach.aio.transport import Stream
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Frame, Hello, Signal

LIMIT_S = 5.0


async def _answer(stream: Stream, message_id: str) -> pb.Envelope:
    async with asyncio.timeout(LIMIT_S):
        while True:
            data = await stream.read()
            assert data is not None
            for envelope in Frame.FromString(data).envelopes:
                if envelope.correlation_id == message_id and not envelope.more:
                    return envelope


async def test_a_request_that_lost_its_time_while_the_node_stood_still_is_not_handed_over() -> None:
    agent = Agent("worker")
    seen: list[str] = []

    @agent.handler
    async def work(data: str) -> str:
        seen.append(data)
        return data

    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        stream = await mesh.new_transport().open("in-process:1", ())
        await stream.write(Frame(signals=[Signal(hello=Hello(protocol_version=1))]).SerializeToString())

        async def ask(number: int, timeout_ms: int, stall_s: float) -> pb.Envelope:
            target = pb.Target(agent_type="worker")
            request = pb.Envelope(message_id=f"m{number}", target=target, timeout_ms=timeout_ms)
            request.payload.text = request.message_id
            frame = Frame(seq=number, envelopes=[request]).SerializeToString()
            time.sleep(stall_s)  # noqa: ASYNC251  # the stall itself
            await stream.write(frame)
            return await _answer(stream, request.message_id)

        late = await ask(1, timeout_ms=400, stall_s=0.8)
        assert late.error.code == codes.TIMEOUT and not late.error.may_have_executed
        assert "before the request was taken in" in late.error.message  # the worker's own loop stood still too
        assert not (await ask(2, timeout_ms=5_000, stall_s=0.8)).HasField("error")
        assert seen == ["m2"]
        await stream.close()
