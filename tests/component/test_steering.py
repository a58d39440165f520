"""Version policies, agents' settings and WatchAgents of a real node, asked over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from agent_sdk import Agent, connect
from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import Envelope, Target
from reach.adapters.admin_client import AdminClient
from reach.core import agents
from reach.core.access import Rights
from reach.core.ports import ANYBODY, Identity, MeshFailure
from tests.support.agents import eventually
from tests.support.node import Node, config, running

LIMIT_S = 10.0


@contextlib.asynccontextmanager
async def operator(node: Node) -> AsyncIterator[AdminClient]:
    async with AdminClient([node.grpc_address]) as client:
        yield client


Watch = Callable[[registry.WatchAgentsRequest], "grpc.aio.UnaryStreamCall[Any, Any]"]


@contextlib.asynccontextmanager
async def watching(node: Node) -> AsyncIterator[Watch]:
    """WatchAgents of the node."""
    async with grpc.aio.insecure_channel(node.grpc_address, options=CLIENT_OPTIONS) as one:
        yield one.unary_stream(
            "/agentreach.v1.RegistryService/WatchAgents",
            request_serializer=registry.WatchAgentsRequest.SerializeToString,
            response_deserializer=registry.WatchAgentsReply.FromString,
        )


async def told(watch: grpc.aio.UnaryStreamCall[Any, Any]) -> registry.WatchAgentsReply:
    """The next reply."""
    reply = await watch.read()
    assert isinstance(reply, registry.WatchAgentsReply)
    return reply


def echo(node: Node, version: str) -> Agent:
    agent = Agent("echo", version=version, capabilities=["echo"], url=node.grpc_address, own_link=True)

    @agent.handler
    async def say(data: object) -> str:
        return version

    return agent


async def has_taken(node: Node, agent: Agent, version: int) -> None:
    """Wait until the agent has reported this version of its settings."""

    async def reported() -> bool:
        found = node.engine.state.directory.get("default", "production", agent.agent_id)
        return found is not None and found.config_version == version

    await eventually(reported, f"{agent.agent_id} reports version {version}")


async def error_of(work: object) -> codes.Error:
    with pytest.raises(MeshFailure) as failed:
        await work  # type: ignore[misc]
    return failed.value.error


class TestVersionPolicy:
    """SetVersionPolicy and GetVersionPolicy."""

    async def test_is_set_steers_requests_is_explained_and_ends(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            node = await stack.enter_async_context(running(config()))
            client = await stack.enter_async_context(operator(node))
            for version in ("1.0", "2.0"):
                await stack.enter_async_context(echo(node, version))
            async with connect(node.grpc_address) as mesh:
                assert (await client.get_version_policy("echo")).version == 0
                policy = registry.VersionPolicy(agent_type="echo", preferred="2.0")
                made = await client.set_version_policy(policy)
                assert made.version and made.env == "production"
                assert await client.get_version_policy("Echo") == made
                answers = {(await mesh.request({}, agent_type="echo", timeout=5)).data for _ in range(20)}
                assert answers == {"2.0"}
                why = await client.explain(Envelope(target=Target(capabilities=["echo"]), timeout_ms=1_000))
                assert [one.removed_by for one in why.candidates] == ["", "version policy"]
                assert why.candidates[1].why == "version: is 1.0; the policy gives this to 2.0"
                ended = await client.set_version_policy(registry.VersionPolicy(agent_type="echo", version=made.version))
                assert ended.version == 0
                answers = {(await mesh.request({}, agent_type="echo", timeout=5)).data for _ in range(40)}
                assert answers == {"1.0", "2.0"}

    async def test_two_operators_do_not_overwrite_each_other(self) -> None:
        async with running(config()) as node, operator(node) as client:
            first = await client.set_version_policy(registry.VersionPolicy(agent_type="echo", preferred="1"))
            error = await error_of(client.set_version_policy(registry.VersionPolicy(agent_type="echo", preferred="2")))
            assert error.code == codes.FENCED and error.details["version"] == str(first.version)
            assert f"it has version {first.version}, not none; read it again" in error.message
            second = registry.VersionPolicy(agent_type="echo", weights={"1": 9, "2": 1}, version=first.version)
            made = await client.set_version_policy(second)
            assert made.version > first.version and dict(made.weights) == {"1": 9, "2": 1}
            error = await error_of(client.set_version_policy(second))
            assert error.details["version"] == str(made.version)
            error = await error_of(client.set_version_policy(registry.VersionPolicy(agent_type="x", version=3)))
            assert "there is none, not version 3" in error.message

    async def test_what_is_wrong_is_named(self) -> None:
        async with running(config()) as node, operator(node) as client:
            error = await error_of(client.set_version_policy(registry.VersionPolicy(agent_type="a", preferred=">1")))
            assert error.code == codes.INVALID_ENVELOPE and "policy.preferred" in error.message
            assert (await error_of(client.get_version_policy(""))).message.startswith("agent_type: ")


class TestConfig:
    """GetConfig and SetConfig, and what agents hear of it."""

    async def test_reaches_agents_at_once_and_shows_in_the_registry_when_they_have_it(self) -> None:
        async with running(config()) as node, operator(node) as client:
            heard: asyncio.Queue[dict[str, str]] = asyncio.Queue()
            agent = echo(node, "1.0")

            @agent.on_config
            async def changed(settings: dict[str, str]) -> None:
                heard.put_nowait(settings)

            version = await client.set_config("agents", {"model": "large", "depth": "3"})
            async with agent, asyncio.timeout(LIMIT_S):
                assert await heard.get() == {"model": "large", "depth": "3"}
                version = await client.set_config("agents/echo", {"model": "small"})
                assert await heard.get() == {"model": "small", "depth": "3"} == dict(agent.config)
                await has_taken(node, agent, version)
                assert (await client.get_agent(agent.agent_id)).config_version == version
                assert heard.empty()
                reply = await client.get_config("agents/echo")
                assert (dict(reply.settings), reply.version) == ({"model": "small"}, version)
                assert (await client.get_config("agents/other")).version == 0

    async def test_a_handler_that_fails_is_called_again_until_it_has_taken_them_over(self) -> None:
        async with running(config(heartbeat_interval_s=0.1)) as node, operator(node) as client:
            agent, calls = echo(node, "1.0"), 0

            @agent.on_config
            def changed(settings: dict[str, str]) -> None:
                nonlocal calls
                calls += 1
                if calls < 3:
                    raise RuntimeError("not yet")

            async with agent, asyncio.timeout(LIMIT_S):
                version = await client.set_config("agents", {"model": "large"})
                await has_taken(node, agent, version)
                assert (await client.get_agent(agent.agent_id)).config_version == version
                assert calls == 3

    async def test_is_compared_and_set_and_names_what_is_wrong(self) -> None:
        async with running(config()) as node, operator(node) as client:
            version = await client.set_config("agents", {"a": "1"})
            error = await error_of(client.set_config("agents", {"a": "2"}))
            assert error.code == codes.FENCED and error.details["version"] == str(version)
            assert await client.set_config("agents", {}, version) > version
            for name in ("nodes", "agents/", ""):
                error = await error_of(client.set_config(name, {}))
                assert error.code == codes.INVALID_ENVELOPE and "agents" in error.message
                assert (await error_of(client.get_config(name))).code == codes.INVALID_ENVELOPE


class TestWatchAgents:
    """The stream, and how it ends."""

    async def test_tells_all_then_changes_and_goes_on_after_a_break(self) -> None:
        async with running(config()) as node, watching(node) as watch_agents, asyncio.timeout(LIMIT_S):
            one = echo(node, "1.0")
            async with one:
                watch = watch_agents(registry.WatchAgentsRequest(target=Target(agent_type="echo")))
                first = await told(watch)
                assert first.begins and [record.agent_id for record in first.snapshot] == [one.agent_id]
                watch.cancel()
            again = watch_agents(registry.WatchAgentsRequest(target=Target(agent_type="echo"), revision=first.revision))
            missed = await told(again)
            assert not missed.begins
            assert [(each.agent.agent_id, each.removed) for each in missed.changes] == [(one.agent_id, True)]
            async with echo(node, "2.0"):
                came = await told(again)
                assert [each.agent.version for each in came.changes] == ["2.0"]
            again.cancel()

    async def test_one_that_does_not_read_is_told_how_things_stand_when_it_does(self) -> None:
        async with running(config()) as node, watching(node) as watch_agents, asyncio.timeout(3 * LIMIT_S):
            crowd = [agents.Agent(f"crowd/{number}", tenant="default") for number in range(400)]
            directory = node.engine.state.directory
            with node.engine.step():
                for agent in crowd:
                    agent.description = "x" * 500
                    directory.add(agent)
            watch = watch_agents(registry.WatchAgentsRequest())
            for number in range(100):  # 40,000 changes, 25 MB if each were sent
                with node.engine.step():
                    for agent in crowd:
                        agent.status = (agents.HEALTHY, agents.DEGRADED)[number % 2]
                        directory.changed(agent)
                await asyncio.sleep(0)
            with node.engine.step():
                directory.remove(crowd[0])
            known: dict[str, int] = {}
            replies, last = 0, 0
            while last & (1 << 40) - 1 != directory.revision:
                reply = await told(watch)
                replies, last = replies + 1, reply.revision
                if reply.begins:
                    known.clear()
                known |= {record.agent_id: record.status for record in reply.snapshot}
                for change in reply.changes:
                    if change.removed:
                        known.pop(change.agent.agent_id, None)
                    else:
                        known[change.agent.agent_id] = change.agent.status
            assert known == {agent.agent_id: agents.DEGRADED for agent in crowd[1:]}
            assert replies < 100, "what it did not take was not kept for it"
            watch.cancel()

    async def test_ends_with_a_status_when_the_node_leaves(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            async with running(config()) as node, watching(node) as watch_agents:
                watch = watch_agents(registry.WatchAgentsRequest())
                assert (await told(watch)).begins
                ending = asyncio.create_task(node.engine.drain(1.0))
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await told(watch)
                await ending
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "SHUTTING_DOWN" in str(ended.value.details())

    async def test_one_that_is_cancelled_is_forgotten_and_there_is_a_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("reach.node.steering.WATCHERS_MAX", 1)
        async with running(config()) as node, watching(node) as watch_agents, asyncio.timeout(LIMIT_S):
            watch = watch_agents(registry.WatchAgentsRequest())
            await told(watch)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await told(watch_agents(registry.WatchAgentsRequest()))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            watch.cancel()

            async def nobody() -> bool:
                return not node.engine._watchers

            await eventually(nobody, "the watcher is forgotten")
            other = watch_agents(registry.WatchAgentsRequest())
            assert (await told(other)).begins
            other.cancel()

    async def test_one_principal_that_watches_all_the_time_leaves_others_room(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found by reading: one key could take all the places, and nobody of any tenant could watch."""
        monkeypatch.setattr("reach.node.steering.PRINCIPAL_WATCHERS_MAX", 2)
        alice, bob = (Identity("default", name, Rights()) for name in ("alice", "bob"))
        async with running(config()) as node, asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as open_calls:

            async def watch(who: Identity) -> registry.WatchAgentsReply:
                replies = node.engine.watch_agents(registry.WatchAgentsRequest(), who)
                await open_calls.enter_async_context(contextlib.aclosing(replies))
                return await anext(replies)

            assert (await watch(alice)).begins and (await watch(alice)).begins
            with pytest.raises(MeshFailure) as refused:
                await watch(alice)
            assert refused.value.error.code == codes.OVERLOADED and "principal alice" in str(refused.value)
            assert (await watch(bob)).begins and (await watch(replace(alice, tenant="acme"))).begins
            for _ in range(3):  # while authentication is off everybody is one and the same
                assert (await watch(ANYBODY)).begins
            await open_calls.aclose()
            assert (await watch(alice)).begins

    async def test_a_target_that_nobody_can_watch_is_refused(self) -> None:
        async with running(config()) as node, watching(node) as watch_agents, asyncio.timeout(LIMIT_S):
            for request in (
                registry.WatchAgentsRequest(target=Target(topic="news")),
                registry.WatchAgentsRequest(env="a b"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await told(watch_agents(request))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
