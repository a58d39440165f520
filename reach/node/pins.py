"""The pins of sessions in the store: made by compare-and-set, kept while the session is used, under leases that end.

A pin stands under the lease of the time in which it was written; nobody keeps that lease alive, so a pin that is not
written again ends by itself. A pin's epoch is the revision of the transaction that made it: it grows with each owner.
A pin may name a snapshot, the session's state in a snapshot store; only an owner of the pin's epoch can change
that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agentreach.aio.clock import boot_time
from agentreach.v1.peer_pb2 import Pin
from reach.adapters.snapshots import MemorySnapshots
from reach.core.effects import CreatePin, RefreshPin, StoreSnapshot, VoidPin
from reach.core.lanes import Lane, LaneKey
from reach.core.moving import Holder
from reach.core.owners import pin_key, refresh_every_s
from reach.core.snapshots import SnapshotStore, SnapshotsUnavailable
from reach.core.store import Get, Item, LeaseGone, Put, Store, StoreUnavailable, absent, unchanged

AT_ONCE = 64  # pins written at the same time; more only wait inside etcd
TRIES = 5  # of one pin, while others change it or its lease is gone


class Fenced(Exception):
    """The pin is another owner's."""


class PinBook:
    """Writes this node's pins."""

    def __init__(
        self,
        store: Store,
        node_id: str,
        session_ttl_s: float,
        away: Callable[[], str],
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """`away` tells why the store cannot be used now, empty while it answers. Without `snapshots`: in memory."""
        self.snapshots: SnapshotStore = snapshots or MemorySnapshots()
        self._store = store
        self._node_id = node_id
        self._session_ttl_s = session_ttl_s
        self._away = away
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._lease_id = 0
        self._lease_until = 0.0
        self._leasing = asyncio.Lock()
        self.seen_revision = 0
        """The newest revision of the store in which a pin was written from here."""

    async def create(self, effect: CreatePin) -> Holder:
        """Write a pin, in place of the one under `replaces_epoch` if there is one.

        Returns who holds the session now: if the store has another pin, that one's holder.
        Raises `StoreUnavailable`, at once while the store is known to be away.
        """
        if away := self._away():
            raise StoreUnavailable(away)
        key = pin_key(effect.lane.key)
        agent = effect.attachment.agent
        session_id, home = effect.lane.key[3], agent.node_id or self._node_id
        new = Pin(
            session_id=session_id,
            agent_id=agent.agent_id,
            incarnation=agent.incarnation,
            home=home,
            turn=effect.turn,
            snapshot=effect.snapshot,
            since=effect.since,
            epoch=effect.epoch,
        )
        former, condition = "", absent(key)
        async with self._at_once:
            for _ in range(TRIES):
                try:
                    put = Put(key, new.SerializeToString(), await self.lease())
                    result = await self._store.txn([condition], [put], [Get(key)])
                except LeaseGone:
                    self._lease_until = 0.0
                    continue
                if result.succeeded:
                    self.seen_revision = result.revision
                    if former and former != new.snapshot:
                        await self.drop(former)
                    return _holder(new, effect.epoch or result.revision, made=True)
                if not result.reads[0]:
                    condition = absent(key)
                    continue
                item = result.reads[0][0]
                pin, epoch = _read(item)
                if epoch != effect.replaces_epoch:
                    return _holder(pin, epoch, made=False)
                condition, former = unchanged(item), pin.snapshot
                if pin.snapshot and not effect.forsaken:
                    new.turn, new.snapshot, new.since = pin.turn, pin.snapshot, pin.since or epoch
        raise StoreUnavailable("the pin, or its lease, changed under every attempt to write it")

    async def holder(self, key: LaneKey) -> Holder | None:
        """Who holds a session by the store. Raises `StoreUnavailable`."""
        if away := self._away():
            raise StoreUnavailable(away)
        item = await self._store.get(pin_key(key))
        return None if item is None else _holder(*_read(item), made=False)

    async def void(self, effect: VoidPin) -> None:
        """Say in a session's pin that its owner is dead. Best effort: else other nodes find out in time."""
        key = pin_key(effect.lane.key)
        if self._away():
            return
        with contextlib.suppress(StoreUnavailable, LeaseGone):
            async with self._at_once:
                item = await self._store.get(key)
                if item is None:
                    return
                pin, epoch = _read(item)
                if epoch == effect.epoch and pin.incarnation:
                    pin.epoch, pin.incarnation = epoch, b""
                    put = Put(key, pin.SerializeToString(), await self.lease())
                    await self._store.txn([unchanged(item)], [put])

    async def refresh(self, effect: RefreshPin) -> Holder | None:
        """Move a used session's pin to a newer lease; write it again if it is gone.

        Returns who holds the session if that is somebody else. Best effort: a session in use is asked for again soon.
        """
        lane = effect.lane
        key, epoch = pin_key(lane.key), lane.epoch
        if self._away() or not epoch:
            return None
        with contextlib.suppress(StoreUnavailable, SnapshotsUnavailable):
            async with self._at_once:
                item = await self._store.get(key)
                if item is None:
                    return await self._write_again(lane, epoch)
                pin, found = _read(item)
                if found != epoch:
                    return _holder(pin, found, made=False)
                pin.epoch = epoch
                if lane.epoch == epoch and lane.owner is not None:
                    pin.home = lane.owner.agent.node_id or self._node_id
                try:
                    await self._store.txn([unchanged(item)], [Put(key, pin.SerializeToString(), await self.lease())])
                except LeaseGone:
                    self._lease_until = 0.0
                if pin.snapshot:
                    await self.snapshots.keep(pin.snapshot)
        return None

    async def write_again(self, lane: Lane, epoch: int) -> Holder | None:
        """Write the pin of an owner that is here, under the epoch it has, if there is none.

        Returns who holds the session if that is somebody else. Raises `StoreUnavailable`.
        """
        async with self._at_once:
            return await self._write_again(lane, epoch)

    async def _write_again(self, lane: Lane, epoch: int) -> Holder | None:
        key = pin_key(lane.key)
        for _ in range(TRIES):
            lease = await self.lease()
            if lane.owner is None or lane.owner.remote or lane.epoch != epoch:
                return None  # it goes to somebody else, who is pinned by now or will be
            try:
                result = await self._store.txn(
                    [absent(key)], [Put(key, self._of(lane).SerializeToString(), lease)], [Get(key)]
                )
            except LeaseGone:
                self._lease_until = 0.0
                continue
            if result.succeeded:
                self.seen_revision = result.revision
            if result.succeeded or not result.reads[0]:
                return None
            pin, found = _read(result.reads[0][0])
            return None if found == epoch else _holder(pin, found, made=False)
        raise StoreUnavailable("the lease of the pins is gone under every attempt to write one")

    def _of(self, lane: Lane) -> Pin:
        agent_id, incarnation = lane.owner_id
        home = lane.owner.agent.node_id if lane.owner is not None else ""
        return Pin(
            session_id=lane.key[3],
            agent_id=agent_id,
            incarnation=incarnation,
            home=home or self._node_id,
            epoch=lane.epoch,
            turn=lane.turn,
            snapshot=lane.snapshot,
            since=lane.since,
        )

    # ---- snapshots ----

    async def store_snapshot(self, effect: StoreSnapshot) -> str:
        """Keep a state, then have its pin name it; returns the reference.

        Raises `Fenced` if the pin is of another epoch, `SnapshotsUnavailable` or `StoreUnavailable` if that cannot be
        told or done. A pin that names a newer turn is left as it is.
        """
        if away := self._away():
            raise StoreUnavailable(away)
        lane, key = effect.lane, pin_key(effect.lane.key)
        async with self._at_once:
            reference = await self.snapshots.put(key, effect.epoch, effect.turn, effect.data)
            for _ in range(TRIES):
                item = await self._store.get(key)
                pin, epoch = _read(item) if item is not None else (self._of(lane), effect.epoch)
                if epoch != effect.epoch or pin.turn > effect.turn:
                    await self.drop(reference)
                    if epoch != effect.epoch:
                        raise Fenced
                    return pin.snapshot
                former, pin.epoch = pin.snapshot, epoch
                pin.turn, pin.snapshot = effect.turn, reference
                condition = absent(key) if item is None else unchanged(item)
                try:
                    put = Put(key, pin.SerializeToString(), await self.lease())
                    result = await self._store.txn([condition], [put])
                except LeaseGone:
                    self._lease_until = 0.0
                    continue
                if result.succeeded:
                    if former and former != reference:
                        await self.drop(former)
                    return reference
        raise StoreUnavailable("the pin, or its lease, changed under every attempt to name a snapshot in it")

    async def drop(self, reference: str) -> None:
        """Forget a state. Best effort: what is left over ends by itself."""
        with contextlib.suppress(SnapshotsUnavailable):
            await self.snapshots.delete(reference)

    async def lease(self) -> int:
        """The lease of this time. A pin under it lives `session_ttl_s` after the last use at least."""
        async with self._leasing:
            if boot_time() >= self._lease_until:
                # The pin may be written at the end of the lease's use, and used until just before its next refresh.
                used_s = refresh_every_s(self._session_ttl_s)
                lease = await self._store.hold_lease(self._session_ttl_s + 2 * used_s)
                lease.abandon()
                self._lease_id, self._lease_until = lease.id, boot_time() + used_s
            return self._lease_id


def _read(item: Item) -> tuple[Pin, int]:
    """A pin as it stands in the store, and its epoch."""
    pin = Pin.FromString(item.value)
    return pin, pin.epoch or item.mod_revision


def _holder(pin: Pin, epoch: int, *, made: bool) -> Holder:
    return Holder(pin.agent_id, pin.incarnation, epoch, made, pin.home, pin.turn, pin.snapshot, pin.since or epoch)
