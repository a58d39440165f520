"""A node whose loop stood still looks at its lease before it says anything, and replaces nobody blindly."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent_sdk import Agent
from agent_sdk.testing import InProcessMesh
from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from reach.core import nodes
from reach.core.ports import ANYBODY, MeshFailure
from reach.node import standstill

STILL_S = 0.8


class Lease:
    """A node's lease, as the test says."""

    def __init__(self, valid_until: float) -> None:
        self.valid_until = valid_until


async def told_after_a_standstill(monkeypatch: pytest.MonkeyPatch, lease_s: float) -> tuple[list[str], str]:
    """What an agent was given and the caller told of a turn that waited in an outbox while the loop stood still."""
    monkeypatch.setattr(standstill, "FROZEN_S", STILL_S / 2)
    seen: list[str] = []
    agent = Agent("chat")

    @agent.handler
    async def turn(data: str) -> str:
        seen.append(data)
        return data

    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        await mesh.request("first", agent_type="chat", timeout=5, session="s")
        node = mesh._nodes[0]
        assert node is not None
        engine = node.engine
        with engine.step() as state:
            nodes.of(state, "another").address = "somewhere:1"  # which may give the session away
            state.fence.lease = Lease(boot_time() + lease_s)
        request = Envelope(
            target=Target(agent_type="chat"), session_id="s", timeout_ms=5_000, payload=Payload(text="second")
        )
        asking = asyncio.create_task(engine.invoke(request, ANYBODY, None))
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, STILL_S)  # after the request was put into the outbox, before a frame is taken
        try:
            told = (await asking).payload.text
        except MeshFailure as failure:
            told = codes.ErrorCode.Name(failure.error.code)
        await mesh.request("other", agent_type="chat", timeout=5)  # on the same link: what was before it has arrived
    return seen, told


async def test_a_turn_that_waited_in_an_outbox_is_not_given_out_after_the_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, told = await told_after_a_standstill(monkeypatch, lease_s=1.0 + STILL_S / 2)  # of which 1 s is a margin
    assert told == "REGISTRY_UNAVAILABLE"
    assert seen == ["first", "other"]


async def test_with_a_lease_that_outlived_the_standstill_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = await told_after_a_standstill(monkeypatch, lease_s=30.0)
    assert told == "second"
    assert seen == ["first", "second", "other"]


async def test_for_a_while_after_a_long_standstill_it_is_not_known_who_has_ended() -> None:
    async with InProcessMesh() as mesh:
        node = mesh._nodes[0]
        assert node is not None
        still = node.engine.standstill
        await asyncio.sleep(0.15)  # the loop runs, for longer than a tick of the watch
        assert still.unread_s() == 0.0 and still.may_judge
        time.sleep(STILL_S)  # noqa: ASYNC251  # the standstill itself
        assert still.unread_s() == standstill.ALL_READ_S and not still.may_judge
        await asyncio.sleep(0.15)  # it runs again
        assert 0.0 < still.unread_s() < standstill.ALL_READ_S
        assert still.ms(boot_time()) < STILL_S * 1000
