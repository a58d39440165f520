"""Keeps the store's picture of this node true: its own key, its agents' keys, and session pins.

Agents' keys stand under leases of this node, at most 1,000 keys each, so that they vanish together when the node dies.
Writes go through one queue and in batches; a lease that was lost, or a key that somebody deleted, is written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.peer_pb2 import Pin
from agentreach.wire.errors import failure
from reach.core.agents import Agent
from reach.core.attach import Arrival, Attaching
from reach.core.effects import CreatePin, DeregisterAgent, RefreshPin
from reach.core.store import (
    Compacted,
    Compare,
    Delete,
    Field,
    Get,
    HeldLease,
    Item,
    LeaseGone,
    Op,
    Put,
    Store,
    StoreUnavailable,
    absent,
    unchanged,
)

log = structlog.get_logger("reach.registry")

KEYS_PER_LEASE = 1_000
BATCH = 60  # agents a transaction: a compare and a put each, below etcd's 128 operations
REGISTER_WAIT_S = 10.0
FRESH_EVERY_S = 3.0
RETRY_S = 0.5
PIN_TTL_SLACK_S = 120.0  # a pin outlives its session's time to live, whichever minute's lease it is under


def agent_key(agent: Agent) -> str:
    """Where an agent's record stands."""
    return f"agents/{agent.tenant}/{agent.env}/{agent.agent_id}"


