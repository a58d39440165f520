"""Timers for deadlines that are nearly always cancelled: one per request, millions a minute.

A heap of timers costs O(log n) and keeps a cancelled one until its time. Here a timer is an entry in the bucket of
its tick: setting and cancelling are dict operations, and a cancelled item is let go at once. Only bucket numbers go
through a heap, one per tick that is in use. The price is coarseness: a timer fires up to one tick late, never early.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Token: TypeAlias = int
"""Where a timer was put; with the item it names the timer. (A NewType would cost a call for every timer.)"""

_EMPTY_BUCKETS_MAX: Final = 256  # kept before a sweep, and always fewer than the buckets in use


class TimerWheel(Generic[T]):
    """Timers by the caller's clock, in seconds. Items are hashable; the same item twice in one tick is one timer.

    Ticks are the largest power of two of a second that is not above `tick_s`: multiples of such a number are exact
    in floating point, so "never early" needs no tolerance.
    """

    __slots__ = ("_buckets", "_empty", "_heap", "_per_s", "_tick_s")

    def __init__(self, tick_s: float = 0.005) -> None:
        if not 0 < tick_s < math.inf:
            raise ValueError("tick_s must be above 0")
        exponent = math.frexp(tick_s)[1] - 1
        self._tick_s = math.ldexp(1.0, exponent)
        self._per_s = math.ldexp(1.0, -exponent)
        # None: all of its timers were cancelled. The number stays in the heap, so that it is not pushed again.
        self._buckets: dict[int, dict[T, None] | None] = {}
        self._heap: list[int] = []
        self._empty = 0

    def __len__(self) -> int:
        """Timers that are set; O(ticks in use), for tests and gauges."""
        return sum(len(bucket) for bucket in self._buckets.values() if bucket)

    def schedule(self, item: T, when: float) -> Token:
        """Set a timer for `when` (finite). One whose time has passed is due at once."""
        number = math.ceil(when * self._per_s)
        bucket = self._buckets.get(number)
        if bucket is not None:
            bucket[item] = None
            return number
        if number in self._buckets:
            self._empty -= 1
        else:
            heappush(self._heap, number)
        self._buckets[number] = {item: None}
        return number

    def cancel(self, token: Token, item: T) -> bool:
        """Take a timer back. False if it has fired or was cancelled before."""
        bucket = self._buckets.get(token)
        if bucket is None or item not in bucket:
            return False
        if len(bucket) > 1:
            del bucket[item]
            return True
        self._buckets[token] = None
        self._empty += 1
        if self._empty > _EMPTY_BUCKETS_MAX and self._empty * 2 > len(self._buckets):
            self._sweep()
        return True

    def due(self, now: float) -> list[T]:
        """Take out every item whose time has come, earliest tick first, in the order of setting within a tick."""
        heap, tick_s = self._heap, self._tick_s
        items: list[T] = []
        while heap and heap[0] * tick_s <= now:
            bucket = self._buckets.pop(heappop(heap))
            if bucket is None:
                self._empty -= 1
            else:
                items.extend(bucket)
        return items

    def next_at(self) -> float | None:
        """When `due` will next have something, or None if no timer is set."""
        heap = self._heap
        while heap:
            if self._buckets[heap[0]] is not None:
                return heap[0] * self._tick_s
            del self._buckets[heappop(heap)]
            self._empty -= 1
        return None

    def _sweep(self) -> None:
        """Let go of empty buckets. Each was emptied by a cancel since the last sweep, so the cost is spread."""
        self._buckets = {number: bucket for number, bucket in self._buckets.items() if bucket is not None}
        self._heap = list(self._buckets)
        heapify(self._heap)
        self._empty = 0
