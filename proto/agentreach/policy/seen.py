"""A bounded memory of what was seen, ordered by age: the table behind "once means once".

Bounds are number, bytes and age; the oldest go first. Reading does not make an entry younger, so an outcome is
replayed for its time and no longer. What the entries mean is the owner's affair.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Seen(Generic[K, V]):
    """Table of at most `entries_max` entries, `bytes_max` bytes and `age_s` seconds. Every step is O(1) amortised.

    `on_drop` is told of each entry that a bound or its age removed, never of one that was discarded or replaced.
    It is called after the entry has gone and may use the table. `now` must not run backwards.
    """

    __slots__ = ("_age_s", "_bytes_max", "_entries", "_entries_max", "_expiry", "_on_drop", "bytes_held")

    def __init__(
        self, entries_max: int, bytes_max: int, age_s: float, on_drop: Callable[[K, V], None] | None = None
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._age_s = age_s
        self._on_drop = on_drop
        # OrderedDict, not dict: taking the first of a dict again and again walks over the holes left before it.
        self._entries: OrderedDict[K, tuple[V, int, float]] = OrderedDict()
        self._expiry = math.inf  # nothing expires before; a hint that may be early
        self.bytes_held = 0
        """Sum of the sizes given with what is held."""

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[V]:
        """What is held, oldest first; may include what is too old and was not asked for since."""
        return [value for value, _, _ in self._entries.values()]

    def get(self, key: K, now: float) -> V | None:
        """The value put under `key`, or None if there is none or its age has passed."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry[2] >= self._age_s:
            self.expire(now)
            return None
        return entry[0]

    def put(self, key: K, value: V, size: int, now: float) -> None:
        """Remember `value` from `now` on, as the youngest; an older value of `key` is replaced.

        Something larger than the whole table is dropped at once and costs no other entry its place.
        """
        entries = self._entries
        former = entries.pop(key, None)
        if former is not None:
            self.bytes_held -= former[1]
        if now >= self._expiry:
            self.expire(now)
        if size > self._bytes_max or self._entries_max <= 0:
            if self._on_drop is not None:
                self._on_drop(key, value)
            return
        if not entries:
            self._expiry = now + self._age_s
        entries[key] = (value, size, now)
        self.bytes_held += size
        while len(entries) > self._entries_max or self.bytes_held > self._bytes_max:
            self._drop_oldest()

    def discard(self, key: K) -> V | None:
        """Forget `key` without telling `on_drop`. Returns what was held, if anything."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.bytes_held -= entry[1]
        return entry[0]

    def expire(self, now: float) -> int:
        """Drop all whose age has passed; returns how many."""
        dropped = 0
        limit = now - self._age_s
        while self._entries:
            entry = self._entries[next(iter(self._entries))]
            if entry[2] > limit:
                self._expiry = entry[2] + self._age_s
                return dropped
            self._drop_oldest()
            dropped += 1
        self._expiry = math.inf
        return dropped

    def _drop_oldest(self) -> None:
        key, (value, size, _) = self._entries.popitem(last=False)
        self.bytes_held -= size
        if self._on_drop is not None:
            self._on_drop(key, value)
