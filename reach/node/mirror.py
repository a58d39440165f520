"""What this node holds of the keys below one prefix, and since when it is known to be all there is.

Pure: it is told listings, changes and looks at the store, and says what is new. Holding only revisions it stays small,
and applying anything twice does nothing.

**Freshness.** A watch delivers the changes below its prefix only, so the store's revision may be ahead of it with
nothing to come, and a silent watch proves nothing. A look (`Store.summary`) reads, linearizably, how many keys there
are below the prefix and the newest of their revisions. With everything applied up to `a`, and a look at revision `r`:

* `a >= r`: what the look saw is applied.
* else, if no key is newer than `a`, every key that the look saw is held (a key that is there with a revision up to `a`
  was there at `a`); and if there are as many as are held, nothing was deleted. Then the two are equal.

Otherwise changes are on their way, and the question is asked again with each that arrives. What is still not answered
when the next look is over was missed: the prefix is listed anew. (Progress requests, which would tell it too, are not
safe before etcd 3.5.8, and progress notifications come every ten minutes.)
"""

from __future__ import annotations

from collections.abc import Iterable

from reach.core.store import Change, Listing, Summary


class Mirror:
    """The keys below a prefix, by name and revision, as of `revision`. Times are by the boot clock."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.held: dict[str, int] = {}
        """`mod_revision` by key."""
        self.revision = 0
        """All changes up to this one are applied."""
        self.confirmed_at = float("-inf")
        """What is held was all there was at this time."""
        self.confirmed_revision = 0
        self._look: tuple[Summary, float] | None = None
        """What the store said when it was asked last, and when that was; None once that is held."""

    # ---- what is new ----

    def difference(self, listing: Listing) -> list[Change]:
        """The changes that lead from what is held to a listing. A key that went back in time is deleted first."""
        present = {item.key for item in listing.items}
        changes = [Change(key, listing.revision, None) for key in self.held if key not in present]
        for item in listing.items:
            held = self.held.get(item.key, 0)
            if held > item.mod_revision:
                changes.append(Change(item.key, listing.revision, None))
            if held != item.mod_revision:
                changes.append(Change(item.key, item.mod_revision, item))
        return changes

    def fresh(self, changes: Iterable[Change]) -> list[Change]:
        """Those changes of a watch that were not applied yet: etcd before 3.5.8 may send some again."""
        found: list[Change] = []
        reached = self.revision
        seen: set[str] = set()  # keys of the revision that is being read
        for change in changes:
            if change.revision > reached:
                reached = change.revision
                seen.clear()
            elif change.revision < reached or change.revision <= self.revision or change.key in seen:
                continue
            seen.add(change.key)
            found.append(change)
        return found

    def hold(self, change: Change) -> None:
        """One of them was applied."""
        if change.item is None:
            self.held.pop(change.key, None)
        else:
            self.held[change.key] = change.item.mod_revision

    # ---- how fresh ----

    def listed(self, revision: int, asked_at: float) -> None:
        """A whole listing is applied. It counts even if it is older than what was held: the store is the truth."""
        self.revision = revision
        self._look = None
        self._confirm(revision, asked_at)

    def reached(self, revision: int) -> None:
        """All changes of a watch up to this revision are applied."""
        self.revision = max(self.revision, revision)
        self._settle()

    def looked(self, summary: Summary, asked_at: float, revision: int) -> bool:
        """Take in a look. `revision` is what was applied when it was asked.

        False if the watch cannot be trusted: what the look before this one saw has still not arrived, or the store
        has gone back in time.
        """
        overdue = self._look is not None
        self._look = (summary, asked_at)
        self._settle()
        return summary.revision >= revision and not (overdue and self._look is not None)

    def _settle(self) -> None:
        if self._look is None:
            return
        summary, asked_at = self._look
        complete = summary.newest <= self.revision and summary.count == len(self.held)
        if self.revision >= summary.revision or complete:
            self._look = None
            self._confirm(max(self.revision, summary.revision), asked_at)

    def _confirm(self, revision: int, at: float) -> None:
        self.confirmed_at = max(self.confirmed_at, at)
        self.confirmed_revision = revision
