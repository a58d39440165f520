"""A list of nodes: where a process goes when its node is lost or leaves, what it brings along, and what it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_sdk import Agent, AgentLost, ConnectFailed, Context, connect, moving, redial
from agent_sdk.identity import incarnation
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire.errors import failure
from tests.support.fake_node import FakeNode, FakeNodes, Session, eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No crowd has to be spread here."""
    monkeypatch.setattr(redial, "SPREAD_S", 0.02)
    monkeypatch.setattr(moving, "SPREAD_S", 0.02)


@pytest.fixture
def mesh() -> FakeNodes:
    return FakeNodes(3)


def agent_on(mesh: FakeNodes, **more: Any) -> Agent:
    return Agent("worker", url=mesh.url, capabilities=["work"], transport=mesh, drain_timeout=1.0, **more)


def said(session: Session, kind: str) -> list[frames.Signal]:
    return [signal for signal in session.signals if signal.WhichOneof("kind") == kind]


async def moved(mesh: FakeNodes, from_node: FakeNode) -> FakeNode:
    """The node that a process went to."""
    found: list[FakeNode] = []

    def there() -> bool:
        node = mesh.elsewhere(from_node)
        if node is not None:
            found.append(node)
        return node is not None

    await eventually(there)
    return found[0]


def echo(session: Session, envelope: pb.Envelope) -> bool:
    session.send(pb.Envelope(type=pb.RESPONSE, correlation_id=envelope.message_id, payload=envelope.payload))
    return True


