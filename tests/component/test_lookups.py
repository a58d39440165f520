"""A node whose view is old asks the store for exactly one agent: what GetAgent answers, where requests go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_sdk import Agent, NoRoute, RegistryUnavailable, connect
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import GetAgentRequest
from reach.adapters.memory_store import MemoryStore
from reach.core import lookups
from reach.core.ports import ANYBODY, MeshFailure
from reach.core.store import Item, StoreUnavailable, Summary
from reach.node import contact
from reach.node.config import Config
from reach.node.queries import Queries
from reach.node.records import AGENTS, NODES
from tests.support.agents import eventually
from tests.support.core import CoreMesh
from tests.support.node import Node, config, running

ECHO = ("default", "production", "echo/1")


class Blind(MemoryStore):
    """A connection whose watches have stopped and whose looks fail; single keys can be read while it is `readable`."""

    blind = False
    readable = True

    async def summary(self, prefix: str) -> Summary:
        """See `Store.summary`."""
        if self.blind:
            raise StoreUnavailable("no looks (test)")
        return await super().summary(prefix)

    async def get(self, key: str) -> Item | None:
        """See `Store.get`."""
        if not self.readable:
            raise StoreUnavailable("no reads (test)")
        return await super().get(key)

    async def watch(self, prefix: str, from_revision: int, *, deletes_only: bool = False) -> Any:
        """See `Store.watch`."""
        async with contextlib.aclosing(super().watch(prefix, from_revision, deletes_only=deletes_only)) as batches:
            async for batch in batches:
                if not (self.blind and prefix in (AGENTS, NODES)) or not batch:
                    yield batch


@pytest.fixture
async def nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Node, Node, Blind]]:
    """Two nodes on one store, and the first one's connection to it. A view is old after a fifth of a second."""
    monkeypatch.setattr(contact, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(lookups, "OLD_S", 0.2)
    blind = Blind()
    stores = {"n0": blind, "n1": MemoryStore(state=blind._state)}

    async def make(config: Config) -> MemoryStore:
        return stores[config.node_id]

    monkeypatch.setattr("reach.node.app.make_store", make)
    # The first to start leads: registrations do not pass the one that is blind.
    async with running(config(node_id="n1")) as other, running(config(node_id="n0")) as one:

        async def linked() -> bool:
            return all(any(each.connected for each in node.engine.state.nodes.values()) for node in (one, other))

        await eventually(linked, "the nodes are linked")
        yield one, other, blind


async def until_old(node: Node) -> None:
    """Wait until the node's view is old."""

    async def old() -> bool:
        return node.engine.registry_age() > lookups.OLD_S

    await eventually(old, "the view is old")


async def test_a_request_to_an_agent_that_came_since_the_view_stood_still_reaches_it(
    nodes: tuple[Node, Node, Blind],
) -> None:
    one, other, store = nodes
    store.blind = True
    await until_old(one)
    agent = Agent("echo/1", url=other.grpc_address, own_link=True)

    @agent.handler
    async def answer(data: Any) -> Any:
        return data

    async with agent, connect(one.grpc_address, own_link=True) as mesh:
        with pytest.raises(NoRoute):
            await mesh.request("x", agent_type="echo", timeout=2)  # no exact lookup: the view is believed

        async def reached() -> bool:  # its home has said how it is
            try:
                return bool((await mesh.request("x", agent_id="echo/1", timeout=2)).source == "echo/1")
            except Exception:
                return False

        await eventually(reached, "it is found")
        record = await one.engine.get_agent(GetAgentRequest(agent_id="echo/1"), ANYBODY)
        assert record.node_id == "n1"
        with pytest.raises(NoRoute):
            await mesh.request("x", agent_id="nobody/1", timeout=2)


async def test_when_that_read_fails_as_well_nobody_can_know(nodes: tuple[Node, Node, Blind]) -> None:
    one, _, store = nodes
    store.blind, store.readable = True, False
    await until_old(one)
    async with connect(one.grpc_address, own_link=True) as mesh:
        with pytest.raises(NoRoute, match="as of"):
            await mesh.request("x", agent_id="nobody/1", timeout=2)
        with one.engine.step() as state:
            state.view_complete_at -= 61.0
        async with asyncio.timeout(10):
            with pytest.raises(RegistryUnavailable):
                await mesh.request("x", agent_id="nobody/1", timeout=5)


async def test_get_agent_reads_what_an_old_view_cannot_tell() -> None:
    core = CoreMesh()
    core.agent("own/1")
    queries, asked = Queries(core.state), []

    async def look_up(tenant: str, env: str, agent_id: str) -> bool:
        asked.append(agent_id)
        if agent_id == "away/1":
            raise StoreUnavailable("away")
        return agent_id == "own/1"

    async def code_of(agent_id: str) -> int:
        try:
            await queries.get_agent(GetAgentRequest(agent_id=agent_id), ANYBODY)
        except MeshFailure as failure:
            return failure.error.code
        return 0

    queries.look_up = look_up
    assert [await code_of(name) for name in ("own/1", "none/1")] == [0, codes.NO_ROUTE] and not asked
    queries.registry_age = lambda: 11.0
    assert [await code_of(name) for name in ("own/1", "none/1")] == [0, codes.NO_ROUTE] and asked == ["none/1"]
    queries.registry_age = lambda: 61.0
    found = [await code_of(name) for name in ("own/1", "none/1", "away/1")]
    assert found == [0, codes.NO_ROUTE, codes.REGISTRY_UNAVAILABLE]
