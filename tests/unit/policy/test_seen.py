from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentreach.policy.seen import Seen

ENTRIES, BYTES, AGE_S = 4, 100, 10.0

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "discard", "expire"]),
        st.integers(0, 7),
        st.integers(0, 120),
        st.floats(0, 6),
    ),
    max_size=60,
)


class Twin:
    """The same table, slow and plain."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int, int, float]] = []
        self.dropped: list[tuple[int, int]] = []

    def drop(self) -> None:
        key, value, _, _ = self.held.pop(0)
        self.dropped.append((key, value))

    def expire(self, now: float) -> None:
        while self.held and self.held[0][3] <= now - AGE_S:
            self.drop()

    def put(self, key: int, value: int, size: int, now: float) -> None:
        self.discard(key)
        self.expire(now)
        if size > BYTES:
            self.dropped.append((key, value))
            return
        self.held.append((key, value, size, now))
        while len(self.held) > ENTRIES or sum(entry[2] for entry in self.held) > BYTES:
            self.drop()

    def discard(self, key: int) -> None:
        self.held = [entry for entry in self.held if entry[0] != key]

    def get(self, key: int, now: float) -> int | None:
        return next((e[1] for e in self.held if e[0] == key and now - e[3] < AGE_S), None)


@given(steps)
def test_the_table_does_what_its_plain_twin_does(steps: list[tuple[str, int, int, float]]) -> None:
    dropped: list[tuple[int, int]] = []
    seen: Seen[int, int] = Seen(ENTRIES, BYTES, AGE_S, lambda key, value: dropped.append((key, value)))
    twin = Twin()
    now = 0.0
    for value, (step, key, size, passed) in enumerate(steps):
        now += passed
        if step == "put":
            seen.put(key, value, size, now)
            twin.put(key, value, size, now)
        elif step == "get":
            assert seen.get(key, now) == twin.get(key, now)
        elif step == "discard":
            seen.discard(key)
            twin.discard(key)
        else:
            seen.expire(now)
            twin.expire(now)
        seen.expire(now)
        twin.expire(now)
        assert dropped == twin.dropped
        assert len(seen) == len(twin.held) <= ENTRIES
        assert seen.bytes_held == sum(entry[2] for entry in twin.held) <= BYTES


def test_reading_does_not_make_an_entry_younger() -> None:
    seen: Seen[str, str] = Seen(10, 1000, 5.0)
    seen.put("a", "reply", 1, 0.0)
    assert seen.get("a", 4.9) == "reply"
    assert seen.get("a", 5.0) is None
    assert len(seen) == 0 and seen.bytes_held == 0


def test_replacing_tells_nobody_and_makes_the_entry_the_youngest() -> None:
    dropped: list[str] = []
    seen: Seen[str, int] = Seen(2, 1000, 60.0, lambda key, _: dropped.append(key))
    seen.put("a", 1, 10, 0.0)
    seen.put("b", 2, 10, 1.0)
    seen.put("a", 3, 5, 2.0)
    assert dropped == [] and seen.bytes_held == 15
    seen.put("c", 4, 10, 3.0)
    assert dropped == ["b"] and seen.get("a", 3.0) == 3


def test_something_larger_than_the_table_washes_nothing_out() -> None:
    dropped: list[str] = []
    seen: Seen[str, int] = Seen(10, 100, 60.0, lambda key, _: dropped.append(key))
    seen.put("small", 1, 90, 0.0)
    seen.put("huge", 2, 101, 1.0)
    assert dropped == ["huge"] and seen.get("small", 1.0) == 1


def test_an_entry_is_gone_when_its_owner_is_told() -> None:
    lengths: list[int] = []
    seen: Seen[int, int] = Seen(1, 100, 60.0, lambda key, _: lengths.append(len(seen)))
    seen.put(1, 1, 1, 0.0)
    seen.put(2, 2, 1, 0.0)
    assert lengths == [1] and seen.discard(1) is None and seen.discard(2) == 2


def test_values_are_the_oldest_first() -> None:
    seen: Seen[str, int] = Seen(3, 100, 60.0)
    for number, key in enumerate("abcda"):
        seen.put(key, number, 1, float(number))
    assert seen.values() == [2, 3, 4]
