"""`InProcessMesh(nodes=3)`: several real nodes in the test's process, as a user's tests see them."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_sdk import Agent, Mesh, NoAgentAvailable, NoRoute, connect
from agent_sdk.testing import InProcessMesh
from tests.support.fake_node import eventually

QUICK = {"resume_window_s": 10.0, "drain_timeout_s": 2.0}


class Counted:
    """An agent that counts its runs, and whose handler waits until it may go on."""

    def __init__(self, name: str = "worker") -> None:
        self.agent = Agent(name, capabilities=["work"], drain_timeout=1.0)
        self.go = asyncio.Event()
        self.ran: list[Any] = []

        self.agent.handler(self.work)

    async def work(self, data: Any) -> Any:
        self.ran.append(data)
        if data == "wait":
            await self.go.wait()
        return data


async def seen(caller: Mesh) -> None:
    """Wait until the node of a caller has heard of the agent."""

    async def ask() -> None:
        while True:
            try:
                await caller.request("seen?", capabilities=["work"], timeout=5)
                return
            except (NoRoute, NoAgentAvailable):
                await asyncio.sleep(0)

    await asyncio.wait_for(ask(), 5)


async def test_callers_of_every_node_reach_an_agent_of_any() -> None:
    worker = Counted()
    async with InProcessMesh(nodes=3, **QUICK) as mesh:
        await mesh.add(worker.agent)
        assert mesh.node_of(worker.agent) == 0
        assert (await mesh.request(1, capabilities=["work"], timeout=5)).data == 1
        await mesh.kill_node(0)
        assert (await mesh.request(2, capabilities=["work"], timeout=10)).data == 2
        assert mesh.node_of(worker.agent) in (1, 2)
    assert worker.ran == [1, 2]


async def test_what_runs_when_its_node_is_killed_is_answered_and_runs_once() -> None:
    worker = Counted()
    async with InProcessMesh(nodes=2, **QUICK) as mesh, mesh.connect() as other:
        await mesh.add(worker.agent)
        calls = [asyncio.create_task(each.request("wait", capabilities=["work"], timeout=20)) for each in (mesh, other)]
        await eventually(lambda: len(worker.ran) == 2)
        await mesh.kill_node(0)
        worker.go.set()
        assert [reply.data for reply in await asyncio.gather(*calls)] == ["wait"] * 2
    assert len(worker.ran) == 2


async def test_a_drained_node_hands_everybody_on_and_can_come_back() -> None:
    worker = Counted()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        await mesh.add(worker.agent)
        running = asyncio.create_task(mesh.request("wait", capabilities=["work"], timeout=20))
        await eventually(lambda: len(worker.ran) == 1)
        draining = asyncio.create_task(mesh.drain_node(0))
        worker.go.set()
        assert (await running).data == "wait"
        await draining
        assert (await mesh.request(2, capabilities=["work"], timeout=10)).data == 2
        assert mesh.node_of(worker.agent) == 1
        await mesh.restart_node(0)
        await mesh.kill_node(1)
        assert (await mesh.request(3, capabilities=["work"], timeout=10)).data == 3
        assert mesh.node_of(worker.agent) == 0
    assert worker.ran == ["wait", 2, 3]


async def test_a_node_that_is_cut_off_from_the_others_still_serves_its_own_and_is_whole_again_after() -> None:
    worker = Counted()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        await mesh.add(worker.agent)
        mesh.part(0)
        assert (await mesh.request(1, capabilities=["work"], timeout=5)).data == 1
        mesh.heal()
        await mesh.kill_node(0)
        assert (await mesh.request(2, capabilities=["work"], timeout=10)).data == 2
    assert worker.ran == [1, 2]


async def test_the_only_agent_of_its_kind_is_never_missed_while_its_node_leaves() -> None:
    """It is registered at the next node before it leaves this one, and this one gives it work until then."""
    worker = Counted()
    async with InProcessMesh(nodes=2, resume_window_s=10.0, drain_timeout_s=5.0) as mesh:
        await mesh.add(worker.agent)
        async with connect("in-process:2", transport=mesh.transport, own_link=True) as other:
            assert other._link().node_id == "node-1"
            await seen(other)
            leaving = asyncio.create_task(mesh.drain_node(0))
            worker.ran.clear()
            asked = 0
            while not leaving.done():
                asked += 1
                assert (await other.request(asked, capabilities=["work"], timeout=5)).data == asked
                await asyncio.sleep(0.001)
            await leaving
            assert mesh.node_of(worker.agent) == 1
    assert worker.ran == list(range(1, asked + 1)) and asked > 1  # how many, the machine says


async def test_a_long_request_holds_up_no_new_ones_while_its_node_leaves_and_is_answered_all_the_same() -> None:
    worker = Counted()
    async with InProcessMesh(nodes=2, resume_window_s=10.0, drain_timeout_s=30.0) as mesh:
        agent = Agent("worker", url="in-process:2", capabilities=["work"], transport=mesh.transport, own_link=True)
        agent.handler(worker.work)
        async with agent:
            await seen(mesh)
            worker.ran.clear()
            long = asyncio.create_task(mesh.request("wait", capabilities=["work"], timeout=30))
            await eventually(lambda: worker.ran == ["wait"])
            leaving = asyncio.create_task(mesh.drain_node(0))
            assert (await mesh.request("new", capabilities=["work"], timeout=10)).data == "new"
            assert mesh._link().node_id == "node-1" and not long.done()
            worker.go.set()
            assert (await long).data == "wait"
            await leaving
    assert worker.ran == ["wait", "new"]
