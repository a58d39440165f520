"""Version policies and agents' settings on real etcd: two nodes, one of which leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import pytest

from agent_sdk import Agent
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from reach.adapters.admin_client import AdminClient
from reach.adapters.etcd import EtcdStore
from reach.core.ports import ANYBODY, MeshFailure
from reach.core.store import Delete, Put
from tests.support.agents import eventually
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.node import Node, config, running
from tests.support.stores import connected

LIMIT_S = 20.0
_prefixes = count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member for all tests; each has a prefix of its own."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture
async def store(etcd: EtcdCluster) -> AsyncIterator[EtcdStore]:
    """What the test sees of etcd."""
    async with connected(etcd, prefix=f"/policies-{next(_prefixes)}/") as store:
        yield store


@contextlib.asynccontextmanager
async def nodes(etcd: EtcdCluster, store: EtcdStore) -> AsyncIterator[tuple[Node, Node]]:
    """The leading node and another one, linked."""
    settings: dict[str, Any] = {
        "registry": f"etcd://{etcd.endpoints[0]}",
        "registry_prefix": store._codec.key("").decode(),
    }
    async with running(config(node_id="a", **settings)) as a, running(config(node_id="b", **settings)) as b:

        async def agreed() -> bool:
            leaders = {leader.node_id for node in (a, b) if (leader := node.engine.leader()) is not None}
            linked = [node.engine.state.nodes for node in (a, b)]
            return len(leaders) == 1 and all(any(one.connected for one in each.values()) for each in linked)

        await eventually(agreed, "the nodes are linked, and one leads")
        leader = a.engine.leader()
        assert leader is not None
        yield (a, b) if leader.node_id == "a" else (b, a)


async def version_on(node: Node, agent_type: str, version: int) -> None:
    """Wait until the node obeys this version of a type's policy; 0: none."""

    async def there() -> bool:
        policy = node.engine.state.version_policies.get(("production", agent_type))
        return (policy.version if policy is not None else 0) == version

    await eventually(there, f"version {version} of {agent_type}'s policy is in force")


