"""A watch that goes on: one stream after another, each resumed where the last one stood.

One stream a watch: a failed create on a shared stream could close another watch (etcd < 3.5.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from grpc import StatusCode

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.calls import RANGE, WATCH, Calls, RevisionUnknown
from reach.adapters.etcd.convert import Codec
from reach.adapters.etcd.status import Verdict, judge
from reach.adapters.etcd.stream import Stream
from reach.adapters.etcd.watch_cursor import WatchCursor, WatchRefused
from reach.core.store import Change, Compacted, StoreUnavailable

STEADY_S = 1.0  # a stream that lived so long was good: its end is the first failure, not one more
CREATE_S = 5.0  # TCP connects fine to a frozen process: without this bound a watch would wait for ever

WatchStream = Stream[pb.WatchRequest, pb.WatchResponse]


class _StreamLost(Exception):
    """This stream is over; a new one goes on."""


class Watch:
    """One watch of all keys below `prefix`."""

    def __init__(self, calls: Calls, codec: Codec, prefix: str, from_revision: int, *, deletes_only: bool) -> None:
        self._calls = calls
        self._endpoints = calls.endpoints
        self._codec = codec
        self._start, self._end = codec.range_of(prefix)
        self._what = codec.key(prefix).decode()
        self._filters = [pb.WatchCreateRequest.NOPUT] if deletes_only else []
        self._cursor = WatchCursor(from_revision)
        self._failures = 0  # in a row, since the last steady stream
        self._refusals = 0  # of those, for permission

    async def changes(self) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        while not self._endpoints.closed:
            try:
                token = await self._calls.token()
            except StoreUnavailable:  # it has waited already; but if etcd knows us and refuses, waiting is in vain
                if self._calls.locked_out:
                    raise
                continue
            if self._endpoints.closed:
                return
            established_at: float | None = None
            stream: WatchStream = Stream(self._endpoints.current, WATCH, token)
            try:
                await self._establish(stream)
                established_at, self._refusals = boot_time(), 0
                yield ()
                while True:
                    response = await stream.receive()
                    if response is None:
                        raise _StreamLost
                    events = self._cursor.take(response)
                    yield [self._codec.change(event) for event in events]
            except (_StreamLost, WatchRefused) as loss:
                if established_at is not None and boot_time() - established_at > STEADY_S:
                    self._failures = 0
                await self._after(stream, loss, token)
            finally:
                await stream.close()
            await self._endpoints.pause(self._failures)

    async def _establish(self, stream: WatchStream) -> None:
        create = pb.WatchCreateRequest(
            key=self._start,
            range_end=self._end,
            start_revision=self._cursor.next_revision,
            progress_notify=True,
            filters=self._filters,
        )
        if not await stream.send(pb.WatchRequest(create_request=create)):
            raise _StreamLost
        try:
            async with asyncio.timeout(CREATE_S):
                created = await stream.receive()
        except TimeoutError:
            self._endpoints.leave(stream.endpoint, frozen=True)
            raise _StreamLost from None
        if created is None:
            raise _StreamLost
        self._cursor.take(created)
        await self._check_anchor()

    async def _check_anchor(self) -> None:
        """See that the revision before the first one watched still exists.

        That finds two silent losses: a deletion at exactly the compacted revision, which etcd before 3.5.18 does not
        send, and a store that went back in time (wiped, or restored), where the watch would wait for a revision that
        belongs to another history.
        """
        anchor = self._cursor.next_revision - 1
        if anchor <= 0:
            return
        request = pb.RangeRequest(key=self._start, range_end=self._end, revision=anchor, limit=1, keys_only=True)
        try:
            await self._calls.again(RANGE, request)
        except RevisionUnknown:
            raise Compacted(anchor) from None
        except StoreUnavailable:
            raise _StreamLost from None

    async def _after(self, stream: WatchStream, loss: Exception, token: str | None) -> None:
        """Decide how to go on after a stream: elsewhere, signed in anew, or not at all."""
        if self._endpoints.closed:
            return
        self._failures += 1
        if isinstance(loss, WatchRefused):
            verdict, text = judge(StatusCode.UNAVAILABLE, str(loss)), str(loss)
        else:
            stream.abandon()
            verdict, text = await stream.failure()
        if verdict is Verdict.SIGN_IN:
            self._refusals += 1
            if self._refusals > 1:
                raise StoreUnavailable(f"etcd refuses to let us watch {self._what!r} ({text})")
            await self._calls.sign_in(token)
        else:
            self._endpoints.leave(stream.endpoint)
