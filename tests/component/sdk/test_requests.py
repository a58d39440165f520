"""A caller's requests: answers, errors, time, cancellation, ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_sdk import (
    Agent,
    ConnectedMesh,
    ConnectFailed,
    ErrorCode,
    IdempotencyConflict,
    InvalidEnvelope,
    NoRoute,
    PayloadTooLarge,
    ShuttingDown,
    Timeout,
    Unauthenticated,
    connect,
)
from agentreach.aio.transport import Refused
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import limits
from tests.support.fake_node import FakeNode, eventually


@asynccontextmanager
async def serving(node: FakeNode, fn: Callable[..., Any], **facts: Any) -> AsyncIterator[Agent]:
    agent = Agent("worker", capabilities=["work"], transport=node, own_link=True, drain_timeout=1.0, **facts)
    agent.handler(fn)
    async with agent:
        yield agent


async def echo(data: Any) -> Any:
    return data


@pytest.mark.parametrize("data", [b"\x00bytes", "text", {"a": [1, 2.5, None, True]}, [], 7, None, ""])
async def test_every_kind_of_value_comes_back_as_it_was_sent(node: FakeNode, mesh: ConnectedMesh, data: Any) -> None:
    async with serving(node, echo) as agent:
        reply = await mesh.request(data, capabilities=["work"], timeout=5)
    assert reply.data == data and type(reply.data) is type(data)
    assert reply.source == agent.agent_id
    assert len(reply.trace_id) == 32
    assert reply.session_event is None


async def test_an_agent_is_found_by_id_and_by_type(node: FakeNode, mesh: ConnectedMesh) -> None:
    async with serving(node, echo) as agent:
        assert (await mesh.request(1, agent_id=agent.agent_id, timeout=5)).data == 1
        assert (await mesh.request(2, agent_type="worker", timeout=5)).data == 2


async def test_an_error_of_the_node_is_raised_as_its_class(mesh: ConnectedMesh) -> None:
    with pytest.raises(NoRoute, match="nothing registered") as caught:
        await mesh.request(1, capabilities=["nobody"], timeout=5)
    assert caught.value.code is ErrorCode.NO_ROUTE
    assert caught.value.trace_id
    assert not caught.value.may_have_executed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"timeout": "5"}, "timeout '5' is not a time"),
        ({"timeout": 1e9}, "at most 600"),
        ({"priority": 99}, "priority 99 is none of HIGH"),
        ({"profile": "NOPE"}, "profile 'NOPE' is none of CACHE"),
        ({"profile": 3, "timeout": None}, "profile 3 is none of CACHE"),
        ({"idempotent": "no"}, "idempotent must be True or False, got 'no'"),
        ({"strict_session": "no"}, "strict_session must be True or False"),
        ({"session": 5}, "session must be text, got 5"),
        ({"dedup_key": 5}, "dedup_key must be text, got 5"),
        ({"message_id": 5}, "message_id must have 1 to 128 characters"),
        ({"headers": {"n": 1}}, "headers must be a mapping of text to text"),
        ({"headers": ["n"]}, "headers must be a mapping of text to text"),
    ],
)
async def test_arguments_of_a_wrong_type_are_named(mesh: ConnectedMesh, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEnvelope, match=words):
        await mesh.request(1, **{"capabilities": ["ner"], "timeout": 1.0} | wrong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"capabilities": ["x"]}, "timeout"),
        ({"timeout": 1}, "to whom"),
        ({"agent_id": "a/b", "agent_type": "a", "timeout": 1}, "agent_id"),
        ({"capabilities": "x", "timeout": 1}, "list"),
        ({"capabilities": ["x"], "timeout": float("nan")}, "timeout"),
        ({"capabilities": ["x"], "timeout": -1}, "timeout"),
        ({"capabilities": ["x"], "profile": "SLOW"}, "profile"),
        ({"capabilities": ["x"], "timeout": 1, "policy": "best"}, "policy"),
        ({"capabilities": ["x"], "timeout": 1, "priority": "urgent"}, "priority"),
        ({"capabilities": ["x"], "timeout": 1, "message_id": "a\nb"}, "message_id"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_before_it_is_sent(
    node: FakeNode, mesh: ConnectedMesh, call: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidEnvelope, match=words):
        await mesh.request(1, **call)
    assert node.session.envelopes == []


async def test_data_that_no_payload_can_carry_is_refused_before_it_is_sent(mesh: ConnectedMesh) -> None:
    with pytest.raises(InvalidEnvelope, match="payload"):
        await mesh.request({"x": float("nan")}, capabilities=["work"], timeout=1)
    with pytest.raises(InvalidEnvelope, match="payload"):
        await mesh.request(object(), capabilities=["work"], timeout=1)


async def test_oversize_is_refused_before_it_is_sent_and_the_limit_itself_passes(node: FakeNode) -> None:
    node.payload_bytes_max = 1000
    async with connect(transport=node) as mesh, serving(node, echo):
        with pytest.raises(PayloadTooLarge, match="1001"):
            await mesh.request(b"x" * 1001, capabilities=["work"], timeout=5)
        assert len((await mesh.request(b"x" * 1000, capabilities=["work"], timeout=5)).data) == 1000


async def test_a_node_that_never_answers_costs_the_timeout_and_little_more(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.hold_requests = True
    before = time.monotonic()
    with pytest.raises(Timeout) as caught:
        await mesh.request(1, capabilities=["work"], timeout=0.1)
    assert 0.1 <= time.monotonic() - before < 1.5
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.may_have_executed


async def test_a_request_that_was_never_sent_says_so(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.down = True
    node.cut()
    await eventually(lambda: not mesh._owner().up)
    with pytest.raises(Timeout, match="not sent") as caught:
        await mesh.request(1, capabilities=["work"], timeout=0.1)
    assert not caught.value.may_have_executed


async def test_cancelling_the_call_cancels_the_handler(node: FakeNode, mesh: ConnectedMesh) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(data: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(node, wait):
        call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=30))
        await asyncio.wait_for(started.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(ended.wait(), 5)


async def test_equal_calls_with_one_message_id_are_sent_once(node: FakeNode, mesh: ConnectedMesh) -> None:
    runs = 0

    async def count(data: Any) -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.02)
        return runs

    async with serving(node, count):
        calls = [mesh.request(1, capabilities=["work"], timeout=5, message_id="once") for _ in range(50)]
        assert {reply.data for reply in await asyncio.gather(*calls)} == {1}
    assert runs == 1


async def test_another_content_under_a_message_id_in_flight_is_a_conflict(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.hold_requests = True
    first = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=5, message_id="m"))
    await eventually(lambda: len(node.session.envelopes) == 1)
    with pytest.raises(IdempotencyConflict):
        await mesh.request(2, capabilities=["work"], timeout=5, message_id="m")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_joined_call_with_more_time_outlives_the_first_ones_deadline(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    node.hold_requests = True
    short = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=0.05, message_id="m"))
    await eventually(lambda: len(node.session.envelopes) == 1)
    long = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=10, message_id="m"))
    await asyncio.sleep(0)
    async with serving(node, echo):
        node.hold_requests = False
        with pytest.raises(Timeout):
            await short
        assert (await long).data == 1


async def test_leaving_a_joined_call_leaves_the_others_waiting(node: FakeNode, mesh: ConnectedMesh) -> None:
    go = asyncio.Event()

    async def wait(data: Any) -> str:
        await go.wait()
        return "done"

    async with serving(node, wait):
        calls = [
            asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=5, message_id="m")) for _ in range(3)
        ]
        await eventually(lambda: len(node.sessions) == 2 and any(s.envelopes for s in node.sessions.values()))
        calls[0].cancel()
        calls[2].cancel()
        await asyncio.sleep(0.01)
        go.set()
        assert (await calls[1]).data == "done"
    assert not any(e.type == pb.CANCEL for s in node.sessions.values() for e in s.envelopes)


async def test_no_node_is_told_with_its_address_and_what_to_do(node: FakeNode) -> None:
    node.down = True
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:7070.*reach serve"):
        await connect(transport=node, timeout=0.05)


async def test_an_address_that_cannot_be_read_ends_it_at_once() -> None:
    with pytest.raises(ConnectFailed, match="HOST:PORT"):
        connect("not an address")


async def test_bad_credentials_end_it_at_once(node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    node.refuse = Refused("UNAUTHENTICATED", "UNAUTHENTICATED: unknown key", True)
    with caplog.at_level("WARNING"), pytest.raises(Unauthenticated) as refused:
        await connect(transport=node, timeout=30)
    assert node.dials == 1
    assert str(refused.value).endswith("refuses: unknown key"), "the code once, as the exception's class"
    assert "trying on" not in caplog.text and "no node reached" not in caplog.text, "neither is true"


async def test_closing_ends_what_is_pending_and_says_goodbye(node: FakeNode) -> None:
    node.hold_requests = True
    mesh = await connect(transport=node)
    session = node.session
    call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=30))
    await eventually(lambda: bool(session.envelopes))
    await mesh.close()
    with pytest.raises(ShuttingDown):
        await call
    assert session.goodbye is not None
    with pytest.raises(RuntimeError, match="closed"):
        await mesh.request(1, capabilities=["work"], timeout=1)


async def test_clients_of_one_process_share_a_link(node: FakeNode) -> None:
    async with connect(transport=node), connect(transport=node), connect(transport=node, own_link=True):
        assert len(node.sessions) == 2


async def test_ten_thousand_requests_at_once_wait_for_room_instead_of_failing(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    async with serving(node, echo):
        calls: list[Awaitable[Any]] = [mesh.request(n, capabilities=["work"], timeout=60) for n in range(10_000)]
        replies = await asyncio.gather(*calls)
    assert [reply.data for reply in replies] == list(range(10_000))


async def test_what_is_asked_at_once_goes_in_four_frames_if_each_is_worth_one(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    link = mesh._owner().link
    hold = asyncio.Event()

    async def held(data: Any) -> Any:
        await hold.wait()
        return data

    async def asked(count: int) -> list[asyncio.Task[Any]]:
        made = [asyncio.create_task(mesh.request(n, agent_type="worker", timeout=5)) for n in range(count)]
        await eventually(lambda: len(mesh._owner().calls) >= count)
        return made

    async with serving(node, held):
        few = await asked(40)
        assert link.enough == limits.FRAME_ENVELOPES_ENOUGH
        many = await asked(400)
        assert link.enough == 110, "a quarter of 440"
        hold.set()
        await asyncio.gather(*few, *many)
    assert link.enough == limits.FRAME_ENVELOPES_MAX, "what nobody waits for goes together"


async def test_an_agent_lets_go_of_what_it_has_handled_with_the_next_message(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    async with serving(node, echo) as agent:
        for n in range(5):
            await mesh.request(n, agent_type="worker", timeout=5)
        host = agent.mesh._owner().hosts[agent.agent_id]
        assert [work.message_id for work in host._watch._recent if work.ended][1:] == []
