"""Keeps the store's picture of this node true: its own key and its agents' keys, under this node's leases.

One task writes, in batches and in the order of asking (or turns: `turnstile`), so that no write of ours races another
of ours. Agents whose keys do not exist yet go past it, to the leader (`newcomers`). Whenever the store may differ from
what it should hold (a lease or an answer lost, a key deleted by somebody) that task compares the two and mends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from weakref import WeakValueDictionary

import structlog
from google.protobuf.message import DecodeError

from agentreach.aio.clock import boot_time
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from reach.core.agents import Agent
from reach.core.arrivals import Arrival, Attaching
from reach.core.effects import DeregisterAgent
from reach.core.store import (
    Change,
    Compare,
    Delete,
    Field,
    Get,
    Item,
    LeaseGone,
    Op,
    Put,
    Store,
    StoreUnavailable,
    TxnResult,
    absent,
    unchanged,
)
from reach.node.admission import Admission
from reach.node.contact import Contact
from reach.node.everywhere import Peers
from reach.node.newcomers import Asked, Newcomers, Registering, of_the_living, of_their_own, take_over
from reach.node.own_key import OwnKey
from reach.node.records import agent_key, stored_record
from reach.node.shards import Shard, Shards
from reach.node.turnstile import Turnstile

log = structlog.get_logger("reach.registry")

BATCH = 60  # agents a transaction: each at most a compare, a write and a read, of 128 allowed per list
BATCH_BYTES = 1_000_000  # of records a transaction; etcd takes 1.5 MiB
RETRY_FIRST_S, RETRY_MOST_S = 0.25, 0.5  # 2 s at most took 5.6 s to write the keys again; cluster.md allows 5


class Registrar:
    """This node's writer to the store. `start`, `run` in a task, `stop`; the rest is called from steps."""

    def __init__(
        self,
        store: Store,
        node: NodeRecord,
        *,
        lease_ttl_s: float,
        register_wait_s: float,
        admission: Admission,
        replaced: Callable[[Agent, bytes], None],
        unread_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`replaced` is told of an agent whose key somebody else has taken, and by which incarnation.

        By another node: the core may have seen that already, and let go of the agent. `unread_s` says for how long yet
        it may not have been read that a process has ended.
        """
        self._register_wait_s = register_wait_s
        self._store = store
        self._node = node
        self._replaced = replaced
        self._unread_s = unread_s
        self._shards = Shards(store, lease_ttl_s, self._in_doubt)
        self.contact = Contact()
        self._own_key = OwnKey(store, node, self._shards, lease_ttl_s)
        self._agents: dict[str, Agent] = {}
        """What should stand in the store, by key."""
        self._newcomers = Newcomers(
            admission, self._shards, admitted=self._written, known=self._known, in_doubt=self._in_doubt
        )
        self._lines: WeakValueDictionary[str, deque[Registering]] = WeakValueDictionary()
        """By link: what it has asked and was not told yet."""
        self._queue: deque[Registering | DeregisterAgent] = deque()
        self._work = asyncio.Event()
        self._turnstile = Turnstile(self._queue.append, self._work.set, register_wait_s)
        self.overtaken: Callable[[Change], None] = self.changed
        """Told when another node is found to have one of our keys; the view says here how it goes on."""
        self._doubt = False
        """The store may differ from `_agents`."""

    @property
    def lease(self) -> Shards:
        """What this node's keys stand under."""
        return self._shards

    # ---- asked by the engine ----

    def register(
        self,
        arrival: Arrival,
        done: Callable[[], None],
        link_id: str = "",
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write the new agents of an arrival; `done` is called when each has its generation or its error.

        At the latest `register_wait_s` from now, then with REGISTRY_UNAVAILABLE; for one link in the order of asking.
        """
        line = self._lines.setdefault(link_id, deque()) if link_id else deque()
        registering = Registering.of(arrival, done, boot_time() + self._register_wait_s, line, is_there)
        self._turnstile.come(registering)
        registering.tell()  # there may be nothing to write

    def deregister(self, effect: DeregisterAgent) -> None:
        """Delete an agent's key if it is still of that attachment."""
        key = agent_key(effect.agent)
        if self._agents.get(key) is effect.agent:
            del self._agents[key]
        self._queue.append(effect)
        self._work.set()

    # ---- told by the view ----

    def listed(self) -> None:
        """The keys are listed anew: what became of ours meanwhile may not have been seen."""
        self._in_doubt()

    def changed(self, change: Change) -> None:
        """Somebody wrote or deleted a key. Called in a step."""
        key, item = change.key, change.item
        if key == self._own_key.key:
            if self._own_key.doubtful(change):
                self._in_doubt()
            return
        agent = self._agents.get(key)
        if agent is None or change.revision <= agent.generation:
            return
        record = _record(item) if item is not None else None
        if record is not None and record.node_id != self._node.node_id:
            self._taken_over(key, agent, record)
        elif item is None or not self._shards.holds(item.lease):
            self._in_doubt()

    # ---- its life ----

    async def start(self, peers: Peers | None = None) -> None:
        """Take the first lease and show this node in the store. Raises `StoreUnavailable`, and `NameTaken`.

        `peers` is asked whether a node that has this one's key lives; without it nobody does.
        """
        try:
            await self._own_key.take(peers)
        except LeaseGone as error:
            raise StoreUnavailable(str(error)) from error

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(), name="registry-writer")
            group.create_task(self._newcomers.run(), name="registry-newcomers")
            group.create_task(self._turnstile.run(), name="registry-turnstile")

    async def stop(self) -> None:
        """Give the leases back, so that this node's keys vanish at once. Best effort, bounded by 2 s."""
        await self._shards.release()

    # ---- the writer ----

    async def _write(self) -> None:
        failures = 0
        while True:
            if not self._doubt and not self._queue:
                self._work.clear()
                await self._work.wait()
            try:
                async with asyncio.timeout(self._time_left()):
                    await self._write_some()
                failures = 0
            except (StoreUnavailable, LeaseGone, TimeoutError) as error:
                failures += 1
                self._in_doubt()
                self.contact.doubted()
                self._refuse_overdue(str(error))
                await asyncio.sleep(min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** min(failures - 1, 8)))
                self._refuse_overdue(str(error))

    async def _write_some(self) -> None:
        if self._doubt:
            self._doubt = False
            await self._mend()
        elif isinstance(self._queue[0], Registering):
            await self._write_arrivals()
        else:
            await self._delete_departed()

    def _in_doubt(self) -> None:
        self._doubt = True
        self._work.set()

    def _time_left(self) -> float | None:
        deadline = next((each.deadline for each in self._queue if isinstance(each, Registering) and each.left), None)
        return None if deadline is None else max(0.0, deadline - boot_time())

    def _refuse_overdue(self, why: str) -> None:
        """Give up the registrations whose time is over."""
        now = boot_time()
        why = why or self.contact.away or f"the registry took longer than {self._register_wait_s:g} s"
        for register in [each for each in self._queue if isinstance(each, Registering) and each.deadline <= now]:
            self._queue.remove(register)
            late, register.left = register.left, deque()
            for each in late:
                register.refuse(each, why)

    # ---- arrivals and departures ----

    async def _write_arrivals(self) -> None:
        batch = self._next_agents()
        if batch:
            await self._put_known(batch)
        while self._queue and isinstance(register := self._queue[0], Registering) and not register.left:
            self._queue.popleft()

    def _next_agents(self) -> list[Asked]:
        """The agents at the head of the queue that one transaction can hold."""
        batch: list[Asked] = []
        size = 0
        for register in self._queue:
            if not isinstance(register, Registering):
                break
            for each in register.left:
                assert each.agent is not None
                size += stored_record(each.agent).ByteSize()
                if batch and (len(batch) >= BATCH or size > BATCH_BYTES):
                    return batch
                batch.append((register, each, each.agent))
        return batch

    async def _put_known(self, batch: list[Asked]) -> None:
        """Write records over whoever has their keys: the core has checked that they may. The last of equal keys wins.

        Compared by revision, so that a write of somebody else in between is seen and not undone. No leader is asked.
        """
        batch.sort(key=lambda asked: asked[0].deadline)  # as they came: who was a newcomer first comes back earlier
        found = await self._store.txn([], [Get(key) for key in dict.fromkeys(agent_key(agent) for *_, agent in batch)])
        while True:
            present = {item.key: item for read in found.reads for item in read}
            batch = of_their_own(self._without_newcomers(batch, present.keys()), present)
            if (unread_s := self._unread_s()) > 0 and take_over(batch, present):
                await asyncio.sleep(unread_s)
            batch = of_the_living(batch, present)
            if not batch:
                return
            records = {agent_key(agent): agent for *_, agent in batch}
            shard = await self._shards.room_for(len(records))
            puts = [Put(key, _value(agent), shard.lease.id) for key, agent in records.items()]
            reads = [Get(key) for key in records]
            found = await self._put(shard, [unchanged(present[key]) for key in records], puts, reads)
            if found.succeeded:
                break
        for register, each, agent in batch:
            register.take(each)
            if records[agent_key(agent)].incarnation == agent.incarnation:
                agent.generation = found.revision
            else:
                register.overtaken(each)
        for key, agent in records.items():
            self._written(key, agent, shard)
        for register, *_ in batch:
            register.settled()

    def _without_newcomers(self, batch: list[Asked], present: Container[str]) -> list[Asked]:
        """Those that somebody knows; the others are newcomers from here on."""
        known: list[Asked] = []
        for register, each, agent in batch:
            key = agent_key(agent)
            if key in present and key not in self._newcomers:
                register.known_since = min(register.known_since, boot_time())
                known.append((register, each, agent))
            else:
                register.take(each)
                self._newcomers.add(register, each)
        return known

    def _known(self, register: Registering, each: Attaching) -> None:
        """Somebody has written a newcomer's key before the leader could."""
        register.left.append(each)
        if register not in self._queue:
            self._queue.appendleft(register)
        self._work.set()

    def _written(self, key: str, agent: Agent, shard: Shard) -> None:
        self._agents[key] = agent
        self._shards.wrote(key, shard)

    async def _put(
        self, shard: Shard, conditions: Sequence[Compare], puts: Sequence[Put], reads: Sequence[Get] = ()
    ) -> TxnResult:
        try:
            return await self._store.txn(conditions, puts, reads)
        except LeaseGone:
            self._shards.drop(shard)
            raise

    async def _delete_departed(self) -> None:
        """Delete the keys of agents that left. What fails here, `_mend` deletes: it is not in `_agents` any more."""
        batch: list[DeregisterAgent] = []
        while self._queue and len(batch) < BATCH and isinstance(effect := self._queue[0], DeregisterAgent):
            self._queue.popleft()
            batch.append(effect)
        keys = {agent_key(each.agent): each.agent.generation for each in batch}
        result = await self._store.txn([_still(*each) for each in keys.items()], [Delete(key) for key in keys])
        if not result.succeeded:
            for key, generation in keys.items():
                await self._store.txn([_still(key, generation)], [Delete(key)])
        for key in keys:
            if key not in self._agents:
                self._shards.removed(key)

    # ---- mending ----

    async def _mend(self) -> None:
        """Make the store hold exactly what it should: write what is missing, delete what is left over.

        `_doubt` is set again if something changed meanwhile.
        """
        self._shards.drop_lost()
        if not await self._own_key.mend():
            self._in_doubt()
        present = {item.key: item for item in (await self._store.list("agents/")).items}
        missing: list[tuple[Compare, str, Agent]] = []
        for key, agent in list(self._agents.items()):
            found = present.get(key)
            record = _record(found) if found is not None and found.mod_revision != agent.generation else None
            if self._agents.get(key) is not agent:
                continue
            if found is None:
                missing.append((absent(key), key, agent))
            elif record is not None and record.node_id != self._node.node_id:
                self.overtaken(Change(key, found.mod_revision, found))
            elif record is not None and record.incarnation != agent.incarnation:
                self._taken_over(key, agent, record)
            elif not self._shards.holds(found.lease) or found.mod_revision != agent.generation:
                missing.append((unchanged(found), key, agent))
        await self._write_again(missing)
        left_over = [
            item
            for key, item in present.items()
            if key not in self._agents and key not in self._newcomers and self._shards.holds(item.lease)
        ]
        for at in range(0, len(left_over), BATCH):
            part = left_over[at : at + BATCH]
            result = await self._store.txn([unchanged(item) for item in part], [Delete(item.key) for item in part])
            self._doubt = self._doubt or not result.succeeded

    def _taken_over(self, key: str, agent: Agent, record: AgentRecord) -> None:
        moved = record.incarnation == agent.incarnation  # with its process, as after a drain: nothing is wrong
        (log.info if moved else log.warning)("an agent was taken over", agent=agent.agent_id, node=record.node_id)
        del self._agents[key]
        self._shards.removed(key)
        self._replaced(agent, record.incarnation)

    async def _write_again(self, missing: Sequence[tuple[Compare, str, Agent]]) -> None:
        for at in range(0, len(missing), BATCH):
            part = [each for each in missing[at : at + BATCH] if self._agents.get(each[1]) is each[2]]
            if not part:
                continue
            shard = await self._shards.room_for(len(part))
            puts = [Put(key, _value(agent), shard.lease.id) for _, key, agent in part]
            result = await self._put(shard, [condition for condition, _, _ in part], puts)
            if not result.succeeded:
                self._doubt = True
                continue
            for _, key, agent in part:
                agent.generation = result.revision
                if self._agents.get(key) is agent:
                    self._shards.wrote(key, shard)
            log.info("agents written to the registry again", count=len(part))


def _value(agent: Agent) -> bytes:
    return stored_record(agent).SerializeToString()


def _record(item: Item) -> AgentRecord | None:
    """What stands there, or None if it is not a record at all: nobody's, to be written over."""
    try:
        return AgentRecord.FromString(item.value)
    except DecodeError:
        return None


def _still(key: str, generation: int) -> Compare:
    return Compare(key, Field.MOD, Op.EQUAL, generation)
