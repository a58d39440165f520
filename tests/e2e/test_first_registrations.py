"""First registrations over real nodes: any node takes them, the leader decides, and its death delays nobody known."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from agentreach.v1 import error_pb2 as codes
from reach.adapters.admin_client import AdminClient
from tests.support.agents import BUSY_S, make
from tests.support.cluster import ClusterNode, NodeCluster, node_cluster
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.rawlink import raw_link

TTL_S = 5.0  # the election's, as nodes have it; the other leases outlive the test
TIMES = {"election_ttl_s": TTL_S, "node_lease_ttl_s": 20.0}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with start_etcd() as etcd:
        yield etcd


async def leader_of(nodes: NodeCluster, *without: ClusterNode) -> ClusterNode:
    """Wait until the nodes agree who leads."""
    async with asyncio.timeout(20):
        while True:
            said = set()
            for node in nodes.others(*without):
                async with AdminClient([node.grpc]) as client:
                    said.add((await client.list_nodes()).leader_id)
            if len(said) == 1 and "" not in said:
                return nodes.by_id(said.pop())
            await asyncio.sleep(0.05)


async def registers(node: ClusterNode, agent_id: str) -> codes.Error:
    """What a process is told that attaches this agent there and goes."""
    async with raw_link(node.grpc, agents=[agent_id]) as link:
        return link.welcome.agents[0].error


async def test_any_node_takes_a_newcomer(etcd: EtcdCluster) -> None:
    async with node_cluster(etcd, 3, registry_prefix="/any/", **TIMES) as nodes:
        await leader_of(nodes)
        for number, node in enumerate(nodes):
            assert (await registers(node, f"new/{number}")).code == 0
        pages = [(await asyncio.to_thread(node.get, "/metrics"))[1] for node in nodes]
        assert sorted("reach_leader 1.0" in page for page in pages) == [False, False, True]


async def test_when_the_leader_is_killed_the_known_do_not_wait_and_newcomers_not_long(etcd: EtcdCluster) -> None:
    async with node_cluster(etcd, 3, registry_prefix="/killed/", **TIMES) as nodes:
        leader = await leader_of(nodes)
        one, other = nodes.others(leader)
        async with raw_link(one.grpc, agents=["known/1"]) as link:
            assert link.welcome.agents[0].generation
            leader.kill()
            killed = time.monotonic()
            newcomer = asyncio.create_task(registers(other, "new/1"))
            assert (await registers(other, "known/1")).code == 0
            assert time.monotonic() - killed < 1 + BUSY_S
            assert not newcomer.done()
            assert (await newcomer).code == 0
            assert time.monotonic() - killed < TTL_S + 2 + BUSY_S


async def test_a_new_process_waits_for_a_leader_longer_than_for_a_node(etcd: EtcdCluster) -> None:
    """A node that is reached says nothing until it has registered the agent, which is no reason to give it up."""
    times = TIMES | {"election_ttl_s": 7.0}
    async with node_cluster(etcd, 3, registry_prefix="/patient/", **times) as nodes:
        leader = await leader_of(nodes)
        leader.kill()
        async with make("new/1", nodes.others(leader)[0].grpc):
            pass


async def test_when_the_leader_leaves_newcomers_hardly_wait(etcd: EtcdCluster) -> None:
    async with node_cluster(etcd, 3, registry_prefix="/left/", **TIMES) as nodes:
        leader = await leader_of(nodes)
        leader.process.send_signal(signal.SIGTERM)
        await leader_of(nodes, leader)
        began = time.monotonic()
        assert (await registers(nodes.others(leader)[0], "new/1")).code == 0
        assert time.monotonic() - began < 1 + BUSY_S
        assert await asyncio.to_thread(leader.process.wait, 20) == 0
