"""Who holds how much of a bounded place, so that a full one has room for whoever holds less than an equal part.

Where a bound is met, refusing the newcomer would let the first flood keep everybody else out. Instead the principal
that holds most gives way with its youngest, if the newcomer would still hold less than the average; a principal that
holds as much as the others is refused.
"""

from __future__ import annotations

from collections.abc import Hashable


class Shares:
    """What each principal holds of one place, in what its bound counts: entries, or bytes."""

    __slots__ = ("_held", "size")

    def __init__(self) -> None:
        self._held: dict[Hashable, int] = {}
        self.size = 0
        """All together."""

    def add(self, principal: Hashable, size: int = 1) -> None:
        """The principal holds so much more."""
        held = self._held
        held[principal] = held.get(principal, 0) + size
        self.size += size

    def remove(self, principal: Hashable, size: int = 1) -> None:
        """The principal holds so much less. `KeyError` if it holds nothing."""
        left = self._held[principal] - size
        if left > 0:
            self._held[principal] = left
        else:
            del self._held[principal]
        self.size -= size

    def who_gives_way(self, principal: Hashable, size: int = 1) -> Hashable | None:
        """The principal that holds most, if it is to make room for so much more of this one; None: it is not.

        Looks at all principals, but only for one that holds less than the average.
        """
        held = self._held
        if (held.get(principal, 0) + size) * len(held) >= self.size:
            return None
        return max(held, key=held.__getitem__)
