"""What operators ask and order, at any of several nodes: the answer is that of all of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, Context, HopLimit, connect
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1.registry_pb2 import HEALTHY, ListAgentsRequest
from reach.adapters.admin_client import AdminClient
from reach.core.ports import MeshFailure
from tests.support.agents import AgentProcess, agent_process, eventually, outcome, usable
from tests.support.cluster import ClusterNode, NodeCluster, node_cluster
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.notetakers import note_taker

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture(scope="module")
def running(etcd: EtcdCluster) -> Iterator[NodeCluster]:
    """Three nodes, an agent at each: worker/1 at node-1, and so on."""
    # A node that stands still for seconds is still one; and agents that ask agents leave dead letters.
    nodes = node_cluster(etcd, node_lease_ttl_s=20, max_hops=1)
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
async def nodes(running: NodeCluster) -> AsyncIterator[NodeCluster]:
    """The nodes, all ready and linked with each other before the test."""
    await running.ready()
    for node in running:
        await linked(node, 2)
    yield running


@pytest.fixture
async def workers(nodes: NodeCluster) -> AsyncIterator[list[AgentProcess]]:
    """worker/1, worker/2, worker/3: each at the node of its number, and known to all of them."""
    with (
        agent_process(nodes[0].grpc, "worker/1") as first,
        agent_process(nodes[1].grpc, "worker/2") as second,
        agent_process(nodes[2].grpc, "worker/3") as third,
    ):
        for node in nodes:
            await known(node, 3)
        yield [first, second, third]


async def linked(node: ClusterNode, others: int) -> None:
    async def all_are() -> bool:
        async with AdminClient([node.grpc]) as client:
            reply = await client.list_nodes()
        return sum(state.linked for state in reply.states) == others + 1

    await eventually(all_are, f"{node.node_id} is linked with {others} others")


async def known(node: ClusterNode, workers: int) -> None:
    async def all_are() -> bool:
        async with AdminClient([node.grpc]) as client:
            request = ListAgentsRequest()
            request.target.agent_type = "worker"
            return sum(record.status == HEALTHY for record in await client.list_agents(request)) == workers

    await eventually(all_are, f"{node.node_id} knows {workers} workers")


def reach(node: ClusterNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments], capture_output=True, text=True, timeout=LIMIT_S,
        env={**environment, "REACH_URL": node.grpc}, check=False,
    )  # fmt: skip


async def reached(node: ClusterNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same while this test's loop turns."""
    return await asyncio.to_thread(reach, node, *arguments)


