"""Which node leads: a campaign as a recipe over the store's transactions, leases and watches.

Every candidate has one key under `election/leader/`, under a lease of its own; of all keys the one that was created
first names the leader. A leader acts only while three things hold: by its own clock the lease cannot be over yet, it
has not heard that its key is gone, and, the only one that is proof, the store finds the key's create revision
unchanged in the very transaction that writes. Whoever fails any of them gives the lease back and stands anew.

Nothing here is needed by a node that serves what exists already. Why the store has no `campaign` of its own, and why
each candidate watches all of them: docs/decisions/0015-leading-is-a-recipe-over-transactions.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING

import structlog

from agentreach.aio.clock import boot_time
from agentreach.v1.peer_pb2 import Candidacy
from reach.core.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    Field,
    Get,
    HeldLease,
    Item,
    LeaseGone,
    Listing,
    Op,
    Operation,
    Put,
    Store,
    StoreUnavailable,
    TxnResult,
    absent,
)

log = structlog.get_logger("reach.election")

PREFIX = "election/leader/"
MARGIN_S = 1.0  # cluster.md: a leader stops so long before others may see its lease end
MARGIN_SHARE = 0.2  # of a lease too short for that: with 2 s, the shortest, a second would leave no time to lead
CLOCK_STEP_S = 0.001  # a timer may fire a little before the clock says so: do not spin until it does
AGAIN_S = 0.25  # between two tries; a store that is away is looked for as often by the registrar


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, since when (Unix time). `revision` is its key's create revision: it grows from leader to leader."""

    node_id: str
    key: str
    revision: int
    since: float

    def fence(self) -> Compare:
        """True while this leader's key stands: part of every transaction that only the leader may make."""
        return Compare(self.key, Field.CREATE, Op.EQUAL, self.revision)


@dataclass(frozen=True, slots=True)
class NotLeading:
    """Nothing was written, for this node does not lead. `leader_id` does, as far as is known; empty: nobody."""

    leader_id: str


class Candidates:
    """The candidates' keys as of `revision`. Pure."""

    def __init__(self) -> None:
        self.revision = 0
        self._items: dict[str, Item] = {}

    def listed(self, listing: Listing) -> None:
        """All of them, as read."""
        self.revision = listing.revision
        self._items = {item.key: item for item in listing.items}

    def changed(self, changes: Sequence[Change]) -> None:
        """What a watch from the revision after `listed` tells, in order."""
        for change in changes:
            self.revision = max(self.revision, change.revision)
            if change.item is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = change.item

    def gone(self, key: str, created: int) -> bool:
        """True if the key that was created at that revision is known to stand no more."""
        item = self._items.get(key)
        return self.revision >= created and (item is None or item.create_revision != created)

    def first(self) -> Item | None:
        """The oldest: who leads, or is about to."""
        return min(self._items.values(), key=lambda each: each.create_revision, default=None)

    def leader(self) -> Leader | None:
        """The oldest, once it has said that it leads."""
        item = self.first()
        if item is None:
            return None
        stands = Candidacy.FromString(item.value)
        if not stands.HasField("leads_since"):
            return None
        return Leader(stands.node_id, item.key, item.create_revision, stands.leads_since.ToMicroseconds() / 1e6)


@dataclass(slots=True)
class _Standing:
    """This node's own candidacy."""

    key: str
    revision: int
    lease: HeldLease
    margin_s: float
    leads: Leader | None = None
    over: str = ""
    """Why it has ended; empty while it stands."""


