"""`agent_sdk.testing`, as a user's tests see it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from agent_sdk import Agent, AgentLost, Context, HopLimit, NoRoute, connect, serve
from agent_sdk.testing import InProcessMesh
from tests.support.fake_node import eventually


def new_agent(name: str = "worker", **options: Any) -> Agent:
    agent = Agent(name, capabilities=[f"{name}-it"], **options)

    @agent.handler
    async def work(data: Any) -> Any:
        return data

    return agent


def test_it_needs_no_event_loop_and_no_plugin() -> None:
    async def main() -> Any:
        async with InProcessMesh() as mesh:
            await mesh.add(new_agent())
            return (await mesh.request({"n": 1}, capabilities=["worker-it"], timeout=5)).data

    assert asyncio.run(main()) == {"n": 1}
    assert asyncio.run(main()) == {"n": 1}


async def test_agents_call_each_other_and_the_node_is_a_real_one() -> None:
    looping = Agent("looping", capabilities=["loop"])

    @looping.handler
    async def loop(data: Any, ctx: Context) -> Any:
        return (await ctx.request(data + 1, capabilities=["loop"], dedup_key=str(data))).data

    async with InProcessMesh(max_hops=3) as mesh:
        await mesh.add(looping)
        with pytest.raises(HopLimit):
            await mesh.request(1, capabilities=["loop"], timeout=5)


async def test_answered_requests_leave_nothing_to_the_garbage_collector() -> None:
    """A cycle for each message costs an agent a fifth of its processor time."""
    async with InProcessMesh() as mesh:
        agent = await mesh.add(new_agent())
        await mesh.request(0, agent_type="worker", timeout=5)
        gc.collect()
        gc.disable()
        try:
            for number in range(200):
                await mesh.request(number, agent_type="worker", timeout=5)
            host = agent._host
            await eventually(lambda: host is not None and not host._watch.watching)  # it lets go of the last 100 ms
            await mesh.request(0, agent_type="worker", timeout=5)
            assert gc.collect() < 1000  # a cycle has nine objects; others may leave a few
        finally:
            gc.enable()


async def test_an_agent_wired_by_hand_and_one_more_caller() -> None:
    async with InProcessMesh() as mesh, new_agent(transport=mesh.transport), mesh.connect(name="other") as other:
        assert (await other.request(1, agent_type="worker", timeout=5)).data == 1
        async with connect(transport=mesh.transport) as third:
            assert (await third.request(2, agent_type="worker", timeout=5)).data == 2


async def test_a_removed_agent_has_drained_and_can_be_added_again() -> None:
    agent = new_agent()
    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        await mesh.remove(agent)
        with pytest.raises(NoRoute):
            await mesh.request(1, agent_type="worker", timeout=5)
        await mesh.add(await mesh.add(agent))
        assert (await mesh.request(2, agent_type="worker", timeout=5)).data == 2


async def test_environments_are_kept_apart() -> None:
    async with InProcessMesh(env="staging") as mesh:
        await mesh.add(new_agent("staged", env="staging"))
        await mesh.add(new_agent("produced"))
        assert (await mesh.request(1, agent_type="staged", timeout=5)).data == 1
        with pytest.raises(NoRoute):
            await mesh.request(1, agent_type="produced", timeout=5)


@pytest.mark.parametrize("both", [False, True])
async def test_a_cut_costs_nothing_that_is_under_way(both: bool) -> None:
    agent = Agent("worker")
    runs, go, running = 0, asyncio.Event(), asyncio.Event()

    @agent.handler
    async def work(data: Any) -> Any:
        nonlocal runs
        runs += 1
        running.set()
        await go.wait()
        return data

    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        call = asyncio.create_task(mesh.request(1, agent_type="worker", timeout=10))
        await asyncio.wait_for(running.wait(), 5)
        mesh.cut(None if both else agent)
        go.set()
        assert (await call).data == 1
        await mesh.back()
        assert (await mesh.request(2, agent_type="worker", timeout=10)).data == 2
    assert runs == 2


async def test_a_killed_agent_is_lost_to_its_callers_and_can_be_started_again() -> None:
    agent = Agent("worker")
    running, ended = asyncio.Event(), asyncio.Event()

    @agent.handler
    async def work(data: Any) -> Any:
        if data == "wait":
            running.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
        return data

    async with InProcessMesh(resume_window_s=0.4, settle_min_s=0.1) as mesh:
        await mesh.add(agent)
        call = asyncio.create_task(mesh.request("wait", agent_type="worker", timeout=10))
        await asyncio.wait_for(running.wait(), 5)
        await mesh.kill(agent)
        assert ended.is_set()
        with pytest.raises(AgentLost) as lost:
            await call
        assert lost.value.may_have_executed
        await mesh.add(agent)
        assert (await mesh.request(1, agent_type="worker", timeout=5)).data == 1


async def test_a_restarted_node_has_the_agents_back() -> None:
    async with InProcessMesh() as mesh:
        await mesh.add(new_agent())
        await mesh.restart_node()
        assert (await mesh.request(1, agent_type="worker", timeout=5)).data == 1


async def test_a_wrong_setting_is_told() -> None:
    with pytest.raises(Exception, match="max_hops"):
        InProcessMesh(max_hopps=3)


async def test_it_is_used_inside_its_context_only() -> None:
    mesh = InProcessMesh()
    with pytest.raises(RuntimeError, match="async with"):
        await mesh.request(1, agent_type="worker", timeout=1)


async def test_a_thousand_agents_of_one_process_are_ready_together() -> None:
    async with InProcessMesh() as mesh:
        agents = [new_agent(f"many-{n}", transport=mesh.transport) for n in range(1000)]
        serving = asyncio.create_task(serve(*agents))
        try:
            await eventually(lambda: all(a._host is not None and a._host.ready.is_set() for a in agents), 30)
            assert (await mesh.request(1, agent_type="many-999", timeout=5)).data == 1
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
