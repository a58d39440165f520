"""The registrar and the embedded store with faults: whatever is lost on the way, the store ends up true."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from reach.adapters.memory_store import MemoryStore
from reach.core import remote
from reach.core.agents import Agent
from reach.core.arrivals import Arrival, Attaching
from reach.core.effects import DeregisterAgent
from reach.core.store import Put
from reach.node.admission import Admission
from reach.node.election import PREFIX, Election
from reach.node.records import agent_key
from reach.node.registrar import BATCH, Registrar
from reach.node.shards import KEYS_PER_LEASE
from reach.node.view import View
from tests.support.core import CoreMesh

LIMIT_S = 30.0
WAIT_S = 0.5


@dataclass
class Bench:
    """A registrar at work on `store`, and `other`: a connection to the same state that never fails."""

    store: MemoryStore
    other: MemoryStore
    registrar: Registrar
    replaced: list[tuple[str, bytes]] = field(default_factory=list)

    unread_s: float = 0.0
    """So long it may not be known yet who has ended."""

    async def register(
        self, *names: str, incarnation: bytes = b"this process", is_there: Callable[[], bool] = lambda: True
    ) -> list[Attaching]:
        """Register agents of these ids, and wait for the answer."""
        arrival = Arrival([Attaching(name, agent_of(name, incarnation)) for name in names])
        done = asyncio.Event()
        self.registrar.register(arrival, done.set, is_there=is_there)
        async with asyncio.timeout(LIMIT_S):
            await done.wait()
        return arrival.agents

    async def names(self, prefix: str = "agents/") -> set[str]:
        """The keys in the store, candidates' apart; of agents only their ids."""
        items = [item for item in (await self.other.list(prefix)).items if not item.key.startswith(PREFIX)]
        return {item.key.removeprefix("agents/default/production/") for item in items}

    async def until(self, names: set[str], prefix: str = "agents/") -> None:
        """Wait until exactly these are in the store."""
        changes = self.other.watch(prefix, (await self.other.list("")).revision + 1)
        async with asyncio.timeout(LIMIT_S), contextlib.aclosing(changes):
            async for _ in changes:  # the first comes at once
                if await self.names(prefix) == names:
                    return


def agent_of(name: str, incarnation: bytes = b"this process") -> Agent:
    return Agent.from_record(
        AgentRecord(agent_id=name, tenant="default", env="production", node_id="n1", incarnation=incarnation)
    )


@contextlib.asynccontextmanager
async def bench(register_wait_s: float = WAIT_S) -> AsyncIterator[Bench]:
    store = MemoryStore()
    replaced: list[tuple[str, bytes]] = []
    node = NodeRecord(node_id="n1")
    election = Election(store, "n1")
    registrar = Registrar(
        store,
        node,
        lease_ttl_s=30,
        register_wait_s=register_wait_s,
        admission=Admission(store, election, "n1", agents_max=5_000),
        replaced=lambda agent, by: replaced.append((agent.agent_id, by)),
        unread_s=lambda: made.unread_s,
    )
    made = Bench(store, store.share(), registrar, replaced)
    view = View(store, node, registrar, step=CoreMesh().step, remote=remote)
    await registrar.start()
    await view.start()
    await election.start()
    duties = [asyncio.create_task(each.run()) for each in (registrar, view, election)]
    try:
        yield made
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.wait(duties)
        await registrar.stop()
        await store.close()


async def test_agents_are_written_in_batches_and_under_leases_of_a_thousand_keys() -> None:
    async with bench(register_wait_s=LIMIT_S) as at:
        before = await at.other.revision()
        answers = await at.register(*(f"many/{number}" for number in range(2_500)))
        assert all(each.error is None and each.agent is not None and each.agent.generation for each in answers)
        items = (await at.other.list("")).items
        assert len(items) == 2_502
        assert (await at.other.revision()) - before <= 2_500 / BATCH + 3
        by_lease: dict[int, int] = {}
        for item in items:
            by_lease[item.lease] = by_lease.get(item.lease, 0) + 1
        assert 0 not in by_lease and max(by_lease.values()) <= KEYS_PER_LEASE


async def successor_at_another_node(at: Bench, name: str) -> int:
    """Another process has registered as this agent elsewhere: the revision of its key."""
    theirs = agent_of(name, b"the successor")
    theirs.node_id = "n2"
    return (await at.other.txn([], [Put(agent_key(theirs), theirs.to_record().SerializeToString())])).revision


async def still_its_successors(at: Bench, name: str, written: int) -> None:
    item = await at.other.get(agent_key(agent_of(name)))
    assert item is not None and item.mod_revision == written


async def test_a_process_that_has_ended_takes_no_agent_id_from_its_successor() -> None:
    """What it had asked waited: the store did not answer, or this node stood still. Others of its arrival go on."""
    async with bench() as at:
        written = await successor_at_another_node(at, "a/1")
        dead, other = await at.register("a/1", "b/1", is_there=lambda: False)
        assert dead.error is not None and dead.error.code == codes.FENCED
        assert other.error is None
        await still_its_successors(at, "a/1", written)


