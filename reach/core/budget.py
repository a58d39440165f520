"""How many retries the node makes at all: a share of the requests, whatever each message would be allowed (§4).

When a target fails, every request to it turns into several; the budget keeps what reaches it near what was asked of
it. Per target type, over the last ten seconds, retries are at most a fifth of the requests, or one a second where
there are few of those. At any moment no instance has more than three retries under way.

A window is ten buckets of a second, so "the last ten seconds" is between nine and ten of them. A type of which the
window is empty is as one that was never heard of, and is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable

SHARE = 0.2
PER_SECOND = 1.0
IN_FLIGHT_MAX = 3
BUCKETS = 10  # of one second each
TYPES_MAX = 20_000  # as many as agents may be; beyond, all further types share one window
_SWEEP_MIN = 64


class _Window:
    """Requests and retries of one type, by second. `at` is where those of the newest second are counted."""

    __slots__ = ("at", "ends", "requests", "retries")

    def __init__(self, now: float) -> None:
        self.at = 0
        self.ends = int(now) + 1
        self.requests = [0] * BUCKETS
        self.retries = [0] * BUCKETS

    def turn(self, now: float) -> None:
        """Let go of what is older than the window. A clock that went back changes nothing."""
        passed = int(now) + 1 - self.ends
        if passed <= 0:
            return
        for _ in range(min(passed, BUCKETS)):
            self.at = (self.at + 1) % BUCKETS
            self.requests[self.at] = self.retries[self.at] = 0
        self.ends += passed


class RetryBudget:
    """One node's budget. `target` names a target type, `instance` an agent's attachment; times are seconds."""

    __slots__ = ("_in_flight", "_rest", "_sweep_again_at", "_sweep_at", "_types_max", "_windows")

    def __init__(self, types_max: int = TYPES_MAX) -> None:
        self._windows: dict[Hashable, _Window] = {}
        self._in_flight: dict[Hashable, int] = {}
        self._types_max = types_max
        self._sweep_at = _SWEEP_MIN
        self._sweep_again_at = float("-inf")
        self._rest = _Window(0.0)

    def __len__(self) -> int:
        """Types that are remembered."""
        return len(self._windows)

    @property
    def in_flight(self) -> int:
        """Retries under way, at all instances."""
        return sum(self._in_flight.values())

    def requested(self, target: Hashable, now: float) -> None:
        """A request (its first attempt) was given to the type."""
        window = self._windows.get(target)
        if window is None:
            window = self._window(target, now)
        if now >= window.ends:
            window.turn(now)
        window.requests[window.at] += 1

    def may_retry(self, target: Hashable, instance: Hashable, now: float) -> bool:
        """Whether a retry of the type may be given to the instance."""
        return self.allows(target, now) and self.has_room(instance)

    def allows(self, target: Hashable, now: float) -> bool:
        """The type's part of it, which is known before an instance is chosen."""
        window = self._windows.get(target)
        if window is None:
            if len(self._windows) < self._types_max:
                return True
            window = self._rest
        window.turn(now)
        return sum(window.retries) + 1 <= max(SHARE * sum(window.requests), PER_SECOND * BUCKETS)

    def has_room(self, instance: Hashable) -> bool:
        """The instance's part of it."""
        return self._in_flight.get(instance, 0) < IN_FLIGHT_MAX

    def planned(self, target: Hashable, now: float) -> None:
        """A retry of the type is going to be made, perhaps after a back-off: it counts from now on."""
        window = self._windows.get(target)
        if window is None:
            window = self._window(target, now)
        window.turn(now)
        window.retries[window.at] += 1

    def began(self, instance: Hashable) -> None:
        """A retry was given to the instance; `ended` follows, once."""
        self._in_flight[instance] = self._in_flight.get(instance, 0) + 1

    def ended(self, instance: Hashable) -> None:
        """A retry at the instance has ended, in whatever way. `ValueError` if none is under way."""
        count = self._in_flight.get(instance, 0)
        if count <= 0:
            raise ValueError(f"no retry is under way at {instance}")
        if count == 1:
            del self._in_flight[instance]
        else:
            self._in_flight[instance] = count - 1

    def forget(self, now: float) -> None:
        """Let go of the types that had nothing in the window. Done by itself as types come."""
        for target, window in list(self._windows.items()):
            window.turn(now)
            if not any(window.requests) and not any(window.retries):
                del self._windows[target]

    def _window(self, target: Hashable, now: float) -> _Window:
        if len(self._windows) >= min(self._sweep_at, self._types_max) and now >= self._sweep_again_at:
            self._sweep_again_at = now + 1.0  # a full table is not gone through for every newcomer
            self.forget(now)
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._windows))
        if len(self._windows) >= self._types_max:
            return self._rest
        window = self._windows[target] = _Window(now)
        return window
