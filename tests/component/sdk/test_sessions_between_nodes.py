"""Conversations whose callers are at one node and whose agent is at another: real hooks, real nodes in the process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_sdk import Agent, ConnectedMesh, Context, Mesh, Session, SessionLost, connect, connection
from agent_sdk.settings import Access
from agent_sdk.testing import InProcessMesh
from agentreach.v1.admin_pb2 import ReleaseSessionRequest
from reach.core.ports import ANYBODY
from tests.support.fake_node import eventually

QUICK = {"resume_window_s": 1.0, "settle_min_s": 0.2, "drain_timeout_s": 5.0}


class Notes:
    """Agents that remember what they were told, each for itself."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.overlaps = 0
        self.busy: set[str] = set()
        self.restored: list[str] = []
        self.pace_s = 0.0

    def agent(self, name: str, *, hooks: bool = True) -> Agent:
        memory: dict[str, list[str]] = {}
        agent = Agent(name, capabilities=["notes"], drain_timeout=5.0)

        @agent.handler
        async def note(text: str, ctx: Context) -> dict[str, Any]:
            session = ctx.session
            self.runs[ctx.message_id] += 1
            self.overlaps += session.session_id in self.busy
            self.busy.add(session.session_id)
            await asyncio.sleep(self.pace_s)
            notes = memory.setdefault(session.session_id, [])
            notes.append(text)
            if hooks:
                await session.checkpoint(notes)
            self.busy.discard(session.session_id)
            return {"notes": list(notes), "turn": session.turn, "at": ctx.agent_id}

        if hooks:

            @agent.on_session_release
            async def release(session: Session) -> Any:
                return memory.pop(session.session_id)

            @agent.on_session_restore
            async def restore(session: Session, notes: list[str]) -> None:
                self.restored.append(session.session_id)
                memory[session.session_id] = notes

        return agent


async def place(mesh: InProcessMesh, agent: Agent, node: int) -> Agent:
    """Attach an agent to this node."""
    transport = mesh.new_transport()
    lease = connection.take(Access(_from(mesh, node)), env="", own_link=True, transport=transport)
    mesh._agents[agent] = lease, transport
    await agent.start(5.0, lease)
    assert mesh.node_of(agent) == node
    return agent


def _from(mesh: InProcessMesh, node: int) -> tuple[str, ...]:
    return mesh._addresses[node:] + mesh._addresses[:node]


@asynccontextmanager
async def caller(mesh: InProcessMesh, node: int) -> AsyncIterator[ConnectedMesh]:
    """A caller at this node."""
    async with connect(",".join(_from(mesh, node)), own_link=True, transport=mesh.new_transport()) as connected:
        yield connected


def knows(mesh: InProcessMesh, node: int, *agents: Agent) -> bool:
    """Whether a node would route to these agents."""
    found = mesh._nodes[node]
    assert found is not None
    directory = found.engine.state.directory
    return all(
        (each := directory.get("default", "production", agent.agent_id)) is not None and each.status == 2
        for agent in agents
    )


async def all_know(mesh: InProcessMesh, *agents: Agent) -> None:
    for node, running in enumerate(mesh._nodes):
        if running is not None:
            await eventually(lambda node=node: knows(mesh, node, *agents))


async def tell(mesh: Mesh, session: str, text: str, **more: Any) -> Any:
    return await mesh.request(text, capabilities=["notes"], session=session, timeout=20, **more)


async def test_every_node_leads_a_conversation_to_its_one_agent_in_order() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=3, **QUICK) as mesh:
        agents = [await place(mesh, notes.agent(f"notes/{node}"), node) for node in range(3)]
        await all_know(mesh, *agents)
        async with caller(mesh, 0) as zero, caller(mesh, 1) as one, caller(mesh, 2) as two:
            for session in range(9):
                events = []
                for turn, each in enumerate((zero, one, two, one, zero)):
                    reply = await tell(each, f"s{session}", str(turn))
                    assert reply.data["notes"] == [str(number) for number in range(turn + 1)]
                    events.append(reply.session_event)
                assert events == ["STARTED", None, None, None, None]
            burst = [asyncio.create_task(tell(two, "s0", f"b{number}")) for number in range(20)]
            last = (await asyncio.gather(*burst))[-1]
            assert last.data["notes"][-20:] == [f"b{number}" for number in range(20)]
    assert notes.overlaps == 0 and set(notes.runs.values()) == {1} and not notes.restored


async def test_many_callers_begin_one_conversation_at_once_at_all_nodes_and_it_has_one_agent() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=3, **QUICK) as mesh:
        agents = [await place(mesh, notes.agent(f"notes/{node}"), node) for node in range(3)]
        await all_know(mesh, *agents)
        async with caller(mesh, 0) as zero, caller(mesh, 1) as one, caller(mesh, 2) as two:
            for session in range(10):
                turns = [tell(each, f"s{session}", str(n)) for n in range(4) for each in (zero, one, two)]
                replies = await asyncio.gather(*turns)
                assert len({reply.source for reply in replies}) == 1
                assert max(len(reply.data["notes"]) for reply in replies) == 12
                assert not any(reply.session_event in ("LOST", "MOVED") for reply in replies)
    assert notes.overlaps == 0 and set(notes.runs.values()) == {1}


