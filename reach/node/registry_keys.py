"""API keys in the registry: one value a key, followed by every node. A key revoked on one ends on all.

A node that cannot reach the registry goes on with the keys it knows; those that expire end all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import structlog
from google.protobuf.message import DecodeError

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.peer_pb2 import StoredKey
from reach.core import keyring
from reach.core.keyring import KEYS_MAX, Kept, KeyRefused, KeysUnusable
from reach.core.store import (
    TXN_OPERATIONS_MAX,
    Change,
    Compacted,
    Compare,
    Delete,
    Item,
    Listing,
    Operation,
    Put,
    Store,
    StoreUnavailable,
    absent,
    unchanged,
)
from reach.node.lineage_key import shared_key
from reach.node.mirror import Mirror

log = structlog.get_logger("reach.keys")

KEYS, LOOKUP_KEY, USED = "keys/api/", "keys/api-lookup", "keys/used/"
LIST_EVERY_S = 60.0  # whatever the watch says: that nothing came does not prove that nothing changed
LIST_AGAIN_S = 0.5  # after the store did not answer
_TRIES = 20  # of a change that others were quicker than: each time one of them is through


class RegistryOfKeys:
    """Implements `reach.node.keys.KeyStore` by a `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self) -> Kept:
        """See `KeyStore.read`."""
        lookup_key, listing = await self._listed()
        return Kept(lookup_key, tuple(record for item in listing.items if (record := _record(item)) is not None))

    async def follow(self) -> AsyncGenerator[Kept | KeysUnusable, None]:
        """See `KeyStore.follow`. The watch tells at once; whatever it says, all are listed each `LIST_EVERY_S`."""
        mirror = _Mirrored()
        while True:
            try:
                mirror.lookup_key, listing = await self._listed()
                mirror.listed_all(listing)
                yield mirror.kept
                async with contextlib.aclosing(self._watched(mirror)) as states:
                    async for kept in states:
                        yield kept
                return  # the store is closed
            except (Compacted, TimeoutError):
                pass
            except KeysUnusable as error:
                yield error
                await asyncio.sleep(LIST_AGAIN_S)

    async def refreshed(self) -> Kept | None:
        """See `KeyStore.refreshed`: the watch tells as soon as etcd does."""
        return None

    async def _watched(self, mirror: _Mirrored) -> AsyncGenerator[Kept, None]:
        """What changes; ends in `TimeoutError` after `LIST_EVERY_S`."""
        until = asyncio.get_running_loop().time() + LIST_EVERY_S
        try:
            async with contextlib.aclosing(self._store.watch(KEYS, mirror.revision + 1)) as batches:
                while True:
                    async with asyncio.timeout_at(until):
                        batch = await anext(batches, None)
                    if batch is None:
                        return
                    if batch:
                        mirror.told(batch)
                        yield mirror.kept
        except StoreUnavailable as error:
            raise _unusable(error) from error

    async def _listed(self) -> tuple[bytes, Listing]:
        try:
            return await shared_key(self._store, LOOKUP_KEY), await self._store.list(KEYS)
        except StoreUnavailable as error:
            raise _unusable(error) from error

    async def change(self, decide: Callable[[Kept], Kept]) -> Kept:
        """See `KeyStore.change`."""
        try:
            lookup_key = await shared_key(self._store, LOOKUP_KEY)
            for _ in range(_TRIES):
                items = {item.key: item for item in (await self._store.list(KEYS)).items}
                there = {key: record for key, item in items.items() if (record := _record(item)) is not None}
                kept = decide(Kept(lookup_key, tuple(there.values())))
                compares, operations = _steps(items, there, kept)
                if not operations or (await self._store.txn(compares, operations)).succeeded:
                    return kept
        except StoreUnavailable as error:
            raise _unusable(error) from error
        raise KeysUnusable("the keys in the registry were not changed: others change them all the time; try again")

    async def used(self) -> dict[str, float]:
        """See `KeyStore.used`."""
        try:
            items = (await self._store.list(USED)).items
        except StoreUnavailable:
            return {}
        found: dict[str, float] = {}
        for item in items:
            with contextlib.suppress(ValueError):
                found[item.key.removeprefix(USED)] = float(item.value)
        return found

    async def put_used(self, used: Mapping[str, float]) -> None:
        """See `KeyStore.put_used`. Of a key used at two nodes the last to tell counts."""
        puts = [Put(f"{USED}{key_id}", f"{at:.0f}".encode()) for key_id, at in used.items()]
        try:
            for at in range(0, len(puts), TXN_OPERATIONS_MAX):
                await self._store.txn((), puts[at : at + TXN_OPERATIONS_MAX])
        except StoreUnavailable as error:
            log.warning("when keys were used cannot be kept", why=str(error))


class _Mirrored(Mirror):
    """The records as a watch tells of them."""

    def __init__(self) -> None:
        super().__init__(KEYS)
        self.lookup_key = b""
        self._records: dict[str, StoredKey] = {}

    def listed_all(self, listing: Listing) -> None:
        """All that is there."""
        self._apply(self.difference(listing))
        self.listed(listing.revision, 0.0)

    def told(self, batch: Sequence[Change]) -> None:
        """What has changed."""
        self._apply(self.fresh(batch))
        self.reached(batch[-1].revision)

    @property
    def kept(self) -> Kept:
        """What is there now."""
        return Kept(self.lookup_key, tuple(self._records.values()))

    def _apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self.hold(change)
            self._records.pop(change.key, None)
            record = _record(change.item) if change.item is not None else None
            if record is not None:
                self._records[change.key] = record


def _steps(
    items: Mapping[str, Item], there: Mapping[str, StoredKey], kept: Kept
) -> tuple[list[Compare], list[Operation]]:
    """What leads from what is there to what is wanted, if nobody else changes those records meanwhile."""
    if len(kept.records) > KEYS_MAX:
        raise KeyRefused(f"the registry has {KEYS_MAX} keys already, the limit", codes.OVERLOADED)
    compares: list[Compare] = []
    operations: list[Operation] = []
    wanted = {KEYS + record.info.key_id: record for record in kept.records}
    for key, record in wanted.items():
        if there.get(key) != record:
            compares.append(unchanged(items[key]) if key in items else absent(key))
            operations.append(Put(key, record.SerializeToString()))
    for key in there.keys() - wanted.keys():
        if len(operations) < TXN_OPERATIONS_MAX - 1:
            compares.append(unchanged(items[key]))
            operations += [Delete(key), Delete(USED + key.removeprefix(KEYS))]
    return compares, operations


def _record(item: Item) -> StoredKey | None:
    """What stands there, if it is a key's record."""
    try:
        record = StoredKey.FromString(item.value)
    except DecodeError:
        fault = "it is no record of a key"
    else:
        fault = keyring.record_fault(record)
        if not fault and item.key != KEYS + record.info.key_id:
            fault = "it is another key's"
    if fault:
        log.error("a key in the registry cannot be used: left out", key=item.key, why=fault)
        return None
    return record


def _unusable(error: StoreUnavailable) -> KeysUnusable:
    return KeysUnusable(f"the keys in the registry cannot be read or written: {error}")
