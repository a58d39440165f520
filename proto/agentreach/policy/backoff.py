"""How long to wait before the next try: exponential back-off with full jitter, reset only by a stable success.

Full jitter (a uniform draw between 0 and the growing bound) spreads a crowd of clients that lost the same node at the
same moment best; see "Exponential Backoff and Jitter", AWS Architecture Blog, 2015. A connection that breaks again
at once is no success: resetting on it would turn a crash loop into a hammer.
"""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """The state of one thing that is tried again and again. Times are seconds of the caller's monotonic clock.

    `at_once_s`: bound of the first wait after a stable connection (a redial of the same node comes within 200 ms);
    None gives the first wait the bound `first_s` as well. From the second on the bound is `first_s`, then grows by
    `factor` up to `cap_s`. `stable_s`: a connection that held so long counts as a success.
    """

    __slots__ = (
        "_at_once_s",
        "_bound_s",
        "_cap_s",
        "_connected_at",
        "_factor",
        "_first_s",
        "_stable_s",
        "capped",
        "tries",
    )

    def __init__(
        self,
        first_s: float,
        cap_s: float,
        factor: float = 2.0,
        *,
        at_once_s: float | None = None,
        stable_s: float = 10.0,
    ) -> None:
        if not (0 < first_s <= cap_s and factor >= 1 and stable_s >= 0 and (at_once_s is None or at_once_s >= 0)):
            raise ValueError("needs 0 < first_s <= cap_s, factor >= 1, at_once_s >= 0, stable_s >= 0")
        self._first_s = first_s
        self._cap_s = cap_s
        self._factor = factor
        self._at_once_s = at_once_s
        self._stable_s = stable_s
        self._connected_at: float | None = None
        self._bound_s = first_s
        self.tries = 0
        """Waits given since the last reset."""
        self.capped = False
        """True once a wait up to the cap was drawn since the last connection: a crowd is spread over the cap by now."""

    def next_s(self, rng: Callable[[], float]) -> float:
        """The next wait in seconds; `rng` draws uniformly from [0, 1)."""
        self.tries += 1
        if self.tries == 1 and self._at_once_s is not None:
            return self._at_once_s * rng()
        bound_s = self._bound_s
        self.capped = self.capped or bound_s >= self._cap_s
        self._bound_s = min(self._cap_s, bound_s * self._factor)
        return bound_s * rng()

    def reset(self) -> None:
        """Start over: the next wait is a first one."""
        self.tries = 0
        self.capped = False
        self._bound_s = self._first_s

    def connected(self, now: float) -> None:
        """The thing works since `now`. Whether that counts is judged when it fails."""
        self._connected_at = now
        self.capped = False

    def failed(self, now: float) -> None:
        """The thing does not work (any more). Starts over if it had worked for the stable period."""
        since = self._connected_at
        self._connected_at = None
        if since is not None and now - since >= self._stable_s:
            self.reset()