async def test_a_drained_agents_conversations_go_on_at_another_node_whoever_asks_from_wherever() -> None:
    notes = Notes()
    notes.pace_s = 0.002
    sessions, turns = [f"s{number}" for number in range(20)], 10
    moved: Counter[str] = Counter()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        leaving = await place(mesh, notes.agent("notes/leaving"), 0)
        await all_know(mesh, leaving)
        async with caller(mesh, 0) as zero, caller(mesh, 1) as one:
            for session in sessions:
                await tell(zero, session, "0")
            heir = await place(mesh, notes.agent("notes/heir"), 1)
            await all_know(mesh, leaving, heir)

            async def talk(session: str, who: Mesh) -> None:
                for turn in range(1, turns):
                    reply = await tell(who, session, str(turn))
                    assert reply.data["notes"] == [str(number) for number in range(turn + 1)]
                    moved[session] += reply.session_event == "MOVED"
                    assert reply.session_event in (None, "MOVED")

            async with asyncio.timeout(40), asyncio.TaskGroup() as talks:
                for number, session in enumerate(sessions):
                    talks.create_task(talk(session, (zero, one)[number % 2]))
                await asyncio.sleep(0)
                await mesh.remove(leaving)
            assert moved == dict.fromkeys(sessions, 1)
            assert {(await tell(zero, session, "end")).source for session in sessions} == {heir.agent_id}
    assert notes.overlaps == 0 and set(notes.runs.values()) == {1}
    assert sorted(notes.restored) == sorted(sessions)


@pytest.mark.parametrize("hooks", [True, False])
async def test_a_killed_agents_conversation_goes_on_elsewhere_from_its_checkpoint_or_is_told_lost(hooks: bool) -> None:
    notes = Notes()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        agents = [await place(mesh, notes.agent(f"notes/{node}", hooks=hooks), node) for node in range(2)]
        await all_know(mesh, *agents)
        async with caller(mesh, 0) as zero, caller(mesh, 1) as one:
            for number in range(6):
                await tell(one, f"s{number}", "first")
            await mesh.kill(agents[0])
            events: Counter[Any] = Counter()
            for number in range(6):
                who = (zero, one)[number % 2]
                strict = not hooks and number < 3
                try:
                    reply = await tell(who, f"s{number}", "second", strict_session=strict)
                except SessionLost:
                    assert strict
                    events["SESSION_LOST"] += 1
                    continue
                events[reply.session_event] += 1
                expected = ["second"] if reply.session_event == "LOST" else ["first", "second"]
                assert reply.data["notes"] == expected
            assert events[None] > 0 and sum(events.values()) == 6
            assert events["MOVED"] > 0 if hooks else events["LOST"] + events["SESSION_LOST"] > 0
            assert not (events["LOST"] if hooks else events["MOVED"])
    assert notes.overlaps == 0


async def test_an_agent_without_hooks_that_leaves_by_itself_costs_other_nodes_callers_no_wait() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=2, **{**QUICK, "resume_window_s": 10.0}) as mesh:
        leaving = await place(mesh, notes.agent("notes/leaving", hooks=False), 0)
        await all_know(mesh, leaving)
        async with caller(mesh, 1) as one:
            await tell(one, "s", "first")
            heir = await place(mesh, notes.agent("notes/heir", hooks=False), 1)
            await all_know(mesh, leaving, heir)
            await mesh.remove(leaving)
            async with asyncio.timeout(3):
                reply = await tell(one, "s", "second")
            assert reply.session_event == "LOST" and reply.source == heir.agent_id


async def test_conversations_stay_with_an_agent_whose_node_is_killed_under_it() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=2, **{**QUICK, "resume_window_s": 10.0}) as mesh:
        agent = await place(mesh, notes.agent("notes/one"), 0)
        spare = await place(mesh, notes.agent("notes/spare"), 1)
        await all_know(mesh, agent, spare)
        async with caller(mesh, 1) as one:
            firsts = {f"s{number}": await tell(one, f"s{number}", "first") for number in range(8)}
            await mesh.kill_node(0)
            for session, first in firsts.items():
                reply = await tell(one, session, "second")
                assert reply.data["notes"] == ["first", "second"] and reply.source == first.source
                assert reply.session_event is None
    assert notes.overlaps == 0 and not notes.restored


async def test_conversations_stay_with_an_agent_whose_node_is_drained() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        agent = await place(mesh, notes.agent("notes/one"), 0)
        spare = await place(mesh, notes.agent("notes/spare"), 1)
        await all_know(mesh, agent, spare)
        async with caller(mesh, 1) as one:
            firsts = {f"s{number}": await tell(one, f"s{number}", "first") for number in range(8)}
            await mesh.drain_node(0)
            for session, first in firsts.items():
                reply = await tell(one, session, "second")
                assert reply.data["notes"] == ["first", "second"] and reply.source == first.source
                assert reply.session_event is None
    assert notes.overlaps == 0 and not notes.restored


async def test_an_operator_releases_a_conversation_from_one_node_to_another() -> None:
    notes = Notes()
    async with InProcessMesh(nodes=2, **QUICK) as mesh:
        agents = [await place(mesh, notes.agent(f"notes/{node}"), node) for node in range(2)]
        await all_know(mesh, *agents)
        async with caller(mesh, 0) as zero, caller(mesh, 1) as one:
            first = await tell(zero, "s", "first")
            home = next(node for node, agent in enumerate(agents) if agent.agent_id == first.source)
            node = mesh._nodes[home]
            assert node is not None
            node.engine.release_session(ReleaseSessionRequest(session_id="s", agent_type="notes"), ANYBODY)
            await eventually(lambda: notes.restored == ["s"])
            for who, expected in ((one, ["first", "a"]), (zero, ["first", "a", "b"])):
                reply = await tell(who, "s", expected[-1])
                assert reply.data["notes"] == expected and reply.source == agents[1 - home].agent_id
    assert notes.overlaps == 0