def pin_key(lane: tuple[str, str, str, str]) -> str:
    """Where a session's pin stands. The session_id is hashed: it may hold anything."""
    tenant, env, agent_type, session_id = lane
    digest = hashlib.blake2b(session_id.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
    return f"pins/{tenant}/{env}/{agent_type}/{digest}"


@dataclass(slots=True)
class _Register:
    arrival: Arrival
    done: Callable[[], None]
    deadline: float
    left: list[Attaching] = field(default_factory=list)


class _Shard:
    """One lease of this node and the keys under it."""

    def __init__(self, lease: HeldLease) -> None:
        self.lease = lease
        self.keys: set[str] = set()


class Registrar:
    """This node's writer to the store. `run` it in a task group; everything else may be called from steps."""

    def __init__(
        self,
        store: Store,
        node: NodeRecord,
        *,
        lease_ttl_s: float,
        session_ttl_s: float,
        replaced: Callable[[Agent], None],
    ) -> None:
        self._store = store
        self._node = node
        self._lease_ttl_s = lease_ttl_s
        self._session_ttl_s = session_ttl_s
        self._replaced = replaced
        self._shards: list[_Shard] = []
        self._agents: dict[str, Agent] = {}
        """What should be in the store, by key."""
        self._queue: deque[_Register | DeregisterAgent] = deque()
        self._work = asyncio.Event()
        self._written = asyncio.Event()
        self._rewrite = asyncio.Event()
        self._pins = asyncio.Semaphore(64)
        self._bucket: tuple[float, int] = (-1e9, 0)
        self._bucket_lock = asyncio.Lock()
        self.revision = 0
        self.fresh_at = boot_time()
        """When the store last answered."""

    @property
    def age_s(self) -> float:
        """Seconds since the store was last heard beyond the usual interval; 0 while it answers."""
        return max(0.0, boot_time() - self.fresh_at - FRESH_EVERY_S - 1.0)

    # ---- asked by the engine ----

    def register(self, arrival: Arrival, done: Callable[[], None]) -> None:
        """Write the new agents of an arrival; `done` is called when each has its generation or its error."""
        new = [each for each in arrival.agents if each.agent is not None and each.attachment is None]
        self._queue.append(_Register(arrival, done, boot_time() + REGISTER_WAIT_S, new))
        self._work.set()

    def deregister(self, effect: DeregisterAgent) -> None:
        """Delete an agent's key if it is still of that attachment."""
        key = agent_key(effect.agent)
        if self._agents.get(key) is effect.agent:
            del self._agents[key]
        self._queue.append(effect)
        self._written.clear()
        self._work.set()

    async def create_pin(self, effect: CreatePin) -> tuple[str, bytes, int]:
        """Write a pin by compare-and-set. Returns who holds the session now: (agent_id, incarnation, epoch).

        Raises `StoreUnavailable`.
        """
        key = pin_key(effect.lane.key)
        agent = effect.attachment.agent
        pin = Pin(
            session_id=effect.lane.key[3],
            agent_id=agent.agent_id,
            incarnation=agent.incarnation,
            home=self._node.node_id,
        )
        async with self._pins:
            item = None
            for _ in range(3):
                condition = unchanged(item) if item is not None else absent(key)
                put = Put(key, pin.SerializeToString(), await self._bucket_lease())
                result = await self._store.txn([condition], [put], [Get(key)])
                if result.succeeded:
                    return agent.agent_id, agent.incarnation, result.revision
                item = result.reads[0][0] if result.reads[0] else None
                if item is None:
                    continue
                holder = Pin.FromString(item.value)
                epoch = holder.epoch or item.mod_revision
                if epoch != effect.replaces_epoch:
                    return holder.agent_id, holder.incarnation, epoch
        raise StoreUnavailable("the pin changed under every attempt to write it")

    async def refresh_pin(self, effect: RefreshPin) -> None:
        """Move a used pin to a newer lease. Best effort: a session in use is asked for again in a minute."""
        key = pin_key(effect.lane.key)
        with contextlib.suppress(StoreUnavailable, LeaseGone):
            async with self._pins:
                item = await self._store.get(key)
                if item is None:
                    return
                pin = Pin.FromString(item.value)
                pin.epoch = pin.epoch or item.mod_revision
                if pin.epoch != effect.lane.epoch:
                    return
                put = Put(key, pin.SerializeToString(), await self._bucket_lease())
                await self._store.txn([unchanged(item)], [put])

    async def _bucket_lease(self) -> int:
        """The lease of this minute, for pins: nobody keeps it alive, it ends when its pins' time is over."""
        async with self._bucket_lock:
            made_at, _ = self._bucket
            if boot_time() - made_at > 60.0:
                lease = await self._store.hold_lease(self._session_ttl_s + PIN_TTL_SLACK_S)
                lease.abandon()
                self._bucket = (boot_time(), lease.id)
            return self._bucket[1]

    # ---- its tasks ----

    async def start(self) -> None:
        """Take the first lease and show this node in the store. Raises `StoreUnavailable`."""
        shard = _Shard(await self._store.hold_lease(self._lease_ttl_s))
        self._shards.append(shard)
        await self._put_node(shard)
        self.fresh_at = boot_time()

    async def run(self) -> None:
        """Write, watch and keep fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(), name="registry-writer")
            group.create_task(self._watch(), name="registry-watch")
            group.create_task(self._stay_fresh(), name="registry-freshness")
            group.create_task(self._mend(), name="registry-mender")

    async def settle(self, limit_s: float) -> None:
        """Wait until what was asked for is written, or the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._written.wait()

    async def stop(self) -> None:
        """Give the leases back, so that this node's keys vanish at once."""
        for shard in self._shards:
            await shard.lease.release()
        self._shards.clear()

    async def _put_node(self, shard: _Shard) -> None:
        key = f"nodes/{self._node.node_id}"
        await self._store.txn([], [Put(key, self._node.SerializeToString(), shard.lease.id)])
        shard.keys.add(key)

    async def _shard_for(self, count: int) -> _Shard:
        for shard in self._shards:
            if not shard.lease.lost and len(shard.keys) + count <= KEYS_PER_LEASE:
                return shard
        shard = _Shard(await self._store.hold_lease(self._lease_ttl_s))
        self._shards.append(shard)
        return shard

    async def _write(self) -> None:
        while True:
            self._written.set()
            await self._work.wait()
            self._work.clear()
            self._written.clear()
            while self._queue:
                if isinstance(self._queue[0], _Register):
                    await self._write_arrivals()
                else:
                    await self._delete_departed()

    async def _write_arrivals(self) -> None:
        batch: list[_Register] = []
        size = 0
        while self._queue and size < BATCH and isinstance(self._queue[0], _Register):
            register = self._queue.popleft()
            assert isinstance(register, _Register)
            batch.append(register)
            size += len(register.left)
        agents = [each for register in batch for each in register.left]
        for at in range(0, len(agents), BATCH):
            await self._put_waiting(agents[at : at + BATCH], max(register.deadline for register in batch))
        for register in batch:
            register.done()

    async def _put_waiting(self, part: Sequence[Attaching], deadline: float) -> None:
        while True:
            try:
                await self._put_new(part)
                return
            except (StoreUnavailable, LeaseGone) as error:
                if boot_time() + RETRY_S >= deadline:
                    for each in part:
                        if each.error is None and each.agent is not None and not each.agent.generation:
                            each.error = failure(
                                codes.REGISTRY_UNAVAILABLE,
                                f"{each.agent_id} cannot be registered: the registry does not answer ({error})",
                                retry_after_ms=1_000,
                            )
                    return
                await asyncio.sleep(RETRY_S)

    async def _put_new(self, part: Sequence[Attaching]) -> None:
        agents = [each.agent for each in part if each.agent is not None and not each.agent.generation]
        shard = await self._shard_for(len(agents))
        keys = [agent_key(agent) for agent in agents]
        result = await self._store.txn(
            [absent(key) for key in dict.fromkeys(keys)],
            [Put(key, _value(agent), shard.lease.id) for key, agent in dict(zip(keys, agents, strict=True)).items()],
        )
        if result.succeeded and len(set(keys)) == len(keys):
            for key, agent in zip(keys, agents, strict=True):
                self._registered(shard, key, agent, result.revision)
            return
        for key, agent in zip(keys, agents, strict=True):
            await self._take_over(shard, key, agent)

    async def _take_over(self, shard: _Shard, key: str, agent: Agent) -> None:
        """Write over whoever has the key; a permission to do so was checked by the core for agents of this node."""
        while True:
            result = await self._store.txn([absent(key)], [Put(key, _value(agent), shard.lease.id)], [Get(key)])
            if not result.succeeded and result.reads[0]:
                former = result.reads[0][0]
                result = await self._store.txn([unchanged(former)], [Put(key, _value(agent), shard.lease.id)])
            if result.succeeded:
                self._registered(shard, key, agent, result.revision)
                return

    def _registered(self, shard: _Shard, key: str, agent: Agent, revision: int) -> None:
        for other in self._shards:
            other.keys.discard(key)
        shard.keys.add(key)
        self._agents[key] = agent
        agent.generation = revision
        self.revision = max(self.revision, revision)

    async def _delete_departed(self) -> None:
        batch: list[DeregisterAgent] = []
        while self._queue and len(batch) < BATCH and isinstance(self._queue[0], DeregisterAgent):
            effect = self._queue.popleft()
            assert isinstance(effect, DeregisterAgent)
            batch.append(effect)
        try:
            result = await self._store.txn(_still(batch), [Delete(agent_key(each.agent)) for each in batch])
            if not result.succeeded:
                for each in batch:
                    await self._store.txn(_still([each]), [Delete(agent_key(each.agent))])
        except StoreUnavailable as error:
            log.warning("agents' keys not deleted: they end with their lease", count=len(batch), why=str(error))
        for each in batch:
            key = agent_key(each.agent)
            if key not in self._agents:
                for shard in self._shards:
                    shard.keys.discard(key)

    async def _stay_fresh(self) -> None:
        while True:
            try:
                self.revision = max(self.revision, await self._store.revision())
                self.fresh_at = boot_time()
            except StoreUnavailable as error:
                log.warning("the registry does not answer", age_s=round(self.age_s, 1), why=str(error))
            if any(shard.lease.lost for shard in self._shards):
                self._rewrite.set()
            await asyncio.sleep(FRESH_EVERY_S)

    async def _watch(self) -> None:
        """See what others do to our keys: one that vanished is written again."""
        while True:
            try:
                listing = await self._store.list("agents/")
                self._compare(listing.items)
                async with contextlib.aclosing(self._store.watch("agents/", listing.revision + 1)) as changes:
                    async for batch in changes:
                        self.fresh_at = boot_time()
                        for change in batch:
                            agent = self._agents.get(change.key)
                            if agent is not None and change.item is None and change.revision > agent.generation:
                                self._rewrite.set()
            except Compacted:
                continue
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)

    def _compare(self, items: Iterable[Item]) -> None:
        present = {item.key for item in items}
        if any(key not in present for key in self._agents):
            self._rewrite.set()

    async def _mend(self) -> None:
        """After a lost lease or a deleted key: grant anew, write again what is ours."""
        async with asyncio.TaskGroup() as group:
            watched: set[int] = set()
            while True:
                for shard in self._shards:
                    if shard.lease.id not in watched:
                        watched.add(shard.lease.id)
                        group.create_task(self._on_loss(shard), name=f"lease-watch-{shard.lease.id:x}")
                try:
                    async with asyncio.timeout(1.0):
                        await self._rewrite.wait()
                except TimeoutError:
                    continue
                self._rewrite.clear()
                try:
                    await self._write_again()
                except (StoreUnavailable, LeaseGone) as error:
                    log.warning("the registry could not be mended yet", why=str(error))
                    self._rewrite.set()
                    await asyncio.sleep(RETRY_S)

    async def _on_loss(self, shard: _Shard) -> None:
        await shard.lease.wait_lost()
        if shard in self._shards:
            log.warning("a lease of this node was lost: its keys are written again", keys=len(shard.keys))
            self._rewrite.set()

    async def _write_again(self) -> None:
        node_shown = any(not shard.lease.lost and f"nodes/{self._node.node_id}" in shard.keys for shard in self._shards)
        self._shards = [shard for shard in self._shards if not shard.lease.lost]
        if not node_shown:
            await self._put_node(await self._shard_for(1))
        present = {item.key: item for item in (await self._store.list("agents/")).items}
        held = {shard.lease.id for shard in self._shards}
        missing = [
            (key, agent)
            for key, agent in self._agents.items()
            if key not in present or (present[key].mod_revision == agent.generation and present[key].lease not in held)
        ]
        for key, agent in [*self._agents.items()]:
            item = present.get(key)
            if item is not None and item.mod_revision > agent.generation and self._agents.get(key) is agent:
                log.warning("another node has taken an agent over", agent=agent.agent_id)
                del self._agents[key]
                self._replaced(agent)
        for key, agent in missing:
            if self._agents.get(key) is not agent:
                continue
            shard = await self._shard_for(1)
            own = Compare(key, Field.MOD, Op.EQUAL, agent.generation) if key in present else absent(key)
            result = await self._store.txn([own], [Put(key, _value(agent), shard.lease.id)])
            if result.succeeded:
                self._registered(shard, key, agent, result.revision)
            else:
                self._rewrite.set()
        if missing:
            log.info("agents written to the registry again", count=len(missing))


def _value(agent: Agent) -> bytes:
    record = agent.to_record()
    record.ClearField("load")
    record.ClearField("in_flight")
    record.ClearField("heartbeat_at")
    record.ClearField("status")
    return record.SerializeToString()


def _still(batch: Sequence[DeregisterAgent]) -> list[Compare]:
    return [Compare(agent_key(each.agent), Field.MOD, Op.EQUAL, each.agent.generation) for each in batch]
