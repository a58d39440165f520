"""The embedded registry store: all in this process, gone with it.

For a single node, and for simulations of several: `share()` gives another node its own connection to the same state,
and each connection can be cut on its own. Time comes from `clock` and timers from the running event loop, so a test
with virtual time (looptime) passes `clock=asyncio.get_running_loop().time`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from agentreach.aio.clock import boot_time
from reach.adapters.memory_keyspace import HISTORY_MAX, Keyspace
from reach.core.store import (
    Change,
    Compare,
    Item,
    Listing,
    Operation,
    StoreUnavailable,
    Summary,
    TxnResult,
    check_txn,
)

Clock = Callable[[], float]

_WATCH_REVISIONS_MAX = 1_000  # of one batch, as in etcd; bounds how long one step of a watcher holds the loop


class MemoryState:
    """What the connections share: the keys, the timer of the leases, and who waits for a change."""

    def __init__(self, keyspace: Keyspace, clock: Clock) -> None:
        self.keys = keyspace
        self.clock = clock
        self.waiting: set[asyncio.Event] = set()
        self._timer: asyncio.TimerHandle | None = None

    def expire(self) -> None:
        """End what is over by the clock. Before every use: a timer may be late, an answer must not be stale."""
        before = self.keys.revision
        self.keys.expire(self.clock())
        if self.keys.revision != before:
            self.changed()

    def changed(self) -> None:
        """Wake the watchers and look at the leases again."""
        for event in self.waiting:
            event.set()
        self.arm()

    def arm(self) -> None:
        """Set the timer to the next end of a lease."""
        self.disarm()
        due = self.keys.next_expiry()
        if due is not None:
            delay_s = max(0.0, due - self.clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def disarm(self) -> None:
        """Stop the timer; expired leases then end at the next use."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self.expire()
        self.arm()


