"""Submitting: an acceptance at once, the outcome as an event, over a real node in this process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from agent_sdk import (
    Acceptance,
    Agent,
    Cancelled,
    Context,
    Event,
    IdempotencyConflict,
    InvalidEnvelope,
    NoRoute,
    Rejected,
    Subscription,
    Timeout,
    sync,
)
from agent_sdk.testing import InProcessMesh

TOPIC = "results"
LIMIT_S = 10.0


def worker(name: str = "worker") -> Agent:
    """Does as it is told."""
    agent = Agent(name, drain_timeout=1.0)

    @agent.handler
    async def work(data: Any, ctx: Context) -> Any:
        if data == "refuse":
            raise Rejected("no")
        if data == "hang":
            await asyncio.Event().wait()
        return {"did": data}

    @agent.on("count")
    async def count(n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    return agent


async def next_event(events: Subscription) -> Event:
    """The next one, or a failed test."""
    async with asyncio.timeout(LIMIT_S):
        return await anext(events)


async def test_the_outcome_of_a_submitted_request_is_an_event_of_its_topic() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        accepted = await mesh.submit({"n": 1}, agent_type="worker", reply_topic=TOPIC, timeout=5)
        assert isinstance(accepted, Acceptance) and accepted.reply_topic == TOPIC
        event = await next_event(events)
        assert event.data == {"did": {"n": 1}} and event.error is None
        assert (event.correlation_id, event.trace_id) == (accepted.message_id, accepted.trace_id)
        assert event.source.startswith("worker/") and event.topic == TOPIC


async def test_a_failure_is_an_event_with_its_error() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        accepted = await mesh.submit("refuse", agent_type="worker", reply_topic=TOPIC, timeout=5)
        event = await next_event(events)
        assert isinstance(event.error, Rejected) and event.data is None
        assert event.correlation_id == accepted.message_id and event.error.trace_id == accepted.trace_id


async def test_what_is_refused_at_once_is_raised() -> None:
    async with InProcessMesh() as mesh:
        with pytest.raises(NoRoute):
            await mesh.submit(1, agent_type="nobody", reply_topic=TOPIC, timeout=5)
        with pytest.raises(InvalidEnvelope, match="reply_topic"):
            await mesh.submit(1, agent_type="nobody", reply_topic="/bad", timeout=5)
        with pytest.raises(InvalidEnvelope, match="how long"):
            await mesh.submit(1, agent_type="nobody", reply_topic=TOPIC)


async def test_its_submitter_may_go() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        agent, go = Agent("slow", drain_timeout=1.0), asyncio.Event()

        @agent.handler
        async def slow(data: int) -> int:
            await go.wait()
            return data

        await mesh.add(agent)
        async with mesh.connect() as other:
            await other.submit(7, agent_type="slow", reply_topic=TOPIC, timeout=30)
        go.set()
        assert await next_event(events) == 7


async def test_a_streamed_reply_is_one_event_with_the_list() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        await mesh.submit(200, capabilities=["count"], reply_topic=TOPIC, timeout=5)
        assert await next_event(events) == list(range(200))


async def test_the_timeout_holds_and_a_cancel_reaches_the_handler() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        await mesh.submit("hang", agent_type="worker", reply_topic=TOPIC, timeout=0.1)
        assert isinstance((await next_event(events)).error, Timeout)
        accepted = await mesh.submit("hang", agent_type="worker", reply_topic=TOPIC, timeout=60)
        await mesh.cancel(accepted.message_id)
        event = await next_event(events)
        assert isinstance(event.error, Cancelled) and event.correlation_id == accepted.message_id


async def test_submitting_twice_is_one_run_and_one_event() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        ids = {
            (await mesh.submit(1, agent_type="worker", reply_topic=TOPIC, timeout=5, message_id="job-1")).message_id
            for _ in range(3)
        }
        assert ids == {"job-1"} and (await next_event(events)).correlation_id == "job-1"
        await mesh.submit(2, agent_type="worker", reply_topic=TOPIC, timeout=5, message_id="job-2")
        assert (await next_event(events)).correlation_id == "job-2", "job-1 was published again"
        reply = await mesh.request(1, agent_type="worker", timeout=5, message_id="job-1")
        assert reply.data == {"did": 1}
        with pytest.raises(IdempotencyConflict):
            await mesh.submit(3, agent_type="worker", reply_topic=TOPIC, timeout=5, message_id="job-2")


async def test_an_agent_handles_the_outcomes_of_what_its_handler_submitted() -> None:
    async with InProcessMesh() as mesh:
        planner, seen = Agent("planner", drain_timeout=1.0), asyncio.Queue[tuple[Any, ...]]()

        @planner.handler
        async def plan(data: str, ctx: Context) -> str:
            accepted = await ctx.submit(data, agent_type="worker", reply_topic=TOPIC, timeout=30)
            return accepted.message_id

        @planner.on_event(TOPIC)
        async def done(data: Any, ctx: Context) -> None:
            seen.put_nowait((data, ctx.error, ctx.correlation_id, ctx.trace_id))

        await mesh.add(planner)
        await mesh.add(worker())
        for text, result, error in (("fine", {"did": "fine"}, None), ("refuse", None, Rejected)):
            reply = await mesh.request(text, agent_type="planner", timeout=1)
            data, failed, correlation_id, trace_id = await asyncio.wait_for(seen.get(), LIMIT_S)
            assert (data, correlation_id, trace_id) == (result, reply.data, reply.trace_id)
            assert failed is None if error is None else isinstance(failed, error)


async def test_a_def_handler_submits_too(caplog: pytest.LogCaptureFixture) -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        planner = Agent("planner", drain_timeout=1.0)

        @planner.handler
        def plan(data: str, ctx: Any) -> str:
            return str(ctx.submit(data, agent_type="worker", reply_topic=TOPIC, timeout=30).message_id)

        @planner.on_event(TOPIC)
        def done(data: Any) -> None:
            raise AssertionError("it was given a failure that it cannot see")

        await mesh.add(planner)
        await mesh.add(worker())
        message_id = (await mesh.request("refuse", agent_type="planner", timeout=5)).data
        assert (await next_event(events)).correlation_id == message_id
        assert f"request {message_id} failed" in caplog.text


async def test_a_hundred_races_of_cancel_and_answer_have_one_terminal_event_each() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        agent, rng = Agent("racer", drain_timeout=1.0), random.Random(7)

        @agent.handler
        async def race(turns: int) -> int:
            for _ in range(turns):
                await asyncio.sleep(0)
            return turns

        await mesh.add(agent)
        ended: Counter[str] = Counter()
        for _ in range(100):
            turns = rng.randrange(8)
            accepted = await mesh.submit(turns, agent_type="racer", reply_topic=TOPIC, timeout=20)
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            await mesh.cancel(accepted.message_id)
            event = await next_event(events)
            assert event.correlation_id == accepted.message_id, "an event too many of the one before"
            ended["done" if event.error is None else event.error.code] += 1
        assert set(ended) == {"done", "CANCELLED"}, f"no race at all: {ended}"
        assert not events._inbox or not events._inbox.events


async def test_the_outcome_tells_what_happened_to_the_session() -> None:
    async with InProcessMesh() as mesh, mesh.subscribe(TOPIC) as events:
        await mesh.add(worker())
        for event in ("STARTED", None):
            await mesh.submit(1, agent_type="worker", reply_topic=TOPIC, timeout=5, session="s")
            assert (await next_event(events)).session_event == event


def test_without_async_it_is_the_same() -> None:
    loop = sync._loop()
    node = InProcessMesh()

    def on_the_loop(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)

    on_the_loop(node.__aenter__())
    try:
        on_the_loop(node.add(worker()))
        with sync.connect(transport=node.new_transport(), own_link=True) as mesh, mesh.subscribe(TOPIC) as events:
            accepted = mesh.submit(1, agent_type="worker", reply_topic=TOPIC, timeout=5)
            event = next(events)
            assert event.correlation_id == accepted.message_id and event.data == {"did": 1}
            accepted = mesh.submit("hang", agent_type="worker", reply_topic=TOPIC, timeout=60)
            mesh.cancel(accepted.message_id)
            assert isinstance(next(events).error, Cancelled)
    finally:
        on_the_loop(node.__aexit__(None, None, None))