async def test_what_is_set_at_another_node_than_the_leader_is_in_force_at_both_and_compared(
    etcd: EtcdCluster, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (leader, other), AdminClient([other.grpc_address]) as client:
        async with asyncio.timeout(LIMIT_S):
            made = await client.set_version_policy(registry.VersionPolicy(agent_type="echo", preferred="2"))
            assert other.engine.state.version_policies["production", "echo"].version == made.version
            await version_on(leader, "echo", made.version)
            item = await store.get("versions/production/echo")
            assert item is not None and item.mod_revision == made.version and not item.lease
            with pytest.raises(MeshFailure) as failed:
                await client.set_version_policy(registry.VersionPolicy(agent_type="echo", preferred="3"))
            assert failed.value.error.code == codes.FENCED
            assert failed.value.error.details["version"] == str(made.version)
            for version in (made.version + 1, 1 << 63, (1 << 64) - 1):
                with pytest.raises(MeshFailure) as failed:
                    await client.set_config("agents", {}, version)
                assert failed.value.error.code == codes.FENCED
            with pytest.raises(MeshFailure) as failed:
                await client.set_config("nodes", {})
            assert failed.value.error.code == codes.INVALID_ENVELOPE
            await client.set_version_policy(registry.VersionPolicy(agent_type="echo", version=made.version))
            await version_on(leader, "echo", 0)
            assert await store.get("versions/production/echo") is None


async def test_settings_reach_the_agents_of_every_node(etcd: EtcdCluster, store: EtcdStore) -> None:
    async with nodes(etcd, store) as (leader, other), asyncio.timeout(LIMIT_S):
        heard: asyncio.Queue[tuple[str, dict[str, str]]] = asyncio.Queue()
        async with contextlib.AsyncExitStack() as stack:
            for name, node in (("one", leader), ("two", other)):
                agent = Agent(f"echo/{name}", url=node.grpc_address, own_link=True)

                @agent.handler
                async def say(data: object) -> None: ...

                @agent.on_config
                async def changed(settings: dict[str, str], name: str = name) -> None:
                    heard.put_nowait((name, settings))

                await stack.enter_async_context(agent)
            async with AdminClient([other.grpc_address]) as client:
                await client.set_config("agents/echo", {"model": "large"})
            told = dict([await heard.get(), await heard.get()])
            assert told == {"one": {"model": "large"}, "two": {"model": "large"}}


async def test_the_policy_outlives_every_node_and_another_leader_can_replace_it(
    etcd: EtcdCluster, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (leader, _), AdminClient([leader.grpc_address]) as client:
        made = await client.set_version_policy(registry.VersionPolicy(agent_type="echo", weights={"1": 1, "2": 3}))
    async with nodes(etcd, store) as (leader, other), AdminClient([other.grpc_address]) as client:
        assert await client.get_version_policy("echo") == made
        again = await client.set_version_policy(
            registry.VersionPolicy(agent_type="echo", preferred="2", version=made.version)
        )
        await version_on(leader, "echo", again.version)


async def test_what_is_put_or_deleted_by_hand_is_followed_and_rubbish_is_left_out(
    etcd: EtcdCluster, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (leader, other), asyncio.timeout(LIMIT_S):
        value = registry.VersionPolicy(agent_type="echo", env="production", preferred="2").SerializeToString()
        await store.txn(
            [],
            [
                Put("versions/production/bad", b"\xff\xff"),
                Put("versions/production/liar", value),
                Put("config/nodes", b""),
                Put("config/agents", b"\xff\xff"),
            ],
        )
        put = await store.txn([], [Put("versions/production/echo", value)])
        for node in (leader, other):
            await version_on(node, "echo", put.revision)
            assert set(node.engine.state.version_policies) == {("production", "echo")}
            assert len(node.engine.state.configs) == 0
        await store.txn([], [Delete("versions/production/echo")])
        for node in (leader, other):
            await version_on(node, "echo", 0)


async def test_what_cannot_be_read_is_shown_with_its_version_and_replaced_with_that(
    etcd: EtcdCluster, store: EtcdStore
) -> None:
    async with nodes(etcd, store) as (leader, other), asyncio.timeout(LIMIT_S):
        async with AdminClient([leader.grpc_address]) as client:
            kept = await client.set_config("agents", {"model": "large"})
        await store.txn([], [Put("config/agents", b"\xff\xff"), Put("versions/production/echo", b"\xff\xff")])
        rubbish = await store.revision()
        assert rubbish > kept
        for node in (leader, other):
            await shown(node, rubbish)
        async with AdminClient([other.grpc_address]) as client:
            assert (await client.get_config("agents")).settings == {"model": "large"}
            version = await client.set_config("agents", {"model": "small"}, rubbish)
            there = await client.get_config("agents")
            assert (there.version, there.settings) == (version, {"model": "small"})
            policy = registry.VersionPolicy(agent_type="echo", preferred="2", version=rubbish)
            version = (await client.set_version_policy(policy)).version
        for node in (leader, other):
            await version_on(node, "echo", version)
        await store.txn([], [Put("versions/production/echo", b"\xff\xff"), Delete("config/agents")])
        rubbish = await store.revision()
        async with AdminClient([leader.grpc_address]) as client:

            async def gone() -> bool:
                version = (await client.get_version_policy("echo")).version
                return version == rubbish and not (await client.get_config("agents")).version

            await eventually(gone, "neither is in force any more")
            await client.set_version_policy(registry.VersionPolicy(agent_type="echo", version=rubbish))
            assert await store.get("versions/production/echo") is None


async def shown(node: Node, version: int) -> None:
    """Wait until a node says that the policy of echo and the settings of all have this version."""
    async with AdminClient([node.grpc_address]) as client:

        async def so() -> bool:
            policy = await client.get_version_policy("echo")
            return (await client.get_config("agents")).version == policy.version == version

        await eventually(so, f"version {version} is shown")


async def test_who_watches_at_one_node_is_told_of_the_agents_of_all(etcd: EtcdCluster, store: EtcdStore) -> None:
    async with nodes(etcd, store) as (leader, other), asyncio.timeout(LIMIT_S):
        watch = other.engine.watch_agents(registry.WatchAgentsRequest(), ANYBODY)
        async with contextlib.aclosing(watch):
            assert (await anext(watch)).begins
            agent = Agent("echo/far", url=leader.grpc_address, own_link=True)

            @agent.handler
            async def say(data: object) -> None: ...

            seen: list[tuple[int, bool]] = []
            async with agent:
                while (registry.HEALTHY, False) not in seen:
                    seen += [(each.agent.status, each.removed) for each in (await anext(watch)).changes]
            while not seen[-1][1]:
                seen += [(each.agent.status, each.removed) for each in (await anext(watch)).changes]
