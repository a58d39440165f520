"""Several nodes' views on real etcd: outages longer than a lease, lost leases, moves during a cut, compaction.

The nodes run in this process, so that what each knows can be looked at; every node has wires of its own to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import pytest

from agent_sdk import Agent, Mesh, NoRoute, RegistryUnavailable, connect
from agentreach.aio.clock import boot_time
from agentreach.v1.error_pb2 import REGISTRY_UNAVAILABLE
from agentreach.v1.registry_pb2 import AgentRecord, GetAgentRequest, ListAgentsRequest
from reach.adapters.etcd import EtcdStore
from reach.core.ports import ANYBODY, MeshFailure
from reach.core.store import Delete, Item, Operation, Put
from tests.support.agents import eventually
from tests.support.etcd_cluster import WiredEtcd, etcd_cluster
from tests.support.node import Node, config, running
from tests.support.stores import connected

LEASE_S = 2.0  # QUICK's node_lease_ttl_s
MENDED_S = 5.0  # "within 5 s of etcd being reachable"
BUSY_S = 10.0  # what a machine whose cores are all taken adds

_prefixes = count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[WiredEtcd]:
    """One member behind wires; each test has a prefix of its own, and heals what it cuts."""
    with etcd_cluster(1) as etcd:
        yield etcd


@pytest.fixture
async def store(etcd: WiredEtcd) -> AsyncIterator[EtcdStore]:
    """What the test sees of etcd."""
    async with connected(etcd, prefix=f"/views-{next(_prefixes)}/") as store:
        yield store


@contextlib.asynccontextmanager
async def nodes(etcd: WiredEtcd, store: EtcdStore, size: int = 2, **more: Any) -> AsyncIterator[list[Node]]:
    """Nodes `n0`, `n1`, … that all see each other."""
    async with contextlib.AsyncExitStack() as stack:
        prefix = store._codec.key("").decode()
        made = []
        for number in range(size):
            name = f"n{number}"
            settings = {"registry": etcd.registry_for(name), "registry_prefix": prefix, "node_id": name, **more}
            made.append(await stack.enter_async_context(running(config(**settings))))

        async def linked() -> bool:
            return all(sum(node.connected for node in each.engine.state.nodes.values()) == size - 1 for each in made)

        await eventually(linked, "every node is linked with every other", BUSY_S)
        yield made


@contextlib.asynccontextmanager
async def echo(node: Node, name: str = "echo") -> AsyncIterator[Agent]:
    """An agent in this process that returns what it gets, attached to this node alone."""
    agent = Agent(name, url=node.grpc_address, own_link=True)

    @agent.handler
    async def answer(data: Any) -> Any:
        return data

    async with agent:
        yield agent


async def reached(mesh: Mesh, agent_type: str, limit_s: float = BUSY_S) -> None:
    """Wait until an agent of this type can be used from there."""

    async def answers() -> bool:
        try:
            return bool((await mesh.request("x", agent_type=agent_type, timeout=2)).data == "x")
        except Exception:
            return False

    await eventually(answers, f"{agent_type} can be used", limit_s)


@contextlib.asynccontextmanager
async def traffic(mesh: Mesh, agent_type: str) -> AsyncIterator[list[float]]:
    """Requests one after another while the block runs, each answered; gives the times of the answers."""
    answers: list[float] = []
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            await mesh.request("x", agent_type=agent_type, timeout=5)
            answers.append(boot_time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.03):
                    await over.wait()

    task = asyncio.create_task(ask(), name="traffic")
    try:
        yield answers
        over.set()
        await task
    finally:
        task.cancel()


async def records(store: EtcdStore) -> dict[str, AgentRecord]:
    """The agents' records, by key."""
    return {item.key: AgentRecord.FromString(item.value) for item in (await store.list("agents/")).items}


