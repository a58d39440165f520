"""Taking turns: within one level of a wait queue each principal is served in proportion to its weight (§6).

Start-time fair queueing (Goyal, Vin, Cheng, 1996): a principal's next entry carries a virtual start time, which grows
by 1 / weight with each entry served; the smallest is served next. One who was idle begins at the present virtual time,
so it waits for at most one entry of each other principal and saves up nothing. Each principal's own entries are served
in the order in which they came.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

E = TypeVar("E", bound=Hashable)

IDLE_MAX = 64  # principals with nothing waiting that are remembered, besides as many as have something


class _Turn(Generic[E]):
    """One principal's entries, and its virtual start time."""

    __slots__ = ("entries", "queued", "start", "weight")

    def __init__(self, start: float, weight: float) -> None:
        self.entries: OrderedDict[E, int] = OrderedDict()
        self.start = start
        self.weight = weight
        self.queued = False
        """It has its one place in the heap, which may be ahead of where it belongs but never behind."""


class FairLevel(Generic[E]):
    """The entries of one level. Adding and taking cost O(log principals), removing O(1)."""

    __slots__ = ("_active", "_heap", "_number", "_turns", "_virtual", "size")

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn[E]] = {}
        self._heap: list[tuple[float, int, int, _Turn[E]]] = []
        self._active = 0
        self._number = 0
        self._virtual = 0.0
        self.size = 0
        """Entries in it."""

    @property
    def principals(self) -> int:
        """Principals that are remembered, those with nothing waiting included."""
        return len(self._turns)

    def add(self, entry: E, principal: Hashable, weight: float = 1.0) -> None:
        """Append an entry behind the principal's others. `weight` (above 0) is the principal's from now on."""
        turn = self._turns.get(principal)
        if turn is None:
            if len(self._turns) > 2 * self._active + IDLE_MAX:
                self._forget_idle()
            turn = self._turns[principal] = _Turn(self._virtual, weight)
        elif not turn.entries and turn.start < self._virtual:
            turn.start = self._virtual
        turn.weight = weight
        self._active += not turn.entries
        self._number += 1
        turn.entries[entry] = self._number
        self.size += 1
        if not turn.queued:
            turn.queued = True
            heappush(self._heap, (turn.start, self._number, self._number, turn))

    def remove(self, entry: E, principal: Hashable) -> None:
        """Take an entry out, wherever it stands. `KeyError` if it is not there."""
        turn = self._turns[principal]
        del turn.entries[entry]
        self._active -= not turn.entries
        self.size -= 1

    def head(self) -> E | None:
        """The entry whose turn it is, or None if there is none."""
        heap = self._heap
        while heap:
            start, place, _, turn = heap[0]
            if not turn.entries:
                heappop(heap)
                turn.queued = False
                continue
            entry = next(iter(turn.entries))
            first = turn.entries[entry]
            if start == turn.start and place == first:
                return entry
            self._number += 1
            heapreplace(heap, (turn.start, first, self._number, turn))
        return None

    def pop(self) -> E:
        """Take out the entry whose turn it is. `IndexError` if there is none."""
        entry = self.head()
        if entry is None:
            raise IndexError("nothing is waiting")
        turn = self._heap[0][3]
        del turn.entries[entry]
        self._active -= not turn.entries
        self.size -= 1
        self._virtual = turn.start
        turn.start += 1.0 / turn.weight
        return entry

    def _forget_idle(self) -> None:
        """Let go of principals with nothing waiting; what they had ahead of the virtual time is forgiven them."""
        self._turns = {principal: turn for principal, turn in self._turns.items() if turn.entries}
        self._heap = [place for place in self._heap if place[3].entries]
        heapify(self._heap)