async def test_a_process_that_has_ended_is_registered_over_itself_for_it_may_come_back() -> None:
    async with bench() as at:
        await at.register("a/1")
        (again,) = await at.register("a/1", is_there=lambda: False)
        assert again.error is None and again.agent is not None and again.agent.generation


async def test_after_a_standstill_nobody_is_replaced_before_it_is_known_who_has_ended() -> None:
    async with bench() as at:
        written = await successor_at_another_node(at, "a/1")
        at.unread_s = 0.2
        there = True

        def its_end_is_read() -> None:
            nonlocal there
            there = False

        asyncio.get_running_loop().call_later(0.1, its_end_is_read)
        (dead,) = await at.register("a/1", is_there=lambda: there)
        assert dead.error is not None and dead.error.code == codes.FENCED
        await still_its_successors(at, "a/1", written)
        at.unread_s = 0.0
        (living,) = await at.register("a/1", incarnation=b"a third one")
        assert living.error is None


async def test_a_newcomer_that_has_ended_does_not_take_the_agent_id_of_who_came_before_the_leader_answered() -> None:
    async with bench() as at:
        at.store.set_available(False)
        there = True
        registering = asyncio.create_task(at.register("a/1", is_there=lambda: there))
        await asyncio.sleep(0)
        written = await successor_at_another_node(at, "a/1")
        there = False
        at.store.set_available(True)
        (dead,) = await registering
        assert dead.error is not None and dead.error.code in (codes.FENCED, codes.REGISTRY_UNAVAILABLE)
        await still_its_successors(at, "a/1", written)


async def test_a_registration_whose_answer_is_lost_is_done_once_the_store_answers() -> None:
    async with bench() as at:
        at.store.set_answers(False)
        registering = asyncio.create_task(at.register("a/1"))
        await at.until({"a/1"})
        at.store.set_answers(True)
        (answer,) = await registering
        assert answer.error is None and answer.agent is not None
        item = await at.other.get(agent_key(answer.agent))
        assert item is not None and item.mod_revision == answer.agent.generation


async def test_a_refused_registration_that_was_written_all_the_same_leaves_no_ghost() -> None:
    async with bench() as at:
        at.store.set_answers(False)
        (answer,) = await at.register("a/1")
        assert answer.error is not None and answer.error.code == codes.REGISTRY_UNAVAILABLE
        assert answer.error.retry_after_ms and "answer" in answer.error.message
        at.store.set_answers(True)
        await at.until(set())


async def test_many_registrations_are_refused_in_time_together_not_one_after_another() -> None:
    async with bench() as at:
        at.store.set_available(False)
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(at.register(f"a/{number}") for number in range(3 * BATCH)))
        assert asyncio.get_running_loop().time() - began < 3 * WAIT_S
        assert {each.error.code for (each,) in answers if each.error} == {codes.REGISTRY_UNAVAILABLE}
        assert all(each.error is not None for (each,) in answers)


async def test_a_departure_that_the_store_did_not_hear_of_is_made_good() -> None:
    async with bench() as at:
        stays, leaves = await at.register("a/stays", "a/leaves")
        assert leaves.agent is not None and stays.agent is not None
        at.store.set_available(False)
        at.registrar.deregister(DeregisterAgent(leaves.agent, leaves.agent.generation))
        assert await at.names() == {"a/stays", "a/leaves"}
        at.store.set_available(True)
        await at.until({"a/stays"})


async def test_the_departure_of_an_elder_does_not_touch_its_successor() -> None:
    async with bench() as at:
        (elder,) = await at.register("a/1")
        (younger,) = await at.register("a/1")
        assert elder.agent is not None and younger.agent is not None
        at.registrar.deregister(DeregisterAgent(elder.agent, elder.agent.generation))
        await at.register("b/1")  # written after it
        assert await at.names() == {"a/1", "b/1"}


async def test_a_key_deleted_or_a_lease_revoked_by_somebody_is_written_again() -> None:
    async with bench() as at:
        (answer,) = await at.register("a/1")
        assert answer.agent is not None
        for prefix in ("agents/", "nodes/"):
            (item,) = (await at.other.list(prefix)).items
            await at.other.revoke(item.lease)
            await at.until({"a/1", "nodes/n1"}, "")


async def test_a_key_that_another_node_wrote_is_left_alone_and_its_agent_told() -> None:
    async with bench() as at:
        (answer,) = await at.register("a/1")
        assert answer.agent is not None
        theirs = agent_of("a/1", b"that process")
        theirs.node_id = "n2"
        key = agent_key(answer.agent)
        written = (await at.other.txn([], [Put(key, theirs.to_record().SerializeToString())])).revision
        async with asyncio.timeout(LIMIT_S):
            while not at.replaced:
                await at.register("b/1")  # a way through the writer
        assert at.replaced == [("a/1", b"that process")]
        item = await at.other.get(key)
        assert item is not None and item.mod_revision == written
