"""Which lease is renewed when. Pure: told the time, never asks.

Due at a third of the TTL after the last one was sent, so two may be lost; at most 256 unanswered, because etcd serves
a keepalive stream strictly one by one and a longer queue would only make the answers late.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

IN_FLIGHT_MAX = 256
ANSWER_S = 2.0  # etcd answers in milliseconds; a frozen one must leave time for another endpoint
YOUNG_S = 1.0  # etcd before 3.5.3 may not know a lease right after it granted it
ASK_AGAIN_S = 0.3


class Answer(Enum):
    """What a keepalive answer means."""

    KEPT = "the lease lives on"
    GONE = "the lease has ended"
    UNKNOWN = "not a lease of ours any more, or too young to judge"


@dataclass(slots=True)
class _Entry:
    ttl_s: float
    granted_at: float
    due: float
    sent_at: float | None = None  # while in flight


class LeaseSchedule:
    """The leases to keep alive."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._heap: list[tuple[float, int]] = []  # entries not in flight; stale ones are skipped
        self._in_flight: dict[int, None] = {}  # in the order sent

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, lease_id: int, ttl_s: float, granted_at: float) -> None:
        """Keep a lease alive that was asked for at `granted_at`."""
        entry = self._entries[lease_id] = _Entry(ttl_s, granted_at, granted_at)
        self._plan(lease_id, entry, granted_at + ttl_s / 3)

    def remove(self, lease_id: int) -> None:
        """Forget a lease."""
        self._entries.pop(lease_id, None)
        self._in_flight.pop(lease_id, None)

    def take_due(self, now: float) -> list[int]:
        """The leases to renew now; they are in flight from here on."""
        due: list[int] = []
        while self._heap and self._heap[0][0] <= now and len(self._in_flight) < IN_FLIGHT_MAX:
            at, lease_id = heapq.heappop(self._heap)
            entry = self._entries.get(lease_id)
            if entry is None or entry.due != at or entry.sent_at is not None:
                continue
            entry.sent_at = now
            self._in_flight[lease_id] = None
            due.append(lease_id)
        return due

    def answered(self, lease_id: int, ttl_s: float, now: float) -> tuple[Answer, float]:
        """Take an answer (`ttl_s` 0: there is no such lease). With KEPT comes until when the lease is valid."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.sent_at is None:
            return Answer.UNKNOWN, 0.0
        sent_at, entry.sent_at = entry.sent_at, None
        self._in_flight.pop(lease_id, None)
        if ttl_s > 0:
            entry.ttl_s = ttl_s
            self._plan(lease_id, entry, sent_at + ttl_s / 3)
            return Answer.KEPT, sent_at + ttl_s
        if now - entry.granted_at < YOUNG_S:
            self._plan(lease_id, entry, now + ASK_AGAIN_S)
            return Answer.UNKNOWN, 0.0
        self.remove(lease_id)
        return Answer.GONE, 0.0

    def reconnected(self, now: float) -> None:
        """The stream is new: what was in flight is due at once."""
        for lease_id in list(self._in_flight):
            entry = self._entries[lease_id]
            entry.sent_at = None
            self._plan(lease_id, entry, now)
        self._in_flight.clear()

    def next_due(self) -> float | None:
        """When to look again for something to send; None while nothing will be due before an answer comes."""
        while self._heap:
            at, lease_id = self._heap[0]
            entry = self._entries.get(lease_id)
            if entry is None or entry.due != at or entry.sent_at is not None:
                heapq.heappop(self._heap)
                continue
            return at if len(self._in_flight) < IN_FLIGHT_MAX else None
        return None

    def answer_due(self) -> float | None:
        """When the oldest unanswered keepalive has waited too long; None without one."""
        for lease_id in self._in_flight:
            entry = self._entries[lease_id]
            if entry.sent_at is not None:
                return entry.sent_at + min(ANSWER_S, entry.ttl_s / 3)
        return None

    def _plan(self, lease_id: int, entry: _Entry, due: float) -> None:
        entry.due = due
        heapq.heappush(self._heap, (due, lease_id))
