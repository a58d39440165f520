"""The clock of deadlines and leases: monotonic, and it goes on while the machine is suspended."""

from __future__ import annotations

import asyncio
import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def boot_time() -> float:
    """Seconds since boot, suspension included where the platform has such a clock; else the monotonic clock."""
    return time.clock_gettime(_BOOT) if _BOOT is not None else time.monotonic()


class StallWatch:
    """Tells how long the event loop may have stood still, which is time that arrived messages lost unseen.

    A message read right after a stall may have arrived at its start, so the whole stall counts against it.
    """

    TICK_S = 0.1
    """A stall shorter than this is not told apart from ordinary work."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last = boot_time()
        self._handle: asyncio.TimerHandle | None = loop.call_later(self.TICK_S, self._tick)
        self._stall_s = 0.0
        self._stall_seen = 0.0

    def _tick(self) -> None:
        now = boot_time()
        late = now - self._last - self.TICK_S
        if late > self.TICK_S:
            self._stall_s, self._stall_seen = late, now
        self._last = now
        self._handle = self._loop.call_later(self.TICK_S, self._tick)

    def stall_s(self, now: float) -> float:
        """How much of the time just before `now` the loop did not run; 0.0 in ordinary operation."""
        late = now - self._last - self.TICK_S
        if late > self.TICK_S:
            return late
        if now - self._stall_seen < self.TICK_S:
            return self._stall_s
        return 0.0

    def close(self) -> None:
        """Stop ticking."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