class MemoryStore:
    """One connection to an embedded store; implements `reach.core.store.Store`.

    `first_revision` defaults to the wall clock in microseconds, so revisions grow over restarts.
    """

    def __init__(
        self,
        clock: Clock = boot_time,
        *,
        first_revision: int | None = None,
        history_max: int = HISTORY_MAX,
        state: MemoryState | None = None,
    ) -> None:
        if state is None:
            first = time.time_ns() // 1_000 if first_revision is None else first_revision
            state = MemoryState(Keyspace(first, history_max), clock)
        self._state = state
        self._leases: dict[int, MemoryLease] = {}
        self._available = True
        self._answers = True
        self._closed = False
        self._wake: set[asyncio.Event] = set()

    # Faults and hooks, for tests and simulations

    def share(self) -> MemoryStore:
        """Another connection to the same state, with faults of its own."""
        return MemoryStore(state=self._state)

    def set_available(self, available: bool) -> None:
        """Cut or mend this connection: calls fail at once, watches go silent, leases are not kept alive."""
        self._available = available
        self._wake_watches()

    def set_answers(self, answers: bool) -> None:
        """With False the answer of each transaction that changes a key is lost: `StoreUnavailable`."""
        self._answers = answers

    def compact(self, revision: int) -> None:
        """Forget the changes up to `revision`: watches from there are told `Compacted`."""
        self._state.keys.compact(revision)
        self._state.changed()

    # Store

    async def get(self, key: str) -> Item | None:
        """See `Store.get`."""
        return self._keys().get(key)

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`."""
        keys = self._keys()
        return Listing(keys.below(prefix), keys.revision)

    async def revision(self) -> int:
        """See `Store.revision`."""
        return self._keys().revision

    async def summary(self, prefix: str) -> Summary:
        """See `Store.summary`."""
        keys = self._keys()
        found = keys.below(prefix)
        return Summary(keys.revision, len(found), max((item.mod_revision for item in found), default=0))

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """See `Store.txn`."""
        check_txn(compares, then, otherwise)
        keys = self._keys()
        before = keys.revision
        result = keys.txn(compares, then, otherwise)
        if keys.revision != before:
            self._state.changed()
            if not self._answers:
                raise StoreUnavailable("the answer of the embedded store was lost (test)")
        return result

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        wake = asyncio.Event()
        self._wake.add(wake)
        self._state.waiting.add(wake)
        established = False
        position = from_revision
        try:
            while not self._closed:
                wake.clear()
                if not self._available:
                    established = False
                    await wake.wait()
                    continue
                self._state.expire()
                found, position = self._state.keys.changes(prefix, position, _WATCH_REVISIONS_MAX)
                if deletes_only:
                    found = [change for change in found if change.item is None]
                if not established:
                    established = True
                    yield ()
                if found:
                    yield found
                elif position > self._state.keys.revision:
                    await wake.wait()
        finally:
            self._wake.discard(wake)
            self._state.waiting.discard(wake)

    async def hold_lease(self, ttl_s: float) -> MemoryLease:
        """See `Store.hold_lease`. The TTL is exactly what was asked for."""
        keys = self._keys()
        lease = MemoryLease(self, self._state, keys.grant(ttl_s, self._state.clock()), ttl_s)
        self._leases[lease.id] = lease
        self._state.arm()
        return lease

    async def revoke(self, lease_id: int) -> None:
        """See `Store.revoke`."""
        keys = self._keys()
        keys.revoke(lease_id)
        self._state.changed()

    async def close(self) -> None:
        """See `Store.close`. What other connections share stays."""
        self._closed = True
        self._wake_watches()
        for lease in list(self._leases.values()):
            lease.abandon()
        self._leases.clear()

    def reachable(self) -> bool:
        """True while this connection can talk to the state."""
        return self._available and not self._closed

    def forget(self, lease_id: int) -> None:
        """A lease of this connection is lost or released."""
        self._leases.pop(lease_id, None)

    def _keys(self) -> Keyspace:
        if self._closed:
            raise StoreUnavailable("the embedded store is closed")
        if not self._available:
            raise StoreUnavailable("the embedded store is cut off (test)")
        self._state.expire()
        return self._state.keys

    def _wake_watches(self) -> None:
        for event in self._wake:
            event.set()


class MemoryLease:
    """A lease of the embedded store, kept alive by a timer; implements `HeldLease`."""

    def __init__(self, store: MemoryStore, state: MemoryState, lease_id: int, ttl_s: float) -> None:
        self._store = store
        self._state = state
        self._id = lease_id
        self._ttl_s = ttl_s
        self._valid_until = state.clock() + ttl_s
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    @property
    def id(self) -> int:
        """See `HeldLease.id`."""
        return self._id

    @property
    def ttl_s(self) -> float:
        """See `HeldLease.ttl_s`."""
        return self._ttl_s

    @property
    def valid_until(self) -> float:
        """See `HeldLease.valid_until`; by the store's clock."""
        return self._valid_until

    @property
    def lost(self) -> bool:
        """See `HeldLease.lost`."""
        return self._gone.is_set() or self._state.clock() >= self._valid_until

    async def wait_lost(self) -> None:
        """See `HeldLease.wait_lost`."""
        await self._gone.wait()

    async def release(self) -> None:
        """See `HeldLease.release`."""
        self._lose()
        try:
            await self._store.revoke(self._id)
        except StoreUnavailable:
            return  # best effort: it expires

    def abandon(self) -> None:
        """Stop keeping it alive; it expires at its time."""
        self._store.forget(self._id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        # A third of the TTL, or its end if that comes first: two keepalives may fail before it is lost.
        delay_s = min(self._ttl_s / 3, max(0.0, self._valid_until - self._state.clock()))
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._beat)

    def _beat(self) -> None:
        now = self._state.clock()
        if now >= self._valid_until:
            self._lose()
            return
        if self._store.reachable():
            self._state.expire()
            if not self._state.keys.renew(self._id, now):
                self._lose()
                return
            self._valid_until = now + self._ttl_s
        self._arm()

    def _lose(self) -> None:
        self.abandon()
        self._valid_until = min(self._valid_until, self._state.clock())
        self._gone.set()
