"""Conversations change hands: real hooks, a real node in the process. No turn is lost, none runs twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest

from agent_sdk import Agent, Blob, BlockingContext, Context, PayloadTooLarge, Session
from agent_sdk.errors import AgentError, Rejected
from agent_sdk.testing import InProcessMesh
from agentreach.wire.limits import SESSION_STATE_BYTES_MAX


@dataclasses.dataclass
class Tally:
    """A state with a type."""

    total: int
    of: list[str]


class Notes:
    """Agents that remember what they were told, each for itself."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        """By message_id: how often a handler began with it."""
        self.overlaps = 0
        self.released: list[Session] = []
        self.restored: list[Session] = []
        self._busy: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()

    def agent(self, name: str = "notes", *, hooks: bool = True, checkpoints: bool = False, **more: Any) -> Agent:
        """One agent of them. Its handler answers with all that the conversation holds."""
        memory: dict[str, list[str]] = {}
        agent = Agent(name, capabilities=["notes"], drain_timeout=10.0, **more)

        @agent.handler
        async def note(text: str, ctx: Context) -> dict[str, Any]:
            session = ctx.session
            self.runs[ctx.message_id] += 1
            self.overlaps += session.session_id in self._busy
            self._busy.add(session.session_id)
            self.started.set()
            await self.gate.wait()
            notes = memory.setdefault(session.session_id, [])
            notes.append(text)
            if checkpoints:
                await session.checkpoint(notes)
            self._busy.discard(session.session_id)
            return {"notes": list(notes), "turn": session.turn, "at": ctx.agent_id}

        if hooks:

            @agent.on_session_release
            async def release(session: Session) -> Any:
                self.released.append(session)
                return memory.pop(session.session_id)

            @agent.on_session_restore
            async def restore(session: Session, notes: list[str]) -> None:
                self.restored.append(session)
                memory[session.session_id] = notes

        return agent


async def tell(mesh: InProcessMesh, session: str, text: str, **more: Any) -> Any:
    """One turn."""
    return await mesh.request(text, capabilities=["notes"], session=session, timeout=10, **more)


async def two(mesh: InProcessMesh, notes: Notes, session: str = "s") -> tuple[Agent, Agent]:
    """Two agents and a conversation of one turn: (its owner, the other)."""
    one, other = await mesh.add(notes.agent("notes/one")), await mesh.add(notes.agent("notes/two"))
    owner = (await tell(mesh, session, "first")).source
    return (one, other) if one.agent_id == owner else (other, one)


async def test_a_conversation_goes_on_where_its_agent_that_leaves_has_handed_it_over() -> None:
    notes = Notes()
    async with InProcessMesh() as mesh:
        owner, other = await two(mesh, notes)
        await mesh.remove(owner)
        reply = await tell(mesh, "s", "second")
        assert reply.data == {"notes": ["first", "second"], "turn": 2, "at": other.agent_id}
        assert reply.session_event == "MOVED"
        third = await tell(mesh, "s", "third")
        assert third.session_event is None and third.data["turn"] == 3
        (released,), (restored,) = notes.released, notes.restored
    assert released.session_id == restored.session_id == "s" and released.turn == restored.turn == 1
    assert restored.epoch > released.epoch


async def test_a_request_without_a_session_is_told_that_its_handler_needs_one() -> None:
    seen: list[tuple[bool, str, int]] = []
    async with InProcessMesh() as mesh:
        await mesh.add(Notes().agent(checkpoints=True))
        with pytest.raises(Rejected, match=r"the message belongs to no session, .* send it with session=") as refused:
            await mesh.request("x", capabilities=["notes"], timeout=5)
        assert refused.value.may_have_executed and not refused.value.retryable
        agent = Agent("plain")

        @agent.handler
        async def plain(_: str, ctx: Context) -> None:
            seen.append((bool(ctx.session), ctx.session.session_id, ctx.session.turn))

        await mesh.add(agent)
        await mesh.request("x", agent_type="plain", timeout=5)
        await mesh.request("x", agent_type="plain", session="s", timeout=5)
    assert seen == [(False, "", 0), (True, "s", 1)]


async def test_fifty_live_conversations_leave_a_drained_agent_with_their_state_and_every_turn_once() -> None:
    notes, sessions, turns = Notes(), [f"s{number}" for number in range(50)], 12
    moved: Counter[str] = Counter()
    async with InProcessMesh() as mesh:
        leaving = await mesh.add(notes.agent("notes/leaving"))
        for session in sessions:
            await tell(mesh, session, "0")
        await mesh.add(notes.agent("notes/one"))
        await mesh.add(notes.agent("notes/two"))

        async def talk(session: str) -> None:
            for turn in range(1, turns):
                reply = await tell(mesh, session, str(turn))
                assert reply.data["notes"] == [str(number) for number in range(turn + 1)]
                assert reply.data["turn"] == turn + 1
                moved[session] += reply.session_event == "MOVED"
                assert reply.session_event in (None, "MOVED")

        async with asyncio.timeout(30), asyncio.TaskGroup() as talks:
            for session in sessions:
                talks.create_task(talk(session))
            await asyncio.sleep(0)
            await mesh.remove(leaving)
            assert len(notes.released) == len(notes.restored) == 50
    assert moved == dict.fromkeys(sessions, 1)
    assert set(notes.runs.values()) == {1} and len(notes.runs) == 50 * turns
    assert notes.overlaps == 0


async def test_a_running_turn_ends_before_its_conversation_is_handed_over() -> None:
    notes = Notes()
    async with InProcessMesh() as mesh:
        owner, other = await two(mesh, notes)
        notes.gate.clear()
        notes.started.clear()
        running = asyncio.create_task(tell(mesh, "s", "second"))
        await notes.started.wait()
        leaves = asyncio.create_task(mesh.remove(owner))
        waiting = asyncio.create_task(tell(mesh, "s", "third"))
        done, _ = await asyncio.wait([running, leaves, waiting], timeout=0.2)
        assert not done and not notes.released
        notes.gate.set()
        assert (await running).data == {"notes": ["first", "second"], "turn": 2, "at": owner.agent_id}
        assert (await waiting).data == {"notes": ["first", "second", "third"], "turn": 3, "at": other.agent_id}
        await leaves


async def test_a_message_that_was_handled_before_the_move_is_answered_again_and_does_not_run() -> None:
    notes = Notes()
    async with InProcessMesh(replay_s=0) as mesh:  # the node itself remembers no outcome
        owner, other = await two(mesh, notes)
        second = await tell(mesh, "s", "second", message_id="order-2")
        await mesh.remove(owner)
        again = await tell(mesh, "s", "second", message_id="order-2")
        assert again.data == second.data and again.source == other.agent_id
        assert notes.runs["order-2"] == 1
        assert (await tell(mesh, "s", "third")).data["notes"] == ["first", "second", "third"]


async def test_a_lost_agents_conversation_goes_on_from_its_checkpoint() -> None:
    notes = Notes()
    async with InProcessMesh(resume_window_s=0.2, settle_min_s=0.1) as mesh:
        agents = [await mesh.add(notes.agent(f"notes/{name}", checkpoints=True)) for name in ("one", "two")]
        first = await tell(mesh, "s", "first")
        owner = next(agent for agent in agents if agent.agent_id == first.source)
        mesh._agents[owner][1].unreachable = True
        mesh.cut(owner)
        reply = await tell(mesh, "s", "second", strict_session=True)
        assert reply.session_event == "MOVED" and reply.source != owner.agent_id
        assert reply.data["notes"] == ["first", "second"] and reply.data["turn"] == 2
        assert not notes.released


async def test_without_hooks_the_state_is_lost_and_the_caller_is_told() -> None:
    notes = Notes()
    async with InProcessMesh() as mesh:
        one, other = (
            await mesh.add(notes.agent("notes/one", hooks=False)),
            await mesh.add(notes.agent("notes/two", hooks=False)),
        )
        owner = (await tell(mesh, "s", "first")).source
        await mesh.remove(one if one.agent_id == owner else other)
        reply = await tell(mesh, "s", "second")
        assert reply.session_event == "LOST" and reply.data["notes"] == ["second"]


async def test_the_last_agent_leaves_its_conversations_for_whoever_comes_next() -> None:
    notes = Notes()
    async with InProcessMesh() as mesh:
        last = await mesh.add(notes.agent("notes/one"))
        await tell(mesh, "s", "first")
        await mesh.remove(last)
        await mesh.add(notes.agent("notes/two"))
        reply = await tell(mesh, "s", "second")
        assert reply.session_event == "MOVED" and reply.data["notes"] == ["first", "second"]


async def test_hooks_and_checkpoints_may_be_blocking_functions_and_states_have_types() -> None:
    seen: list[Tally] = []

    def agent(name: str) -> Agent:
        made = Agent(name, capabilities=["notes"])
        tallies: dict[str, Tally] = {}

        @made.handler
        def add(number: int, ctx: BlockingContext) -> int:
            tally = tallies.setdefault(ctx.session_id, Tally(0, []))
            tally.total += number
            tally.of.append(ctx.message_id)
            ctx.session.checkpoint(tally)
            return tally.total

        @made.on_session_release
        def release(session: Session) -> Tally:
            return tallies.pop(session.session_id)

        @made.on_session_restore
        def restore(session: Session, tally: Tally) -> None:
            seen.append(tally)
            tallies[session.session_id] = tally

        return made

    async with InProcessMesh() as mesh:
        agents = {name: await mesh.add(agent(name)) for name in ("notes/one", "notes/two")}
        first = await mesh.request(40, capabilities=["notes"], session="s", timeout=5)
        await mesh.remove(agents[first.source])
        assert (await mesh.request(2, capabilities=["notes"], session="s", timeout=5)).data == 42
    assert isinstance(seen[0], Tally) and seen[0].of[0] == first.message_id


async def test_a_state_over_its_limit_is_refused_where_it_is_made_and_a_blob_says_where_it_is() -> None:
    blob = Blob("file:///shared/s", 1 << 30, b"d" * 32)
    large, taken = "x" * (SESSION_STATE_BYTES_MAX + 1), []
    errors: list[Exception] = []

    def agent(name: str) -> Agent:
        made = Agent(name, capabilities=["notes"])

        @made.handler
        async def handle(data: str, ctx: Context) -> str:
            try:
                await ctx.session.checkpoint(large)
            except PayloadTooLarge as error:
                errors.append(error)
            return data

        @made.on_session_release
        async def release(session: Session) -> Blob:
            return blob

        @made.on_session_restore
        async def restore(session: Session, state: Blob) -> None:
            taken.append(state)

        return made

    async with InProcessMesh() as mesh:
        agents = {name: await mesh.add(agent(name)) for name in ("notes/one", "notes/two")}
        first = await mesh.request("x", capabilities=["notes"], session="s", timeout=5)
        await mesh.remove(agents[first.source])
        reply = await mesh.request("y", capabilities=["notes"], session="s", timeout=5)
        assert reply.session_event == "MOVED"
    assert taken == [blob]
    assert len(errors) == 2 and "262144" in str(errors[0]) and "Blob" in str(errors[0])


async def test_a_release_that_fails_at_an_agent_that_leaves_loses_the_state_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = Notes()

    def broken(name: str) -> Agent:
        agent = notes.agent(name)

        @agent.on_session_release
        async def release(session: Session) -> None:
            raise AgentError("the disk is full")

        return agent

    async with InProcessMesh() as mesh:
        agents = {name: await mesh.add(broken(name)) for name in ("notes/one", "notes/two")}
        first = await tell(mesh, "s", "first")
        await mesh.remove(agents[first.source])
        reply = await tell(mesh, "s", "second")
        assert reply.session_event == "LOST" and reply.data["notes"] == ["second"]
    assert "on_session_release" in caplog.text and "disk is full" in caplog.text


async def test_a_restore_that_fails_is_tried_elsewhere() -> None:
    notes, tried = Notes(), []
    async with InProcessMesh() as mesh:
        owner = await mesh.add(notes.agent("notes/owner"))
        await tell(mesh, "s", "first")
        for name in ("notes/one", "notes/two"):
            agent = notes.agent(name)
            good = agent._session_hooks.restore

            async def restore(session: Session, state: Any, good: Any = good) -> None:
                tried.append(session.epoch)
                if len(tried) == 1:
                    raise ValueError("not now")
                await good(session, state)

            agent._session_hooks.restore = restore
            await mesh.add(agent)
        await mesh.remove(owner)
        reply = await tell(mesh, "s", "second")
        assert reply.session_event == "MOVED" and reply.data["notes"] == ["first", "second"]
    assert len(tried) == 2 and tried[0] < tried[1]


async def test_a_checkpoint_needs_a_session_and_somebody_who_could_take_it_up() -> None:
    said: list[str] = []
    agent = Agent("notes", capabilities=["notes"])

    @agent.handler
    async def handle(data: str, ctx: Context) -> int:
        try:
            await ctx.session.checkpoint({})
        except (Rejected, RuntimeError) as error:
            said.append(str(error))
        return ctx.session.turn

    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        assert (await mesh.request("x", capabilities=["notes"], timeout=5)).data == 0
        assert (await mesh.request("x", capabilities=["notes"], session="s", timeout=5)).data == 1
        assert (await mesh.request("x", capabilities=["notes"], session="s", timeout=5)).data == 2
    assert "no session" in said[0] and "on_session_restore" in said[1]


def test_hooks_that_cannot_be_called_are_refused_where_they_are_declared() -> None:
    agent = Agent("notes")
    with pytest.raises(TypeError, match="without brackets"):
        agent.on_session_release(None)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="must take"):
        agent.on_session_restore(lambda session: None)
