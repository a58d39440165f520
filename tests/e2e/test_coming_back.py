"""A node dies and is started again: its agents are back with what they hold, and what was asked is answered or told."""

from __future__ import annotations

import asyncio
import signal

from agent_sdk import connect
from tests.support.agents import BUSY_S, agent_process, eventually, name, nothing_in_flight, outcome, usable
from tests.support.node import NodeProcess, start_node

BACK_S = 8.0  # after an outage of whatever length; after a short one it is less


async def _killed_and_restarted(node: NodeProcess) -> None:
    node.process.kill()
    await asyncio.to_thread(node.process.wait, 10)
    await node.restart()


async def test_a_request_that_ran_when_the_node_died_is_answered_and_has_run_once() -> None:
    """Not idempotent: the copy that its caller sends goes to the agent that has it, and to no replica."""
    async with start_node(resume_window_s=10) as node:
        busy, other = name("busy"), name("busy")
        with agent_process(node.grpc, busy, "--max", "1") as worker, agent_process(node.grpc, other) as idle:
            async with connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_id=busy)
                await usable(mesh, agent_id=other)
                asked = asyncio.create_task(outcome(mesh, {"n": 1, "sleep": 8}, agent_id=busy, timeout=60))

                async def started() -> bool:
                    return worker.runs() == ["1"]

                await eventually(started, "it runs")
                await _killed_and_restarted(node)

                async def back() -> bool:
                    return await node.metric("reach_agents", status="HEALTHY") == 2

                assert await eventually(back, "both are back") < BACK_S + BUSY_S
                # It still runs and has one place: what else it is asked waits for its end.
                second = asyncio.create_task(outcome(mesh, {"n": 2}, agent_id=busy, timeout=60))
                assert await asked == "OK"
                assert await second == "OK"
                assert worker.runs() == ["1", "2"] and idle.runs() == []
                assert "brought messages along" in node.log
            await nothing_in_flight(node)


async def test_what_was_asked_while_the_node_was_away_finds_the_agents_that_come_back() -> None:
    async with start_node(resume_window_s=10) as node:
        agent_id = name("away")
        with agent_process(node.grpc, agent_id) as worker:
            async with connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_id=agent_id)
                node.process.kill()
                await asyncio.to_thread(node.process.wait, 10)
                worker.process.send_signal(signal.SIGSTOP)  # it comes later than its callers
                asked = [asyncio.create_task(outcome(mesh, {"n": n}, agent_id=agent_id, timeout=60)) for n in range(20)]
                await node.restart()

                async def waiting() -> bool:
                    return await node.metric("reach_requests_in_flight") == 20

                await eventually(waiting, "they wait")
                worker.process.send_signal(signal.SIGCONT)
                assert await asyncio.gather(*asked) == ["OK"] * 20
                assert sorted(map(int, worker.runs())) == list(range(20))


async def test_what_ran_in_an_agent_that_died_with_the_node_runs_again_only_if_it_does_no_harm() -> None:
    """G8, and "never a double execution": one copy is refused as perhaps executed, the other one is completed."""
    async with start_node(resume_window_s=10) as node:
        doomed, other = name("pair"), name("pair")
        with agent_process(node.grpc, doomed) as worker:
            async with connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_id=doomed)
                asked = [
                    asyncio.create_task(
                        outcome(mesh, {"n": n, "sleep": 3}, agent_type="pair", timeout=60, idempotent=n == 2)
                    )
                    for n in (1, 2)
                ]

                async def started() -> bool:
                    return sorted(worker.runs()) == ["1", "2"]

                await eventually(started, "both run")
                node.process.kill()
                worker.process.kill()
                await asyncio.to_thread(node.process.wait, 10)
                await node.restart()
                with agent_process(node.grpc, other) as survivor:
                    assert await asyncio.gather(*asked) == ["AGENT_LOST", "OK"]
                    assert survivor.runs() == ["2"]
            await nothing_in_flight(node)
