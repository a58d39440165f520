"""The leases of this node and the keys under each: a dead node's keys vanish together, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from reach.core.store import HeldLease, Store

KEYS_PER_LEASE = 1_000  # cluster.md: one lease with 5,000 keys is one event of 5,000 deletions, too much at once


class Shard:
    """One lease and the keys written under it."""

    def __init__(self, lease: HeldLease) -> None:
        self.lease = lease
        self.keys: set[str] = set()


class Shards:
    """All leases of this node, taken as they are needed."""

    def __init__(self, store: Store, ttl_s: float, lost: Callable[[], None]) -> None:
        """`lost` is called when a lease is found to be gone."""
        self._store = store
        self._ttl_s = ttl_s
        self._lost = lost
        self._shards: list[Shard] = []
        self._waits: dict[Shard, asyncio.Task[None]] = {}

    @property
    def valid_until(self) -> float:
        """Until when all keys of this node stand for sure, by the boot clock; 0 while there is no lease."""
        return min((0.0 if shard.lease.lost else shard.lease.valid_until for shard in self._shards), default=0.0)

    def holds(self, lease_id: int) -> bool:
        """True for a lease that is ours and not lost."""
        return any(shard.lease.id == lease_id and not shard.lease.lost for shard in self._shards)

    async def room_for(self, count: int) -> Shard:
        """A shard that takes so many keys more. Raises `StoreUnavailable`."""
        for shard in self._shards:
            if not shard.lease.lost and len(shard.keys) + count <= KEYS_PER_LEASE:
                return shard
        shard = Shard(await self._store.hold_lease(self._ttl_s))
        self._shards.append(shard)
        self._waits[shard] = asyncio.create_task(self._wait_lost(shard), name=f"lease-{shard.lease.id:x}")
        return shard

    def wrote(self, key: str, shard: Shard) -> None:
        """The key stands under this shard's lease now."""
        self.removed(key)
        shard.keys.add(key)

    def removed(self, key: str) -> None:
        """The key is gone."""
        for shard in self._shards:
            shard.keys.discard(key)

    def drop(self, shard: Shard) -> None:
        """The store does not know this lease any more."""
        if shard in self._shards:
            self._shards.remove(shard)
            self._waits.pop(shard).cancel()
            shard.lease.abandon()

    def drop_lost(self) -> None:
        """Forget every lease that is lost."""
        for shard in [shard for shard in self._shards if shard.lease.lost]:
            self.drop(shard)

    async def release(self) -> None:
        """Give all leases back, so that their keys vanish at once. Bounded by 2 s."""
        for task in self._waits.values():
            task.cancel()
        self._waits.clear()
        shards, self._shards = self._shards, []
        await asyncio.gather(*(shard.lease.release() for shard in shards))

    async def _wait_lost(self, shard: Shard) -> None:
        await shard.lease.wait_lost()
        self._lost()
