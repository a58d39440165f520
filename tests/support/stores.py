"""What tests of the registry stores share: writing through doubt, and following a watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from reach.adapters.etcd import EtcdStore
from reach.core.store import Change, Put, Store, StoreUnavailable, absent
from tests.support.etcd import EtcdCluster

LIMIT_S = 15.0


@asynccontextmanager
async def connected(etcd: EtcdCluster, prefix: str = "/agentreach/v1/") -> AsyncIterator[EtcdStore]:
    """A store on the cluster, closed afterwards."""
    store = await EtcdStore.connect(etcd.endpoints, prefix=prefix)
    try:
        yield store
    finally:
        await store.close()


async def put(store: Store, key: str, value: bytes = b"v", lease: int = 0) -> int:
    """Write one key; its revision."""
    return (await store.txn([], [Put(key, value, lease)])).revision


async def put_stubbornly(store: Store, key: str) -> None:
    """Write a key once although the store is away now and then: after each doubt it is read whether it was done."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await store.txn([absent(key)], [Put(key, b"v")])
                return
            except StoreUnavailable:
                continue


class Follower:
    """Collects all changes of a watch in the background."""

    def __init__(self, changes: AsyncGenerator[Sequence[Change], None]) -> None:
        self.seen: list[Change] = []
        self.established = 0
        self._changes = changes
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="follower")

    async def _follow(self) -> None:
        async with aclosing(self._changes) as changes:
            async for batch in changes:
                self.established += not batch
                self.seen.extend(batch)
                self._news.set()

    @property
    def keys(self) -> list[str]:
        """The keys that changed, in order."""
        return [change.key for change in self.seen]

    async def until(self, number: int = 0, established: int = 0) -> None:
        """Wait for so many changes, and for the watch to have been established so many times."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < number or self.established < established:
                self._news.clear()
                waiting = asyncio.create_task(self._news.wait())
                await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._task.done():
                    await self._task
                    return

    async def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        await asyncio.wait([self._task])
