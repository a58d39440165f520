"""Which instances get no work for a while because it failed there: one breaker for each (agent_id, incarnation) (§4).

CLOSED until five failures in a row, or more failures than successes among ten outcomes or more in 30 s. Then OPEN, for
30 s times the trips so far. Then HALF_OPEN: one real request is the probe. Its success begins a ramp (RAMPING) from a
twentieth of the instance's fair share, doubled every five seconds; at the full share it is CLOSED. Any failure before
that opens it again. Outcomes of attempts that began before the probing started say nothing and are not counted.

A breaker does nothing by itself: time's changes are seen when it is asked. `next_at` says when to ask again.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Final, Protocol

from reach.core.retry import Failed

IN_A_ROW_MAX: Final = 5
OUTCOMES_MIN: Final = 10  # fewer say nothing about a share
WINDOW_S: Final = 30.0
BUCKETS: Final = 10  # of three seconds: the window is 27 to 30 s long
BUCKET_S: Final = WINDOW_S / BUCKETS
OPEN_S: Final = 30.0
OPEN_S_MAX: Final = 300.0
PROBE_S: Final = 30.0  # a probe that is under way so long gives its place to another
RAMP_FIRST: Final = 0.05
RAMP_STEP_S: Final = 5.0
RAMP_STEPS: Final = 5  # 5, 10, 20, 40, 80 %; then it is closed
FORGIVE_S: Final = 300.0  # one trip is forgotten for each such time in health
TIMEOUT_MIN_S: Final = 1.0  # a TIMEOUT after less than this (or the agent's p95) is its caller's impatience


class Rng(Protocol):
    """Where chance comes from; `random.Random` is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class BreakerState(Enum):
    """The names are those of `ListBreakers` and of the metric."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"
    RAMPING = "RAMPING"


CLOSED, OPEN, HALF_OPEN, RAMPING = BreakerState
TRANSITIONS: dict[BreakerState, frozenset[BreakerState]] = {
    CLOSED: frozenset({OPEN}),
    OPEN: frozenset({HALF_OPEN, CLOSED}),
    HALF_OPEN: frozenset({RAMPING, OPEN, CLOSED}),
    RAMPING: frozenset({CLOSED, OPEN}),
}
"""From each state to which others. From OPEN and HALF_OPEN straight to CLOSED only by an operator (`reset`)."""


def counts_as_failure(failed: Failed, waited_s: float, p95_s: float, *, tried: bool = True) -> bool | None:
    """What a failed attempt says of its agent: True a failure, False an answer (it works), None nothing either way.

    `waited_s` is how long the request was at the agent, `p95_s` how long the agent's replies take. `tried` False:
    a CONNECT where no hand-over was tried (refused by homes, or the agent left with a goodbye).
    """
    match failed:
        case Failed.UNKNOWN | Failed.LOST:
            return True
        case Failed.CONNECT:
            return True if tried else None
        case Failed.TIMEOUT:
            return True if waited_s >= max(TIMEOUT_MIN_S, p95_s) else None
        case Failed.AGENT_ERROR:
            return False
        case Failed.OVERLOADED | Failed.REJECTED:
            return None


class Breaker:
    """One instance's. Times are the node's boot clock, in seconds, and do not run backwards."""

    __slots__ = (
        "_at",
        "_bad",
        "_bad_sum",
        "_ends",
        "_good",
        "_in_a_row",
        "_probe_at",
        "_ramp_at",
        "_since",
        "_state",
        "_trips",
        "_until",
        "changed_at",
    )

    def __init__(self) -> None:
        self._state = CLOSED
        self._in_a_row = 0
        # Outcomes by bucket: `_at` is where the newest is counted, `_ends` when the next one begins.
        self._good = [0] * BUCKETS
        self._bad = [0] * BUCKETS
        self._bad_sum = 0
        self._at = 0
        self._ends = -inf
        self._until = 0.0
        self._since = -inf
        self._probe_at = -inf
        self._ramp_at = 0.0
        self._trips = 0
        self.changed_at = -inf
        """When its state last changed."""

    @property
    def is_closed(self) -> bool:
        """True if it was closed when last asked: nothing has to be asked then, and nothing told but outcomes."""
        return self._state is CLOSED

    def state(self, now: float) -> BreakerState:
        """Its state now, with what time has changed."""
        if self._state is OPEN and now >= self._until:
            self._since, self._probe_at = self._until, -inf
            self._move(HALF_OPEN, self._until)
        elif self._state is RAMPING and now >= self._ramp_at + RAMP_STEPS * RAMP_STEP_S:
            self._close(self._ramp_at + RAMP_STEPS * RAMP_STEP_S)
        return self._state

    def share(self, now: float) -> float:
        """The part of its fair share that it gets, 0..1. A probe is no share: half open is 0."""
        state = self.state(now)
        if state is RAMPING:
            return RAMP_FIRST * 2.0 ** min(RAMP_STEPS - 1, int((now - self._ramp_at) / RAMP_STEP_S))
        return 1.0 if state is CLOSED else 0.0

    def admits(self, now: float, rng: Rng) -> bool:
        """Whether the next request may be given to it. If it then is, say so with `began`."""
        state = self._state
        if state is CLOSED:
            return True
        state = self.state(now)
        if state is HALF_OPEN:
            return now - self._probe_at >= PROBE_S
        return state is not OPEN and rng.random() < self.share(now)

    def began(self, now: float) -> None:
        """A request was given to it: half open, this is the probe. (Not needed while it is closed.)"""
        if self.state(now) is HALF_OPEN:
            self._probe_at = now

    def outcome(self, success: bool, now: float, began_at: float) -> bool:
        """An attempt that was given to it at `began_at` ended. True if that changed its state."""
        if success and self._state is CLOSED:
            self._in_a_row = 0
            if now >= self._ends:
                self._turn(now)
            self._good[self._at] += 1
            return self._bad_sum != 0 and self._judge(now)
        return self._other(success, now, began_at)

    def neither(self, now: float, began_at: float) -> None:
        """An attempt ended that says nothing about it. If it was the probe, another request may be."""
        if self.state(now) is HALF_OPEN and began_at >= self._probe_at:
            self._probe_at = -inf

    def reset(self, now: float) -> None:
        """An operator's: close it, and forget its trips."""
        if self._state is not CLOSED:
            self._close(now)
        self._clear()
        self._trips = 0

    def trips(self, now: float) -> int:
        """How often it opened, without the trips that time in health has made good."""
        if self._state is not CLOSED or not self._trips:
            return self._trips
        return max(0, self._trips - int((now - self.changed_at) / FORGIVE_S))

    def failures(self, now: float) -> int:
        """Failures in the window."""
        if now >= self._ends:
            self._turn(now)
        return self._bad_sum

    def next_probe_s(self, now: float) -> float:
        """Seconds until it admits a probe; 0.0 if it admits requests now."""
        state = self.state(now)
        if state is OPEN:
            return self._until - now
        return max(0.0, self._probe_at + PROBE_S - now) if state is HALF_OPEN else 0.0

    def next_at(self, now: float) -> float:
        """When time alone will next change what it admits; infinity if it will not."""
        state = self.state(now)
        if state is OPEN:
            return self._until
        if state is HALF_OPEN and now - self._probe_at < PROBE_S:
            return self._probe_at + PROBE_S
        if state is RAMPING:
            return self._ramp_at + RAMP_STEP_S * (1 + int((now - self._ramp_at) / RAMP_STEP_S))
        return inf

    def _other(self, success: bool, now: float, began_at: float) -> bool:
        """A failure, or a success while it is not closed."""
        state = self.state(now)
        if state is OPEN or began_at < self._since:
            return False
        if state is CLOSED:
            if now >= self._ends:
                self._turn(now)
            if success:  # time has just closed it
                self._good[self._at] += 1
                return False
            self._in_a_row += 1
            self._bad[self._at] += 1
            self._bad_sum += 1
            return self._judge(now)
        if not success:
            self._trip(now)
        elif state is HALF_OPEN:
            self._ramp_at = now
            self._move(RAMPING, now)
        return not success or state is HALF_OPEN

    def _judge(self, now: float) -> bool:
        bad = self._bad_sum
        outcomes = bad + sum(self._good)
        if self._in_a_row < IN_A_ROW_MAX and (outcomes < OUTCOMES_MIN or 2 * bad <= outcomes):
            return False
        self._trip(now)
        return True

    def _trip(self, now: float) -> None:
        self._trips = self.trips(now) + 1
        self._until = now + min(OPEN_S_MAX, OPEN_S * self._trips)
        self._move(OPEN, now)

    def _close(self, now: float) -> None:
        self._clear()
        self._move(CLOSED, now)

    def _clear(self) -> None:
        self._in_a_row = self._bad_sum = 0
        self._good = [0] * BUCKETS
        self._bad = [0] * BUCKETS

    def _move(self, state: BreakerState, now: float) -> None:
        if state not in TRANSITIONS[self._state]:
            raise AssertionError(f"a breaker does not go from {self._state.value} to {state.value}")
        self._state = state
        self.changed_at = now

    def _turn(self, now: float) -> None:
        """Begin the bucket of `now`, and let go of those that are older than the window."""
        number = int(now // BUCKET_S)
        passed = BUCKETS if self._ends == -inf else number - round(self._ends / BUCKET_S) + 1
        for _ in range(min(passed, BUCKETS)):
            self._at = (self._at + 1) % BUCKETS
            self._bad_sum -= self._bad[self._at]
            self._good[self._at] = self._bad[self._at] = 0
        self._ends = (number + 1) * BUCKET_S
