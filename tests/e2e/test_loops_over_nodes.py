"""Circles of calls whose agents are attached to different nodes (group L of the failures seen)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agent_sdk import Agent, Context, HopLimit, LoopDetected, Mesh, ReachError, WouldDeadlock, connect
from tests.support.agents import usable
from tests.support.cluster import NodeCluster, node_cluster
from tests.support.etcd import start_etcd

MAX_HOPS = 6


@pytest.fixture(scope="module")
def running() -> Iterator[NodeCluster]:
    with start_etcd() as etcd:
        nodes = node_cluster(etcd, 2, max_hops=MAX_HOPS)
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                node.wait_ready()
            yield nodes
        finally:
            nodes.close()


class Circle:
    """Agents that pass what they get on to the next one; every second one at the other node."""

    def __init__(self, nodes: NodeCluster, stack: AsyncExitStack) -> None:
        self._nodes, self._stack = nodes, stack
        self.kind = secrets.token_hex(3)
        self.runs: list[str] = []
        self._made = 0

    def name(self, letter: str) -> str:
        """The agent_id of one of them."""
        return f"{letter}{self.kind}/1"

    async def add(self, letter: str, following: str, *, concurrency: int = 0) -> None:
        """One that asks the next in the same conversation, and answers what that said; at each node in turn."""
        node = self._nodes[self._made % len(self._nodes)]
        self._made += 1
        agent = Agent(self.name(letter), url=node.grpc, own_link=True, max_concurrency=concurrency, drain_timeout=0.2)

        @agent.handler
        async def pass_on(data: Any, ctx: Context) -> Any:
            if data == "usable?":
                return data
            self.runs.append(letter)
            how = {"session": ctx.session_id} if ctx.session_id else {}
            if not following or data == 0:
                return "the end"
            left = data - 1 if isinstance(data, int) else data
            return (await ctx.request(left, agent_id=self.name(following), **how)).data

        await self._stack.enter_async_context(agent)


@pytest.fixture
async def circle(running: NodeCluster) -> AsyncIterator[Circle]:
    async with AsyncExitStack() as stack:
        yield Circle(running, stack)


@pytest.fixture
async def mesh(running: NodeCluster) -> AsyncIterator[Mesh]:
    async with connect(running[0].grpc, own_link=True) as mesh:
        yield mesh


async def ready(mesh: Mesh, circle: Circle, letters: str) -> None:
    for letter in letters:
        await usable(mesh, agent_id=circle.name(letter))


@pytest.mark.parametrize("session", ["one", None])
@pytest.mark.parametrize("letters", ["a", "ab", "abc"])
async def test_a_circle_of_one_at_a_time_agents_ends_at_once_and_is_named(
    mesh: Mesh, circle: Circle, letters: str, session: str | None
) -> None:
    """L1."""
    for letter, following in zip(letters, letters[1:] + letters[0], strict=True):
        await circle.add(letter, following, concurrency=1)
    await circle.add("z", "", concurrency=1)
    await ready(mesh, circle, letters + "z")
    began = time.monotonic()
    asking = mesh.request("go", agent_id=circle.name("a"), session=session, timeout=60)
    beside = mesh.request("go", agent_id=circle.name("z"), session="another", timeout=10)
    refused, answered = await asyncio.gather(asking, beside, return_exceptions=True)
    assert isinstance(refused, (WouldDeadlock, LoopDetected)), refused
    assert not isinstance(answered, BaseException)
    assert time.monotonic() - began < 5
    assert circle.runs.count("z") == 1
    assert {circle.runs.count(letter) for letter in letters} == {1}
    for letter in letters:  # and everybody is free again
        assert (await mesh.request(0, agent_id=circle.name(letter), timeout=5)).data == "the end"


async def test_a_circle_over_nodes_without_an_end_is_cut_and_its_beginner_told(mesh: Mesh, circle: Circle) -> None:
    """L2: nodes on the way do not count as agents, and no node on the way starts the count anew."""
    for letter, following in ("ab", "bc", "ca"):
        await circle.add(letter, following)
    await ready(mesh, circle, "abc")
    with pytest.raises((HopLimit, LoopDetected)) as told:
        await mesh.request("go", agent_id=circle.name("a"), timeout=20)
    assert len(circle.runs) <= MAX_HOPS
    assert circle.name("a") in str(told.value.details)


async def test_a_chain_of_as_many_hops_as_may_be_works_and_one_more_is_refused_with_the_limit(
    mesh: Mesh, circle: Circle
) -> None:
    """L3."""
    letters = "abcdefg"[: MAX_HOPS + 1]
    for place, letter in enumerate(letters):
        await circle.add(letter, letters[place + 1] if place + 1 < len(letters) else "")
    await ready(mesh, circle, letters)
    reply = await mesh.request(MAX_HOPS - 1, agent_id=circle.name("a"), timeout=20)
    assert reply.data == "the end"
    assert len(circle.runs) == MAX_HOPS
    with pytest.raises(ReachError) as told:
        await mesh.request(MAX_HOPS, agent_id=circle.name("a"), timeout=20)
    assert str(told.value.code) == "HOP_LIMIT" and str(MAX_HOPS) in str(told.value)
