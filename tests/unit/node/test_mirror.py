"""What a mirror holds, beside all that its prefix ever was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reach.core.store import Change, Item, Listing, Summary
from reach.node.mirror import Mirror

Keys = dict[str, int]
WRITES = st.lists(st.tuples(st.sampled_from(["p/a", "p/b", "p/c", "other"]), st.booleans()), max_size=30)


class History:
    """Every state of a store, by revision."""

    def __init__(self, writes: list[tuple[str, bool]]) -> None:
        self.states: list[Keys] = [{}]
        self.changes: list[Change] = []
        for key, delete in writes:
            state, revision = dict(self.states[-1]), len(self.states)
            if delete and key not in state:
                continue
            if delete:
                del state[key]
            else:
                state[key] = revision
            self.states.append(state)
            item = None if delete else Item(key, b"", revision, revision)
            self.changes.append(Change(key, revision, item))

    def at(self, revision: int) -> Keys:
        """What was below the prefix."""
        return {key: at for key, at in self.states[revision].items() if key.startswith("p/")}

    def between(self, after: int, upto: int) -> list[Change]:
        """What a watch brings."""
        return [change for change in self.changes[after:upto] if change.key.startswith("p/")]

    def listing(self, revision: int) -> Listing:
        """All of it."""
        items = [Item(key, b"", at, at) for key, at in sorted(self.at(revision).items())]
        return Listing(tuple(items), revision)

    def summary(self, revision: int) -> Summary:
        """What a look sees."""
        keys = self.at(revision)
        return Summary(revision, len(keys), max(keys.values(), default=0))


def take(mirror: Mirror, changes: list[Change]) -> None:
    """What the view does with a batch of a watch."""
    for change in mirror.fresh(changes):
        mirror.hold(change)
    if changes:
        mirror.reached(changes[-1].revision)


@given(WRITES, st.data())
def test_it_is_said_to_be_complete_exactly_when_it_is_as_the_look_saw_it_or_newer(
    writes: list[tuple[str, bool]], data: st.DataObject
) -> None:
    history = History(writes)
    last = len(history.states) - 1
    listed = data.draw(st.integers(0, last))
    seen = data.draw(st.integers(listed, last))
    looked = data.draw(st.integers(seen, last))
    mirror = Mirror("p/")
    for change in mirror.difference(history.listing(listed)):
        mirror.hold(change)
    mirror.listed(listed, 1.0)
    take(mirror, history.between(listed, seen))
    assert mirror.held == history.at(seen)
    before = mirror.revision
    assert mirror.looked(history.summary(looked), 2.0, before)
    assert (mirror.confirmed_at == 2.0) == (history.at(looked) == history.at(seen))
    take(mirror, history.between(seen, looked))
    assert mirror.confirmed_at == 2.0 and mirror.confirmed_revision >= looked
    take(mirror, history.between(looked, last))
    assert mirror.held == history.at(last)


@given(WRITES, st.data())
def test_a_listing_leads_from_anywhere_to_what_is_and_repeats_lead_nowhere(
    writes: list[tuple[str, bool]], data: st.DataObject
) -> None:
    history = History(writes)
    last = len(history.states) - 1
    known, listed = data.draw(st.integers(0, last)), data.draw(st.integers(0, last))
    mirror = Mirror("p/")
    mirror.held = dict(history.at(known))
    for change in mirror.difference(history.listing(listed)):
        mirror.hold(change)
    mirror.listed(listed, 1.0)
    assert mirror.held == history.at(listed) and not mirror.difference(history.listing(listed))
    upto = data.draw(st.integers(listed, last))
    take(mirror, history.between(listed, upto))
    assert not mirror.fresh(history.between(0, upto))
    doubled = [change for change in history.between(upto, last) for _ in range(2)]
    assert mirror.fresh(doubled) == history.between(upto, last)


def test_a_watch_that_brings_nothing_until_the_next_look_has_missed_something() -> None:
    mirror = Mirror("p/")
    mirror.listed(5, 1.0)
    assert mirror.looked(Summary(9, 1, 9), 2.0, 5)
    assert mirror.confirmed_at == 1.0
    assert not mirror.looked(Summary(9, 1, 9), 3.0, 5)


def test_a_store_with_a_smaller_revision_than_was_seen_has_gone_back_in_time() -> None:
    mirror = Mirror("p/")
    mirror.listed(5, 1.0)
    assert not mirror.looked(Summary(4, 0, 0), 2.0, 5)
