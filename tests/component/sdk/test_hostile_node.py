"""Whatever a node says, a process of the SDK neither falls over nor logs a fault of its own; see `tools/fuzzing`."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from agent_sdk import ConnectedMesh
from agentreach.v1.frame_pb2 import Goodbye
from tests.support.fake_node import FakeNode, eventually
from tools.fuzzing.sdk_world import HostileNode, SdkDrawing, attack

PROCESSES = 12  # at a time: they mostly wait
STEPS = 60


async def test_a_goodbye_with_a_code_of_tomorrow_ends_the_stream_like_any_other(
    node: FakeNode, mesh: ConnectedMesh, caplog: pytest.LogCaptureFixture
) -> None:
    node.session.signal(goodbye=Goodbye(code=77, reason="tomorrow"))  # type: ignore[arg-type]  # not one of ours
    await eventually(lambda: node.dials == 2 and mesh._link().up)
    assert not [record for record in caplog.records if record.exc_info]


async def one(seed: int) -> list[str]:
    drawing = SdkDrawing(Random(seed), HostileNode().words)
    return [f"seed {seed}: {fault}" for fault in await attack([drawing.step() for _ in range(STEPS)])]


async def test_no_frames_of_a_hostile_node_harm_a_process_beyond_what_was_asked_of_the_node() -> None:
    faults = [fault for found in await asyncio.gather(*map(one, range(PROCESSES))) for fault in found]
    assert not faults, "\n".join(faults[:3])
