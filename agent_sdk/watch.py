"""Which works take long, and which have outlived their time, at next to no cost for those that do neither.

A work that is not done 100 ms after it came is looked at once, and gets a place in a heap; any other is let go of as
soon as those before it are done, and with it the frame that it came in. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final

from agent_sdk.work import Work

SLOW_S: Final = 0.1  # from here on the mesh is told that the handler is at work
OVERDUE_S: Final = 1.0  # after its deadline the node has sent CANCEL; if it could not, the handler ends by itself


class Watch:
    """The works of one agent."""

    def __init__(self) -> None:
        self._recent: deque[Work] = deque()
        self._late: list[tuple[float, int, Work]] = []
        self._order = 0

    def add(self, work: Work) -> None:
        """Look after a work that has just come; let go of the first ones if they are done, and of what they hold."""
        recent = self._recent
        while recent and recent[0].ended:
            recent.popleft()
        recent.append(work)

    @property
    def watching(self) -> bool:
        """True while there is anything to look after."""
        return bool(self._recent or self._late)

    def slow(self, now: float) -> list[Work]:
        """Those that are not done 100 ms after they came; each is given once."""
        recent, horizon = self._recent, now - SLOW_S
        found: list[Work] = []
        while recent and recent[0].received <= horizon:
            work = recent.popleft()
            if not work.ended:
                self._push(work)
                found.append(work)
        return found

    def overdue(self, now: float) -> list[Work]:
        """Those whose last waiter's time has long passed; each is given once."""
        found: list[Work] = []
        while self._late and self._late[0][0] <= now:
            work = heappop(self._late)[2]
            if work.ended or work.cancelled:
                continue
            if work.deadline + OVERDUE_S > now:  # somebody with more time has joined
                self._push(work)
            else:
                found.append(work)
        return found

    def _push(self, work: Work) -> None:
        self._order += 1
        heappush(self._late, (work.deadline + OVERDUE_S, self._order, work))
