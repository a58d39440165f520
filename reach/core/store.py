"""What the node needs of a registry store: keys with revisions, leases, transactions and watches.

Two implementations pass one contract suite: `reach.adapters.memory_store` and `reach.adapters.etcd`.
Keys are text relative to the store's prefix. Revisions grow with every change of the whole store; the memory
store's start at the wall clock in microseconds, so a revision is greater than any before a restart.

This module knows no I/O: it holds the facts and the shape of the store only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One key as stored. `lease` is 0 for a key without one."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All items below a prefix as of `revision`, in key order."""

    items: tuple[Item, ...]
    revision: int


class Field(Enum):
    """What a `Compare` looks at; an absent key has create and mod revision 0 and an empty value."""

    CREATE = "create_revision"
    MOD = "mod_revision"
    VALUE = "value"


class Op(Enum):
    """How a `Compare` compares."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    GREATER = ">"


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: `field(key) op operand`."""

    key: str
    field: Field
    op: Op
    operand: int | bytes


def absent(key: str) -> Compare:
    """True while `key` does not exist."""
    return Compare(key, Field.CREATE, Op.EQUAL, 0)


def unchanged(item: Item) -> Compare:
    """True while nobody has written or deleted the key since `item` was read."""
    return Compare(item.key, Field.MOD, Op.EQUAL, item.mod_revision)


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key; lease 0 = none."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key, or with `prefix` all keys that start with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key, or with `prefix` all keys that start with it."""

    key: str
    prefix: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Outcome of a transaction: which branch ran, at which revision, and what each `Get` of it read.

    `reads` has one tuple for every operation of the branch that ran, in order; empty for Put and Delete.
    """

    succeeded: bool
    revision: int
    reads: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One key written (`item` set) or deleted (`item` None) at `revision`."""

    key: str
    revision: int
    item: Item | None


class StoreUnavailable(Exception):
    """The store cannot be reached, or did not answer within its time. Nothing is known of the outcome."""


class Compacted(Exception):
    """The revision asked for is gone: list again, diff, and watch from the new revision."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revisions up to {revision} are compacted")
        self.revision = revision


class LeaseGone(Exception):
    """The lease has expired or was revoked; keys under it are gone."""


class HeldLease(Protocol):
    """A lease that the store keeps alive by itself (every TTL/3) until it is lost or released."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def valid_until(self) -> float:
        """By this process's boot clock: send time of the last acknowledged keepalive + TTL."""
        ...

    @property
    def lost(self) -> bool: ...

    async def wait_lost(self) -> None:
        """Return when the lease is lost (answer TTL 0, or local deadline passed). Cancelling only stops the wait."""
        ...

    async def release(self) -> None:
        """Stop keeping it alive and revoke it, so its keys vanish at once. Best effort, bounded by 2 s."""
        ...


class Store(Protocol):
    """A registry store. Every call is bounded in time and raises `StoreUnavailable` when that passes.

    Cancelling a call abandons the wait; a transaction may still be applied.
    """

    async def get(self, key: str) -> Item | None:
        """Read one key, linearizably."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Read all keys that start with `prefix`, linearizably."""
        ...

    async def revision(self) -> int:
        """The store's current revision by a linearizable read of no keys: how fresh a watch must be."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Change]]:
        """Changes below `prefix` from `from_revision` on, in order, one batch a revision or more.

        Goes on by itself over lost connections, without gap or repeat. An empty batch is a sign of life.
        Raises `Compacted`. Close it with `contextlib.aclosing`.
        """
        ...

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Run `then` if all compares hold, else `otherwise`, atomically. At most 128 operations.

        `LeaseGone` if a Put names a lease that does not exist. A transaction whose answer was lost is never sent
        again blindly: `StoreUnavailable` is raised, and the caller reads what happened.
        """
        ...

    async def hold_lease(self, ttl_s: float) -> HeldLease:
        """Grant a lease and keep it alive."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End a lease: its keys are deleted in one step. Unknown leases are ignored."""
        ...

    async def close(self) -> None:
        """End watches and keepalives; leases are left to expire unless released before."""
        ...
