from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.fair import IDLE_MAX, FairLevel


class Twin:
    """The same turns by looking at everything each time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str]] = []
        self.start: dict[str, float] = {}
        self.virtual = 0.0

    def add(self, entry: int, principal: str) -> None:
        if principal not in [name for _, name in self.waiting]:
            self.start[principal] = max(self.start.get(principal, 0.0), self.virtual)
        self.waiting.append((entry, principal))

    def pop(self, weights: dict[str, float]) -> int:
        firsts = {name: place for place, (_, name) in reversed(list(enumerate(self.waiting)))}
        principal = min(firsts, key=lambda name: (self.start[name], firsts[name]))
        self.virtual = self.start[principal]
        self.start[principal] += 1.0 / weights[principal]
        return self.waiting.pop(firsts[principal])[0]


steps = st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove"]), st.integers(0, 3)), max_size=150)


@settings(max_examples=200, deadline=None)
@given(steps, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4))
def test_turns_are_those_of_one_who_looks_at_everything(steps: list[tuple[str, int]], weights: list[float]) -> None:
    level: FairLevel[int] = FairLevel()
    twin, by_name = Twin(), {f"p{n}": weight for n, weight in enumerate(weights)}
    for entry, (step, number) in enumerate(steps):
        if step == "add":
            level.add(entry, f"p{number}", weights[number])
            twin.add(entry, f"p{number}")
        elif step == "pop" and twin.waiting:
            assert level.head() == level.pop() == twin.pop(by_name)
        elif step == "remove" and twin.waiting:
            gone, principal = twin.waiting.pop(number % len(twin.waiting))
            level.remove(gone, principal)
        assert level.size == len(twin.waiting)
    while twin.waiting:
        assert level.pop() == twin.pop(by_name)
    assert level.head() is None and level.size == 0


def test_one_of_a_newcomer_comes_after_at_most_one_of_each_other() -> None:
    level: FairLevel[str] = FairLevel()
    for number in range(10_000):
        level.add(f"flood {number}", "flood")
    for _ in range(500):
        level.pop()
    level.add("mine", "me")
    assert "mine" in (level.pop(), level.pop())


def test_one_who_always_has_one_waiting_gets_no_more_than_its_turn() -> None:
    level: FairLevel[str] = FairLevel()
    for number in range(300):
        level.add(f"flood {number}", "flood")
    served: Counter[str] = Counter()
    for number in range(200):
        if served["me"] + 1 > number - served["flood"]:
            level.add(f"me {number}", "me")
        served[level.pop().split()[0]] += 1
    assert abs(served["me"] - served["flood"]) <= 2


def test_weights_are_shares() -> None:
    level: FairLevel[tuple[str, int]] = FairLevel()
    for number in range(400):
        level.add(("heavy", number), "heavy", 3.0)
        level.add(("light", number), "light", 1.0)
    served = Counter(level.pop()[0] for _ in range(400))
    assert served == {"heavy": 300, "light": 100}


def test_principals_that_come_and_go_are_not_remembered_for_ever() -> None:
    level: FairLevel[int] = FairLevel()
    level.add(-1, "stays")
    for number in range(5000):
        level.add(number, f"p{number}")
        level.remove(number, f"p{number}")
        assert level.principals <= IDLE_MAX + 4
    assert level.pop() == -1
    for number in range(5000):
        level.add(number, f"q{number}")
        assert level.pop() == number
        assert level.principals <= IDLE_MAX + 4


def test_what_is_not_there_can_be_neither_taken_nor_removed() -> None:
    level: FairLevel[int] = FairLevel()
    with pytest.raises(IndexError):
        level.pop()
    level.add(1, "p")
    with pytest.raises(KeyError):
        level.remove(2, "p")
    level.remove(1, "p")
    with pytest.raises(IndexError):
        level.pop()
