"""Keeping leases alive: one stream for all of them, over whichever endpoint answers.

A lease is lost when etcd says so, or when its time is over by our own clock, whichever comes first: what this process
may do as its holder must end before anybody else can see the keys vanish.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import structlog

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.calls import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE, Calls
from reach.adapters.etcd.lease_schedule import Answer, LeaseSchedule
from reach.adapters.etcd.status import Verdict
from reach.adapters.etcd.stream import Stream
from reach.core.store import LeaseGone, StoreUnavailable

_log = structlog.get_logger("reach")

AGAIN_S = 1.0  # after a fault of ours; a lease lasts many times as long
RELEASE_S = 2.0  # of a revocation on release: whoever stops does not wait longer, the lease expires by itself

KeepAlive = Stream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]


class EtcdLease:
    """A lease of etcd; implements `HeldLease`. Made by `LeaseKeeper.grant`."""

    def __init__(self, keeper: LeaseKeeper, lease_id: int, ttl_s: float, granted_at: float) -> None:
        self._keeper = keeper
        self._id = lease_id
        self._ttl_s = ttl_s
        self._valid_until = granted_at + ttl_s
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watch_the_clock()

    @property
    def id(self) -> int:
        """See `HeldLease.id`."""
        return self._id

    @property
    def ttl_s(self) -> float:
        """See `HeldLease.ttl_s`: what etcd granted."""
        return self._ttl_s

    @property
    def valid_until(self) -> float:
        """See `HeldLease.valid_until`; by `agentreach.aio.clock.boot_time`."""
        return self._valid_until

    @property
    def lost(self) -> bool:
        """See `HeldLease.lost`. Right even if the loop stood still and no timer has fired yet."""
        return self._gone.is_set() or boot_time() >= self._valid_until

    async def wait_lost(self) -> None:
        """See `HeldLease.wait_lost`."""
        await self._gone.wait()

    async def release(self) -> None:
        """See `HeldLease.release`."""
        self.lose()
        with suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(RELEASE_S):
                await self._keeper.revoke(self._id)

    def kept(self, valid_until: float) -> None:
        """A keepalive was acknowledged. What is lost stays lost."""
        if not self.lost:
            self._valid_until = valid_until

    def lose(self) -> None:
        """It is gone, or to be treated so from now on."""
        self.abandon()
        self._valid_until = min(self._valid_until, boot_time())
        self._gone.set()

    def abandon(self) -> None:
        """See `HeldLease.abandon`."""
        self._keeper.forget(self._id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_the_clock(self) -> None:
        left_s = self._valid_until - boot_time()
        if left_s <= 0:
            self.lose()
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._watch_the_clock)


class LeaseKeeper:
    """All leases of one store."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._endpoints = calls.endpoints
        self._schedule = LeaseSchedule()
        self._leases: dict[int, EtcdLease] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def grant(self, ttl_s: float) -> EtcdLease:
        """Get a lease and keep it alive. A lost answer leaves a lease behind that holds no key and expires."""
        asked_at = boot_time()
        response = await self._calls.again(LEASE_GRANT, pb.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        # From before the call and not from its last attempt: too early is safe.
        lease = EtcdLease(self, response.ID, float(response.TTL), asked_at)
        if not lease.lost:
            self._leases[lease.id] = lease
            self._schedule.add(lease.id, lease.ttl_s, asked_at)
            self._wake.set()
            if self._task is None:
                self._start()
        return lease

    def _start(self) -> None:
        if not self._closed:
            self._task = asyncio.create_task(self._run(), name="etcd lease keeper")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Leases that nobody keeps alive would take this node's agents out of the registry: go on after any fault."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the keeper of the leases failed; it is started again", exc_info=error)
            task.get_loop().call_later(AGAIN_S, self._start)

    async def revoke(self, lease_id: int) -> None:
        """End a lease, ours or not; an unknown one is ignored."""
        with suppress(LeaseGone):
            await self._calls.again(LEASE_REVOKE, pb.LeaseRevokeRequest(ID=lease_id))

    def forget(self, lease_id: int) -> None:
        """Send no more keepalives for it."""
        self._leases.pop(lease_id, None)
        self._schedule.remove(lease_id)

    async def close(self) -> None:
        """Stop; the leases expire at their time. By this clock they are lost then, and `wait_lost` says so."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        failures = 0
        while True:
            if not self._schedule:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                token = await self._calls.token()
            except StoreUnavailable:
                failures += 1
                await self._endpoints.pause(failures)
                continue
            self._schedule.reconnected(boot_time())
            stream: KeepAlive = Stream(self._endpoints.current, LEASE_KEEP_ALIVE, token)
            try:
                answered = await self._keep(stream)
                failures = 1 if answered else failures + 1
                await self._leave(stream, token)
            finally:
                await stream.close()
            await self._endpoints.pause(failures)

    async def _keep(self, stream: KeepAlive) -> bool:
        """Use one stream until it ends; True if it ever answered."""
        answered = False
        sender = asyncio.create_task(self._send(stream), name="etcd lease keepalives")
        try:
            while (response := await stream.receive()) is not None:
                answered = True
                self._take(response)
        finally:
            sender.cancel()
            await asyncio.wait([sender])
        return answered

    def _take(self, response: pb.LeaseKeepAliveResponse) -> None:
        answer, valid_until = self._schedule.answered(response.ID, float(response.TTL), boot_time())
        lease = self._leases.get(response.ID)
        if lease is not None and answer is Answer.KEPT:
            lease.kept(valid_until)
        elif lease is not None and answer is Answer.GONE:
            lease.lose()
        self._wake.set()  # there is room in flight again

    async def _send(self, stream: KeepAlive) -> None:
        """Send what is due; abandon a stream that does not answer."""
        while True:
            self._wake.clear()
            now = boot_time()
            overdue = self._schedule.answer_due()
            if overdue is not None and overdue <= now:
                self._endpoints.leave(stream.endpoint, frozen=True)
                stream.abandon()
                return
            for lease_id in self._schedule.take_due(now):
                if not await stream.send(pb.LeaseKeepAliveRequest(ID=lease_id)):
                    return
            times = [at for at in (self._schedule.next_due(), self._schedule.answer_due()) if at is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(times) - boot_time()) if times else None):
                    await self._wake.wait()

    async def _leave(self, stream: KeepAlive, token: str | None) -> None:
        verdict, _ = await stream.failure()
        if verdict is Verdict.SIGN_IN:
            with suppress(StoreUnavailable):
                await self._calls.sign_in(token)
        else:
            self._endpoints.leave(stream.endpoint)
