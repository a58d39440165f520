"""Deadlines, late answers, retries and waiting between real processes (the rest of groups C, D, F, K, L)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from agent_sdk import Agent, AgentError, AgentLost, Context, ReachError, Timeout, connect
from tests.support.agents import BUSY_S, agent_process, eventually, make, name, nothing_in_flight, outcome, usable
from tests.support.node import NodeProcess, start_node
from tools.faultproxy import FaultProxy

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node


def unique(agent_type: str) -> str:
    """An agent type that no other test uses."""
    return f"{agent_type}{secrets.token_hex(3)}"


class TestDeadlines:
    """C5: what is left of the time travels along."""

    async def test_a_chain_of_three_has_the_time_of_its_first_caller(self, node: NodeProcess) -> None:
        kinds = [unique(f"chain{number}") for number in range(3)]
        seen: dict[str, float] = {}
        ended: list[str] = []
        async with contextlib.AsyncExitStack() as agents, connect(node.grpc, own_link=True) as mesh:
            for number, kind in enumerate(kinds):
                agent = Agent(f"{kind}/1", url=node.grpc, own_link=True, drain_timeout=0.2)

                @agent.handler
                async def pass_on(data: Any, ctx: Context, kind: str = kind, number: int = number) -> Any:
                    if data == "usable?":
                        return data
                    seen[kind] = ctx.time_left()
                    try:
                        if number == 1:
                            await asyncio.sleep(1.5)
                        if number < 2:
                            return (await ctx.request(data, agent_type=kinds[number + 1])).data
                        await asyncio.sleep(60)
                    finally:
                        ended.append(kind)

                await agents.enter_async_context(agent)
                await usable(mesh, agent_type=kind)
            began = time.monotonic()
            with pytest.raises(Timeout):
                await mesh.request("go", agent_type=kinds[0], timeout=2)
            assert 1.9 < time.monotonic() - began < 2 + BUSY_S
            assert seen[kinds[0]] <= 2 and seen[kinds[2]] <= 0.5

            async def all_ended() -> bool:
                return set(ended) == set(kinds)

            await eventually(all_ended, "nobody works on for a caller that has gone")

    async def test_a_message_whose_time_passed_behind_others_is_never_started(self, node: NodeProcess) -> None:
        with agent_process(node.grpc, name("behind"), "--max", "1") as worker:
            kind = worker.agent_id.partition("/")[0]
            async with connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_type=kind)
                first = asyncio.create_task(
                    mesh.request({"n": 1, "sleep": 3}, agent_type=kind, session="one", timeout=20)
                )

                async def begun() -> bool:
                    return worker.runs() == ["1"]

                await eventually(begun, "the first has begun")
                began = time.monotonic()
                with pytest.raises(Timeout) as caught:
                    await mesh.request({"n": 2}, agent_type=kind, session="one", timeout=1)
                assert 0.9 < time.monotonic() - began < 1 + BUSY_S
                assert not caught.value.may_have_executed and "queued" in str(caught.value)
                assert (await first).data == 1
                assert worker.runs() == ["1"]


class TestLateAnswers:
    """F5, F6: the first end is the only one, whatever comes later."""

    async def test_a_hundred_cancels_that_race_with_their_answers_end_once_each(self, node: NodeProcess) -> None:
        rng = random.Random(5)
        async with make(name("racing"), node.grpc, own_link=True) as agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            ended: Counter[str] = Counter()

            async def race(number: int) -> None:
                data = {"n": number, "sleep": 0.02}
                asked = asyncio.create_task(mesh.request(data, agent_id=agent.agent_id, timeout=10))
                await asyncio.wait([asked], timeout=0.015 + rng.random() * 0.02)
                asked.cancel()
                try:
                    assert (await asked).data == number
                    ended["answered"] += 1
                except asyncio.CancelledError:
                    if not asked.cancelled():
                        raise
                    ended["cancelled"] += 1

            for _ in range(10):
                await asyncio.gather(*(race(number) for number in range(10)))
            assert ended.total() == 100
            await usable(mesh, agent_id=agent.agent_id)
        await nothing_in_flight(node)

    async def test_of_two_attempts_that_both_finish_the_first_result_stands(self, node: NodeProcess) -> None:
        """The way to the first replica goes deaf in mid-work; what it says when it is back is too late."""
        kind = unique("twice")
        late = await node.metric("reach_duplicates_total", kind="late")
        async with FaultProxy(node.grpc) as proxy, connect(node.grpc, own_link=True) as mesh:
            first = Agent(f"{kind}/first", url=proxy.address, own_link=True, drain_timeout=1)
            go = asyncio.Event()
            runs: list[str] = []

            @first.handler
            async def wait(data: str) -> str:
                if data == "usable?":
                    return data
                runs.append("first")
                await go.wait()
                return "first"

            second = Agent(f"{kind}/second", url=node.grpc, own_link=True, drain_timeout=1)

            @second.handler
            async def answer(data: str) -> str:
                if data == "usable?":
                    return data
                runs.append("second")
                return "second"

            async with first:
                await usable(mesh, agent_id=first.agent_id)
                how = {"agent_type": kind, "timeout": 20, "idempotent": True, "message_id": f"of {kind}"}
                asked = asyncio.create_task(mesh.request("go", **how))

                async def begun() -> bool:
                    return runs == ["first"]

                await eventually(begun, "the first has begun")
                async with second:
                    await usable(mesh, agent_id=second.agent_id)
                    proxy.blackhole()
                    reply = await asked
                    assert reply.data == "second" and runs == ["first", "second"]
                    proxy.heal()
                    go.set()

                    async def told() -> bool:
                        return await node.metric("reach_duplicates_total", kind="late") > late

                    await usable(mesh, limit_s=25, agent_id=first.agent_id)
                    await eventually(told, "the late answer is counted")
                    again = await mesh.request("go", **how)
                    assert again.data == "second" and runs == ["first", "second"]

    async def test_work_far_longer_than_every_interval_runs_once(self, node: NodeProcess) -> None:
        """Six times the heartbeat, longer than three of them, the lease, the resume window and the time to accept."""
        with agent_process(node.grpc, name("long")) as worker:
            async with connect(node.grpc, own_link=True) as mesh:
                kind = worker.agent_id.partition("/")[0]
                await usable(mesh, agent_type=kind)
                data = {"n": 1, "sleep": 4}
                assert (await mesh.request(data, agent_type=kind, timeout=20, idempotent=True)).data == 1
                assert worker.runs() == ["1"]


class TestRetries:
    """K5: only what may run twice, and never many times as much."""

    async def test_a_side_effect_whose_handler_dies_is_done_once_and_told_as_unknown(self, node: NodeProcess) -> None:
        kind = unique("dying")
        with agent_process(node.grpc, f"{kind}/1") as one, agent_process(node.grpc, f"{kind}/2") as other:
            async with connect(node.grpc, own_link=True) as mesh:
                for number in (1, 2):
                    await usable(mesh, agent_id=f"{kind}/{number}")
                with pytest.raises(AgentLost) as caught:
                    await mesh.request({"n": 1, "die": True}, agent_type=kind, timeout=10)
                assert caught.value.may_have_executed and not caught.value.retryable
                assert one.runs() + other.runs() == ["1"]

    async def test_when_every_agent_fails_the_retries_are_few(self) -> None:
        """400 requests in four seconds, of which every one may be retried."""
        async with start_node() as node, contextlib.AsyncExitStack() as agents:
            mesh = await agents.enter_async_context(connect(node.grpc, own_link=True))
            kind, runs = unique("failing"), 0
            for number in range(3):
                agent = Agent(f"{kind}/{number}", url=node.grpc, own_link=True, drain_timeout=1)

                @agent.handler
                async def fail(data: Any) -> Any:
                    nonlocal runs
                    if data == "usable?":
                        return data
                    runs += 1
                    raise AgentError("out of order", retryable=True)

                await agents.enter_async_context(agent)
                await usable(mesh, agent_id=agent.agent_id)
            asked = []
            for number in range(400):
                how = {"agent_type": kind, "timeout": 10, "idempotent": True}
                asked.append(asyncio.create_task(outcome(mesh, number, **how)))
                await asyncio.sleep(0.01)  # 100 requests a second
            found = Counter(await asyncio.gather(*asked))
            assert runs <= 1.2 * 400 + 10, (runs, found)  # 10: one a second are always allowed
            assert "OK" not in found

    async def test_cancelling_a_handler_that_tries_again_and_again_counts_as_no_failure(
        self, node: NodeProcess
    ) -> None:
        """C7: neither the breaker nor the retries know of it."""
        agent = Agent(name("trying"), url=node.grpc, own_link=True, drain_timeout=1)
        tries = 0

        @agent.handler
        async def work(data: object, ctx: Context) -> object:
            nonlocal tries
            while data != "usable?":
                with contextlib.suppress(ReachError):
                    await ctx.request("x", agent_type="nobody")
                tries += 1
                await asyncio.sleep(0.1)
            return data

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            retries = await node.metric("reach_retries_total")
            for number in range(8):  # more than the failures in a row that open a breaker
                call = asyncio.create_task(mesh.request("go", agent_id=agent.agent_id, timeout=30))

                async def trying(number: int = number) -> bool:
                    return tries > number

                await eventually(trying, "it tries")
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                await nothing_in_flight(node)
            assert await node.metric("reach_breaker_state", agent_id=agent.agent_id) == 0
            assert await node.metric("reach_retries_total") == retries
            await usable(mesh, agent_id=agent.agent_id, limit_s=2 + BUSY_S)


class TestWaiting:
    """L4: whoever waits gets his turn."""

    async def test_messages_of_low_priority_have_their_turn_under_a_steady_load_of_high_ones(
        self, node: NodeProcess
    ) -> None:
        agent = Agent(name("busy"), url=node.grpc, own_link=True, max_concurrency=2, drain_timeout=1)
        kind = agent.agent_id.partition("/")[0]

        @agent.handler
        async def work(data: Any) -> Any:
            await asyncio.sleep(0.02)
            return data

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_type=kind)
            over = asyncio.Event()
            high: Counter[str] = Counter()

            async def keep_asking() -> None:
                while not over.is_set():
                    high[await outcome(mesh, "high", agent_type=kind, timeout=10, priority="HIGH")] += 1

            load = [asyncio.create_task(keep_asking()) for _ in range(30)]

            async def saturated() -> bool:
                return await node.metric("reach_queue_depth") >= 10

            await eventually(saturated, "the high ones wait in a queue")
            low = [mesh.request(number, agent_type=kind, timeout=8, priority="LOW") for number in range(10)]
            assert [reply.data for reply in await asyncio.gather(*low)] == list(range(10))
            over.set()
            await asyncio.gather(*load)
            assert high.keys() == {"OK"} and high["OK"] > 30


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_five_hundred_links_come_back_spread_over_time() -> None:
    """K1: half a minute without a node; then no second brings a quarter of them, and in a minute all are there."""
    count = 500
    async with start_node(heartbeat_interval_s=10, lease_ttl_s=30) as node, contextlib.AsyncExitStack() as links:
        for begin in range(0, count, 50):
            await asyncio.gather(
                *(
                    links.enter_async_context(make(f"fleet/{number}", node.grpc, own_link=True))
                    for number in range(begin, begin + 50)
                )
            )

        async def there(wanted: int) -> bool:
            return await node.metric("reach_agents") >= wanted

        async def all_there() -> bool:
            return await there(count)

        await eventually(all_there, "all are there", limit_s=60)
        await node.end(signal.SIGKILL)
        await asyncio.sleep(30)  # the outage itself
        await node.restart()
        began, seconds = time.monotonic(), []
        while not await all_there():
            assert time.monotonic() - began < 60
            seconds.append(await node.metric("reach_agents"))
            await asyncio.sleep(1)  # what is counted is what one second brings
        arrived = [later - earlier for earlier, later in pairwise(seconds)]
        assert max(arrived, default=0) < count / 4, arrived