@contextlib.contextmanager
def agent_process(url: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`reach test-agent` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "reach.cli", "test-agent", "--url", url, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def test_nodes_see_each_other_and_each_others_agents_and_how_old_that_is(
    etcd: WiredEtcd, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (one, other), connect(one.grpc_address, own_link=True) as mesh:
        async with echo(other) as agent:
            await reached(mesh, "echo")
            for node in (one, other):
                reply = node.engine.list_agents(ListAgentsRequest(), ANYBODY)
                assert [(each.agent_id, each.node_id) for each in reply.agents] == [(agent.agent_id, "n1")]
                assert reply.age_ms == 0 and node.engine.get_node().registry_age_ms == 0
                state = node.engine.state
                assert state.node_addresses == {"n0": one.grpc_address, "n1": other.grpc_address}
            assert one.engine.state.peer_addresses == (other.grpc_address,)

            written = (await store.txn([], [Put("pins/of/somebody", b"x")])).revision

            async def fresh() -> bool:
                return one.engine.get_node().revision >= written

            await eventually(fresh, "the view is known to be as new as a key that it does not watch", 3.0 + BUSY_S)

        async def gone() -> bool:
            return not one.engine.list_agents(ListAgentsRequest(), ANYBODY).agents

        await eventually(gone, "the agent left")
        with pytest.raises(NoRoute):
            await mesh.request("x", agent_id=agent.agent_id, timeout=2)


async def test_traffic_between_nodes_outlives_an_outage_longer_than_the_lease_and_all_keys_come_back(
    etcd: WiredEtcd, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (one, other), connect(one.grpc_address, own_link=True) as mesh, echo(other):
        await reached(mesh, "echo")
        before = {item.key: item.lease for item in (await store.list("")).items if item.lease}
        before = {key: lease for key, lease in before.items() if not key.startswith("election/")}
        async with traffic(mesh, "echo") as answers:
            etcd.members[0].stop()

            async def away() -> bool:
                return one.engine.registry_age() > LEASE_S + 1.0

            await eventually(away, "the outage is longer than the lease", 30.0)
            assert one.engine.list_agents(ListAgentsRequest(), ANYBODY).age_ms > 1000 * LEASE_S
            assert one.engine.ready
            with pytest.raises(NoRoute):
                await mesh.request("x", agent_type="nobody", timeout=2)
            asked = len(answers)
            await etcd.members[0].restart()

            async def back() -> bool:
                found = {item.key: item.lease for item in (await store.list("")).items}
                return all(key in found and found[key] != lease for key, lease in before.items())

            await eventually(back, "all keys are back under new leases", MENDED_S)

            async def fresh() -> bool:
                return all(node.engine.registry_age() == 0.0 for node in (one, other))

            await eventually(fresh, "both views are fresh", MENDED_S + BUSY_S)
            assert len(answers) > asked > 30
        assert [agent.node_id for agent in one.engine.list_agents(ListAgentsRequest(), ANYBODY).agents] == ["n1"]


async def test_leases_revoked_and_keys_deleted_by_hand_cost_no_request_between_nodes(
    etcd: WiredEtcd, store: EtcdStore
) -> None:
    async with (
        nodes(etcd, store, node_lease_ttl_s=60) as (one, other),
        connect(one.grpc_address, own_link=True) as mesh,
        echo(other),
    ):
        await reached(mesh, "echo")
        async with traffic(mesh, "echo") as answers:
            for prefix in ("agents/", "nodes/"):
                for item in (await store.list(prefix)).items:
                    for by_hand in (lambda item: store.revoke(item.lease), lambda item: deleted(store, item.key)):
                        there = await store.get(item.key)
                        assert there is not None
                        await by_hand(there)

                        async def again(key: str = item.key, revision: int = there.mod_revision) -> bool:
                            found = await store.get(key)
                            return found is not None and found.mod_revision > revision

                        await eventually(again, f"{item.key} is written again", MENDED_S)
            asked = len(answers)

            async def more() -> bool:
                return len(answers) > asked

            await eventually(more, "traffic flows")


async def deleted(store: EtcdStore, key: str) -> None:
    await store.txn([], [Delete(key)])


async def test_after_the_grace_what_is_not_known_is_unknowable_and_says_so(etcd: WiredEtcd, store: EtcdStore) -> None:
    async with (
        nodes(etcd, store, registry_grace_s=1.0) as (one, other),
        connect(one.grpc_address, own_link=True) as mesh,
        echo(one, "own"),
        echo(other, "theirs"),
    ):
        for agent_type in ("own", "theirs"):
            await reached(mesh, agent_type)
        etcd.cut_client("n0", reset=True)

        async def old() -> bool:
            return one.engine.registry_age() > 1.0 and not one.engine.ready

        await eventually(old, "the node says that it is not ready", 30.0)
        assert re.search(r"registry has not answered for \d+ s", one.engine.unready_reason)
        for agent_type in ("own", "theirs"):
            assert (await mesh.request("x", agent_type=agent_type, timeout=2)).data == "x"
        with pytest.raises(RegistryUnavailable, match=r"is \d+ s old, and") as caught:
            await mesh.request("x", agent_type="nobody", timeout=2)
        assert caught.value.retry_after
        with pytest.raises(RegistryUnavailable):  # after a read that did not succeed either, once the view is old
            await mesh.request("x", agent_id="nobody/1", timeout=20)
        with pytest.raises(MeshFailure) as failed:
            await one.engine.get_agent(GetAgentRequest(agent_id="nobody/1"), ANYBODY)
        assert failed.value.error.code == REGISTRY_UNAVAILABLE
        etcd.heal()

        async def fresh() -> bool:
            return one.engine.ready

        await eventually(fresh, "and ready again", BUSY_S)
        with pytest.raises(NoRoute):
            await mesh.request("x", agent_type="nobody", timeout=2)


async def test_a_key_that_another_node_holds_now_is_left_alone_by_a_node_that_was_cut_off(
    etcd: WiredEtcd, store: EtcdStore, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "agents/default/production/moving/1"
    async with (
        nodes(etcd, store) as (one, other),
        connect(one.grpc_address, own_link=True) as mesh,
        echo(one, "stays"),
    ):
        with agent_process(one.grpc_address, "--type", "moving/1") as elder:
            await reached(mesh, "moving", 3 * BUSY_S)
            assert (await records(store))[key].node_id == "n0"
            etcd.cut_client("n0", reset=True)

            async def expired() -> bool:
                return not await records(store)

            await eventually(expired, "the lease of the node that is cut off has ended", LEASE_S + BUSY_S)
            async with echo(other, "moving/1"):  # another process
                taken = await store.get(key)
                etcd.heal()

                async def back() -> bool:
                    return "stays" in {record.agent_type for record in (await records(store)).values()}

                await eventually(back, "what nobody took is written again", MENDED_S)
                assert await asyncio.to_thread(elder.wait, BUSY_S) == 4  # it was told that it is replaced
                assert known(one)["moving/1"] == known(other)["moving/1"] == taken.mod_revision if taken else 0
                await reached(mesh, "moving")
                assert await store.get(key) == taken
                assert capsys.readouterr().out.count("agent replaced by another process") == 1


@pytest.mark.parametrize("compacted", [True, False])
async def test_a_node_that_was_cut_off_while_much_changed_knows_it_all_within_seconds(
    etcd: WiredEtcd, store: EtcdStore, compacted: bool
) -> None:
    async with nodes(etcd, store, 1, node_lease_ttl_s=60) as (one,):
        await write(store, *(theirs(number) for number in range(1000)))

        async def true() -> bool:
            return known(one) == {name: item.mod_revision for name, item in (await items(store)).items()}

        await eventually(true, "the view is true", BUSY_S)
        etcd.cut_client("n0", reset=True)
        await write(store, *(Delete(key_of(number)) for number in range(500)))
        await write(store, *(theirs(number, version="2") for number in range(400, 1200)))
        if compacted:
            await etcd.compact()
        etcd.heal()
        await eventually(true, "the view is true again", MENDED_S)
        assert len(known(one)) == 800


def key_of(number: int) -> str:
    return f"agents/default/production/many/{number}"


def theirs(number: int, **more: str) -> Operation:
    record = AgentRecord(agent_id=f"many/{number}", tenant="default", env="production", node_id="n9", **more)  # type: ignore[arg-type]
    return Put(key_of(number), record.SerializeToString())


async def write(store: EtcdStore, *operations: Operation) -> None:
    """Write these, as another node does, in parts that etcd takes."""
    for at in range(0, len(operations), 100):
        await store.txn([], operations[at : at + 100])


async def test_views_stay_true_while_members_of_etcd_die_and_are_cut_off() -> None:
    async with (
        etcd_cluster(3) as etcd,
        connected(etcd, prefix="/trio/") as store,
        nodes(etcd, store) as (one, other),
        connect(one.grpc_address, own_link=True) as mesh,
        echo(other),
    ):
        await reached(mesh, "echo", 2 * BUSY_S)
        async with traffic(mesh, "echo"):
            for number, fault in enumerate(("kill the leader", "cut the leader off")):
                leader = await etcd.leader()
                if fault.startswith("kill"):
                    leader.kill()
                else:
                    etcd.isolate(leader)
                await etcd.leader_other_than(leader)
                for operation in (
                    theirs(number),
                    theirs(number, version="2"),
                    theirs(number + 10),
                    Delete(key_of(number)),
                ):
                    await stubbornly(store, operation)
                await etcd.settled()

                async def true() -> bool:
                    found = {key: item.mod_revision for key, item in (await items(store)).items()}
                    return all(known(node) == found for node in (one, other))

                await eventually(true, f"both views are true after: {fault}", 2 * BUSY_S)
        assert all(node.engine.registry_age() < 10.0 for node in (one, other))


async def items(store: EtcdStore) -> dict[str, Item]:
    """The agents' keys, by agent_id."""
    return {AgentRecord.FromString(item.value).agent_id: item for item in (await store.list("agents/")).items}


def known(node: Node) -> dict[str, int]:
    """The generation of every agent that a node knows."""
    return {agent.agent_id: agent.generation for agent in node.engine.state.directory}


async def stubbornly(store: EtcdStore, operation: Operation) -> None:
    """Write although the store is away now and then; twice is as good as once."""

    async def written() -> bool:
        try:
            await store.txn([], [operation])
        except Exception:
            return False
        return True

    await eventually(written, "it is written", 2 * BUSY_S)
