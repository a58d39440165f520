"""When this process's loop has stood still, and what that means for what it does next.

Arrived messages have lost that time unseen; ends of streams have not been read yet, so nobody is judged by time, and
no process takes another's place, until they have; and what may be said by right of a lease, and waits in an outbox, is
not said before the lease was looked at (cluster.md, "Leases, on two levels").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog

from agentreach.aio.clock import StallWatch, boot_time
from reach.core import fence
from reach.core.state import State

log = structlog.get_logger("reach")

UNJUDGED_S = 0.5  # a loop that stood still for so long has answers to read before it judges anybody by time
ALL_READ_S = 1.0  # after a stall the ends of all streams that broke meanwhile have been seen
FROZEN_S = 5.0  # as long as another node's word for this one's pins holds (`fence.HONOURED_S`)


class Standstill:
    """Watches one node's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step: Callable[[], AbstractContextManager[State]]) -> None:
        """`step` is the engine's."""
        self._watch = StallWatch(loop, self._ended)
        self._step = step

    def _ended(self, seconds: float) -> None:
        if seconds > FROZEN_S:
            log.warning(
                "this node stood still: it looks at its lease before it says anything", seconds=round(seconds, 1)
            )
            with self._step() as state:
                fence.holds(state)  # if not, what waits in outboxes for sessions is taken back

    def before_writing(self, now: float) -> None:
        """A frame is about to be taken from an outbox: see whether the loop has stood still since it was last seen."""
        if now - self._watch.last > FROZEN_S:
            self._watch.look()

    def ms(self, now: float) -> int:
        """How long it has just stood still."""
        return int(self._watch.stall_s(now) * 1000)

    @property
    def may_judge(self) -> bool:
        """Whether nothing is left to read of a standstill that has just ended."""
        return self._watch.stall_s(boot_time()) <= UNJUDGED_S

    def unread_s(self) -> float:
        """For how long yet it may not be known who has ended meanwhile."""
        return max(0.0, ALL_READ_S - self._watch.awake_s(boot_time()))

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()
