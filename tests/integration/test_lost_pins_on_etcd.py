"""Two nodes on real etcd that loses the pins of live sessions: each keeps its one owner, and nothing is begun anew."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agent_sdk import Agent, Context, Mesh, RegistryUnavailable, Reply, connect
from agentreach.v1.peer_pb2 import Pin
from reach.adapters.etcd import EtcdStore
from tests.support.agents import eventually, usable
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.node import Node, config, running
from tests.support.stores import connected

SESSIONS = [f"s{number}" for number in range(80)]  # more than are written at once
BACK_S = 20.0

Loss = Callable[[EtcdCluster, EtcdStore], Awaitable[None]]


async def deleted(etcd: EtcdCluster, store: EtcdStore) -> None:
    """As an operator would."""
    await etcd.ctl("del", "--prefix", "/agentreach/v1/pins/")


async def revoked(etcd: EtcdCluster, store: EtcdStore) -> None:
    """The leases under which they stand."""
    for lease in {item.lease for item in (await store.list("pins/")).items}:
        await etcd.ctl("lease", "revoke", f"{lease:x}")


async def wiped(etcd: EtcdCluster, store: EtcdStore) -> None:
    """The whole store, which begins again at revision 1."""
    (member,) = etcd.members
    member.kill()
    member.wipe()
    await member.restart()


@contextlib.asynccontextmanager
async def counter(node: Node, name: str) -> AsyncIterator[dict[str, int]]:
    """An agent that counts each session's messages."""
    agent, counts = Agent(name, url=node.grpc_address, own_link=True), dict[str, int]()

    @agent.handler
    async def count(data: Any, ctx: Context) -> Any:
        session = ctx.session.session_id or ""
        counts[session] = counts.get(session, 0) + 1
        return counts[session]

    async with agent:
        yield counts


async def pins(store: EtcdStore) -> dict[str, tuple[str, int]]:
    """Owner and epoch of each session."""
    found = [(Pin.FromString(item.value), item.mod_revision) for item in (await store.list("pins/")).items]
    return {pin.session_id: (pin.agent_id, pin.epoch or revision) for pin, revision in found}


@pytest.mark.parametrize("lose", [deleted, revoked, wiped])
async def test_sessions_keep_their_one_owner_when_the_store_loses_their_pins(lose: Loss) -> None:
    async with start_etcd() as etcd, connected(etcd) as store, contextlib.AsyncExitStack() as stack:
        settings = {"registry": f"etcd://{etcd.endpoints[0]}"}
        nodes = [
            await stack.enter_async_context(running(config(node_id=f"n{number}", **settings))) for number in range(2)
        ]
        for number, node in enumerate(nodes):
            await stack.enter_async_context(counter(node, f"counter/{number}"))
        meshes = [await stack.enter_async_context(connect(node.grpc_address, own_link=True)) for node in nodes]
        for mesh in meshes:
            for number in range(2):
                await usable(mesh, agent_id=f"counter/{number}")
        owner = {session: await begun(meshes[number % 2], session) for number, session in enumerate(SESSIONS)}
        assert set(owner.values()) == {"counter/0", "counter/1"}
        before = await pins(store)
        assert before.keys() == set(SESSIONS)
        await lose(etcd, store)

        async def stand() -> bool:
            return await pins(store) == before

        await eventually(stand, "each pin stands again under its owner and epoch", BACK_S)
        for number, session in enumerate(SESSIONS):  # by the node that knows nothing of the session yet, where one does
            reply = await asked(meshes[1 - number % 2], session)
            assert (reply.source, reply.data, reply.session_event) == (owner[session], 2, None)
        assert await pins(store) == before


async def asked(mesh: Mesh, session: str) -> Reply:
    """What the session's owner answers; a node whose lease is not granted anew yet refuses, and nothing is run."""
    replies: list[Reply] = []

    async def answers() -> bool:
        try:
            replies.append(await mesh.request("x", agent_type="counter", session=session, timeout=10))
        except RegistryUnavailable as error:
            assert error.retryable and not error.may_have_executed
            return False
        return True

    await eventually(answers, f"{session} is served again", BACK_S)
    return replies[0]


async def begun(mesh: Mesh, session: str) -> str:
    """Begin a session; its owner."""
    reply = await mesh.request("x", agent_type="counter", session=session, timeout=10)
    assert (reply.data, reply.session_event) == (1, "STARTED")
    return reply.source