class TestTheFirstConnection:
    """In the order of the list, each with its share of the time."""

    async def test_the_first_that_answers_in_the_order_of_the_list_is_taken(self, mesh: FakeNodes) -> None:
        mesh.nodes[0].down = True
        async with connect(mesh.url, transport=mesh):
            assert mesh.nodes[1].sessions and not mesh.nodes[2].sessions
        assert mesh.dialled == mesh.addresses[:2]

    async def test_an_address_that_never_answers_leaves_time_for_the_next(
        self, mesh: FakeNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(redial, "DIAL_S", 0.6)
        monkeypatch.setattr(redial, "_DIAL_LEAST_S", 0.0)
        mesh.nodes[0].silent = mesh.nodes[1].silent = True
        async with connect(mesh.url, transport=mesh, timeout=1.5):
            assert mesh.nodes[2].sessions

    async def test_where_none_answers_all_are_named_and_why(self, mesh: FakeNodes) -> None:
        for node in mesh.nodes:
            node.down = True
        with pytest.raises(ConnectFailed, match="nobody listens") as told:
            async with connect(mesh.url, transport=mesh, timeout=0.3):
                pass
        assert all(address in str(told.value) for address in mesh.addresses)


class TestANodeIsLost:
    """Everything is declared anew at another one; nothing is lost and nothing runs twice."""

    async def test_an_agent_brings_what_it_holds_and_shows_no_token_to_a_stranger(self, mesh: FakeNodes) -> None:
        agent, go = agent_on(mesh, own_link=True), asyncio.Event()

        @agent.on_event("news")
        async def on_news(data: Any) -> None: ...

        @agent.handler
        async def work(data: Any) -> int:
            await go.wait()
            return 1

        async with agent:
            home = mesh.nodes[0]
            session = home.session
            request = pb.Envelope(type=pb.REQUEST, message_id="m", timeout_ms=9000, session_id="s", epoch=7)
            entry = home.deliver(session, session, agent.agent_id, request)
            await eventually(lambda: agent._host is not None and agent._host.busy)
            home.kill()
            node = await moved(mesh, home)
            hello = node.session.hello
            assert hello is not None
            assert (hello.resume_token, hello.last_seq, hello.incarnation) == (b"", 0, incarnation())
            (attach,) = hello.agents
            assert [(h.key.message_id, h.session_id, h.state) for h in attach.holding] == [
                ("m", "s", frames.Holding.RUNNING)
            ]
            assert [(s.session_id, s.epoch) for s in attach.sessions] == [("s", 7)]
            await eventually(lambda: (agent.agent_id, "production", "news") in node.session.topics)
            go.set()
            await eventually(lambda: any(e.type == pb.RESPONSE for e in node.session.envelopes))
            assert [e.entry for e in node.session.envelopes if e.type == pb.RESPONSE] == [entry]

    async def test_an_answer_that_was_not_acknowledged_is_sent_again_under_its_entry(self, mesh: FakeNodes) -> None:
        agent = agent_on(mesh, own_link=True)
        ran: list[Any] = []

        @agent.handler
        async def work(data: Any) -> Any:
            ran.append(data)
            return data

        async with agent:
            home = mesh.nodes[0]
            session = home.session
            home.deaf = True
            entry = home.deliver(session, session, agent.agent_id, pb.Envelope(message_id="m", timeout_ms=9000))
            await eventually(lambda: len(ran) == 1)
            home.kill()
            node = await moved(mesh, home)
            (attach,) = node.session.agents.values()
            assert [(h.key.message_id, h.state) for h in attach.holding] == [("m", frames.Holding.REPLIED)]
            await eventually(lambda: bool(node.session.envelopes))
            assert [(e.type, e.entry) for e in node.session.envelopes] == [(pb.RESPONSE, entry)]
            again = pb.Envelope(message_id="m", timeout_ms=9000)
            node.deliver(node.session, node.session, agent.agent_id, again)
            await eventually(lambda: len(node.session.envelopes) == 2)
            assert len(ran) == 1, "its table answers"

    async def test_pending_requests_go_out_again_in_their_order_with_the_time_left(self, mesh: FakeNodes) -> None:
        for node in mesh.nodes:
            node.hold_requests = True
        async with connect(mesh.url, transport=mesh) as caller:
            calls = [
                asyncio.create_task(caller.request(n, capabilities=["work"], timeout=20, session="s")) for n in range(5)
            ]
            home = mesh.nodes[0]
            first = home.session
            await eventually(lambda: len(first.envelopes) == 5)
            home.kill()
            node = await moved(mesh, home)
            await eventually(lambda: len(node.session.envelopes) == 5)
            again = node.session.envelopes
            assert [e.message_id for e in again] == [e.message_id for e in first.envelopes]
            assert all(not e.fresh and e.resent and 0 < e.timeout_ms < 20_000 for e in again)
            for envelope in again:
                echo(node.session, envelope)
            assert [reply.data for reply in await asyncio.gather(*calls)] == list(range(5))

    async def test_a_node_that_is_back_within_its_second_goes_on_with_the_link(self, mesh: FakeNodes) -> None:
        async with connect(mesh.url, transport=mesh) as caller:
            home = mesh.nodes[0]
            home.on_request = echo
            session = home.session
            await caller.request(1, capabilities=["work"], timeout=5)
            home.down = True
            session.cut()
            await eventually(lambda: mesh.dialled == mesh.addresses[:1] * 2)
            home.down = False
            await eventually(lambda: session.stream is not None)
            assert set(mesh.dialled) == {mesh.addresses[0]} and home.session is session

    async def test_a_token_is_good_again_where_no_other_node_was_reached_meanwhile(self, mesh: FakeNodes) -> None:
        async with connect(mesh.url, transport=mesh):
            home = mesh.nodes[0]
            session = home.session
            for node in mesh.nodes:
                node.down = True
            session.cut()
            await eventually(lambda: set(mesh.addresses) <= set(mesh.dialled))
            home.down = False
            await eventually(lambda: session.stream is not None)
            assert home.session is session, "resumed"

    async def test_subscriptions_are_renewed_and_callbacks_come(self, mesh: FakeNodes) -> None:
        async with connect(mesh.url, transport=mesh) as caller, caller.subscribe("news") as events:
            home = mesh.nodes[0]
            await eventually(lambda: ("", "production", "news") in home.session.topics)
            home.kill()
            node = await moved(mesh, home)
            await eventually(lambda: ("", "production", "news") in node.session.topics)
            await caller.publish("news", "hot", timeout=5)
            assert (await asyncio.wait_for(anext(aiter(events)), 5)).data == "hot"

    async def test_a_streamed_reply_goes_on_where_it_was_or_says_after_how_many_items_it_was_lost(
        self, mesh: FakeNodes
    ) -> None:
        for node in mesh.nodes:
            node.hold_requests = True
        async with connect(mesh.url, transport=mesh) as caller:
            items: list[Any] = []

            async def read() -> None:
                async for item in caller.stream("x", capabilities=["work"], timeout=20):
                    items.append(item)

            reading = asyncio.create_task(read())
            home = mesh.nodes[0]
            await eventually(lambda: len(home.session.envelopes) == 1)
            give(home.session, home.session.envelopes[0], range(3))
            await eventually(lambda: items == [0, 1, 2])
            home.kill()
            second = await moved(mesh, home)
            await eventually(lambda: len(second.session.envelopes) == 1)
            give(second.session, second.session.envelopes[0], range(5))  # the agent's table: from the start
            await eventually(lambda: items == [0, 1, 2, 3, 4])
            second.kill()
            third = await moved(mesh, second)
            await eventually(lambda: len(third.session.envelopes) == 1)
            third.fail(third.session, third.session.envelopes[0], codes.AGENT_LOST, "nobody has it")
            with pytest.raises(AgentLost) as told:
                await asyncio.wait_for(reading, 5)
            assert told.value.details["items"] == "5" and told.value.may_have_executed


def give(session: Session, request: pb.Envelope, numbers: range) -> None:
    """Items of a streamed reply."""
    for number in numbers:
        item = pb.Envelope(type=pb.RESPONSE, correlation_id=request.message_id, sequence=number, more=True)
        item.payload.content_type, item.payload.body = "application/json", str(number).encode()
        session.send(item)


async def test_what_an_agent_has_it_says_whichever_way_its_env_is_written(mesh: FakeNodes) -> None:
    agent = agent_on(mesh, own_link=True)
    ran: list[Any] = []
    agent.handler(ran.append)
    async with agent:
        home = mesh.nodes[0]
        session = home.session
        home.deliver(session, session, agent.agent_id, pb.Envelope(message_id="m", timeout_ms=9000))
        await eventually(lambda: bool(session.envelopes))
        asked = session.envelopes[0]
        for env in ("", "production"):
            key = frames.MessageKey(tenant="default", principal="anonymous", env=env, message_id="m")
            session.signal(lookup=frames.Lookup(nonce=7, keys=[key]))
        await eventually(lambda: len(said(session, "found")) == 2)
        found = [item for signal in said(session, "found") for item in signal.found.items]
        assert [(item.state, item.agent_id) for item in found] == [(frames.Found.DONE, agent.agent_id)] * 2, asked
        session.send(copy_of(agent, env=""))
        await eventually(lambda: len(session.envelopes) == 2)
        assert len(ran) == 1


def copy_of(agent: Agent, env: str) -> pb.Envelope:
    """The message once more, as another node may write it."""
    copy = pb.Envelope(message_id="m", timeout_ms=9000, recipient=agent.agent_id, entry=b"e", attempt=1, env=env)
    copy.tenant, copy.principal = "default", "anonymous"
    return copy


class TestAddressesThatNodesTell:
    """One configured address is enough."""

    async def test_the_welcome_names_the_others(self, mesh: FakeNodes) -> None:
        mesh.nodes[0].peers = [mesh.addresses[2], "not an address", mesh.addresses[0]]
        async with connect(mesh.addresses[0], transport=mesh):
            mesh.nodes[0].kill()
            await eventually(lambda: bool(mesh.nodes[2].sessions))
        assert set(mesh.dialled) == {mesh.addresses[0], mesh.addresses[2]}

    async def test_a_node_that_joined_later_is_told_with_a_heartbeat(self, mesh: FakeNodes) -> None:
        mesh.nodes[0].heartbeat_interval_ms = 20
        async with connect(mesh.addresses[0], transport=mesh) as caller:
            assert not caller._link().elsewhere
            mesh.nodes[0].peers = [mesh.addresses[1]]
            await eventually(lambda: caller._link().elsewhere)
            mesh.nodes[0].kill()
            await eventually(lambda: bool(mesh.nodes[1].sessions))

    async def test_a_node_that_comes_is_told_without_a_heartbeat(self, mesh: FakeNodes) -> None:
        home, other = mesh.nodes[:2]
        async with connect(mesh.addresses[0], transport=mesh, own_link=True) as caller:
            assert not caller._link().elsewhere
            home.session.signal(peers=frames.Peers(addresses=["not an address", mesh.addresses[1]]))
            await eventually(lambda: caller._link().elsewhere)
            home.kill()
            await eventually(lambda: bool(other.sessions))
        assert set(mesh.dialled) == set(mesh.addresses[:2])


class TestANodeLeaves:
    """`drain`, and its registrations that are refused."""

    async def test_new_requests_go_to_a_peer_that_lives_and_old_ones_end_where_they_are(self, mesh: FakeNodes) -> None:
        home, dead, live = mesh.nodes
        dead.down, home.hold_requests, live.on_request = True, True, echo
        async with connect(mesh.addresses[0], transport=mesh) as caller:
            session = home.session
            old = asyncio.create_task(caller.request("old", capabilities=["work"], timeout=20))
            await eventually(lambda: len(session.envelopes) == 1)
            session.signal(drain=frames.Drain(deadline_ms=20_000, peers=mesh.addresses[1:]))
            await eventually(lambda: caller._link().leaving)
            new = asyncio.create_task(caller.request("new", capabilities=["work"], timeout=20))
            echo(session, session.envelopes[0])
            assert (await old).data == "old"
            assert (await new).data == "new"
            assert len(session.envelopes) == 1 and live.session.envelopes[0].fresh
            assert session.goodbye is not None and mesh.dialled[-1] == mesh.addresses[2]

    async def test_nobody_says_goodbye_before_another_node_has_let_him_in(self, mesh: FakeNodes) -> None:
        home = mesh.nodes[0]
        for node in mesh.nodes[1:]:
            node.down = True
        async with connect(mesh.url, transport=mesh) as caller:
            session = home.session
            session.signal(drain=frames.Drain(deadline_ms=20_000, peers=mesh.addresses[1:]))
            await eventually(lambda: len(mesh.dialled) >= 4)
            assert session.goodbye is None and session.stream is not None
            assert mesh.dialled.count(mesh.addresses[0]) == 1, "the leaving one is not dialled again"
            mesh.nodes[2].down = False
            await eventually(lambda: caller._link().node_id == "node-2")
            assert session.goodbye is not None

    async def test_an_agent_is_registered_at_the_next_node_before_it_leaves_this_one_and_works_on(
        self, mesh: FakeNodes
    ) -> None:
        """No goodbye: it would count the agent as gone, and its work as lost. What it has to answer goes with it."""
        agent, go = agent_on(mesh, own_link=True), asyncio.Event()
        ended: list[str] = []

        @agent.handler
        async def work(data: Any) -> int:
            try:
                await go.wait()
            finally:
                ended.append("whole" if go.is_set() else "cancelled")
            return 1

        async with agent:
            home = mesh.nodes[0]
            session = home.session
            entry = home.deliver(session, session, agent.agent_id, pb.Envelope(message_id="m", timeout_ms=9000))
            await eventually(lambda: agent._host is not None and agent._host.busy)
            still_here: list[bool] = []
            for node in mesh.nodes[1:]:
                node.on_hello = lambda: still_here.append(session.stream is not None)
            session.signal(drain=frames.Drain(deadline_ms=5000, peers=mesh.addresses[1:]))
            node = await moved(mesh, home)
            (attach,) = node.session.agents.values()
            assert [h.state for h in attach.holding] == [frames.Holding.RUNNING]
            await eventually(lambda: session.stream is None)
            assert still_here == [True]
            assert session.goodbye is None and not said(session, "status_change") and not ended
            go.set()
            await eventually(lambda: any(e.type == pb.RESPONSE for e in node.session.envelopes))
            assert [e.entry for e in node.session.envelopes] == [entry]
            assert ended == ["whole"]

    async def test_a_node_that_notices_that_the_agent_is_elsewhere_does_not_get_it_back(self, mesh: FakeNodes) -> None:
        home = mesh.nodes[0]
        home.heartbeat_interval_ms = 10
        agent = agent_on(mesh, own_link=True)
        agent.handler(lambda data: data)
        async with agent:
            session = home.session
            for node in mesh.nodes[1:]:
                node.on_hello = lambda: setattr(home, "unknown", [agent.agent_id])
            session.signal(drain=frames.Drain(deadline_ms=5000, peers=mesh.addresses[1:]))
            await moved(mesh, home)
            await eventually(lambda: session.stream is None)
            assert not said(session, "attach")

    async def test_a_goodbye_that_comes_before_the_next_nodes_welcome_does_not_undo_the_move(
        self, mesh: FakeNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The node that is left sees the registration before the process does: it must not be made a second time."""
        home, next_one, _ = mesh.nodes
        agent, welcome = Agent("worker", url=mesh.addresses[0], transport=mesh, own_link=True), next_one.greeted
        hellos: list[tuple[Session, frames.Hello]] = []
        monkeypatch.setattr(next_one, "greeted", lambda session, hello: hellos.append((session, hello)))
        agent.handler(lambda data: data)
        async with agent:
            session = home.session
            session.signal(drain=frames.Drain(deadline_ms=5000, peers=mesh.addresses[1:2]))
            await eventually(lambda: bool(hellos))
            session.signal(goodbye=frames.Goodbye(code=frames.Goodbye.SHUTDOWN, reason="node is leaving"))
            await eventually(lambda: session.stream is None)
            assert hellos[0][0].stream is not None
            welcome(*hellos[0])
            await eventually(lambda: agent._host is not None and agent._host.owner.node_id == "node-1")
            assert mesh.dialled == mesh.addresses[:2]

    async def test_a_process_that_ends_between_goodbye_and_welcome_leaves_both(
        self, mesh: FakeNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home, next_one, _ = mesh.nodes
        hellos: list[Session] = []
        monkeypatch.setattr(next_one, "greeted", lambda session, hello: hellos.append(session))
        async with asyncio.timeout(5):
            async with connect(mesh.addresses[0], transport=mesh):
                session = home.session
                session.signal(drain=frames.Drain(deadline_ms=5000, peers=mesh.addresses[1:2]))
                await eventually(lambda: bool(hellos))
                session.signal(goodbye=frames.Goodbye(code=frames.Goodbye.SHUTDOWN, reason="node is leaving"))
                await eventually(lambda: session.stream is None)
            await eventually(lambda: hellos[0].stream is None)

    async def test_a_node_that_is_leaving_as_well_is_not_moved_to(self, mesh: FakeNodes) -> None:
        home, leaving, live = mesh.nodes
        leaving.attach_errors += [failure(codes.SHUTTING_DOWN, "leaving")] * 9
        agent = agent_on(mesh, own_link=True)
        agent.handler(lambda data: data)
        async with agent:
            home.session.signal(drain=frames.Drain(deadline_ms=5000, peers=mesh.addresses[1:]))
            await eventually(lambda: agent._host is not None and agent._host.owner.node_id == "node-2")
            assert agent.agent_id in live.session.agents

    async def test_a_process_that_ends_while_it_moves_leaves_both(self, mesh: FakeNodes) -> None:
        home, next_one, _ = mesh.nodes
        hold = asyncio.Event()
        home.hold_requests = True
        next_one.on_hello = hold.set
        async with connect(mesh.addresses[0], transport=mesh) as caller:
            session = home.session
            session.signal(drain=frames.Drain(deadline_ms=20_000, peers=mesh.addresses[1:2]))
            await hold.wait()
            closing = asyncio.create_task(caller.close())
            await closing
        await eventually(lambda: not next_one.sessions and not home.sessions)

    async def test_a_registration_that_a_leaving_node_refuses_is_made_at_another_at_once(self, mesh: FakeNodes) -> None:
        home = mesh.nodes[0]
        home.attach_errors.append(failure(codes.SHUTTING_DOWN, "leaving"))
        agent = agent_on(mesh, own_link=True)
        agent.handler(lambda data: data)
        async with asyncio.timeout(5), agent:
            node = mesh.elsewhere(home)
            assert node is not None and agent.agent_id in node.session.agents
            assert not home.sessions

    async def test_a_node_without_a_registry_is_left_for_another_after_a_while(
        self, mesh: FakeNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agent_sdk.moving._REFUSED_S", 0.0)
        home = mesh.nodes[0]
        home.attach_errors += [failure(codes.REGISTRY_UNAVAILABLE, "away", retry_after_ms=1)] * 9
        agent = agent_on(mesh, own_link=True)
        agent.handler(lambda data: data)
        async with asyncio.timeout(5), agent:
            assert mesh.elsewhere(home) is not None

    async def test_a_registration_that_was_overtaken_is_asked_for_again(self, mesh: FakeNodes) -> None:
        home = mesh.nodes[0]
        home.attach_errors.append(failure(codes.FENCED, "another process registered as it after this one"))
        agent = agent_on(mesh, own_link=True)
        agent.handler(lambda data: data)
        async with asyncio.timeout(5), agent:
            assert agent.agent_id in home.session.agents and not home.attach_errors


async def test_a_nested_call_survives_the_loss_of_the_node_and_its_parent_answers_once(mesh: FakeNodes) -> None:
    """Agent and caller in one process, on one link: everything moves together."""
    agent = agent_on(mesh)
    ran: list[str] = []
    killed = asyncio.Event()

    @agent.handler
    async def work(data: str, ctx: Context) -> Any:
        ran.append(data)
        if data == "outer":
            return (await ctx.request("inner", capabilities=["work"], timeout=20)).data
        await killed.wait()
        return "done"

    async with agent, connect(mesh.url, transport=mesh) as caller:
        call = asyncio.create_task(caller.request("outer", capabilities=["work"], timeout=20))
        await eventually(lambda: ran == ["outer", "inner"])
        mesh.nodes[0].kill()
        killed.set()
        assert (await asyncio.wait_for(call, 10)).data == "done"
        assert ran == ["outer", "inner"]
