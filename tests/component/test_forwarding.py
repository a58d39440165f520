"""The way to the leader: an answer is taken by who asked, in the life in which it asked, and by nobody after a cut."""

from __future__ import annotations

import asyncio

import pytest

from agentreach.v1.frame_pb2 import Forward, Forwarded
from reach.core import nodes
from reach.core.nodes import NodePeer
from reach.core.store import StoreUnavailable
from reach.node.forwarding import Forwarding
from tests.support.core import CoreMesh

LIMIT_S = 5.0


async def _nobody(forward: Forward, node_id: str) -> Forwarded:
    raise AssertionError("nobody asks this node")


class Asker:
    """One life of a node that another one leads."""

    def __init__(self) -> None:
        core = CoreMesh(node_id="n1")
        self.leader: NodePeer = nodes.of(core.state, "n0")
        self.leader.connected = True
        self.way = Forwarding(core.step, lambda: "n0", _nobody)

    async def ask(self) -> tuple[Forward, asyncio.Task[Forwarded]]:
        forward = Forward()
        asking = asyncio.create_task(self.way.forward(forward))
        await asyncio.sleep(0)
        assert self.leader.link.signals_waiting
        return forward, asking


async def test_an_answer_to_a_former_life_is_nobodys() -> None:
    former, present = Asker(), Asker()
    asked, given_up = await former.ask()
    forward, asking = await present.ask()
    present.way.answered(present.leader, Forwarded(nonce=asked.nonce, version=1))
    present.way.answered(present.leader, Forwarded(nonce=forward.nonce, version=2))
    async with asyncio.timeout(LIMIT_S):
        assert (await asking).version == 2
    given_up.cancel()
    await asyncio.wait([given_up])


async def test_only_the_node_that_was_asked_answers_and_a_cut_ends_the_waiting() -> None:
    asker = Asker()
    forward, asking = await asker.ask()
    other = nodes.of(CoreMesh(node_id="n1").state, "n2")
    asker.way.answered(other, Forwarded(nonce=forward.nonce))
    asker.way.cut(other)
    await asyncio.sleep(0)
    assert not asking.done()
    asker.way.cut(asker.leader)
    with pytest.raises(StoreUnavailable, match="was cut"):
        async with asyncio.timeout(LIMIT_S):
            await asking
