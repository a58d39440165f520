"""Counters and histograms of the node, as plain numbers; `reach.adapters.metrics` shows them to Prometheus.

One record per agent type, and only for types that an agent registered under: a caller can ask for any name, and must
not be able to grow the node's metrics with it. Requests for other types, and types beyond the bound, count as
"unknown".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

UNKNOWN: Final = "unknown"
OK: Final = "OK"

BUCKETS_S: Final[tuple[float, ...]] = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets; one more holds what took longer."""

PHASES: Final = ("queue", "deliver", "handle", "total")
"""Waiting here; the way to the agent and back, with what its own queue did not account for; in the handler; from
receipt to outcome. The second and third go by the agent's `timing`."""

LOOP_KINDS: Final = ("hop_limit", "loop_detected", "would_deadlock")
DUPLICATE_KINDS: Final = ("joined", "replayed", "conflict", "late", "fenced")
MOVE_KINDS: Final = ("moved", "handed on", "lost", "kept", "parked", "dropped")
CALLBACK_KINDS: Final = ("accepted", "published", "unheard")
AUDIT_KINDS: Final = ("written", "summed up", "lost")
DEAD_LETTER_KINDS: Final = ("kept", "dropped", "expired", "redriven")
QUOTA_KINDS: Final = (
    "links_max",
    "agents_max",
    "sessions_max",
    "topics_max",
    "streams_max",
    "requests_per_s",
    "bytes_per_s",
    "silent_streams_max",
)
"""The limits of principals and tenants, as `quotas` names them."""

TYPES_MAX: Final = 1_000  # of agent types with numbers of their own; each may cost some 80 series

_PLACES: Final = len(BUCKETS_S) + 1


class Histogram:
    """How many observations fell into each bucket (not cumulative), and their sum in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * _PLACES
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class TypeStats:
    """The numbers of one agent type."""

    __slots__ = ("deliver", "handle", "in_flight", "outcomes", "queue", "total", "version_fallbacks")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        """Requests by outcome: "OK" or the name of an ErrorCode."""
        self.in_flight = 0
        self.version_fallbacks = 0
        """Choices of another version than the version policy's, which had nobody usable."""
        self.queue = Histogram()
        self.deliver = Histogram()
        self.handle = Histogram()
        self.total = Histogram()

    def phases(self) -> Iterator[tuple[str, Histogram]]:
        """The histograms by the name of their phase."""
        yield from zip(PHASES, (self.queue, self.deliver, self.handle, self.total), strict=True)


class Stats:
    """The node's numbers since its start. The plain attributes are for whoever counts to increment."""

    __slots__ = (
        "_types",
        "_types_max",
        "_unknown",
        "audit",
        "callbacks",
        "dead_letters",
        "denied",
        "duplicates",
        "events_delivered",
        "events_dropped",
        "events_published",
        "forced_releases",
        "home_refusals",
        "link_resumes",
        "loops",
        "moves",
        "quota_refusals",
        "retries",
        "retries_suppressed",
        "slow_consumers",
        "strangers",
    )

    def __init__(self, types_max: int = TYPES_MAX) -> None:
        self._types_max = types_max
        self._types: dict[str, TypeStats] = {}
        self._unknown = TypeStats()
        self.retries = 0
        self.retries_suppressed = 0
        self.forced_releases = 0
        """Slots taken back because the agent did not confirm the end of a cancelled handler."""
        self.link_resumes = 0
        self.slow_consumers = 0
        """Links ended because their peer took nothing for too long."""
        self.denied = 0
        """What somebody wanted to do without the right to."""
        self.strangers = 0
        """Calls that showed nothing valid."""
        self.events_published = 0
        self.home_refusals = 0
        self.events_delivered = 0
        self.events_dropped = 0
        self.loops = dict.fromkeys(LOOP_KINDS, 0)
        self.duplicates = dict.fromkeys(DUPLICATE_KINDS, 0)
        self.callbacks = dict.fromkeys(CALLBACK_KINDS, 0)
        self.moves = dict.fromkeys(MOVE_KINDS, 0)
        """Sessions that moved, lost their state, stayed where they were, were stored for whoever comes next; and
        checkpoints that there was no room for."""
        self.audit = dict.fromkeys(AUDIT_KINDS, 0)
        """Lines of the audit log: written, told of in a sum only, and lost because the file could not be written."""
        self.dead_letters = dict.fromkeys(DEAD_LETTER_KINDS, 0)
        self.quota_refusals = dict.fromkeys(QUOTA_KINDS, 0)
        """What was refused because its principal or tenant is at a limit."""

    def register(self, agent_type: str) -> None:
        """An agent of this type is here: count it under its own name from now on, if there is room."""
        if agent_type not in self._types and agent_type != UNKNOWN and len(self._types) < self._types_max:
            self._types[agent_type] = TypeStats()

    def began(self, agent_type: str) -> TypeStats:
        """A request is in flight. Keep what this returns with the request and give it to `ended`.

        Held by the record, not by the name, so that the gauge comes back to 0 whatever is registered meanwhile.
        """
        record = self._types.get(agent_type) or self._unknown
        record.in_flight += 1
        return record

    def version_fell_back(self, agent_type: str) -> None:
        """Somebody of this type was chosen although the version policy wants another version."""
        (self._types.get(agent_type) or self._unknown).version_fallbacks += 1

    def ended(self, record: TypeStats) -> None:
        """That request is no longer in flight."""
        record.in_flight -= 1

    def finished(
        self,
        agent_type: str,
        outcome: str,
        queue_s: float | None,
        deliver_s: float | None,
        handle_s: float | None,
        total_s: float,
    ) -> None:
        """Count a request that has its outcome; None for a phase that it never reached."""
        record = self._types.get(agent_type) or self._unknown
        outcomes = record.outcomes
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        # Written out, not looped: this runs once a request, and a loop costs half as much again.
        if queue_s is not None:
            histogram = record.queue
            histogram.counts[bisect_left(BUCKETS_S, queue_s)] += 1
            histogram.sum_s += queue_s
        if deliver_s is not None:
            histogram = record.deliver
            histogram.counts[bisect_left(BUCKETS_S, deliver_s)] += 1
            histogram.sum_s += deliver_s
        if handle_s is not None:
            histogram = record.handle
            histogram.counts[bisect_left(BUCKETS_S, handle_s)] += 1
            histogram.sum_s += handle_s
        histogram = record.total
        histogram.counts[bisect_left(BUCKETS_S, total_s)] += 1
        histogram.sum_s += total_s

    def types(self) -> Iterator[tuple[str, TypeStats]]:
        """Every agent type that has numbers, by name, and "unknown" last if anything counted there."""
        yield from sorted(self._types.items())
        if self._unknown.outcomes or self._unknown.in_flight:
            yield UNKNOWN, self._unknown
