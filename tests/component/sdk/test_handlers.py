"""What handlers may be, and how each of their ends is told."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import pydantic
import pytest
from google.protobuf.struct_pb2 import Value

from agent_sdk import (
    Agent,
    AgentError,
    BlockingContext,
    ConnectedMesh,
    Context,
    NoRoute,
    Overloaded,
    PayloadTooLarge,
    ReachError,
    Rejected,
    Timeout,
    connect,
    current_trace_id,
)
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2
from agentreach.v1 import frame_pb2 as frames
from tests.support.fake_node import FakeNode, eventually


@asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[Agent]:
    async with agent:
        yield agent


def new_agent(node: FakeNode, **facts: Any) -> Agent:
    return Agent("worker", capabilities=["work"], transport=node, own_link=True, drain_timeout=1.0, **facts)


@dataclass
class Question:
    text: str
    limit: int = 3


class Order(TypedDict):
    item: str
    count: int


class Model(pydantic.BaseModel):
    name: str
    age: int = 0


async def test_a_handler_may_take_the_context(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)

    @agent.handler
    async def tell(data: Any, ctx: Context) -> list[Any]:
        assert 0 < ctx.time_left() <= 5
        return [ctx.message_id, ctx.trace_id, ctx.session_id, ctx.source, ctx.agent_id, ctx.cancelled]

    async with agent:
        reply = await mesh.request(
            1, capabilities=["work"], timeout=5, message_id="m-1", session="s-1", headers={"k": "v"}
        )
    assert reply.data == ["m-1", reply.trace_id, "s-1", "caller/fake", agent.agent_id, False]


async def test_a_def_handler_runs_in_a_thread_with_a_context_that_blocks(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)

    @agent.on("echo")
    async def echo(data: Any) -> Any:
        return data

    @agent.handler
    def compute(data: Any, ctx: BlockingContext) -> list[Any]:
        nested = ctx.request(data + 1, capabilities=["echo"])
        with ctx.stream(5, capabilities=["echo"]) as items:
            streamed = list(items)
        ctx.progress(50, "half way")
        return [nested.data, streamed, threading.current_thread() is threading.main_thread(), current_trace_id()]

    async with agent:
        reply = await mesh.request(1, agent_type="worker", timeout=5)
    assert reply.data == [2, [5], False, reply.trace_id]


async def test_the_first_capability_with_a_handler_wins_and_nothing_else_is_rejected(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = Agent("worker", transport=node, own_link=True)

    @agent.on("text-upper")
    async def upper(data: str) -> str:
        return data.upper()

    @agent.on("text-lower")
    async def lower(data: str) -> str:
        return data.lower()

    async with agent:
        assert (await mesh.request("aB", capabilities=["text-lower", "text-upper"], timeout=5)).data == "ab"
        assert (await mesh.request("aB", capabilities=["text-upper"], timeout=5)).data == "AB"
        with pytest.raises(Rejected, match="no handler"):
            await mesh.request("aB", agent_type="worker", timeout=5)


async def test_data_is_decoded_into_the_annotated_type_and_the_result_encoded(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = new_agent(node)

    @agent.on("question")
    async def question(data: Question) -> Question:
        return Question(data.text * 2, data.limit + 1)

    @agent.on("order")
    async def order(data: Order) -> dict[str, Any]:
        return {"order": data, "nested": Question("x")}

    @agent.on("model")
    async def model(data: Model) -> Model:
        return Model(name=data.name.title(), age=data.age + 1)

    async with agent:
        ask = mesh.request
        assert (await ask({"text": "a"}, capabilities=["question"], timeout=5)).data == {"text": "aa", "limit": 4}
        assert (await ask({"item": "tea", "count": 2}, capabilities=["order"], timeout=5)).data == {
            "order": {"item": "tea", "count": 2},
            "nested": {"text": "x", "limit": 3},
        }
        assert (await ask({"name": "ada"}, capabilities=["model"], timeout=5)).data == {"name": "Ada", "age": 1}
        for data, capability, words in (
            ({"limit": 1}, "question", "text: missing"),
            ({"text": "a", "limit": "b"}, "question", "limit: expected whole number"),
            ({"item": "tea"}, "order", "count: missing"),
            ({"name": "ada", "age": "old"}, "model", "age"),
            ("no object", "question", "expected object"),
        ):
            with pytest.raises(Rejected, match=words):
                await ask(data, capabilities=[capability], timeout=5)


async def test_what_a_handler_raises_reaches_the_caller_as_it_meant(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)
    raised: list[BaseException] = [
        Rejected("not for you"),
        Overloaded(retry_after=2.5),
        AgentError("no such account", retryable=True),
        AgentError("broken"),
    ]

    @agent.handler
    async def fail(number: int) -> None:
        raise raised[number]

    async with agent:
        errors = []
        for number in range(len(raised)):
            with pytest.raises(ReachError) as caught:
                await mesh.request(number, capabilities=["work"], timeout=5)
            errors.append(caught.value)
    assert [type(error) for error in errors] == [Rejected, Overloaded, AgentError, AgentError]
    assert errors[0].message == "not for you" and not errors[0].may_have_executed
    assert errors[1].retry_after == 2.5 and errors[1].retryable and not errors[1].may_have_executed
    assert errors[2].message == "no such account" and errors[2].retryable and errors[2].may_have_executed
    assert not errors[3].retryable
    assert all(error.agent_id == agent.agent_id for error in errors)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_whatever_else_happens_in_a_handler_is_one_definite_answer(
    node: FakeNode, mesh: ConnectedMesh, caplog: pytest.LogCaptureFixture
) -> None:
    node.payload_bytes_max = 2000
    agent = new_agent(node)
    secret = "secret-4711"
    ends: list[BaseException | Any] = [
        KeyError(secret),
        Unspeakable(),
        SystemExit(secret),
        ExceptionGroup("several", [ValueError(secret)]),
        asyncio.CancelledError(),
        object(),
        float("inf"),
    ]

    def end(number: int) -> Any:
        found = ends[number]
        if isinstance(found, BaseException):
            raise found
        return found

    @agent.on("async")
    async def in_loop(number: int) -> Any:
        return end(number)

    @agent.on("pool")
    def in_pool(number: int) -> Any:
        return end(number)

    @agent.on("large")
    async def large(data: Any) -> bytes:
        return b"x" * 3000

    caplog.set_level(logging.CRITICAL, "agent_sdk")
    async with connect(transport=node, own_link=True) as caller, agent:
        for capability in ("async", "pool"):
            for number, found in enumerate(ends):
                with pytest.raises(AgentError) as caught:
                    await caller.request(number, capabilities=[capability], timeout=5)
                if isinstance(found, BaseException):
                    assert caught.value.message == type(found).__name__
                assert caught.value.may_have_executed
                assert secret not in str(caught.value) + str(caught.value.details)
        with pytest.raises(PayloadTooLarge, match="limit for inline payloads is 2000"):
            await caller.request(1, capabilities=["large"], timeout=5)


async def test_an_error_of_a_nested_call_travels_up_and_tells_its_way(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)

    @agent.on("inner")
    async def inner(data: Any) -> None:
        raise Rejected("inner says no")

    @agent.on("outer")
    async def outer(data: Any, ctx: Context) -> Any:
        return (await ctx.request(1, capabilities=["inner"])).data

    @agent.on("lost")
    async def lost(data: Any, ctx: Context) -> Any:
        return (await ctx.request(1, capabilities=["nobody"])).data

    async with agent:
        with pytest.raises(Rejected, match="inner says no") as caught:
            await mesh.request(1, capabilities=["outer"], timeout=5)
        assert caught.value.may_have_executed and not caught.value.retryable
        assert caught.value.details["via"] == agent.agent_id
        assert caught.value.agent_id == agent.agent_id
        with pytest.raises(NoRoute):
            await mesh.request(1, capabilities=["lost"], timeout=5)


async def test_what_is_sent_from_a_handler_carries_its_lineage_and_its_time(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = new_agent(node)

    @agent.on("inner")
    async def inner(data: Any, ctx: Context) -> float:
        return ctx.time_left()

    @agent.on("outer")
    async def outer(data: Any, ctx: Context) -> list[Any]:
        async with connect(transport=node) as own:
            through_client = await own.request(1, capabilities=["inner"], timeout=60)
        nested = await ctx.request(1, capabilities=["inner"])
        return [through_client.data, nested.data, nested.trace_id]

    async with agent:
        reply = await mesh.request(1, capabilities=["outer"], timeout=2, message_id="parent")
    assert 1 < reply.data[0] <= 2 and 1 < reply.data[1] <= 2
    assert reply.data[2] == reply.trace_id
    nested = [e for s in node.sessions.values() for e in s.envelopes if e.parent_message_id == "parent"]
    assert nested and all(e.lineage == b"lineage of parent" and e.trace_id == reply.trace_id for e in nested)
    assert all(len(e.dedup_key) == 32 for e in nested)


async def test_nothing_starts_above_max_concurrency_before_the_old_handler_has_really_ended(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = new_agent(node, max_concurrency=1)
    release, running, most, cancels = asyncio.Event(), 0, 0, 0

    @agent.handler
    async def stubborn(data: Any) -> str:
        nonlocal running, most, cancels
        running += 1
        most = max(most, running)
        try:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    cancels += 1  # a handler that does not let itself be cancelled at first
                    if cancels > 3:
                        raise
        finally:
            running -= 1
        return "ended"

    async with agent:
        first = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=5))
        await eventually(lambda: running == 1)
        first.cancel()
        second = asyncio.create_task(mesh.request(2, capabilities=["work"], timeout=5))
        host = agent._host
        assert host is not None
        await eventually(lambda: len(host.works()) == 2)
        await asyncio.sleep(0.02)
        assert running == 1
        assert host.load(0.0).leftovers == 1
        release.set()
        assert (await second).data == "ended"
    assert most == 1


async def test_one_session_is_handled_one_at_a_time_in_order_and_sessions_side_by_side(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = new_agent(node)
    active: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    together = 0

    @agent.handler
    async def turn(number: int, ctx: Context) -> None:
        nonlocal together
        session = ctx.session_id
        active[session] = active.get(session, 0) + 1
        assert active[session] == 1
        together = max(together, sum(active.values()))
        seen.setdefault(session, []).append(number)
        await asyncio.sleep(0.001)
        active[session] -= 1

    async with agent:
        await asyncio.gather(
            *(
                mesh.request(number, capabilities=["work"], timeout=20, session=f"s{session}")
                for number in range(50)
                for session in range(5)
            )
        )
    assert seen == {f"s{n}": list(range(50)) for n in range(5)}
    assert together > 1


async def test_a_repeated_message_joins_the_run_and_later_gets_its_reply(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)
    runs, go = 0, asyncio.Event()

    @agent.handler
    async def count(data: Any) -> int:
        nonlocal runs
        runs += 1
        await go.wait()
        return runs

    async with agent:
        home = node.session_of(agent.agent_id)
        request = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=5000)
        request.payload.text = "same"
        entries = [node.deliver(home, home, agent.agent_id, request) for _ in range(3)]
        await eventually(lambda: runs == 1)
        go.set()
        await eventually(lambda: len(responses(home)) == 3)
        entries.append(node.deliver(home, home, agent.agent_id, request))
        await eventually(lambda: len(responses(home)) == 4)
    assert runs == 1
    assert {e.entry for e in responses(home)} == set(entries)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pb.Payload(content_type="text/plain", body=b"one"), pb.Payload(content_type="text/plain", body=b"two")),
        (pb.Payload(text="one"), pb.Payload(text="two")),
        (pb.Payload(json=Value(number_value=1)), pb.Payload(json=Value(number_value=2))),
    ],
    ids=["body", "text", "json"],
)
async def test_other_content_under_a_known_id_is_a_conflict(
    node: FakeNode, first: pb.Payload, second: pb.Payload
) -> None:
    agent = new_agent(node)

    @agent.handler
    async def echo(data: Any) -> Any:
        return data

    async with agent:
        home = node.session_of(agent.agent_id)
        request = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=5000, payload=first)
        node.deliver(home, home, agent.agent_id, request)
        await eventually(lambda: len(responses(home)) == 1)
        request.payload.CopyFrom(second)
        node.deliver(home, home, agent.agent_id, request)
        await eventually(lambda: len(responses(home)) == 2)
    assert responses(home)[1].error.code == error_pb2.IDEMPOTENCY_CONFLICT


def responses(session: Any) -> list[pb.Envelope]:
    return [envelope for envelope in session.envelopes if envelope.type == pb.RESPONSE]


async def test_a_cancel_withdraws_one_waiter_and_the_handler_ends_with_its_last(node: FakeNode) -> None:
    agent = new_agent(node)
    cancelled = asyncio.Event()

    @agent.handler
    async def wait(data: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with agent:
        home = node.session_of(agent.agent_id)
        request = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=5000)
        entries = [node.deliver(home, home, agent.agent_id, request) for _ in range(2)]
        for entry in entries:
            assert not cancelled.is_set()
            cancel = pb.Envelope(type=pb.CANCEL, correlation_id="m", entry=entry, attempt=1, recipient=agent.agent_id)
            home.send(cancel)
            await eventually(lambda entry=entry: any(e.entry == entry for e in responses(home)))  # type: ignore[misc]
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_request_whose_time_has_passed_is_answered_without_its_handler(node: FakeNode) -> None:
    agent = new_agent(node)
    ran = False

    @agent.handler
    async def run(data: Any) -> None:
        nonlocal ran
        ran = True

    async with agent:
        home = node.session_of(agent.agent_id)
        late = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=50, recipient=agent.agent_id, entry=b"x")
        home.raw(frames.Frame(seq=home.link._next_seq, age_ms=60, envelopes=[late]).SerializeToString())
        home.link._next_seq += 1
        await eventually(lambda: len(responses(home)) == 1)
    assert responses(home)[0].error.code == 8
    assert not ran


async def test_time_in_which_the_process_stood_still_counts_against_what_came_meanwhile(node: FakeNode) -> None:
    agent = new_agent(node)
    ran = False

    @agent.handler
    async def run(data: Any) -> None:
        nonlocal ran
        ran = True

    async with agent:
        home = node.session_of(agent.agent_id)
        late = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=300, recipient=agent.agent_id, entry=b"x")
        home.raw(frames.Frame(seq=home.link._next_seq, envelopes=[late]).SerializeToString())
        home.link._next_seq += 1
        time.sleep(0.7)  # noqa: ASYNC251  # the stall itself
        await eventually(lambda: len(responses(home)) == 1)
    assert responses(home)[0].error.code == error_pb2.TIMEOUT
    assert not ran


async def test_a_long_handler_is_told_to_the_mesh_and_a_short_one_is_not(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)

    @agent.handler
    async def sleep(seconds: float, ctx: Context) -> None:
        await asyncio.sleep(seconds)
        if seconds:
            await ctx.progress(40, "thinking")

    async with agent:
        home = node.session_of(agent.agent_id)
        await mesh.request(0, capabilities=["work"], timeout=5, message_id="short")
        await mesh.request(0.25, capabilities=["work"], timeout=5, message_id="long")
        await eventually(lambda: len(told(home)) == 2)
    first, second = told(home)
    assert (first.message_id, first.started) == ("long", True)
    assert (second.percent, second.text, second.started) == (40, "thinking", False)


def told(session: Any) -> list[frames.Progress]:
    return [s.progress for s in session.signals if s.WhichOneof("kind") == "progress"]


async def test_a_probe_is_answered_though_every_thread_of_the_pool_is_busy(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node, max_concurrency=1)
    go = threading.Event()

    @agent.handler
    def block(data: Any) -> None:
        go.wait(10)

    async with agent:
        home = node.session_of(agent.agent_id)
        call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=10))
        await eventually(lambda: agent._host is not None and agent._host.busy)
        home.signal(probe=frames.Probe(agent_id=agent.agent_id, nonce=77))
        await eventually(lambda: any(s.probe_reply.nonce == 77 and s.probe_reply.ready for s in home.signals))
        go.set()
        await call


async def test_a_call_that_comes_back_to_a_reentrant_agent_uses_the_slot_it_holds(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    agent = new_agent(node, max_concurrency=1, reentrant=True)

    @agent.handler
    async def again(depth: int, ctx: Context) -> int:
        if depth == 0:
            return 0
        return 1 + (await ctx.request(depth - 1, capabilities=["work"], session="s")).data  # type: ignore[no-any-return]

    async with agent:
        assert (await mesh.request(1, capabilities=["work"], timeout=5, session="s")).data == 1


async def test_a_handler_that_blocks_the_loop_is_named_while_it_does(
    node: FakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from agent_sdk import loopwatch

    monkeypatch.setattr(loopwatch, "BLOCKED_S", 0.1)
    monkeypatch.setattr(loopwatch, "_LOOK_EVERY_S", 0.05)
    agent = new_agent(node)

    @agent.handler
    async def greedy(data: Any) -> None:
        time.sleep(0.4)  # noqa: ASYNC251  # what must not be done

    async with agent, connect(transport=node) as mesh:
        host = agent._host
        assert host is not None
        watch = loopwatch.LoopWatch(host.works)
        try:
            with caplog.at_level(logging.WARNING, "agent_sdk"):
                await mesh.request(1, capabilities=["work"], timeout=5)
        finally:
            watch.stop()
    assert any("greedy" in record.getMessage() and "time.sleep" in record.getMessage() for record in caplog.records)


async def test_handlers_that_take_the_wrong_arguments_are_refused_when_they_are_written(node: FakeNode) -> None:
    agent = new_agent(node)
    with pytest.raises(TypeError, match="must take"):
        agent.handler(lambda: None)
    with pytest.raises(TypeError, match="must take"):
        agent.handler(lambda a, b, c: None)


@pytest.mark.parametrize("name", ["Extractor", "", "a b", "x/", "caf\u00e9", "a/b/c"])
def test_a_name_that_cannot_be_is_refused_when_the_agent_is_written(name: str) -> None:
    with pytest.raises(ValueError):
        Agent(name)


async def test_generators_of_both_kinds_make_a_list_of_their_items(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)

    @agent.on("async")
    async def counting(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    @agent.on("sync")
    def listing(n: int, ctx: BlockingContext) -> Iterator[int]:
        yield from range(n)

    async with agent:
        for capability in ("async", "sync"):
            for n in (0, 1, 200):
                assert (await mesh.request(n, capabilities=[capability], timeout=10)).data == list(range(n))


async def test_a_request_that_waited_too_long_in_the_agent_ends_by_itself(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node, max_concurrency=1)
    go = asyncio.Event()

    @agent.handler
    async def wait(data: Any) -> int:
        await go.wait()
        return int(data)

    async with agent:
        first = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=10))
        await eventually(lambda: agent._host is not None and len(agent._host.works()) == 1)
        with pytest.raises(Timeout):
            await mesh.request(2, capabilities=["work"], timeout=0.05)
        host = agent._host
        assert host is not None
        await eventually(lambda: len(host.works()) == 1)
        go.set()
        assert (await first).data == 1