class TestQuestions:
    async def test_a_trace_shows_a_message_once_with_the_stages_of_both_nodes_wherever_one_asks(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        async with connect(nodes[0].grpc) as mesh:
            reply = await mesh.request({"n": 1}, agent_id="worker/2", timeout=10)
        for node in nodes:
            async with AdminClient([node.grpc]) as client:
                trace = await client.get_trace(reply.trace_id)
            assert not trace.silent_nodes
            (message,) = trace.messages
            assert (message.agent_id, message.outcome) == ("worker/2", "OK")
            assert {stage.node_id for stage in message.stages} == {"node-1", "node-2"}
            offsets = [stage.offset_us for stage in message.stages]
            assert offsets == sorted(offsets)
            assert message.stages[0].node_id == "node-1"  # the entry received it first

    async def test_sessions_are_listed_with_their_homes_wherever_one_asks(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        async with connect(nodes[0].grpc) as mesh:
            for number in range(30):
                await mesh.request({"n": number}, agent_type="worker", session=f"s{number}", timeout=10)
        for node in nodes:
            async with AdminClient([node.grpc]) as client:
                reply = await client.list_sessions(admin.ListSessionsRequest(agent_type="worker"))
                few = await client.list_sessions(admin.ListSessionsRequest(limit=7))
                one = await client.list_sessions(admin.ListSessionsRequest(session_id="s3"))
            assert {info.session_id for info in reply.sessions} == {f"s{number}" for number in range(30)}
            assert len(reply.sessions) == 30
            assert {(info.agent_id, info.node_id) for info in reply.sessions} == {
                ("worker/1", "node-1"), ("worker/2", "node-2"), ("worker/3", "node-3")
            }  # fmt: skip
            assert [info.idle_s for info in reply.sessions] == sorted(info.idle_s for info in reply.sessions)
            assert len(few.sessions) == 7
            assert [info.session_id for info in one.sessions] == ["s3"]

    async def test_a_node_that_stands_still_is_named_and_costs_a_second(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        nodes[2].pause()
        try:
            async with AdminClient([nodes[0].grpc]) as client:
                began = time.monotonic()
                reply = await client.list_sessions(admin.ListSessionsRequest())
                assert time.monotonic() - began < 1.8
                assert list(reply.silent_nodes) == ["node-3"]
                assert list((await client.list_dead_letters()).silent_nodes) == ["node-3"]
            told = await reached(nodes[1], "sessions")
            assert "not complete: no answer from node-3" in told.stderr
        finally:
            nodes[2].resume()
        async with AdminClient([nodes[0].grpc]) as client:

            async def complete() -> bool:
                return not (await client.list_sessions(admin.ListSessionsRequest())).silent_nodes

            await eventually(complete, "node-3 answers again")

    async def test_every_node_tells_of_all_nodes_and_of_the_same_leader(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        leaders = set()
        for node in nodes:
            told = await reached(node, "nodes", "--json")
            assert told.returncode == 0, told.stderr
            reply = json.loads(told.stdout)
            assert [each["nodeId"] for each in reply["nodes"]] == ["node-1", "node-2", "node-3"]
            assert [each["address"] for each in reply["nodes"]] == [each.grpc for each in nodes]
            assert [state["agents"] for state in reply["states"]] == [1, 1, 1]
            assert all(state["linked"] for state in reply["states"])
            leaders.add(reply["leaderId"])
            table = (await reached(node, "nodes")).stdout
            assert all(word in table for word in ("NODE", "node-1", nodes[1].grpc, "LEADER"))
        assert len(leaders) == 1 and leaders <= {"node-1", "node-2", "node-3"}


class TestOrders:
    async def test_an_agent_is_drained_by_whichever_node_is_asked(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        told = await reached(nodes[0], "drain", "worker/3")
        assert told.returncode == 0, told.stderr
        assert "worker/3 has drained and left" in told.stdout
        assert await workers[2].ended() == 0

    async def test_an_agent_that_nobody_has_is_refused_by_name(self, nodes: NodeCluster) -> None:
        told = await reached(nodes[0], "drain", "nobody/1")
        assert told.returncode == 1
        assert "NO_ROUTE: no agent 'nobody/1'" in told.stderr

    async def test_a_breaker_is_reset_on_every_node(self, nodes: NodeCluster, workers: list[AgentProcess]) -> None:
        async with connect(nodes[0].grpc) as one, connect(nodes[1].grpc) as other:
            how = {"agent_id": "worker/2", "timeout": 1.5}
            hanging = [outcome(mesh, {"forever": True}, **how) for mesh in (one, other) for _ in range(5)]
            assert set(await asyncio.gather(*hanging)) == {"TIMEOUT"}
        async with AdminClient([nodes[2].grpc]) as client:
            tripped = await client.list_breakers(10)
            assert {(info.agent_id, info.node_id) for info in tripped.breakers} == {
                ("worker/2", "node-1"), ("worker/2", "node-2")
            }  # fmt: skip
            assert not (await client.reset_breaker(admin.ResetBreakerRequest(agent_id="worker/2"))).silent_nodes
            assert not (await client.list_breakers(10)).breakers
            with pytest.raises(MeshFailure, match="no agent 'worker/9'"):
                await client.reset_breaker(admin.ResetBreakerRequest(agent_id="worker/9"))

    async def test_a_dead_letter_is_found_and_redriven_from_another_node(
        self, nodes: NodeCluster, workers: list[AgentProcess]
    ) -> None:
        planner = Agent("planner/1", url=nodes[0].grpc, drain_timeout=1.0)

        @planner.handler
        async def plan(data: Any, ctx: Context) -> Any:
            return (await ctx.request({"n": 7}, agent_id="worker/2", message_id="the-letter")).data

        async with planner, connect(nodes[0].grpc) as mesh:
            await usable(mesh, agent_id="worker/2")
            with pytest.raises(HopLimit):
                await mesh.request("go", agent_id="planner/1", timeout=10)
        async with AdminClient([nodes[2].grpc]) as client:
            (letter,) = (await client.list_dead_letters(message_id="the-letter")).dead_letters
            assert letter.reason == "HOP_LIMIT"
            assert letter.node_id in ("node-1", "node-2")  # the entry or the home, whoever refused it
            again = await client.redrive_dead_letter(admin.RedriveDeadLetterRequest(message_id="the-letter"))
            (letter,) = (await client.list_dead_letters(message_id="the-letter")).dead_letters
            assert letter.redriven_as == again.message_id

            async def ran() -> bool:
                return workers[1].runs() == ["7"]

            await eventually(ran, "worker/2 got it")
            with pytest.raises(MeshFailure, match="was sent once more before"):
                await client.redrive_dead_letter(admin.RedriveDeadLetterRequest(message_id="the-letter"))
            with pytest.raises(MeshFailure, match="no dead letter 'unknown'"):
                await client.redrive_dead_letter(admin.RedriveDeadLetterRequest(message_id="unknown"))

    async def test_a_conversation_is_released_by_whichever_node_is_asked_and_goes_on_at_another_one(
        self, nodes: NodeCluster, tmp_path: Path
    ) -> None:
        written = tmp_path / "runs"
        written.touch()
        with (
            note_taker(nodes[0].grpc, "notes/1", written, "--checkpoints"),
            note_taker(nodes[1].grpc, "notes/2", written, "--checkpoints"),
        ):
            async with connect(nodes[0].grpc) as mesh:
                await usable(mesh, agent_id="notes/1")
                await usable(mesh, agent_id="notes/2")
                first = await mesh.request("one", agent_type="notes", session="ada", timeout=10)
                told = await reached(nodes[2], "sessions", "--session", "ada", "--json")
                (info,) = json.loads(told.stdout)["sessions"]
                assert (info["agentId"], info["turn"]) == (first.source, "1")
                told = await reached(nodes[2], "sessions", "release", "ada", "--type", "notes")
                assert told.returncode == 0, told.stderr
                assert f"session ada leaves {first.source}" in told.stdout
                second = await mesh.request("two", agent_type="notes", session="ada", timeout=10)
                assert second.source != first.source and second.data["notes"] == ["one", "two"]
            told = await reached(nodes[2], "sessions", "release", "nobody", "--type", "notes")
            assert told.returncode == 1 and "NO_ROUTE" in told.stderr

    async def test_a_node_is_drained_by_name_from_another_one(self, nodes: NodeCluster) -> None:
        told = await reached(nodes[0], "drain", "--node", "node-2", "--reason", "tried")
        assert told.returncode == 0, told.stderr
        assert "node node-2 has drained and left" in told.stdout
        assert await asyncio.to_thread(nodes[1].process.wait, LIMIT_S) == 0
        assert nodes[0].running and nodes[2].running

    async def test_a_node_that_nobody_knows_is_refused_with_those_that_are(self, nodes: NodeCluster) -> None:
        told = await reached(nodes[0], "drain", "--node", "node-9")
        assert told.returncode == 1
        assert "there is no node node-9; those known here are node-1, node-2, node-3" in told.stderr
