"""Notices a handler that blocks the event loop, and says which one and where, while it still does.

An `async def` handler that computes or sleeps without `await` stops everything else in its process: heartbeats are
late, and the mesh takes the agent out of routing. A thread looks at the loop twice a second; it costs nothing per call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from agent_sdk.work import Work

log = logging.getLogger("agent_sdk")

BLOCKED_S = 1.0
_LOOK_EVERY_S = 0.5


class LoopWatch:
    """Watches the running loop until `stop`. `works` gives the works under way."""

    def __init__(self, works: Callable[[], list[Work]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._works = works
        self._beat = time.monotonic()
        self._told = False
        self._end = threading.Event()
        self._tick()
        self._thread = threading.Thread(target=self._look, name="agent_sdk loop watch", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self._told = False
        self._timer = self._loop.call_later(_LOOK_EVERY_S / 2, self._tick)

    def _look(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            blocked_s = time.monotonic() - self._beat
            if blocked_s >= BLOCKED_S and not self._told:
                self._told = True
                self._tell(blocked_s)

    def _tell(self, blocked_s: float) -> None:
        task = asyncio.current_task(self._loop)
        work = next((work for work in self._works() if work.task is task), None) if task is not None else None
        who = f"handler {work.handler.name} of {work.host.agent_id}" if work else "something outside of handlers"
        frame = sys._current_frames().get(self._thread_id)
        where = "".join(traceback.format_stack(frame, limit=None)[-1:]).strip() if frame is not None else "unknown"
        log.warning(
            "%s has blocked the event loop for %.1f s; nothing else in this process runs meanwhile. "
            "Use a plain `def` handler (it gets a thread) or await. It is at: %s",
            who,
            blocked_s,
            where,
            extra={"trace_id": work.trace_id if work else "-"},
        )

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()
        self._end.set()
