"""What a cut, a restart, or an end of the node costs: nothing lost, nothing twice, and never a silent wait."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from agent_sdk import Agent, AgentReplaced, ConnectedMesh, Context, PermissionDenied, Unauthenticated, connect
from agent_sdk.identity import incarnation
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2, registry_pb2
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire.errors import failure
from tests.support.fake_node import FakeNode, eventually


def new_agent(node: FakeNode) -> Agent:
    return Agent("worker", capabilities=["work"], transport=node, own_link=True, drain_timeout=1.0)


async def test_requests_survive_cuts_in_their_midst_and_run_once(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)
    ran: list[int] = []

    @agent.handler
    async def work(number: int) -> int:
        ran.append(number)
        await asyncio.sleep(0.001 * (number % 7))
        return number

    async with agent:
        calls = [asyncio.create_task(mesh.request(n, capabilities=["work"], timeout=30)) for n in range(300)]
        for _ in range(4):
            await asyncio.sleep(0.02)
            node.cut()
        assert [reply.data for reply in await asyncio.gather(*calls)] == list(range(300))
    assert sorted(ran) == list(range(300))


async def test_a_node_that_forgot_the_link_gets_pending_requests_again_in_order_and_not_as_fresh(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    node.hold_requests = True
    calls = [
        asyncio.create_task(mesh.request(n, capabilities=["work"], timeout=20, session="s", message_id=f"m{n}"))
        for n in range(3)
    ]
    fresh = asyncio.create_task(mesh.request(3, capabilities=["work"], timeout=20, session="s"))
    first = node.session
    await eventually(lambda: len(first.envelopes) == 4)
    assert [e.fresh for e in first.envelopes] == [False, False, False, True]
    node.forget()
    await eventually(lambda: len(node.sessions) == 1 and len(node.session.envelopes) == 4)
    again = node.session.envelopes
    assert [e.message_id for e in again] == [e.message_id for e in first.envelopes]
    assert not any(e.fresh for e in again) and all(e.resent for e in again)
    assert not any(e.resent for e in first.envelopes)
    assert all(0 < e.timeout_ms < 20_000 for e in again)
    anew = asyncio.create_task(mesh.request(4, capabilities=["work"], timeout=20, session="s"))
    await eventually(lambda: len(node.session.envelopes) == 5)
    assert node.session.envelopes[-1].fresh and node.session.envelopes[-1].resent, "its agent may not be back either"
    anew.cancel()
    for call in (*calls, fresh):
        call.cancel()
    await asyncio.gather(*calls, fresh, return_exceptions=True)


async def test_a_call_with_less_time_left_than_a_node_takes_is_not_sent_again(
    node: FakeNode, mesh: ConnectedMesh
) -> None:
    """A node would call it INVALID_ENVELOPE, which it never was; its own time ends it in a moment."""
    node.hold_requests = True
    asked = asyncio.create_task(mesh.request("x", capabilities=["work"], timeout=20, message_id="m"))
    await eventually(lambda: len(node.session.envelopes) == 1)
    calls = mesh._calls()
    call = calls.find("m")
    assert call is not None
    sent = call.item
    calls._send_again(call, call.deadline - 0.009)
    assert call.item is sent
    calls._send_again(call, call.deadline - 0.011)
    assert call.item is not sent
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_an_agent_attaches_anew_with_what_it_holds_after_the_node_forgot_it(node: FakeNode) -> None:
    agent = new_agent(node)
    go = asyncio.Event()

    @agent.on_event("news")
    async def on_news(data: Any) -> None: ...

    @agent.handler
    async def work(data: Any) -> int:
        await go.wait()
        return 1

    async with agent:
        request = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=9000, session_id="s", epoch=7)
        node.deliver(node.session, node.session, agent.agent_id, request)
        await eventually(lambda: agent._host is not None and agent._host.busy)
        node.forget()
        await eventually(lambda: len(node.sessions) == 1 and agent.agent_id in node.session.agents)
        attach = node.session.agents[agent.agent_id]
        assert [(h.key.message_id, h.session_id, h.state) for h in attach.holding] == [
            ("m", "s", frames.Holding.RUNNING)
        ]
        assert [(s.session_id, s.epoch) for s in attach.sessions] == [("s", 7)]
        assert attach.record.incarnation == incarnation()
        await eventually(lambda: (agent.agent_id, "production", "news") in node.session.topics)
        go.set()
        await eventually(lambda: any(e.type == pb.RESPONSE for e in node.session.envelopes))


async def test_a_heartbeat_tells_the_load_and_an_unknown_agent_is_attached_again(node: FakeNode) -> None:
    node.heartbeat_interval_ms = 20
    agent = new_agent(node)
    agent.handler(lambda data: data)
    async with agent:
        session = node.session
        await eventually(lambda: any(s.heartbeat.agents for s in session.signals))
        load = next(s.heartbeat for s in session.signals if s.heartbeat.agents).agents[0]
        assert (load.agent_id, load.status, load.in_flight) == (agent.agent_id, registry_pb2.HEALTHY, 0)
        session.agents.clear()
        node.unknown = [agent.agent_id]
        await eventually(lambda: agent.agent_id in session.agents)


async def test_an_agent_that_was_replaced_does_not_come_back(node: FakeNode) -> None:
    agent = new_agent(node)
    agent.handler(lambda data: data)
    serving = asyncio.create_task(agent.serve())
    await eventually(lambda: len(node.sessions) == 1 and bool(node.session.agents))
    session = node.session

    def detached(who: bytes) -> None:
        end = frames.Detached(
            agent_id=agent.agent_id, code=frames.Goodbye.REPLACED, reason="host-b registered as it", incarnation=who
        )
        session.signal(detached=end)

    detached(incarnation())  # ourselves, by a newer stream: no reason to end
    await asyncio.sleep(0.02)
    assert not serving.done()
    detached(os.urandom(16))
    with pytest.raises(AgentReplaced, match="host-b registered as it"):
        await asyncio.wait_for(serving, 5)
    assert not any(s.WhichOneof("kind") == "attach" for s in session.signals)


async def test_credentials_refused_later_end_everything_at_once(node: FakeNode, mesh: ConnectedMesh) -> None:
    node.hold_requests = True
    call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=30))
    await eventually(lambda: bool(node.session.envelopes))
    node.session.signal(goodbye=frames.Goodbye(code=frames.Goodbye.UNAUTHENTICATED, reason="key revoked"))
    with pytest.raises(Unauthenticated, match="key revoked"):
        await asyncio.wait_for(call, 5)
    with pytest.raises(Unauthenticated):
        await mesh.request(1, capabilities=["work"], timeout=1)


async def test_garbage_from_the_node_ends_the_stream_and_starts_a_new_link(node: FakeNode, mesh: ConnectedMesh) -> None:
    session = node.session
    session.raw(b"\xff\xff\xff garbage")
    await eventually(lambda: session.goodbye is not None)
    assert session.goodbye is not None and session.goodbye.code == frames.Goodbye.PROTOCOL_ERROR
    await eventually(lambda: len(node.sessions) == 1 and node.session is not session)


async def test_a_silent_node_is_left_after_three_heartbeats(node: FakeNode) -> None:
    node.heartbeat_interval_ms = 20
    async with connect(transport=node):
        dials = node.dials
        node.deaf = True
        await eventually(lambda: node.dials > dials)
        node.deaf = False


async def test_a_draining_node_is_left_for_another_once_nothing_is_under_way(node: FakeNode) -> None:
    async with connect("127.0.0.1:7070,127.0.0.1:7080", transport=node) as mesh:
        node.hold_requests = True
        call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=30))
        session = node.session
        await eventually(lambda: bool(session.envelopes))
        session.signal(drain=frames.Drain(deadline_ms=30_000))
        await asyncio.sleep(0.1)
        assert session.goodbye is None
        node.fail(session, session.envelopes[0], 10, "no")
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: session.goodbye is not None)
        await eventually(lambda: len(node.sessions) == 1 and node.session is not session)


async def test_every_frame_that_is_cut_in_two_directions_arrives_once(node: FakeNode) -> None:
    """An agent and a caller on one link, cut again and again while messages are under way."""
    agent = Agent("worker", capabilities=["work"], transport=node, drain_timeout=1.0)
    ran: dict[int, int] = {}

    @agent.handler
    async def work(number: int) -> int:
        ran[number] = ran.get(number, 0) + 1
        return number

    async with agent, connect(transport=node) as mesh:
        assert len(node.sessions) == 1
        done = 0
        for start in range(0, 200, 40):
            calls = [mesh.request(n, capabilities=["work"], timeout=30) for n in range(start, start + 40)]
            gathered = asyncio.gather(*calls)
            for _ in range(3):
                await asyncio.sleep(0)
            node.cut()
            done += len(await gathered)
    assert done == 200
    assert ran == dict.fromkeys(range(200), 1)


async def test_a_client_from_before_a_fork_says_so(mesh: ConnectedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(RuntimeError, match="fork"):
        await mesh.request(1, capabilities=["work"], timeout=1)


async def test_a_link_that_another_process_has_taken_ends_its_agents_and_does_not_resume(node: FakeNode) -> None:
    agent = new_agent(node)
    agent.handler(lambda data: data)
    serving = asyncio.create_task(agent.serve())
    async with connect(transport=node, own_link=True) as mesh:
        await eventually(lambda: len(node.sessions) == 2 and any(s.agents for s in node.sessions.values()))
        session = node.session_of(agent.agent_id)
        goodbye = frames.Goodbye(code=frames.Goodbye.REPLACED, reason="a copy of it runs", incarnation=os.urandom(16))
        session.signal(goodbye=goodbye)
        with pytest.raises(AgentReplaced, match="a copy of it runs"):
            await asyncio.wait_for(serving, 5)
        caller = node.sessions[mesh._link().resume_token]
        caller.signal(goodbye=goodbye)
        await eventually(lambda: caller.stream is None)
        await eventually(lambda: mesh._link().up and mesh._link().resume_token != caller.token)


async def test_a_goodbye_that_names_this_very_process_ends_none_of_its_agents(node: FakeNode) -> None:
    agent = new_agent(node)
    agent.handler(lambda data: data)
    async with agent:
        dials = node.dials
        goodbye = frames.Goodbye(code=frames.Goodbye.REPLACED, reason="a newer stream", incarnation=incarnation())
        node.session.signal(goodbye=goodbye)
        await eventually(lambda: node.dials > dials and node.session.stream is not None)
        assert agent._host is not None and not agent._host.gone.is_set()


async def test_an_agent_attached_while_there_is_no_stream_is_registered_after_the_resume(node: FakeNode) -> None:
    first, second = new_agent(node), Agent("late", transport=node, drain_timeout=1.0)
    first._own_link = False
    for agent in (first, second):
        agent.handler(lambda data: data)
    async with first:
        session = node.session
        session.cut()
        async with asyncio.timeout(5), second:
            assert node.session is session
            assert set(session.agents) == {first.agent_id, second.agent_id}
        session.cut()
        assert first._host is not None
        first._host.owner.detach(first._host, "left while there was no stream")
        await eventually(lambda: first.agent_id not in session.agents)


async def test_progress_is_told_ten_times_a_second_and_the_last_one_is(node: FakeNode, mesh: ConnectedMesh) -> None:
    agent = new_agent(node)
    go = asyncio.Event()

    @agent.handler
    async def work(data: Any, ctx: Context) -> None:
        for percent in range(101):
            await ctx.progress(percent)
        await go.wait()

    def told() -> list[float]:
        signals = node.session_of(agent.agent_id).signals
        return [s.progress.percent for s in signals if s.WhichOneof("kind") == "progress" and not s.progress.started]

    async with agent:
        call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=10))
        await eventually(lambda: told()[-1:] == [100.0])
        assert told() == [0.0, 100.0]
        go.set()
        await call


async def test_an_agent_that_cannot_be_registered_now_asks_again_until_it_is(node: FakeNode) -> None:
    away = failure(error_pb2.REGISTRY_UNAVAILABLE, "the registry does not answer", retry_after_ms=1)
    node.attach_errors += [away, away]
    agent = new_agent(node)

    @agent.handler
    async def work(number: int) -> int:
        return number

    async with asyncio.timeout(20), agent, connect(transport=node) as caller:
        assert not node.attach_errors
        assert (await caller.request(1, capabilities=["work"], timeout=5)).data == 1


async def test_an_agent_that_is_refused_for_good_says_so(node: FakeNode) -> None:
    node.attach_errors.append(failure(error_pb2.PERMISSION_DENIED, "registered by somebody else"))
    agent = new_agent(node)

    @agent.handler
    async def work(number: int) -> int:
        return number

    with pytest.raises(PermissionDenied, match="somebody else"):
        async with asyncio.timeout(20), agent:
            pass
