"""A process's connection to the store: calls, watches and keepalives that take their time, and can be lost.

As with etcd: a call whose answer does not come is `StoreUnavailable`, and may have been applied, even later than that;
a lease is valid by the process's own boot clock from the sending of the last keepalive that was answered; a watch goes
on over breaks without gap or repetition. The lease object is the one of the etcd adapter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentreach.aio.clock import boot_time
from reach.adapters.etcd.lease import EtcdLease
from reach.adapters.memory_keyspace import Keyspace
from reach.core.store import (
    Change,
    Compacted,
    Compare,
    Item,
    LeaseGone,
    Listing,
    Operation,
    StoreUnavailable,
    Summary,
    TxnResult,
    check_txn,
)

from .registry import BATCH_REVISIONS_MAX

if TYPE_CHECKING:
    from .process import Process
    from .registry import Registry

CALL_S = 5.0  # as reach.adapters.etcd.calls
KEEPALIVE_ANSWER_S = 2.0  # as reach.adapters.etcd.lease_schedule
WATCH_AGAIN_S = 0.5


class StoreLink:
    """One process's `reach.core.store.Store`."""

    def __init__(self, registry: Registry, process: Process) -> None:
        self.registry = registry
        self.process = process
        self.closed = False
        self.cut_until = registry.away_until
        """Until then nothing passes, either way."""
        self.refuses = False
        """While it is cut a call fails at once; else it is not answered."""
        self.answers_lost_until = 0.0
        """Until then what is asked is done, and the answer is lost."""
        self.slow_until = 0.0
        self.slow_s = 0.0
        """Until then each way takes so much longer."""
        self.watches_late_until = 0.0
        """Until then changes are not told."""
        self._leases: dict[int, SimLease] = {}

    # ---- Store ----

    async def get(self, key: str) -> Item | None:
        """See `Store.get`."""
        return await self._read(lambda keys: keys.get(key))

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`."""
        return await self._read(lambda keys: Listing(keys.below(prefix), keys.revision))

    async def revision(self) -> int:
        """See `Store.revision`."""
        return await self._read(lambda keys: keys.revision)

    async def summary(self, prefix: str) -> Summary:
        """See `Store.summary`."""
        return await self._read(lambda keys: _summary(keys, prefix))

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """See `Store.txn`."""
        check_txn(compares, then, otherwise)
        given = tuple(compares), tuple(then), tuple(otherwise)
        return await self._call(lambda: self.registry.txn(self.process, *given))

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        watch = Watch(self, prefix, from_revision, deletes_only)
        try:
            while not self.closed:
                try:
                    await self._call(watch.begin)
                except StoreUnavailable:
                    await asyncio.sleep(WATCH_AGAIN_S)
                    continue
                yield ()
                while (batch := await watch.next()) is not None:
                    yield batch
        finally:
            watch.end()

    async def hold_lease(self, ttl_s: float) -> SimLease:
        """See `Store.hold_lease`."""
        asked_at, world = boot_time(), self.registry.world
        lease_id = await self._read(lambda keys: keys.grant(ttl_s, world.now))
        lease = SimLease(self, lease_id, ttl_s, asked_at)
        if not lease.lost:
            self._leases[lease_id] = lease
            lease.keep()
        return lease

    async def revoke(self, lease_id: int) -> None:
        """See `Store.revoke`."""
        await self._read(lambda keys: keys.revoke(lease_id))

    async def close(self) -> None:
        """See `Store.close`."""
        self.closed = True
        for lease in list(self._leases.values()):
            lease.abandon()

    def forget(self, lease_id: int) -> None:
        """Send no more keepalives for it."""
        self._leases.pop(lease_id, None)

    # ---- faults ----

    def cut(self, seconds: float, *, refuses: bool) -> None:
        """Nothing passes for so long."""
        world = self.registry.world
        self.cut_until, self.refuses = max(self.cut_until, world.now + seconds), refuses
        for watch in list(self.registry.watches):
            if watch.link is self:
                watch.breaks(seconds)

    @property
    def is_cut(self) -> bool:
        """True while nothing passes."""
        return self.registry.world.now < self.cut_until

    def hears_since(self, seconds: float) -> bool:
        """True if for so long nothing kept from it what the store says."""
        since = self.registry.world.now - seconds
        return since > max(self.cut_until, self.slow_until, self.watches_late_until, self.answers_lost_until)

    # ---- the way there and back ----

    def way_s(self) -> float:
        """How long one way takes now."""
        world = self.registry.world
        return world.latency_s() / 2 + (self.slow_s if world.now < self.slow_until else 0.0)

    async def _read(self, act: Callable[[Keyspace], Any]) -> Any:
        return await self._call(lambda: self.registry.use(act))

    async def _call(self, act: Callable[[], Any]) -> Any:
        if self.closed:
            raise StoreUnavailable("the connection is closed")
        answer: asyncio.Future[Any] = self.process.loop.create_future()
        self._send(self._at_store, act, answer)
        try:
            async with asyncio.timeout(CALL_S):
                return await answer
        except TimeoutError:
            raise StoreUnavailable(f"no answer within {CALL_S:g} s") from None

    def _send(self, what: Callable[..., None], *given: Any) -> None:
        world = self.registry.world
        world.scheduler.after(self.way_s(), what, *given)

    def _at_store(self, act: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        if self.is_cut:
            if self.refuses:
                self._back(answer, StoreUnavailable("connection refused"), lost=False)
            return
        outcome: Any
        try:
            outcome = act()
        except (LeaseGone, Compacted, ValueError) as error:
            outcome = error
        self._back(answer, outcome, lost=self.registry.world.now < self.answers_lost_until)

    def _back(self, answer: asyncio.Future[Any], outcome: Any, *, lost: bool) -> None:
        if not lost:
            self._send(self._arrived, answer, outcome)

    def _arrived(self, answer: asyncio.Future[Any], outcome: Any) -> None:
        loop = self.process.loop
        if (not self.is_cut or isinstance(outcome, StoreUnavailable)) and not loop.dead:
            loop.call_soon(_settle, answer, outcome)


def _summary(keys: Keyspace, prefix: str) -> Summary:
    found = keys.below(prefix)
    return Summary(keys.revision, len(found), max((item.mod_revision for item in found), default=0))


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


class Watch:
    """One watch: a cursor at the store, and what is on its way to the process."""

    def __init__(self, link: StoreLink, prefix: str, from_revision: int, deletes_only: bool) -> None:
        self.link = link
        self._prefix = prefix
        self._deletes_only = deletes_only
        self._wanted = from_revision
        """What the process has not seen yet begins here."""
        self._cursor = from_revision
        self._life = 0
        self._last_arrival = 0.0
        self._arrived: deque[tuple[Sequence[Change], int]] = deque()
        self._broken = self._ended = False
        self._wake = asyncio.Event()

    def begin(self) -> None:
        """At the store: go on from where the process is. Raises `Compacted`."""
        registry = self.link.registry
        registry.keys.changes(self._prefix, self._wanted, 0)
        if self._ended:
            return  # it was asked for long ago, and was slow
        self._life += 1
        self._cursor, self._broken = self._wanted, False
        self._arrived.clear()
        registry.watches[self] = None
        self.push()

    def push(self) -> None:
        """At the store: send what is new."""
        registry = self.link.registry
        if self.link.process.loop.dead:
            registry.watches.pop(self, None)
            return
        found, self._cursor = registry.keys.changes(self._prefix, self._cursor, BATCH_REVISIONS_MAX)
        if self._deletes_only:
            found = [change for change in found if change.item is None]
        if found:
            world = registry.world
            at = max(self._last_arrival + 1e-6, world.now + self.link.way_s(), self.link.watches_late_until)
            self._last_arrival = at
            world.scheduler.at(at, self._arrives, found, self._cursor, self._life)

    def _arrives(self, found: Sequence[Change], cursor: int, life: int) -> None:
        if life == self._life and self in self.link.registry.watches and not self.link.process.loop.dead:
            self.link.process.loop.call_soon(self._take, found, cursor, life)

    def _take(self, found: Sequence[Change], cursor: int, life: int) -> None:
        if life == self._life and not self._broken:
            self._arrived.append((found, cursor))
            self._wake.set()

    async def next(self) -> Sequence[Change] | None:
        """The next batch; None when the connection broke."""
        while not self._arrived:
            if self._broken or self.link.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        found, self._wanted = self._arrived.popleft()
        return found

    def breaks(self, noticed_after_s: float) -> None:
        """Nothing more comes; the process notices after a time."""
        self.link.registry.watches.pop(self, None)
        self.link.registry.world.scheduler.after(noticed_after_s, self._notice, self._life)

    def _notice(self, life: int) -> None:
        loop = self.link.process.loop
        if not loop.dead and life == self._life:
            loop.call_soon(self._noticed)

    def _noticed(self) -> None:
        self._broken = True
        self._wake.set()

    def end(self) -> None:
        """The process wants no more of it."""
        self._ended = True
        self.link.registry.watches.pop(self, None)


class SimLease(EtcdLease):
    """A lease that is kept alive over the simulated way to the store."""

    def __init__(self, link: StoreLink, lease_id: int, ttl_s: float, asked_at: float) -> None:
        self._link = link
        self._beat_timer: asyncio.TimerHandle | None = None
        self._beats = 0
        super().__init__(link, lease_id, ttl_s, asked_at)  # type: ignore[arg-type]  # of a keeper it needs forget, revoke

    def keep(self) -> None:
        """Send the next keepalive a third of the TTL from now."""
        self._beat_in(self.ttl_s / 3)

    def abandon(self) -> None:
        """See `HeldLease.abandon`."""
        super().abandon()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None

    def _beat_in(self, seconds: float) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        if self.lost:
            self.lose()
            return
        self._beats += 1
        link = self._link
        link._send(self._at_store, boot_time(), self._beats)
        self._beat_in(min(KEEPALIVE_ANSWER_S, self.ttl_s / 3))  # unless it is answered before

    def _at_store(self, sent_at: float, number: int) -> None:
        link = self._link
        if link.is_cut:
            return
        registry = link.registry
        kept = registry.use(lambda keys: keys.renew(self.id, registry.world.now))
        if registry.world.now >= link.answers_lost_until:
            link._send(self._answered, kept, sent_at, number)

    def _answered(self, kept: bool, sent_at: float, number: int) -> None:
        loop = self._link.process.loop
        if not self._link.is_cut and not loop.dead:
            loop.call_soon(self._take, kept, sent_at, number)

    def _take(self, kept: bool, sent_at: float, number: int) -> None:
        if self._beat_timer is None:
            return
        if not kept:
            self.lose()
            return
        self.kept(sent_at + self.ttl_s)
        if number == self._beats:
            self._beat_in(max(0.0, sent_at + self.ttl_s / 3 - boot_time()))
