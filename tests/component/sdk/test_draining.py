"""Leaving: an agent by its own wish or on order, a process that follows its node's leaving. Nothing lost or doubled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_sdk import Agent, AgentLost, ConnectedMesh, Context, ShuttingDown, connect
from agent_sdk.serving import serve
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.registry_pb2 import DRAINING, HEALTHY
from tests.support.fake_node import FakeNode, Session, eventually

TWO = "127.0.0.1:7070,127.0.0.1:7080"


class Slow:
    """An agent whose handler waits until it may go on."""

    def __init__(self, node: FakeNode, name: str = "worker", **more: Any) -> None:
        self.go = asyncio.Event()
        self.started = 0
        self.agent = Agent(name, capabilities=["work"], transport=node, drain_timeout=5.0, **more)

        @self.agent.handler
        async def work(data: Any) -> Any:
            self.started += 1
            await self.go.wait()
            return data


def said(session: Session, kind: str) -> list[frames.Signal]:
    """The signals of a kind that a process has sent."""
    return [signal for signal in session.signals if signal.WhichOneof("kind") == kind]


def echo(session: Session, envelope: pb.Envelope) -> bool:
    """Answer a request as an agent would that gives back what it gets."""
    session.send(pb.Envelope(type=pb.RESPONSE, correlation_id=envelope.message_id, payload=envelope.payload))
    return True


def order(session: Session, agent: Agent, limit_s: float = 5.0, reason: str = "new version") -> None:
    """What the node says when an operator drains an agent."""
    session.signal(drain=frames.Drain(agent_id=agent.agent_id, deadline_ms=int(limit_s * 1000), reason=reason))


async def heard(*sessions: Session) -> None:
    """Wait until the processes have taken everything that the node has sent them."""
    await eventually(lambda: all(session.link.idle for session in sessions))


async def anything_sent_has_arrived(mesh: ConnectedMesh) -> None:
    """An event goes there and its counts come back: whatever this process sent before is there, too."""
    await mesh.publish("round/trip", 0)


class TestAnAgentIsOrdered:
    """`reach drain AGENT_ID`, as its process sees it."""

    async def test_it_ends_what_it_works_on_then_detaches_and_its_serve_returns(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        slow = Slow(node, own_link=True)
        serving = asyncio.create_task(slow.agent.serve())
        await eventually(lambda: any(session.agents for session in node.sessions.values()))
        call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=20))
        await eventually(lambda: slow.started == 1)
        session = node.session_of(slow.agent.agent_id)
        order(session, slow.agent)
        await eventually(lambda: bool(said(session, "status_change")))
        assert said(session, "status_change")[0].status_change.status == DRAINING
        assert not serving.done() and not said(session, "detach")
        slow.go.set()
        assert (await call).data == 1
        await asyncio.wait_for(serving, 5)
        assert said(session, "detach")
        assert session.goodbye is not None and session.goodbye.code == frames.Goodbye.NORMAL

    async def test_its_answer_is_acknowledged_before_it_detaches(self, node: FakeNode, mesh: ConnectedMesh) -> None:
        """In one frame the signal would count before the answer, and the request be told to be lost."""
        slow = Slow(node, own_link=True)
        order_of_things: list[str] = []
        async with slow.agent:
            session = node.session_of(slow.agent.agent_id)
            calls = [asyncio.create_task(mesh.request(n, capabilities=["work"], timeout=20)) for n in range(50)]
            await eventually(lambda: slow.started == 50)
            on_signal, on_envelope = node.on_signal, node.on_envelope

            def signal(of: Session, what: frames.Signal) -> None:
                if what.WhichOneof("kind") == "detach":
                    order_of_things.append("detach")
                on_signal(of, what)

            def envelope(of: Session, what: pb.Envelope) -> None:
                if what.type == pb.RESPONSE:
                    order_of_things.append("answer")
                on_envelope(of, what)

            node.on_signal, node.on_envelope = signal, envelope  # type: ignore[method-assign, assignment]
            order(session, slow.agent)
            await eventually(lambda: bool(said(session, "status_change")))
            slow.go.set()
            assert [(await call).data for call in calls] == list(range(50))
            await eventually(lambda: "detach" in order_of_things)
        assert order_of_things == ["answer"] * 50 + ["detach"]

    async def test_handlers_that_outlast_the_order_are_cancelled_and_answered(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        slow = Slow(node, own_link=True)
        async with slow.agent:
            call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=20))
            await eventually(lambda: slow.started == 1)
            order(node.session_of(slow.agent.agent_id), slow.agent, limit_s=0.05)
            with pytest.raises(AgentLost, match="shutting down") as told:
                await asyncio.wait_for(call, 5)
            assert told.value.may_have_executed

    async def test_the_other_agents_of_its_process_go_on(self, node: FakeNode, mesh: ConnectedMesh) -> None:
        one, two = Slow(node, "one"), Slow(node, "two")
        one.go.set()
        two.go.set()
        serving = asyncio.create_task(serve(one.agent, two.agent))
        await eventually(lambda: sum(len(session.agents) for session in node.sessions.values()) == 2)
        session = node.session_of(one.agent.agent_id)
        order(session, one.agent)
        await eventually(lambda: bool(said(session, "detach")))
        assert (await mesh.request(2, agent_type="two", timeout=5)).data == 2
        assert not serving.done()
        order(session, two.agent)
        await asyncio.wait_for(serving, 5)

    async def test_a_later_order_gives_it_another_time(self, node: FakeNode, mesh: ConnectedMesh) -> None:
        slow = Slow(node, own_link=True)
        async with slow.agent:
            call = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=20))
            await eventually(lambda: slow.started == 1)
            session = node.session_of(slow.agent.agent_id)
            order(session, slow.agent, limit_s=60)
            order(session, slow.agent, limit_s=0.05)
            with pytest.raises(AgentLost, match="shutting down") as told:
                await asyncio.wait_for(call, 5)
            assert told.value.may_have_executed
            await eventually(lambda: bool(said(session, "detach")))

    async def test_a_node_that_lets_it_go_ends_it_and_it_is_not_attached_again(self, node: FakeNode) -> None:
        slow = Slow(node, own_link=True)
        serving = asyncio.create_task(slow.agent.serve())
        await eventually(lambda: any(session.agents for session in node.sessions.values()))
        session = node.session_of(slow.agent.agent_id)
        session.signal(detached=frames.Detached(agent_id=slow.agent.agent_id, code=frames.Goodbye.DRAINED))
        await asyncio.wait_for(serving, 5)
        assert not said(session, "attach")

    async def test_events_stop_coming_and_those_under_way_are_handled(self, node: FakeNode) -> None:
        slow = Slow(node, own_link=True)
        seen: list[int] = []
        slow.agent.on_event("news")(seen.append)
        async with slow.agent, connect(transport=node, own_link=True) as mesh:
            session = node.session_of(slow.agent.agent_id)
            await eventually(lambda: bool(session.topics))
            await mesh.publish("news", 1)
            order(session, slow.agent)
            await eventually(lambda: bool(said(session, "detach")))
            assert not session.topics
        assert seen == [1]


class TestTheNodeLeaves:
    """A node's `drain`, as a process sees it."""

    async def test_a_new_request_waits_for_the_nodes_successor(self, node: FakeNode, mesh: ConnectedMesh) -> None:
        caller = node.session
        caller.signal(drain=frames.Drain(deadline_ms=30_000))
        await heard(caller)
        call = asyncio.create_task(mesh.request(7, capabilities=["work"], timeout=20))
        await anything_sent_has_arrived(mesh)
        assert {envelope.type for envelope in caller.envelopes} == {pb.EVENT} and not call.done()
        node.on_request = echo
        node.forget()
        assert (await asyncio.wait_for(call, 10)).data == 7
        (request,) = node.session.envelopes
        assert request.fresh, "it never ran: no copy of it can be anywhere"

    async def test_one_that_the_node_refused_waits_too_and_is_still_fresh(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        caller = node.session

        def refuse(session: Session, envelope: pb.Envelope) -> bool:
            session.signal(drain=frames.Drain(deadline_ms=30_000))
            node.fail(session, envelope, codes.SHUTTING_DOWN, "this node is leaving")
            return True

        node.on_request = refuse
        call = asyncio.create_task(mesh.request(7, capabilities=["work"], timeout=20))
        await eventually(lambda: bool(caller.envelopes))
        await heard(caller)
        await anything_sent_has_arrived(mesh)
        assert not call.done()
        node.on_request = echo
        node.forget()
        assert (await asyncio.wait_for(call, 10)).data == 7
        assert [envelope.fresh for envelope in node.session.envelopes] == [True]

    async def test_one_that_a_lost_node_had_goes_on_to_the_next_node_too_and_is_not_fresh(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        """The node that refuses it has not taken it; whether the one before has is for the next one to ask."""
        node.on_request = lambda session, envelope: True
        call = asyncio.create_task(mesh.request(7, capabilities=["work"], timeout=20))
        await eventually(lambda: bool(node.session.envelopes))

        def refuse(session: Session, envelope: pb.Envelope) -> bool:
            session.signal(drain=frames.Drain(deadline_ms=30_000))
            node.fail(session, envelope, codes.SHUTTING_DOWN, "this node is leaving")
            return True

        node.on_request = refuse
        node.forget()
        await eventually(lambda: any(session.envelopes for session in node.sessions.values()))
        await heard(node.session)
        await anything_sent_has_arrived(mesh)
        assert not call.done()
        node.on_request = echo
        node.forget()
        assert (await asyncio.wait_for(call, 10)).data == 7
        assert [envelope.fresh for envelope in node.session.envelopes] == [False]

    async def test_what_a_goodbye_does_not_acknowledge_was_never_taken_and_is_still_fresh(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        caller = node.session
        node.deaf = True  # it takes nothing more, as a node that has said goodbye
        call = asyncio.create_task(mesh.request(7, capabilities=["work"], timeout=20))
        await eventually(lambda: node.swallowed > 0)
        node.deaf = False
        node.on_request = echo
        node.sessions.clear()
        caller.signal(goodbye=frames.Goodbye(code=frames.Goodbye.SHUTDOWN))
        caller.close()
        assert (await asyncio.wait_for(call, 10)).data == 7
        (request,) = node.session.envelopes
        assert request.fresh

    async def test_whoever_waits_in_vain_is_told_at_the_deadline_that_the_node_is_leaving(
        self, node: FakeNode, mesh: ConnectedMesh
    ) -> None:
        node.session.signal(drain=frames.Drain(deadline_ms=30_000))
        await heard(node.session)
        with pytest.raises(ShuttingDown, match="fake is leaving") as told:
            await mesh.request(7, capabilities=["work"], timeout=0.1)
        assert told.value.retryable and not told.value.may_have_executed

    async def test_nested_requests_and_events_still_go_out(self, node: FakeNode) -> None:
        inner = Slow(node, "inner", own_link=True)
        inner.go.set()
        outer = Agent("outer", transport=node, own_link=True, drain_timeout=5.0)
        may_ask = asyncio.Event()

        @outer.handler
        async def ask(data: Any, ctx: Context) -> Any:
            await may_ask.wait()
            return (await ctx.request(data, agent_type="inner")).data

        async with inner.agent, outer, connect(transport=node, own_link=True) as mesh:
            call = asyncio.create_task(mesh.request(7, agent_type="outer", timeout=20))
            session = node.session_of(outer.agent_id)
            caller = next(session for session in node.sessions.values() if not session.agents)
            await eventually(lambda: bool(caller.envelopes))
            for each in (session, caller):
                each.signal(drain=frames.Drain(deadline_ms=30_000))
            await heard(session, caller)
            may_ask.set()
            assert (await asyncio.wait_for(call, 5)).data == 7
            assert (await mesh.publish("news", 1)).matched == 0
            assert any(envelope.type == pb.EVENT for envelope in caller.envelopes)

    async def test_a_caller_with_another_address_goes_there_when_its_answers_have_come(
        self, node: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agent_sdk.moving._LOOK_S", 0.0)  # it looks whether it may go in each turn of the loop
        slow = Slow(node, own_link=True)
        async with slow.agent, connect(TWO, transport=node, own_link=True) as mesh:
            caller = next(session for session in node.sessions.values() if not session.agents)
            under_way = asyncio.create_task(mesh.request(1, capabilities=["work"], timeout=20))
            await eventually(lambda: slow.started == 1)
            caller.signal(drain=frames.Drain(deadline_ms=30_000))
            await heard(caller)
            kept = asyncio.create_task(mesh.request(2, capabilities=["work"], timeout=20))
            await anything_sent_has_arrived(mesh)
            assert caller.goodbye is None, "its first request is not answered"
            slow.go.set()
            assert (await under_way).data == 1
            assert (await asyncio.wait_for(kept, 10)).data == 2
            assert caller.goodbye is not None
        assert slow.started == 2

    async def test_an_agent_that_moves_to_a_peer_takes_work_there(self, node: FakeNode) -> None:
        slow = Slow(node, own_link=True)
        slow.go.set()
        async with slow.agent:
            session = node.session_of(slow.agent.agent_id)
            session.signal(drain=frames.Drain(deadline_ms=5_000, peers=["127.0.0.1:7080"]))
            await eventually(lambda: session.stream is None)
            assert session.goodbye is None and not said(session, "status_change")
            there = next(each for each in node.sessions.values() if each is not session)
            (attach,) = there.agents.values()
            assert attach.record.status != DRAINING
            await eventually(lambda: any(each.heartbeat.agents for each in said(there, "heartbeat")))
            beats = [each.heartbeat for each in said(there, "heartbeat") if each.heartbeat.agents]
            assert beats[-1].agents[0].status == HEALTHY

    async def test_an_agent_whose_node_knows_no_peers_stays_until_the_goodbye(
        self, node: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its last requests may need it; another node of our own list could not reach it for them."""
        monkeypatch.setattr("agent_sdk.moving._LOOK_S", 0.0)
        slow = Slow(node, own_link=True, url=TWO)
        slow.go.set()
        async with slow.agent:
            session = node.session_of(slow.agent.agent_id)
            session.signal(drain=frames.Drain(deadline_ms=30_000))
            await heard(session)
            async with connect(transport=node, own_link=True) as mesh:
                assert (await mesh.request(1, capabilities=["work"], timeout=5)).data == 1
            assert session.goodbye is None and session.agents and not said(session, "status_change")
            node.sessions.pop(session.token)
            session.signal(goodbye=frames.Goodbye(code=frames.Goodbye.SHUTDOWN))
            session.close()
            await eventually(lambda: bool(node.sessions) and bool(node.session.agents))
            assert node.session.hello is not None and not node.session.hello.resume_token
