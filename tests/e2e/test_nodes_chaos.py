"""Nodes that are killed, that stand still, that are replaced, under load: nothing is lost, nothing runs twice.

Three nodes on three etcd members, four agents, callers at every node; all of them processes. What is asked all the
time are requests that may run twice and that may not, messages with ids of their own, streamed replies, and
conversations. Books outside of the mesh say how often each ran, who had which session when, and who led
(`tests.support.ordeal`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_sdk import Mesh, ReachError, connect
from tests.support.agents import eventually
from tests.support.dialled import CAN_TELL
from tests.support.etcd_cluster import etcd_cluster
from tests.support.node_wires import wired_nodes
from tests.support.ordeal import LEASE_S, TIMES, Ordeal
from tools.faultproxy import FaultProxy

pytestmark = [
    pytest.mark.skipif(not CAN_TELL, reason="which process dialled cannot be told here"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ordeal]:
    with etcd_cluster() as etcd:
        nodes = wired_nodes(etcd, **TIMES)
        try:
            ordeal = Ordeal(etcd, nodes, Path(tmp_path_factory.mktemp("ordeal")))
            asyncio.run(nodes.ready())
            with ordeal.agents():
                yield ordeal
        finally:
            nodes.close()


@pytest.fixture
async def ordeal(shared: Ordeal) -> AsyncIterator[Ordeal]:
    """All is up before the test; if it fails, the ends of the nodes' logs are shown."""
    await shared.ready()
    yield shared
    print(shared.nodes.logs())


@pytest.mark.parametrize("who", ["the leader", pytest.param("a follower", marks=pytest.mark.soak)])
async def test_a_killed_node_loses_nothing_and_nothing_runs_twice(ordeal: Ordeal, who: str) -> None:
    async with ordeal.under_load() as load:
        leader = await ordeal.leader()
        node = leader if who == "the leader" else ordeal.nodes.others(leader)[0]
        node.kill()
        await load.more(100)
        await node.restart()
        await load.more(50)
    await ordeal.check(stream={"AGENT_LOST"})


@pytest.mark.soak  # in its short form: the storm; without sessions: test_fail_over.py
@pytest.mark.parametrize("who", ["the leader", "a follower"])
async def test_a_node_that_stands_still_for_longer_than_its_lease_runs_nothing_twice(ordeal: Ordeal, who: str) -> None:
    """What it may have run cannot be known while it cannot be asked: after ten seconds that is said (AGENT_LOST)."""
    async with ordeal.under_load() as load:
        leader = await ordeal.leader()
        node = leader if who == "the leader" else ordeal.nodes.others(leader)[0]
        node.pause()
        await load.lasts(LEASE_S + 2)
        node.resume()
        await load.more(100)
    await ordeal.check(stream={"AGENT_LOST"}, named={"AGENT_LOST"}, request={"AGENT_LOST"})


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.soak)])
async def test_of_fifty_copies_over_three_nodes_one_runs_whatever_breaks(ordeal: Ordeal, kills: int) -> None:
    """F1: cut streams, then killed nodes."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.grpc)) for node in ordeal.nodes]
        meshes = [
            await stack.enter_async_context(connect(proxy.address, own_link=True, timeout=30))
            for proxy in proxies
            for _ in range(17)
        ]
        breaks = [lambda: [proxy.reset() for proxy in proxies], *(node.kill for node in ordeal.nodes.nodes[:kills])]
        for number, break_it in zip(ordeal.book.numbers(len(breaks)), breaks, strict=True):

            async def ask(mesh: Mesh, number: int = number) -> object:
                data = {"n": number, "sleep": 1.0}
                name = f"{ordeal.kind}-copy-{number}"
                try:
                    return (await mesh.request(data, agent_type=ordeal.kind, timeout=20, message_id=name)).data
                except ReachError as error:
                    assert error.may_have_executed, error
                    return error.code

            asked = [asyncio.create_task(ask(mesh)) for mesh in meshes]

            async def began(number: int = number) -> bool:
                return ordeal.book.runs()[number] > 0

            await eventually(began, "it has begun")
            break_it()
            found = Counter(await asyncio.gather(*asked))
            assert found.keys() <= {number, "AGENT_LOST"} and found[number], found
            assert ordeal.book.runs()[number] == 1
            await ordeal.ready()
    await ordeal.settled()


async def test_replacing_every_node_under_load_loses_nothing_and_nothing_runs_twice(ordeal: Ordeal) -> None:
    async with ordeal.under_load() as load:
        for node in ordeal.nodes:
            assert await node.term() == 0
            await node.restart()
            await load.more(30)
    await ordeal.check()
