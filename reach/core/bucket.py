"""A token bucket: so many a second, and after a rest so many seconds' worth at once.

It is kept as the time at which it is full again, which is the virtual scheduling form of the leaky bucket (ITU-T I.371,
annex A: the generic cell rate algorithm): with n taken, full_at = max(full_at, now) + n / rate; its level is
(capacity_s - (full_at - now)) * rate.
"""

from __future__ import annotations

_ROUNDING_S = 1e-9  # of a time that was waited for: it is over


class Bucket:
    """A token bucket. Durations in seconds; a token is a request or a byte."""

    __slots__ = ("_capacity_s", "_full_at", "_one_s", "_rate")

    def __init__(self, rate: float, burst_s: float) -> None:
        self._rate = rate
        self._one_s = 1 / rate
        self._capacity_s = max(burst_s, self._one_s)
        self._full_at = 0.0

    def takes_one(self, now: float) -> bool:
        """Take a token if it holds one."""
        full_at = self._full_at
        full_at = (full_at if full_at > now else now) + self._one_s
        if full_at - now > self._capacity_s + _ROUNDING_S:
            return False
        self._full_at = full_at
        return True

    def give_one_back(self) -> None:
        """What was taken was not needed."""
        self._full_at -= self._one_s

    def wait_s(self, now: float, overdraft: float = 1.0) -> float:
        """How long until it holds one token; 0: it does. With an `overdraft` it may lack so many times its capacity."""
        lacks_s = max(self._full_at - now, 0.0) + self._one_s - self._capacity_s * overdraft
        return lacks_s if lacks_s > _ROUNDING_S else 0.0

    def take(self, now: float, count: int) -> None:
        """Take tokens, also those that it does not hold."""
        self._full_at = max(self._full_at, now) + count / self._rate

    def is_full(self, now: float) -> bool:
        """Nothing was taken for long."""
        return self._full_at <= now
