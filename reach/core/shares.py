"""Who holds how much of a bounded place, so that a full one has room for whoever holds less than an equal part.

Where a bound is met, refusing the newcomer would let the first flood keep everybody else out. Instead the youngest
entry of the principal that holds most makes room, if the newcomer would still hold less than the average; a principal
that holds as much as the others is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

E = TypeVar("E", bound=Hashable)


class _Holding(Generic[E]):
    """One principal's entries with their sizes, oldest first."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: OrderedDict[E, int] = OrderedDict()
        self.size = 0


class Shares(Generic[E]):
    """The entries of one place by principal. A size is what the bound counts: 1 an entry, or its bytes."""

    __slots__ = ("_holdings", "size")

    def __init__(self) -> None:
        self._holdings: dict[Hashable, _Holding[E]] = {}
        self.size = 0
        """All sizes together."""

    def add(self, entry: E, principal: Hashable, size: int = 1) -> None:
        """The principal holds one entry more, its youngest."""
        holding = self._holdings.get(principal)
        if holding is None:
            holding = self._holdings[principal] = _Holding()
        holding.entries[entry] = size
        holding.size += size
        self.size += size

    def remove(self, entry: E, principal: Hashable) -> None:
        """The principal holds this entry no more. `KeyError` if it does not."""
        holding = self._holdings[principal]
        size = holding.entries.pop(entry)
        holding.size -= size
        self.size -= size
        if not holding.entries:
            del self._holdings[principal]

    def __iter__(self) -> Iterator[E]:
        for holding in self._holdings.values():
            yield from holding.entries

    def give_way(self, principal: Hashable, size: int, wanted: int, entries_max: int = 1) -> list[E] | None:
        """Who makes room of `wanted` for one more entry, of `size`, of the principal's.

        None if the principal has its part already, or if it would take more than `entries_max` entries of the
        principal that holds most. Looks at all principals, but only for one that holds less than the average.
        """
        own = self._holdings.get(principal)
        held = size if own is None else own.size + size
        if held * len(self._holdings) >= self.size:
            return None
        largest = max(self._holdings.values(), key=lambda holding: holding.size)
        leaving: list[E] = []
        for entry in reversed(largest.entries):
            if wanted <= 0 or len(leaving) >= entries_max:
                break
            leaving.append(entry)
            wanted -= largest.entries[entry]
        return leaving if wanted <= 0 else None
