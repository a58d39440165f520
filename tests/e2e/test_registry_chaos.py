"""What happens to the registry, and to nodes that it cannot see, under load: nobody notices, or never two owners.

Three nodes on three etcd members, as in `test_nodes_chaos.py`. Where a node is cut off its own callers go on talking to
it: until when it may serve their conversations, and from when on others may, is the fence of two owners.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_sdk import Mesh, connect
from tests.support import turns
from tests.support.agents import BUSY_S, agent_process, eventually, usable
from tests.support.dialled import CAN_TELL
from tests.support.etcd_cluster import etcd_cluster
from tests.support.node_wires import wired_nodes
from tests.support.ordeal import TIMES, Ordeal

pytestmark = [
    pytest.mark.skipif(not CAN_TELL, reason="which process dialled cannot be told here"),
    pytest.mark.timeout(300),
]

LEASE_S = 5.0  # shorter than in the others: no node stands still here that has others' requests
BACK_S = 5.0  # after etcd is there again
TAKEN_OVER_S = LEASE_S + 10 + 6 + 20  # the lease; for how long nobody may void; the last word; a busy machine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ordeal]:
    with etcd_cluster() as etcd:
        nodes = wired_nodes(etcd, **{**TIMES, "node_lease_ttl_s": LEASE_S})
        try:
            ordeal = Ordeal(etcd, nodes, Path(tmp_path_factory.mktemp("ordeal")))
            asyncio.run(nodes.ready())
            with ordeal.agents(3):
                yield ordeal
        finally:
            nodes.close()


@pytest.fixture
async def ordeal(shared: Ordeal) -> AsyncIterator[Ordeal]:
    """All is up before the test; if it fails, the ends of the nodes' logs are shown."""
    await shared.ready()
    yield shared
    print(shared.nodes.logs())


async def test_nobody_notices_that_members_of_etcd_are_killed_frozen_and_cut_off(ordeal: Ordeal) -> None:
    etcd = ordeal.etcd
    async with ordeal.under_load() as load:
        for what, led in itertools.product(("kill", "pause", "isolate"), (True, False)):
            member = await etcd.leader() if led else (await etcd.followers())[0]
            if what == "kill":
                member.kill()
            elif what == "pause":
                member.pause()
            else:
                etcd.isolate(member)
            await etcd.leader_other_than(member)
            await load.more(15)
            await etcd.settled()
    await ordeal.check()


async def test_nobody_notices_that_etcd_is_away_for_longer_than_every_lease(ordeal: Ordeal) -> None:
    """Conversations go on too: every node's word that it honours the others' pins stands in for their leases."""
    async with ordeal.under_load() as load:
        before = await ordeal.keys()
        for member in ordeal.etcd.members:
            member.pause()
        await load.lasts(LEASE_S + 3)
        await load.more(50)
        for member in ordeal.etcd.members:
            member.resume()
        await registered(ordeal, before, BACK_S + BUSY_S)
        await load.more(50)
    await ordeal.check()


async def registered(ordeal: Ordeal, before: dict[str, int], limit_s: float) -> None:
    """Wait until every key that was there is there, under a lease that lives."""

    async def all_there() -> bool:
        with contextlib.suppress(RuntimeError):
            found = await ordeal.keys()
            alive = {int(line, 16) for line in (await ordeal.etcd.ctl("lease", "list")).split()[3:]}
            return found.keys() >= before.keys() and set(found.values()) <= alive
        return False

    await eventually(all_there, "every agent is registered", limit_s, every_s=0.2)


async def test_nobody_notices_that_leases_are_revoked_and_keys_deleted_by_hand(ordeal: Ordeal) -> None:
    async with ordeal.under_load() as load:
        before = await ordeal.keys()
        for lease in set(before.values()):
            await ordeal.etcd.revoke_lease(lease)
        await load.more(20)
        await registered(ordeal, before, BACK_S + BUSY_S)
        for key in before:
            await ordeal.etcd.delete(key)
        await load.more(20)
        await registered(ordeal, before, BACK_S + BUSY_S)
        for key, lease in (await ordeal.etcd.leases_of("/agentreach/v1/nodes/")).items():
            await ordeal.etcd.revoke_lease(lease)
            await ordeal.etcd.leases_of(key)
        await load.more(20)
    await ordeal.check()


class TestTwoOwners:
    """A node that others cannot see, and that has one of their conversations."""

    @pytest.mark.parametrize("what", ["cut off", pytest.param("frozen with its agent", marks=pytest.mark.soak)])
    async def test_a_session_taken_over_from_a_node_that_cannot_be_seen_has_one_owner_at_a_time(
        self, ordeal: Ordeal, what: str
    ) -> None:
        home, kind = ordeal.nodes[2], f"{ordeal.kind}{what[0]}"
        with agent_process(home.grpc, f"{kind}/1", *ordeal.where) as far:
            async with ordeal.callers(ordeal.nodes[0]) as (near,), connect(home.grpc, own_link=True) as beside:
                await usable(near, agent_id=far.agent_id)
                sessions = [f"{kind}-{n}" for n in range(3)]
                for session in sessions:
                    assert (await ordeal.book.one(near, kind, session=session)).code == "OK"
                with agent_process(ordeal.nodes.url, f"{kind}/2", *ordeal.where) as heir:
                    await usable(near, agent_id=heir.agent_id)
                    meshes = [near]
                    if what == "cut off":
                        meshes.append(beside)
                        ordeal.nodes.isolate(home)
                    else:
                        far.process.send_signal(signal.SIGSTOP)
                        home.pause()
                    over = asyncio.Event()
                    talking = [
                        asyncio.create_task(talk(ordeal, mesh, kind, session, over))
                        for mesh in meshes
                        for session in sessions
                    ]

                    async def taken_over() -> bool:
                        owners = [turn.owner[0] for turn in turns.read(ordeal.record) if turn.session in sessions]
                        return owners.count(heir.agent_id) > 20

                    try:
                        await eventually(taken_over, "another agent has the sessions", TAKEN_OVER_S, every_s=0.2)
                        ordeal.nodes.heal()
                        home.resume()
                        far.process.send_signal(signal.SIGCONT)
                        await home.ready()
                        await asyncio.sleep(3)  # in which the late node, and its agent, do whatever would be wrong
                    finally:
                        over.set()
                        await asyncio.gather(*talking)
                    ordeal.kill(heir)
            ordeal.kill(far)
        await ordeal.check(session={"AGENT_LOST", "REGISTRY_UNAVAILABLE", "TIMEOUT", "NO_AGENT_AVAILABLE"})


async def talk(ordeal: Ordeal, mesh: Mesh, kind: str, session: str, over: asyncio.Event) -> None:
    """Go on with a conversation, whatever becomes of its messages."""
    while not over.is_set():
        await ordeal.book.one(mesh, kind, session=session, timeout=5, sleep=0.3)
        await asyncio.sleep(0.05)
