"""A node dies and is started again: its agents are back with what they hold, and what was asked is answered or told."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_sdk import Agent, connect
from tests.support.agents import BUSY_S, agent_process, eventually, make, name, nothing_in_flight, outcome, usable
from tests.support.node import NodeProcess, start_node

BACK_S = 8.0  # after an outage of whatever length; after a short one it is less
WINDOW_S = 10.0


async def dies(node: NodeProcess) -> None:
    """SIGKILL, and the end of the process."""
    node.process.kill()
    await asyncio.to_thread(node.process.wait, 10)


async def test_a_request_that_ran_when_the_node_died_is_answered_and_has_run_once(tmp_path: Path) -> None:
    """Not idempotent: the copy that its caller sends goes to the agent that has it, and to no replica."""
    other_runs = tmp_path / "runs"
    runs: list[int] = []
    may_end = asyncio.Event()
    async with start_node(resume_window_s=WINDOW_S) as node:
        busy = Agent(name("busy"), url=node.grpc, own_link=True, max_concurrency=1)
        other = make(name("busy"), node.grpc, other_runs, own_link=True)

        @busy.handler
        async def work(number: int) -> None:
            if number:
                runs.append(number)
                await may_end.wait()

        async with busy, other, connect(node.grpc, own_link=True) as mesh:
            assert await outcome(mesh, 0, agent_id=busy.agent_id, timeout=20) == "OK"

            def ask(number: int) -> asyncio.Task[str]:
                return asyncio.create_task(outcome(mesh, number, agent_id=busy.agent_id, timeout=90))

            first = ask(1)

            async def started() -> bool:
                return runs == [1]

            await eventually(started, "it runs")
            await dies(node)
            await node.restart()

            async def back() -> bool:
                return await node.metric("reach_agents", status="HEALTHY") == 2

            assert await eventually(back, "both are back") < BACK_S + BUSY_S
            assert "brought messages along" in node.log
            # It still runs and has one place: what else it is asked waits for its end, at the node.
            second = ask(2)

            async def waits() -> bool:
                return await node.metric("reach_queue_depth") == 1

            await eventually(waits, "the second one waits for the place")
            assert runs == [1]
            may_end.set()
            assert [await first, await second] == ["OK", "OK"]
            assert runs == [1, 2] and not other_runs.exists()
        await nothing_in_flight(node)


async def test_what_was_asked_of_the_former_node_finds_agents_that_come_after_its_callers(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    # The window counts from the node's start: in it lie the callers' return, a new caller's and the agents' arrival.
    async with start_node(resume_window_s=60) as node, connect(node.grpc, own_link=True) as mesh:
        agent_id = name("away")
        await dies(node)
        asked = [asyncio.create_task(outcome(mesh, {"n": n}, agent_id=agent_id, timeout=90)) for n in range(20)]
        await node.restart()

        async def asked_again() -> bool:
            return mesh._link().up

        await eventually(asked_again, "its callers are back")
        async with connect(node.grpc, own_link=True) as new:  # it knows nothing of a former node
            assert await outcome(new, "new", agent_id=agent_id, timeout=5) == "NO_ROUTE"
        async with make(agent_id, node.grpc, runs, own_link=True):
            assert await asyncio.gather(*asked) == ["OK"] * 20
            assert sorted(map(int, runs.read_text().split())) == list(range(20))


async def test_what_ran_in_an_agent_that_died_with_the_node_runs_again_only_if_it_does_no_harm(tmp_path: Path) -> None:
    """G8, and "never a double execution": one copy is refused as perhaps executed, the other one is completed."""
    runs = tmp_path / "runs"
    async with start_node(resume_window_s=4) as node, connect(node.grpc, own_link=True) as mesh:
        with agent_process(node.grpc, name("pair")) as worker:
            await usable(mesh, agent_type="pair", limit_s=60)

            def ask(number: int) -> asyncio.Task[str]:
                data = {"n": number, "sleep": 3}
                again = number == 2
                return asyncio.create_task(outcome(mesh, data, agent_type="pair", timeout=60, idempotent=again))

            asked = [ask(1), ask(2)]

            async def started() -> bool:
                return sorted(worker.runs()) == ["1", "2"]

            await eventually(started, "both run")
            worker.process.kill()
            await dies(node)
        await node.restart()
        async with make(name("pair"), node.grpc, runs, own_link=True):
            assert await asyncio.gather(*asked) == ["AGENT_LOST", "OK"]
            assert runs.read_text().split() == ["2"]
        await nothing_in_flight(node)
