"""Conversations go on when the process that has them ends (G1, G3): real processes and signals, real etcd too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import ConnectedMesh, Mesh, SessionLost, connect
from tests.support.agents import eventually, usable
from tests.support.cluster import node_cluster
from tests.support.etcd import start_etcd
from tests.support.node import NodeProcess, start_node
from tests.support.notetakers import NoteTaker, note_taker, overlaps_of, runs_of

TURNS = 12


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with start_node(snapshots_dir=str(tmp_path / "states"), resume_window_s=1, settle_min_s=0.5) as node:
        yield node


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.touch()
    return path


async def tell(mesh: Mesh, session: str, data: Any, **more: Any) -> Any:
    return await mesh.request(data, capabilities=["notes"], session=session, timeout=30, **more)


async def there(mesh: Mesh, *agent_ids: str) -> None:
    for agent_id in agent_ids:
        await usable(mesh, agent_id=agent_id)


async def killed(node: NodeProcess, one: NoteTaker) -> None:
    """SIGKILL, and wait until the node has seen it: what is sent in between may be lost with the process."""
    one.process.kill()
    await one.ended()

    async def seen() -> bool:
        return any(one.agent_id in line and "UNREACHABLE" in line for line in node.log.splitlines())

    await eventually(seen, "the node sees it")


async def talk(mesh: Mesh, session: str, events: Counter[Any]) -> None:
    """A conversation, turn by turn; each answer must hold all of it."""
    for turn in range(1, TURNS):
        reply = await tell(mesh, session, turn)
        assert reply.data["notes"] == list(range(turn + 1)) and reply.data["turn"] == turn + 1
        events[reply.session_event] += 1


async def test_sigterm_in_the_midst_of_fifty_conversations_costs_none_of_them_a_turn(
    node: NodeProcess, written: Path
) -> None:
    sessions = [f"s{number}" for number in range(50)]
    events: Counter[Any] = Counter()
    async with connect(node.grpc) as mesh:
        with note_taker(node.grpc, "notes/leaving", written, "--pace", "0.01") as leaving:
            await there(mesh, leaving.agent_id)
            for session in sessions:
                await tell(mesh, session, 0)
            with note_taker(node.grpc, "notes/one", written) as one, note_taker(node.grpc, "notes/two", written) as two:
                await there(mesh, one.agent_id, two.agent_id)
                async with asyncio.timeout(60), asyncio.TaskGroup() as talks:
                    for session in sessions:
                        talks.create_task(talk(mesh, session, events))
                    leaving.process.terminate()
                    assert await leaving.ended() == 0
                assert events == {"MOVED": 50, None: 50 * (TURNS - 2)}
    runs = runs_of(written)
    assert len(runs) == 50 * TURNS and set(runs.values()) == {1}
    assert overlaps_of(written) == []


async def test_sigkill_leaves_what_was_kept_and_of_the_rest_the_caller_is_told(
    node: NodeProcess, written: Path
) -> None:
    async with connect(node.grpc) as mesh:
        with note_taker(node.grpc, "notes/keeps", written, "--checkpoints") as keeps:
            await there(mesh, keeps.agent_id)
            assert (await tell(mesh, "kept", "first")).session_event == "STARTED"
            with note_taker(node.grpc, "notes/one", written) as one:
                await there(mesh, one.agent_id)
                await killed(node, keeps)
                async with asyncio.timeout(10):
                    reply = await tell(mesh, "kept", "second", strict_session=True)
                assert reply.session_event == "MOVED" and reply.source == one.agent_id
                assert reply.data == {"notes": ["first", "second"], "turn": 2}
                with note_taker(node.grpc, "notes/two", written) as two:
                    await there(mesh, two.agent_id)
                    await killed(node, one)  # which kept nothing of its own: there is what the first one had kept
                    async with asyncio.timeout(10):
                        reply = await tell(mesh, "kept", "third", strict_session=True)
                    assert reply.session_event == "MOVED" and reply.data["notes"] == ["first", "third"]


async def test_sigkill_without_anything_kept_is_told_as_lost_and_to_strict_callers_instead_of_an_answer(
    node: NodeProcess, written: Path
) -> None:
    async with connect(node.grpc) as mesh:
        with note_taker(node.grpc, "notes/one", written) as one:
            await there(mesh, one.agent_id)
            await tell(mesh, "s", "first")
            with note_taker(node.grpc, "notes/two", written) as two:
                await there(mesh, two.agent_id)
                await killed(node, one)
                async with asyncio.timeout(10):
                    with pytest.raises(SessionLost):
                        await tell(mesh, "s", "second", strict_session=True)
                    reply = await tell(mesh, "s", "third")
                assert reply.session_event == "LOST" and reply.data == {"notes": ["third"], "turn": 1}


async def test_the_only_agent_that_restarts_finds_its_conversations_again_also_after_its_node(
    node: NodeProcess, written: Path
) -> None:
    async with connect(node.grpc) as mesh:
        with note_taker(node.grpc, "notes/first", written) as first:
            await there(mesh, first.agent_id)
            await tell(mesh, "s", "first")
            first.process.terminate()
            assert await first.ended() == 0
        with note_taker(node.grpc, "notes/second", written) as second:
            await there(mesh, second.agent_id)
            reply = await tell(mesh, "s", "second")
            assert reply.session_event == "MOVED" and reply.data["notes"] == ["first", "second"]


async def test_over_two_nodes_and_etcd_conversations_outlive_their_agents_and_their_nodes(
    written: Path,
) -> None:
    """Callers at both nodes; one agent is told to leave, its heir is killed, then a node is."""
    sessions = [f"s{number}" for number in range(10)]
    events: Counter[Any] = Counter()
    with start_etcd() as etcd:
        async with (
            node_cluster(etcd, size=2, resume_window_s=2, settle_min_s=0.5) as nodes,
            connect(nodes[0].grpc, own_link=True) as zero,
            connect(nodes[1].grpc, own_link=True) as one,
        ):
            callers: list[ConnectedMesh] = [zero, one]
            first = f"{nodes[0].grpc},{nodes[1].grpc}"
            second = f"{nodes[1].grpc},{nodes[0].grpc}"
            with note_taker(first, "notes/a", written, "--checkpoints", "--pace", "0.01") as a:
                for each in callers:
                    await there(each, a.agent_id)
                for session in sessions:
                    await tell(zero, session, 0)
                with (
                    note_taker(second, "notes/b", written, "--checkpoints") as b,
                    note_taker(second, "notes/c", written, "--checkpoints") as c,
                ):
                    for each in callers:
                        await there(each, b.agent_id, c.agent_id)
                    async with asyncio.timeout(90), asyncio.TaskGroup() as talks:
                        for number, session in enumerate(sessions):
                            talks.create_task(talk(callers[number % 2], session, events))
                        a.process.terminate()
                        assert await a.ended() == 0
                    assert events == {"MOVED": 10, None: 10 * (TURNS - 2)}
                    await killed(nodes[1], b)
                    async with asyncio.timeout(60):
                        for number, session in enumerate(sessions):
                            reply = await tell(callers[number % 2], session, TURNS)
                            assert reply.data["notes"] == list(range(TURNS + 1)) and reply.source == c.agent_id
                            assert reply.session_event in (None, "MOVED")
                    nodes[1].kill()  # the home of who is left: it goes to the other node, and has all that it had
                    async with asyncio.timeout(60):
                        for number, session in enumerate(sessions):
                            reply = await tell(zero, session, "end")
                            assert reply.data["notes"] == [*range(TURNS + 1), "end"] and reply.source == c.agent_id
                            # Of every second one this caller has heard nothing since it was with the first agent.
                            assert reply.session_event == ("MOVED" if number % 2 else None)
    assert set(runs_of(written).values()) == {1}
    assert overlaps_of(written) == []
