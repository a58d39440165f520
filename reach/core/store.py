"""What the node needs of a registry store: keys with revisions, leases, transactions and watches.

Two implementations pass one contract suite: `reach.adapters.memory_store` and `reach.adapters.etcd`.
Keys are text relative to the store's prefix. Revisions grow with every change of the whole store; the memory
store's start at the wall clock in microseconds, so a revision is greater than any before a restart.

This module knows no I/O: it holds the facts and the shape of the store only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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


@dataclass(frozen=True, slots=True)
class Summary:
    """How many keys there are below a prefix as of `revision`, and the newest `mod_revision` among them (0: none)."""

    revision: int
    count: int
    newest: int


class Field(Enum):
    """What a `Compare` looks at.

    An absent key has create and mod revision 0. It has no value: every comparison of one is false (as in etcd).
    """

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

TXN_OPERATIONS_MAX = 128
"""Operations of one branch, and compares, that etcd takes in a transaction (its `--max-txn-ops`)."""

TXN_BYTES_MAX = 1_500_000
"""Keys and values of one transaction; etcd takes 1.5 MiB a request (`--max-request-bytes`), framing included."""


def check_txn(compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> None:
    """Raise `ValueError` for a transaction that no store would take, whatever the state of its keys."""
    if max(len(compares), len(then), len(otherwise)) > TXN_OPERATIONS_MAX:
        raise ValueError(f"a transaction has at most {TXN_OPERATIONS_MAX} operations and compares")
    size = sum(len(op.key) + len(op.value) for op in (*then, *otherwise) if isinstance(op, Put))
    if size > TXN_BYTES_MAX:
        raise ValueError(f"a transaction writes at most {TXN_BYTES_MAX} bytes, this one {size}")
    for branch in (then, otherwise):
        _check_written_once(branch)
    for compare in compares:
        if isinstance(compare.operand, bytes) != (compare.field is Field.VALUE):
            raise ValueError(f"{compare.field.value} of {compare.key!r} cannot be compared with {compare.operand!r}")


def _check_written_once(branch: Sequence[Operation]) -> None:
    written: set[str] = set()
    for operation in branch:
        if isinstance(operation, Put):
            if operation.key in written:
                raise ValueError(f"a transaction writes {operation.key!r} twice")
            written.add(operation.key)
    for operation in branch:
        if isinstance(operation, Delete):
            key, prefix = operation.key, operation.prefix
            if any(name == key or (prefix and name.startswith(key)) for name in written):
                raise ValueError(f"a transaction both writes and deletes {key!r}")


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
    """The store cannot be reached, did not answer within its time, or refuses. Nothing is known of the outcome.

    The text is for an operator: it names the server, and what to do where that is known.
    """


class Compacted(Exception):
    """The revision asked for is gone: list again, diff, and watch from the new revision.

    Also raised when the store does not know the revision yet: it has lost data, or was restored from a backup.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"changes up to revision {revision} cannot be watched any more")
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
        """Return when the lease is lost (answer TTL 0, or local deadline passed). Cancelling only stops the wait.

        A released lease counts as lost. What was lost is never found again: hold a new one.
        """
        ...

    def abandon(self) -> None:
        """Stop keeping it alive: it ends by itself, TTL after the last keepalive. Nobody is told then."""
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
        """The store's current revision by a linearizable read of no keys."""
        ...

    async def summary(self, prefix: str) -> Summary:
        """Read how far the keys that start with `prefix` have come, linearizably and without their values."""
        ...

    def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """Changes below `prefix` from `from_revision` on, in order, one batch a revision or more.

        With `deletes_only` what is written is not sent, and costs nothing.

        Goes on by itself over lost connections, without gap or repeat. An empty batch is a sign of life: the first
        thing after the watch is established, at the start and after each lost connection.
        Raises `Compacted`, and `StoreUnavailable` if the store refuses the watch (permission). Ends when the store
        is closed. Close it with `contextlib.aclosing`.
        """
        ...

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Run `then` if all compares hold, else `otherwise`, atomically. `ValueError` beyond `check_txn`'s limits.

        `LeaseGone` if a Put names a lease that does not exist. A transaction whose answer was lost is never sent
        again blindly: `StoreUnavailable` is raised, and the caller reads what happened.
        """
        ...

    async def hold_lease(self, ttl_s: float) -> HeldLease:
        """Grant a lease and keep it alive. etcd rounds up to whole seconds, and to 2 s at least: see its `ttl_s`."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End a lease: its keys are deleted in one step. Unknown leases are ignored."""
        ...

    async def close(self) -> None:
        """End watches and keepalives; leases are left to expire unless released before."""
        ...
