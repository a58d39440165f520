"""The pins of sessions in the store: made by compare-and-set, kept while the session is used, under leases that end.

A pin stands under the lease of the time in which it was written; nobody keeps that lease alive, so a pin that is not
written again ends by itself. A pin's epoch is the revision of the transaction that made it: it grows with each owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from agentreach.aio.clock import boot_time
from agentreach.v1.peer_pb2 import Pin
from reach.core.effects import CreatePin, RefreshPin
from reach.core.lanes import LaneKey
from reach.core.owners import refresh_every_s
from reach.core.store import Get, LeaseGone, Put, Store, StoreUnavailable, absent, unchanged

AT_ONCE = 64  # pins written at the same time; more only wait inside etcd
TRIES = 5  # of one pin, while others change it or its lease is gone


def pin_key(lane: LaneKey) -> str:
    """Where a session's pin stands. The session_id is hashed: it may hold anything."""
    tenant, env, agent_type, session_id = lane
    digest = hashlib.blake2b(session_id.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
    return f"pins/{tenant}/{env}/{agent_type}/{digest}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a session by the store; `made`: by the pin that was just written."""

    agent_id: str
    incarnation: bytes
    epoch: int
    made: bool


class PinBook:
    """Writes this node's pins."""

    def __init__(self, store: Store, node_id: str, session_ttl_s: float, away: Callable[[], str]) -> None:
        """`away` tells why the store cannot be used now, empty while it answers."""
        self._store = store
        self._node_id = node_id
        self._session_ttl_s = session_ttl_s
        self._away = away
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._lease_id = 0
        self._lease_until = 0.0
        self._leasing = asyncio.Lock()

    async def create(self, effect: CreatePin) -> Holder:
        """Write a pin, in place of the one under `replaces_epoch` if there is one.

        Returns who holds the session now: if the store has another pin, that one's holder.
        Raises `StoreUnavailable`, at once while the store is known to be away.
        """
        if away := self._away():
            raise StoreUnavailable(away)
        key = pin_key(effect.lane.key)
        agent = effect.attachment.agent
        value = self._value(effect.lane.key, agent.agent_id, agent.incarnation, 0)
        condition = absent(key)
        async with self._at_once:
            for _ in range(TRIES):
                try:
                    put = Put(key, value, await self._lease())
                    result = await self._store.txn([condition], [put], [Get(key)])
                except LeaseGone:
                    self._lease_until = 0.0
                    continue
                if result.succeeded:
                    return Holder(agent.agent_id, agent.incarnation, result.revision, made=True)
                if not result.reads[0]:
                    condition = absent(key)
                    continue
                item = result.reads[0][0]
                holder = Pin.FromString(item.value)
                epoch = holder.epoch or item.mod_revision
                if epoch != effect.replaces_epoch:
                    return Holder(holder.agent_id, holder.incarnation, epoch, made=False)
                condition = unchanged(item)
        raise StoreUnavailable("the pin, or its lease, changed under every attempt to write it")

    async def refresh(self, effect: RefreshPin) -> None:
        """Move a used session's pin to a newer lease; write it again if it is gone (etcd was away for long).

        Best effort: a session in use is asked for again soon.
        """
        lane = effect.lane
        key, epoch, (agent_id, incarnation) = pin_key(lane.key), lane.epoch, lane.owner_id
        if self._away() or not epoch:
            return
        value = self._value(lane.key, agent_id, incarnation, epoch)
        with contextlib.suppress(StoreUnavailable):
            async with self._at_once:
                item = await self._store.get(key)
                if item is not None and (Pin.FromString(item.value).epoch or item.mod_revision) != epoch:
                    return
                condition = absent(key) if item is None else unchanged(item)
                try:
                    await self._store.txn([condition], [Put(key, value, await self._lease())])
                except LeaseGone:
                    self._lease_until = 0.0

    def _value(self, lane: LaneKey, agent_id: str, incarnation: bytes, epoch: int) -> bytes:
        pin = Pin(session_id=lane[3], agent_id=agent_id, incarnation=incarnation, home=self._node_id, epoch=epoch)
        return pin.SerializeToString()

    async def _lease(self) -> int:
        """The lease of this time. A pin under it lives `session_ttl_s` after the last use at least."""
        async with self._leasing:
            if boot_time() >= self._lease_until:
                # The pin may be written at the end of the lease's use, and used until just before its next refresh.
                used_s = refresh_every_s(self._session_ttl_s)
                lease = await self._store.hold_lease(self._session_ttl_s + 2 * used_s)
                lease.abandon()
                self._lease_id, self._lease_until = lease.id, boot_time() + used_s
            return self._lease_id
