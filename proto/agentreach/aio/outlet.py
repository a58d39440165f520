"""The writing half of a link's stream: when to flush, for both ends.

One task pulls frames from an `Outlet` and is the only writer of the stream (concurrent writes lose messages, and a
cancelled write hangs the client: house.md, traps 1, 2, 4). An idle link flushes at once; under load the outlet lets
the event loop turn while more keeps coming, so that one frame carries many envelopes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from agentreach.aio.clock import boot_time
from agentreach.wire.limits import ACK_DELAY_S
from agentreach.wire.link import Link

_TURNS_MAX = 4  # loop turns a loaded writer waits for more; beyond, latency grows and batches do not
_CROWD = 4  # links with something to say at once from which each waits a few turns: a frame costs more than an envelope
_LOADED = 2  # envelopes in the last frame from which a link counts as loaded


class _Crowd:
    """How many links of one event loop have something to say that is not written yet."""

    __slots__ = ("__weakref__", "woken")

    def __init__(self) -> None:
        self.woken = 0


_crowds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Crowd] = weakref.WeakKeyDictionary()


class Outlet:
    """Frames of one link for one stream at a time."""

    def __init__(self, link: Link, before: Callable[[float], None] | None = None) -> None:
        """`before` is called with the time before each frame is taken from the link."""
        self._link = link
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._crowd = _crowds.setdefault(self._loop, _Crowd())
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._ack_now = False
        self._closed = False
        self._flush = True
        self._sent_envelopes = 0

    def wake(self) -> None:
        """Something was put on the link."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # one that is inside a write, perhaps for long, is no crowd
            waiter.set_result(None)
            self._woken = True
            self._crowd.woken += 1

    def received(self) -> None:
        """A frame was received: see that its ack goes out in time, and whatever waited for the peer's."""
        if self._waiter is not None and self._link.ready:
            self.wake()  # its ack has opened the window: nothing else may ever be put on the link
        if self._link.ack_urgent:
            self._ack_now = True
            self.wake()
        elif self._ack_timer is None and self._link.ack_owed:
            self._ack_timer = self._loop.call_later(ACK_DELAY_S, self._ack_due)

    def _ack_due(self) -> None:
        self._ack_timer = None
        if self._link.ack_owed:
            self._ack_now = True
            self.wake()

    def close(self, *, flush: bool = True) -> None:
        """Let `next_frame` give what is ready (without `flush`: only a waiting goodbye) and then None."""
        self._closed = True
        self._flush = flush
        self.wake()

    def abandon(self) -> None:
        """The stream is gone: `next_frame` gives None at once."""
        self._closed = True
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._abandoned = True
        self.wake()
        self._quiet()

    _abandoned = False

    async def next_frame(self) -> bytes | None:
        """Wait for the next frame; None after `close` or `abandon`. Cancelling the wait loses nothing."""
        link = self._link
        while True:
            if self._abandoned:
                return None
            if not self._flush:
                self._stop_timer()
                self._quiet()
                return link.last_words()
            if link.ready:
                if link.waiting < link.enough:
                    if self._crowd.woken >= _CROWD:
                        await self._let_turns_pass()
                    elif self._sent_envelopes >= _LOADED:
                        await self._let_more_come()
                    if self._abandoned:
                        return None
                before = link.waiting
                frame = self._take()
                if frame is not None:
                    self._sent_envelopes = before - link.waiting
                    self._ack_now = False
                    self._quiet()
                    return frame
            if self._ack_now:
                self._ack_now = False
                frame = self._take()
                if frame is not None:
                    self._quiet()
                    return frame
            if self._closed:
                self._stop_timer()
                self._quiet()
                return None
            self._quiet()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> bytes | None:
        now = boot_time()
        if self._before is not None:
            self._before(now)
        return self._link.next_frame(now)

    def _quiet(self) -> None:
        if self._woken:
            self._woken = False
            self._crowd.woken -= 1

    async def _let_turns_pass(self) -> None:
        for _ in range(_TURNS_MAX):
            await asyncio.sleep(0)
            if self._link.waiting >= self._link.enough or self._abandoned:
                return

    async def _let_more_come(self) -> None:
        waiting = self._link.waiting
        for _ in range(_TURNS_MAX):
            await asyncio.sleep(0)
            if self._link.waiting == waiting:
                return
            waiting = self._link.waiting

    def _stop_timer(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
