"""A node of several dies, freezes or leaves: its agents and callers go on at another one, and nothing runs twice.

Real processes on a real etcd. Whoever is given a list of nodes is linked with the first; the node leases outlive every
test, so whoever is back is so because it came, and not because a record expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest

from agent_sdk import AgentLost, ConnectedMesh, Mesh, ReachError, connect
from tests.support.agents import BUSY_S, agent_process, eventually, make, name, nothing_in_flight, outcome, usable
from tests.support.cluster import NodeCluster, node_cluster
from tests.support.etcd import EtcdCluster, start_etcd

BACK_S = 5.0  # from the death of a node until its agents are reachable again
FROZEN_S = 8.0  # until pings find out that a node stands still


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture
async def nodes(etcd: EtcdCluster) -> AsyncIterator[NodeCluster]:
    settings = {"resume_window_s": 10, "node_lease_ttl_s": 20, "lease_ttl_s": 30, "heartbeat_interval_s": 1}
    async with node_cluster(etcd, 2, **settings) as nodes:
        yield nodes


@contextlib.asynccontextmanager
async def callers(nodes: NodeCluster) -> AsyncIterator[tuple[ConnectedMesh, ConnectedMesh]]:
    """One at the first node, which it may have to leave, and one at the second."""
    async with (
        connect(nodes.url, own_link=True) as first,
        connect(nodes.url_from(1), own_link=True) as second,
    ):
        assert (at(first), at(second)) == ("node-1", "node-2")
        yield first, second


def at(mesh: Mesh) -> str:
    """The node that a client is linked with."""
    return mesh._link().node_id


async def begun(worker: Any, count: int = 1) -> None:
    async def has() -> bool:
        return len(worker.runs()) >= count

    await eventually(has, f"{count} runs have begun")


class TestANodeIsKilled:
    """SIGKILL: no goodbye, no word to anybody."""

    async def test_its_agents_are_reachable_within_five_seconds_whatever_they_were_told_to_dial(
        self, nodes: NodeCluster
    ) -> None:
        """Half of them know one address only: the node has told them the other one."""
        async with callers(nodes) as (first, second), contextlib.AsyncExitStack() as fleet:
            ids = [name("fleet") for _ in range(10)]
            for place, agent_id in enumerate(ids):
                url = nodes.url if place % 2 else nodes[0].grpc
                await fleet.enter_async_context(make(agent_id, url, own_link=True))
            for agent_id in ids:
                await usable(second, agent_id=agent_id)
            nodes[0].kill()
            began = time.monotonic()
            await asyncio.gather(*(usable(second, agent_id=agent_id) for agent_id in ids))
            assert time.monotonic() - began < BACK_S + BUSY_S
            assert (await first.request("hi", agent_id=ids[0], timeout=10)).data == "hi"
            assert at(first) == "node-2"

    async def test_who_was_linked_with_the_only_node_there_was_has_heard_of_the_second_before_anybody_comes_by_it(
        self, etcd: EtcdCluster
    ) -> None:
        """The next heartbeat, which would tell it too, comes too late here."""
        settings = {"resume_window_s": 10, "node_lease_ttl_s": 20, "lease_ttl_s": 120, "heartbeat_interval_s": 40}
        async with node_cluster(etcd, 2, **settings) as nodes:
            assert await nodes[1].term() == 0
            agent_id = name("early")
            async with make(agent_id, nodes[0].grpc, own_link=True):
                await nodes[1].restart()
                async with connect(nodes.url_from(1), own_link=True) as second:
                    await usable(second, agent_id=agent_id)
                    nodes[0].kill()
                    began = time.monotonic()
                    await usable(second, agent_id=agent_id)
                    assert time.monotonic() - began < BACK_S + BUSY_S

    @pytest.mark.parametrize(
        ("caller_at", "agent_at"), [(0, 0), (0, 1), (1, 0)], ids=["both-at-it", "caller-at-it", "agent-at-it"]
    )
    async def test_a_request_under_way_ends_with_its_answer_and_runs_once(
        self, nodes: NodeCluster, caller_at: int, agent_at: int
    ) -> None:
        agent_id = name("slow")
        with agent_process(nodes.url_from(agent_at), agent_id) as worker:
            async with callers(nodes) as meshes:
                mesh = meshes[caller_at]
                await usable(mesh, agent_id=agent_id)
                call = asyncio.create_task(mesh.request({"n": 7, "sleep": 6}, agent_id=agent_id, timeout=30))
                await begun(worker)
                nodes[0].kill()
                assert (await asyncio.wait_for(call, 35)).data == 7
                await nothing_in_flight(nodes[1])
            assert worker.runs() == ["7"]

    async def test_of_many_requests_under_way_each_ends_before_its_time_and_none_runs_twice(
        self, nodes: NodeCluster
    ) -> None:
        ids = [name("many") for _ in range(2)]
        with contextlib.ExitStack() as processes:
            workers = [
                processes.enter_context(agent_process(nodes.url_from(place), agent_id))
                for place, agent_id in enumerate(ids)
            ]
            async with callers(nodes) as meshes:
                for mesh in meshes:
                    for agent_id in ids:
                        await usable(mesh, agent_id=agent_id)
                calls = [
                    asyncio.create_task(
                        outcome(meshes[n % 2], {"n": n, "sleep": 2}, agent_id=ids[n // 2 % 2], timeout=20)
                    )
                    for n in range(80)
                ]
                await begun(workers[0], 40)
                await begun(workers[1], 40)
                nodes[0].kill()
                began = time.monotonic()
                found = await asyncio.gather(*calls)
                assert time.monotonic() - began < 20
                assert found == ["OK"] * 80
            runs = [int(run) for worker in workers for run in worker.runs()]
            assert sorted(runs) == list(range(80))

    async def test_a_conversation_goes_on_in_order_with_its_owner(self, nodes: NodeCluster) -> None:
        """What waited for its turn at the dead node may be told to be lost, since nobody can know; it does not run."""
        agent_type = name("talker").partition("/")[0] + "-" + name("x").partition("/")[2]
        with (
            agent_process(nodes.url, f"{agent_type}/1") as one,
            agent_process(nodes.url_from(1), f"{agent_type}/2") as two,
        ):
            async with callers(nodes) as (first, _):
                for number in (1, 2):
                    await usable(first, agent_id=f"{agent_type}/{number}")
                how: dict[str, Any] = {"agent_type": agent_type, "session": "s", "timeout": 30}
                owner = (await first.request({"n": 0, "who": 1}, **how)).data
                calls = [asyncio.create_task(outcome(first, {"n": n, "sleep": 0.2}, **how)) for n in range(1, 16)]
                await begun(one if owner.endswith("/1") else two, 4)
                nodes[0].kill()
                found = await asyncio.gather(*calls)
                assert set(found) <= {"OK", "AGENT_LOST"} and found[:2] == ["OK"] * 2, found
                assert (await first.request({"n": 16, "who": 1}, **how)).data == owner
            runs = [int(run) for run in (one if owner.endswith("/1") else two).runs()]
            answered = [n for n, code in enumerate(["OK", *found, "OK"]) if code == "OK"]
            assert runs == sorted(set(runs)) and set(answered) <= set(runs), (runs, answered)

    async def test_a_streamed_reply_goes_on_or_says_after_how_many_items_it_was_lost(self, nodes: NodeCluster) -> None:
        agent_id, items = name("streamer"), []
        with agent_process(nodes.url_from(1), agent_id, "--capabilities", "stream") as worker:
            async with callers(nodes) as (first, _):
                await usable(first, agent_id=agent_id)
                lost: ReachError | None = None
                try:
                    async for item in first.stream(
                        {"n": 1, "stream": 60, "pause": 0.1}, capabilities=["stream"], timeout=40
                    ):
                        items.append(item)
                        if len(items) == 10:
                            nodes[0].kill()
                except AgentLost as error:
                    lost = error
                assert items == list(range(len(items)))
                if lost is None:
                    assert len(items) == 60
                else:
                    assert lost.may_have_executed and int(lost.details["items"]) == len(items)
            assert worker.runs() == ["1"]

    async def test_subscriptions_of_agents_and_callers_are_renewed(self, nodes: NodeCluster) -> None:
        topic, agent_id = name("news").replace("/", "-"), name("listener")
        with agent_process(nodes.url, agent_id, "--topic", topic) as worker:
            async with callers(nodes) as (first, second), first.subscribe(topic) as events:
                await usable(second, agent_id=agent_id)
                nodes[0].kill()

                async def both_hear() -> bool:
                    told = await second.publish(topic, {"n": 0}, timeout=2)
                    return told.accepted >= 2

                await eventually(both_hear, "both have subscribed again", limit_s=20)
                assert (await asyncio.wait_for(anext(aiter(events)), 5)).data == {"n": 0}
                await begun(worker)


async def test_a_frozen_node_is_left_after_eight_seconds_and_what_it_had_is_answered_elsewhere(
    nodes: NodeCluster,
) -> None:
    agent_id = name("thawed")
    with agent_process(nodes.url, agent_id) as worker:
        async with callers(nodes) as (first, second):
            await usable(second, agent_id=agent_id)
            call = asyncio.create_task(first.request({"n": 3, "sleep": 1}, agent_id=agent_id, timeout=40))
            await begun(worker)
            nodes[0].pause()
            began = time.monotonic()
            await usable(second, agent_id=agent_id)
            assert time.monotonic() - began < FROZEN_S + BACK_S + BUSY_S
            assert (await call).data == 3
            assert at(first) == "node-2"
            nodes[0].resume()
            await nodes[0].ready()
            assert (await second.request("still", agent_id=agent_id, timeout=10)).data == "still"
        assert worker.runs() == ["3"]


async def test_a_node_that_leaves_under_load_costs_nobody_a_request(nodes: NodeCluster) -> None:
    """SIGTERM: its agents and callers go to the other node, what is under way ends where it is."""
    ids = [name("steady").partition("/")[0] + f"/{n}" for n in range(4)]
    with contextlib.ExitStack() as processes:
        workers = [processes.enter_context(agent_process(nodes.url_from(n % 2), each)) for n, each in enumerate(ids)]
        async with callers(nodes) as meshes:
            for mesh in meshes:
                for agent_id in ids:
                    await usable(mesh, agent_id=agent_id)
            calls: list[asyncio.Task[str]] = []

            async def load(for_s: float) -> None:
                over = time.monotonic() + for_s
                while time.monotonic() < over:
                    for mesh in meshes:
                        data = {"n": len(calls), "sleep": 0.1}
                        calls.append(asyncio.create_task(outcome(mesh, data, agent_type="steady", timeout=20)))
                    await asyncio.sleep(0.02)

            async def roll() -> None:
                for node in nodes:
                    assert await node.end(signal.SIGTERM, 30) == 0
                    await node.restart()
                    for mesh in meshes:
                        for agent_id in ids:
                            await usable(mesh, agent_id=agent_id)

            loading = asyncio.create_task(load(20))
            await roll()
            await loading
            found = await asyncio.gather(*calls)
            assert {code: found.count(code) for code in set(found)} == {"OK": len(found)}
        runs = [int(run) for worker in workers for run in worker.runs()]
        assert sorted(runs) == list(range(len(calls)))


async def test_the_only_agent_of_its_kind_is_not_missed_in_a_rolling_restart(nodes: NodeCluster) -> None:
    agent_id = name("only")
    with agent_process(nodes.url, agent_id) as worker:
        async with callers(nodes) as meshes:
            for mesh in meshes:
                await usable(mesh, agent_id=agent_id)
            codes: list[str] = []

            async def ask(mesh: Mesh) -> None:
                while not over.is_set():
                    codes.append(await outcome(mesh, {"n": len(codes)}, agent_id=agent_id, timeout=10))
                    await asyncio.sleep(0.01)

            over = asyncio.Event()
            asking = [asyncio.create_task(ask(mesh)) for mesh in meshes]
            for node in nodes:
                assert await node.end(signal.SIGTERM, 30) == 0
                await node.restart()
                await usable(meshes[0], agent_id=agent_id)
            over.set()
            await asyncio.gather(*asking)
            assert {code: codes.count(code) for code in set(codes)} == {"OK": len(codes)}
        assert len(worker.runs()) == len(codes)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_of_a_fleet_at_two_nodes_no_second_after_a_loss_brings_a_quarter(nodes: NodeCluster) -> None:
    """K1: half of 500 links come from the killed node to the other one, over a while, and soon."""
    count = 500
    async with contextlib.AsyncExitStack() as links:
        for begin in range(0, count, 50):
            fleet = (make(f"fleet/{n}", nodes.url_from(n % 2), own_link=True) for n in range(begin, begin + 50))
            await asyncio.gather(*(links.enter_async_context(agent) for agent in fleet))

        async def there() -> float:
            return await nodes[1].metric("reach_agents")

        async def half() -> bool:
            return await there() >= count / 2

        await eventually(half, "they are there", limit_s=60)
        nodes[0].kill()
        began, seconds = time.monotonic(), [await there()]
        while seconds[-1] < count:
            assert time.monotonic() - began < 15
            await asyncio.sleep(1)  # what is counted is what one second brings
            seconds.append(await there())
        arrived = [later - earlier for earlier, later in pairwise(seconds)]
        assert max(arrived) < count / 4, arrived