class Election:
    """This node as a candidate. `start` once, `run` in a task, `resign` when it leaves, `stop` at the end."""

    def __init__(
        self, store: Store, node_id: str, *, ttl_s: float = 5.0, clock: Callable[[], float] = boot_time
    ) -> None:
        """`clock` is the one by which the store's leases tell their `valid_until`."""
        self._store = store
        self._node_id = node_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._candidates = Candidates()
        self._standing: _Standing | None = None
        self._resigned = False
        self._news = asyncio.Event()
        self._told: Leader | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called in the event loop whenever another node leads, this one or none. Must not raise."""

    # ---- who leads ----

    @property
    def leading(self) -> Leader | None:
        """This node's leadership while it may act on it; asks the clock each time."""
        own = self._standing
        if own is None or own.leads is None or own.over or own.lease.lost:
            return None
        return own.leads if self._clock() < own.lease.valid_until - own.margin_s else None

    @property
    def leader(self) -> Leader | None:
        """Who leads, as far as this node can know; None also while it has no valid lease itself (the store is away)."""
        own, first = self._standing, self._candidates.first()
        if own is not None and first is not None and first.key == own.key:
            return self.leading
        in_touch = own is not None and not own.over and not own.lease.lost
        known = self._candidates.leader() if in_touch or self._resigned else None
        # What this node sees may be old: a key of a candidacy of its own that is over says nothing.
        return None if known is None or known.node_id == self._node_id else known

    @property
    def leader_id(self) -> str:
        """Its node_id; empty: nobody."""
        leader = self.leader
        return "" if leader is None else leader.node_id

    @property
    def leader_since(self) -> float:
        """When it began to lead, as Unix time; 0: nobody leads."""
        leader = self.leader
        return 0.0 if leader is None else leader.since

    # ---- what only the leader may write ----

    async def write_as_leader(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult | NotLeading:
        """A transaction like `Store.txn` that is made only if this node leads at its revision.

        `NotLeading`: nothing was written; forward the wish to `leader_id`, or wait. A `TxnResult` that did not succeed
        is one whose own `compares` failed; its `reads` are those of `otherwise`. One compare and one operation fewer
        than `TXN_OPERATIONS_MAX` fit. Raises `StoreUnavailable` (the outcome is unknown), `LeaseGone`, `ValueError`.
        """
        own, leading = self._standing, self.leading
        if own is None or leading is None:
            return NotLeading(self.leader_id)
        result = await self._store.txn([leading.fence(), *compares], then, [Get(leading.key), *otherwise])
        if result.succeeded:
            return result
        found, *reads = result.reads
        if not any(item.create_revision == leading.revision for item in found):
            self._end(own, "a write was refused: its key is gone")
            return NotLeading(self.leader_id)
        return replace(result, reads=tuple(reads))

    # ---- its life ----

    async def start(self) -> None:
        """Stand, and lead at once if nobody else stands. Waits for nobody; if the store fails, `run` goes on."""
        with contextlib.suppress(StoreUnavailable, LeaseGone):
            await self._stand()
            self._candidates.listed(await self._store.list(PREFIX))
            await self._take_office()
        self._tell()

    async def run(self) -> None:
        """Watch the candidates and stand for election, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="election-watch")
            group.create_task(self._campaign(), name="election-campaign")

    def resign(self) -> None:
        """Lead no more from now on, and let the next one lead at once: this node is leaving."""
        self._resigned = True
        if self._standing is not None:
            self._end(self._standing, "this node is leaving")

    async def stop(self) -> None:
        """Give the lease back, so that the next one leads at once. After `run` has ended; bounded by 2 s."""
        self.resign()
        own, self._standing = self._standing, None
        if own is not None:
            await own.lease.release()

    # ---- watching ----

    async def _follow(self) -> None:
        while True:
            try:
                listing = await self._store.list(PREFIX)
                self._candidates.listed(listing)
                self._look()
                async with contextlib.aclosing(self._store.watch(PREFIX, listing.revision + 1)) as batches:
                    async for changes in batches:
                        self._candidates.changed(changes)
                        self._look()
                return  # the store is closed
            except Compacted:
                continue
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    def _look(self) -> None:
        """The candidates have changed."""
        own = self._standing
        if own is not None and not own.over and self._candidates.gone(own.key, own.revision):
            self._end(own, "its key is gone")
        self._news.set()
        self._tell()

    def _tell(self) -> None:
        now = self.leader
        if now != self._told:
            self._told = now
            for listener in self.listeners:
                listener()

    # ---- standing ----

    async def _campaign(self) -> None:
        while True:
            try:
                if self._standing is None and not self._resigned:
                    await self._stand()
                await self._hold_on()
            except (StoreUnavailable, LeaseGone) as error:
                log.debug("cannot stand for election now", why=str(error))
                if self._standing is not None:
                    self._end(self._standing, str(error))
            if self._standing is not None:
                await self._standing.lease.release()
                self._standing = None
            await asyncio.sleep(AGAIN_S * random.uniform(0.2, 1.0))

    async def _stand(self) -> None:
        """Put a key of our own among the candidates'. One that was put unseen is deleted by the next try."""
        lease = await self._store.hold_lease(self._ttl_s)
        try:
            mine = f"{PREFIX}{self._node_id}/"
            await self._store.txn([], [Delete(mine, prefix=True)])  # no former life of this node leads
            key = f"{mine}{lease.id:x}"  # of this lease alone: its create revision is ours
            put = Put(key, Candidacy(node_id=self._node_id).SerializeToString(), lease.id)
            result = await self._store.txn([absent(key)], [put])
            if not result.succeeded:
                raise StoreUnavailable(f"{key} exists although its lease is new")
        except BaseException:
            lease.abandon()
            raise
        self._standing = _Standing(key, result.revision, lease, min(MARGIN_S, MARGIN_SHARE * lease.ttl_s))
        self._tell()  # the watch may have shown the key before the answer did

    async def _hold_on(self) -> None:
        """Lead when it is this node's turn, and return when the candidacy is over."""
        own = self._standing
        if own is None:
            await self._resting()
            return
        losing = asyncio.create_task(own.lease.wait_lost(), name="election-lease")
        losing.add_done_callback(lambda _: self._news.set())
        try:
            while not own.over:
                self._news.clear()
                await self._take_office()
                self._check_time(own)
                if not own.over:
                    await self._wait(own)
        finally:
            losing.cancel()
            await asyncio.wait([losing])

    async def _resting(self) -> None:
        """After resigning there is nothing more to do, for ever."""
        while self._resigned:
            self._news.clear()
            await self._news.wait()

    async def _wait(self, own: _Standing) -> None:
        """Wait for news, or for the moment at which a leader whose lease was not prolonged must stop."""
        left_s = None
        if own.leads is not None:
            left_s = max(own.lease.valid_until - own.margin_s - self._clock(), CLOCK_STEP_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._news.wait()

    def _check_time(self, own: _Standing) -> None:
        if own.over:
            return
        if own.lease.lost:
            self._end(own, "its lease is lost")
        elif own.leads is not None and self.leading is None:
            self._end(own, f"the registry has not prolonged its lease for {own.lease.ttl_s - own.margin_s:g} s")

    async def _take_office(self) -> None:
        """Lead if this node's key is the oldest. It is written again to say so, which shows that it still stands."""
        own = self._standing
        if own is None or own.over or own.leads is not None:
            return
        first = self._candidates.first()
        if first is None or first.key != own.key or self._candidates.revision < own.revision:
            return
        value = Candidacy(node_id=self._node_id)
        value.leads_since.FromMicroseconds(time.time_ns() // 1_000)
        leads = Leader(self._node_id, own.key, own.revision, value.leads_since.ToMicroseconds() / 1e6)
        result = await self._store.txn([leads.fence()], [Put(own.key, value.SerializeToString(), own.lease.id)])
        if not result.succeeded:
            self._end(own, "its key is gone")
        elif not own.over:
            own.leads = leads
            log.info("this node leads", election=leads.revision)
            self._tell()

    def _end(self, own: _Standing, why: str) -> None:
        """This candidacy is over: whatever it led, it leads no more."""
        if own.over:
            return
        own.over = why
        if own.leads is not None:
            log.log(WARNING if not self._resigned else INFO, "this node leads no more", election=own.revision, why=why)
        self._news.set()
        self._tell()
