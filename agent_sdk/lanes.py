"""Which of the delivered messages may run now: the agent's slots, and one at a time (or a few) of each session.

The node reserves slots before it delivers; this is the agent's own count, which also knows of handlers that outlived
their cancel. Nothing starts above it. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar


class Admissible(Protocol):
    """What runs in a lane: `session` is None or the key of its conversation; the two flags belong to `Lanes`."""

    session: Hashable | None
    admitted: bool
    place: int


W = TypeVar("W", bound=Admissible)

_NOWHERE: Final = 0
_IN_LANE: Final = 1
_FOR_SLOT: Final = 2


class _Lane(Generic[W]):
    __slots__ = ("active", "queue")

    def __init__(self) -> None:
        self.active = 0
        self.queue: deque[W] = deque()


class Lanes(Generic[W]):
    """`limit` works at once (0: any number), `per_session` of one session, in the order they came."""

    def __init__(self, limit: int, per_session: int) -> None:
        self._limit = limit
        self._per_session = max(per_session, 1)
        self._lanes: dict[Hashable, _Lane[W]] = {}
        self._for_slot: deque[W] = deque()
        self.active = 0
        """Works that run, leftovers included."""
        self.queued = 0
        """Works that wait."""

    def admit(self, work: W, over_limit: bool = False) -> bool:
        """Take a work in. True: start it now. `over_limit` lets a call tree use its own slot again."""
        session = work.session
        if session is not None:
            lane = self._lanes.get(session)
            if lane is None:
                lane = self._lanes[session] = _Lane()
            if lane.active >= self._per_session and not over_limit:
                work.place = _IN_LANE
                lane.queue.append(work)
                self.queued += 1
                return False
            lane.active += 1
        if self._limit and self.active >= self._limit and not over_limit:
            work.place = _FOR_SLOT
            self._for_slot.append(work)
            self.queued += 1
            return False
        work.admitted = True
        self.active += 1
        return True

    def release(self, work: W) -> list[W]:
        """An admitted work has really ended. Returns what starts in its place."""
        work.admitted = False
        self.active -= 1
        if work.session is not None:
            self._leave_lane(work.session)
        return self._start() if self._for_slot else []

    def withdraw(self, work: W) -> list[W]:
        """Take back a work that waits. Returns what starts instead."""
        place, work.place = work.place, _NOWHERE
        if place == _IN_LANE and work.session is not None:
            lane = self._lanes[work.session]
            lane.queue.remove(work)
            self.queued -= 1
        elif place == _FOR_SLOT:
            self._for_slot.remove(work)
            self.queued -= 1
            if work.session is not None:
                self._leave_lane(work.session)
        return self._start()

    def _leave_lane(self, session: Hashable) -> None:
        lane = self._lanes[session]
        lane.active -= 1
        if lane.queue and lane.active < self._per_session:
            following = lane.queue.popleft()
            lane.active += 1
            following.place = _FOR_SLOT
            self._for_slot.append(following)
        elif lane.active == 0 and not lane.queue:
            del self._lanes[session]

    def _start(self) -> list[W]:
        started: list[W] = []
        while self._for_slot and (not self._limit or self.active < self._limit):
            work = self._for_slot.popleft()
            work.place = _NOWHERE
            work.admitted = True
            self.queued -= 1
            self.active += 1
            started.append(work)
        return started
