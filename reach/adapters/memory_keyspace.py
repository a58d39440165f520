"""The state of the embedded store: keys, revisions, leases and history. Pure: told the time, never asks.

Semantics are etcd's, so that one contract suite runs against both: one revision for all that a transaction writes,
deletion of a lease's keys in one revision, comparisons of an absent key's value always false.
It refuses to know who watches and when timers fire.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from reach.core.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    Field,
    Get,
    Item,
    LeaseGone,
    Op,
    Operation,
    Put,
    TxnResult,
)

HISTORY_MAX = 20_000
"""Revisions kept for watches. A watcher further behind is told `Compacted` and lists again; more costs memory only."""

_COMPARE = {Op.EQUAL: operator.eq, Op.NOT_EQUAL: operator.ne, Op.LESS: operator.lt, Op.GREATER: operator.gt}


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class Keyspace:
    """All keys as of `revision`, and the changes since `compacted`."""

    def __init__(self, first_revision: int, history_max: int = HISTORY_MAX) -> None:
        self.revision = first_revision
        self.compacted = first_revision
        self._items: dict[str, Item] = {}
        self._keys: list[str] = []  # sorted
        self._leases: dict[int, _Lease] = {}
        self._last_lease = first_revision
        self._history: deque[tuple[Change, ...]] = deque()  # one entry a revision, the last is `revision`
        self._history_max = history_max

    def get(self, key: str) -> Item | None:
        """The key as stored now."""
        return self._items.get(key)

    def below(self, prefix: str) -> tuple[Item, ...]:
        """All items whose key starts with `prefix`, in key order."""
        return tuple(self._items[key] for key in self._keys_below(prefix))

    def _keys_below(self, prefix: str) -> Iterator[str]:
        for index in range(bisect_left(self._keys, prefix), len(self._keys)):
            if not self._keys[index].startswith(prefix):
                return
            yield self._keys[index]

    # Transactions

    def txn(self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> TxnResult:
        """Run one branch. `LeaseGone`, with nothing changed, if it puts under a lease that does not exist."""
        succeeded = all(self._holds(compare) for compare in compares)
        branch = then if succeeded else otherwise
        for operation in branch:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseGone(f"lease {operation.lease:x} does not exist")
        changes: dict[str, Change] = {}
        reads = tuple(self._run(operation, changes) for operation in branch)
        self._record(changes)
        return TxnResult(succeeded, self.revision, reads)

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        actual: int | bytes
        match compare.field:
            case Field.CREATE:
                actual = item.create_revision if item else 0
            case Field.MOD:
                actual = item.mod_revision if item else 0
            case Field.VALUE:
                if item is None:
                    return False
                actual = item.value
        return bool(_COMPARE[compare.op](actual, compare.operand))

    def _run(self, operation: Operation, changes: dict[str, Change]) -> tuple[Item, ...]:
        match operation:
            case Put():
                self._put(operation, changes)
            case Delete(key, prefix):
                for name in list(self._keys_below(key)) if prefix else [key]:
                    self._delete(name, changes)
            case Get(key, prefix):
                if prefix:
                    return self.below(key)
                item = self._items.get(key)
                return (item,) if item else ()
        return ()

    def _put(self, put: Put, changes: dict[str, Change]) -> None:
        revision = self.revision + 1
        old = self._items.get(put.key)
        if old is None:
            insort(self._keys, put.key)
            item = Item(put.key, put.value, revision, revision, put.lease)
        else:
            self._detach(old)
            item = replace(old, value=put.value, mod_revision=revision, lease=put.lease)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self._items[put.key] = item
        changes[put.key] = Change(put.key, revision, item)

    def _delete(self, key: str, changes: dict[str, Change]) -> None:
        old = self._items.pop(key, None)
        if old is None:
            return
        del self._keys[bisect_left(self._keys, key)]
        self._detach(old)
        changes[key] = Change(key, self.revision + 1, None)

    def _detach(self, item: Item) -> None:
        lease = self._leases.get(item.lease)
        if lease is not None:
            lease.keys.discard(item.key)

    def _record(self, changes: dict[str, Change]) -> None:
        if not changes:
            return
        self.revision += 1
        self._history.append(tuple(changes.values()))
        if len(self._history) > self._history_max:
            self.compact(self.revision - self._history_max)

    # History

    def compact(self, revision: int) -> None:
        """Forget the changes up to `revision` (at most the current one)."""
        while self.compacted < min(revision, self.revision):
            self._history.popleft()
            self.compacted += 1

    def changes(self, prefix: str, from_revision: int, revisions_max: int) -> tuple[list[Change], int]:
        """Changes below `prefix` of at most `revisions_max` revisions, and the revision to go on from.

        `Compacted` if `from_revision` is forgotten, or is further ahead than the next revision.
        """
        if from_revision <= self.compacted or from_revision > self.revision + 1:
            raise Compacted(min(self.compacted, self.revision))
        start = from_revision - self.compacted - 1
        batches = islice(self._history, start, start + revisions_max)
        found = [change for batch in batches for change in batch if change.key.startswith(prefix)]
        return found, min(self.revision + 1, from_revision + revisions_max)

    # Leases

    def grant(self, ttl_s: float, now: float) -> int:
        """A new lease that ends at `now + ttl_s` unless renewed."""
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, now + ttl_s)
        return self._last_lease

    def renew(self, lease_id: int, now: float) -> bool:
        """Let the lease end a whole TTL from `now`; False if it is gone."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_at = now + lease.ttl_s
        return True

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys in one revision; an unknown lease is ignored."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        changes: dict[str, Change] = {}
        for key in sorted(lease.keys):
            self._delete(key, changes)
        self._record(changes)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at <= now]:
            self.revoke(lease_id)

    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)
