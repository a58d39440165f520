"""How long an agent takes: an estimate of the 95th percentile, cheap enough to be fed by every reply.

A histogram of quarter octaves from 1 ms to 12 minutes, in one byte a bucket. When a bucket holds 64
observations, all counts are halved, so that the estimate follows the last few hundred replies whatever their rate. It
errs upwards by less than a quarter octave (19 %): the breaker shall rather wait than trip an agent that
is merely slow.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

FIRST_S: Final = 0.001
PER_OCTAVE: Final = 4
BUCKETS: Final = 80
BUCKET_MAX: Final = 64

_ENDS: Final = [FIRST_S * 2 ** (number / PER_OCTAVE) for number in range(BUCKETS - 1)]
"""Upper ends of the buckets; the last one has none."""

_NONE: Final = 255 - BUCKET_MAX
"""What stands for no observation: a full bucket is then a byte that overflows, which costs nothing to look for."""

_HALVED: Final = bytes([_NONE + (max(0, count - _NONE) >> 1) for count in range(256)])


class Latency:
    """One agent's handling times."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = bytearray([_NONE]) * BUCKETS

    def observe(self, seconds: float) -> None:
        """One more reply took so long. (A negative number counts as nothing.)"""
        at = bisect_left(_ENDS, seconds)
        try:
            self._counts[at] += 1
        except ValueError:
            self._counts = self._counts.translate(_HALVED)
            self._counts[at] += 1

    def quantile(self, share: float) -> float:
        """The time, in seconds, within which this share (0..1) of the replies came; 0.0 if none is known."""
        counts = self._counts
        wanted = share * (sum(counts) - _NONE * BUCKETS)
        if wanted <= 0:
            return 0.0
        seen = 0
        for end_s, count in zip(_ENDS, counts, strict=False):
            seen += count - _NONE
            if seen >= wanted:
                return end_s
        return _ENDS[-1]

    @property
    def p95_s(self) -> float:
        """The 95th percentile in seconds; 0.0 if no reply is known."""
        return self.quantile(0.95)
