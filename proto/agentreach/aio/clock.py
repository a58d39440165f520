"""The clock of deadlines and leases: monotonic, and it goes on while the machine is suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", None)


def boot_time() -> float:
    """Seconds since boot, suspension included where the platform has such a clock; else the monotonic clock."""
    return time.clock_gettime(_BOOT) if _BOOT is not None else time.monotonic()


class StallWatch:
    """Tells how long the event loop may have stood still, which is time that arrived messages lost unseen.

    A message read right after a stall may have arrived at its start, so the whole stall counts against it.
    """

    TICK_S = 0.1
    """A stall shorter than this is not told apart from ordinary work."""
    LONG_S = 0.5
    """What arrived in a longer one is not all read as soon as it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[float], None] | None = None) -> None:
        """`ended` is called with the length of every stall that is seen, in seconds."""
        self._loop = loop
        self._ended = ended
        self.last = boot_time()
        """When the loop was last seen to run."""
        self._handle: asyncio.TimerHandle | None = loop.call_later(self.TICK_S, self._tick)
        self._stall_s = 0.0
        self._stall_seen = 0.0
        self._long_seen = float("-inf")

    def _tick(self) -> None:
        self.look()
        self._handle = self._loop.call_later(self.TICK_S, self._tick)

    def look(self) -> None:
        """See now whether the loop has stood still."""
        now = boot_time()
        late = now - self.last - self.TICK_S
        self.last = now
        if late > self.TICK_S:
            self._stall_s, self._stall_seen = late, now
            if late > self.LONG_S:
                self._long_seen = now
            if self._ended is not None:
                self._ended(late)

    def stall_s(self, now: float) -> float:
        """How much of the time just before `now` the loop did not run; 0.0 in ordinary operation."""
        late = now - self.last - self.TICK_S
        if late > self.TICK_S:
            return late
        if now - self._stall_seen < self.TICK_S:
            return self._stall_s
        return 0.0

    def awake_s(self, now: float) -> float:
        """Seconds since the loop last stood still for long; infinity if it never did."""
        if now - self.last - self.TICK_S > self.LONG_S:
            return 0.0
        return now - self._long_seen

    def close(self) -> None:
        """Stop ticking."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
