"""The store that the nodes of a world share: one keyspace on true time, and what a recorder sees of it.

It stands for a whole etcd: it never dies and never lies. What goes wrong are the connections to it (`storelink`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from agentreach.v1.peer_pb2 import Candidacy
from reach.adapters.memory_keyspace import Keyspace
from reach.core.store import Change, Compare, Delete, Field, Op, Operation, Put, TxnResult

if TYPE_CHECKING:
    from .process import Process
    from .storelink import Watch
    from .world import World

FIRST_REVISION = 1_000
BATCH_REVISIONS_MAX = 1_000
ELECTION = "election/"
T = TypeVar("T")


class Registry:
    """The keys, the leases by true time, and who watches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys = Keyspace(FIRST_REVISION)
        self.watches: dict[Watch, None] = {}
        self.away_until = 0.0
        """Until then nobody reaches it."""
        self.ousted = False
        """Somebody has removed a candidate's key by hand in this world."""
        self.changed_at: dict[str, float] = {}
        """By key: when it was written or deleted last."""
        self._look_at = float("inf")
        self._told = FIRST_REVISION

    def use(self, act: Callable[[Keyspace], T]) -> T:
        """Do something with the keys as they are now, and tell the watchers what it changed."""
        self.keys.expire(self.world.now)
        self._tell()
        try:
            return act(self.keys)
        finally:
            self._tell()
            self._plan()

    def txn(
        self, by: Process, compares: tuple[Compare, ...], then: tuple[Operation, ...], otherwise: tuple[Operation, ...]
    ) -> TxnResult:
        """A node's transaction."""
        leading, result = self.use(lambda keys: (self.leader(), keys.txn(compares, then, otherwise)))
        if result.succeeded:
            for revision in led_by(compares):
                self.world.check("led", (by, revision, leading))
        for put in then if result.succeeded else otherwise:
            if isinstance(put, Put):
                self.world.ledger.event("wrote", by, f"{put.key} at {result.revision}")
        return result

    def leader(self) -> int:
        """The create revision of the key that leads: the lowest of the election; 0 without one."""
        return min((item.create_revision for item in self.keys.below(ELECTION)), default=0)

    def leader_id(self) -> str:
        """The node that leads; empty without one."""
        first = min(self.keys.below(ELECTION), key=lambda item: item.create_revision, default=None)
        return "" if first is None else Candidacy.FromString(first.value).node_id

    def compact(self) -> None:
        """Forget every change so far."""
        self.use(lambda keys: keys.compact(keys.revision))

    def delete(self, name: str) -> None:
        """Somebody deletes a key by hand."""
        self.ousted = self.ousted or name.startswith(ELECTION)
        self.use(lambda keys: keys.txn((), (Delete(name),), ()))

    def revoke(self, lease: int) -> None:
        """Somebody revokes a lease by hand."""
        held = self.keys._leases[lease].keys
        self.ousted = self.ousted or any(name.startswith(ELECTION) for name in held)
        self.use(lambda keys: keys.revoke(lease))

    def extend(self) -> None:
        """etcd has a new leader: every lease lives a whole TTL from now on."""
        keys = self.keys
        self.use(lambda _: [keys.renew(lease, self.world.now) for lease in keys._leases])

    def _tell(self) -> None:
        if self._told == self.keys.revision:
            return
        for change in self._changes():
            self.changed_at[change.key] = self.world.now
            if change.item is None:
                self.world.ledger.event("deleted", "store", f"{change.key} at {change.revision}")
        self._told = self.keys.revision
        for watch in list(self.watches):
            watch.push()

    def _changes(self) -> list[Change]:
        found, _ = self.keys.changes("", self._told + 1, BATCH_REVISIONS_MAX)
        return found

    def _plan(self) -> None:
        """Look again when the next lease ends."""
        due = self.keys.next_expiry()
        if due is not None and due < self._look_at:
            self._look_at = due
            self.world.scheduler.at(due, self._look)

    def _look(self) -> None:
        self._look_at = float("inf")
        self.use(lambda _: None)


def led_by(compares: tuple[Compare, ...]) -> list[int]:
    """The create revisions of election keys that a transaction insists on: it is one that only a leader may make."""
    return [
        each.operand
        for each in compares
        if each.key.startswith(ELECTION)
        and each.field is Field.CREATE
        and each.op is Op.EQUAL
        and isinstance(each.operand, int)
        and each.operand
    ]
