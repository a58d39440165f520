from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.core.shares import Shares

steps = st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(1, 9)), max_size=60)


@given(steps, st.sampled_from("abcd"), st.integers(1, 9))
def test_only_the_largest_gives_way_and_only_to_one_below_the_average(
    steps: list[tuple[bool, str, int]], newcomer: str, size: int
) -> None:
    shares, held = Shares(), Counter[str]()
    for adds, principal, amount in steps:
        if adds:
            shares.add(principal, amount)
            held[principal] += amount
        elif held[principal]:
            amount = min(amount, held[principal])
            shares.remove(principal, amount)
            held[principal] -= amount
    held = +held
    assert shares.size == held.total()
    gives_way = shares.who_gives_way(newcomer, size)
    if not held or held[newcomer] + size >= held.total() / len(held):
        assert gives_way is None
    else:
        assert gives_way != newcomer and held[str(gives_way)] == max(held.values()) > held[newcomer] + size


def test_equal_holders_do_not_push_one_another_out() -> None:
    shares = Shares()
    for number in range(9):
        shares.add(f"p{number % 3}")
    assert [shares.who_gives_way(f"p{n}") for n in range(3)] == [None] * 3
    assert shares.who_gives_way("new") == "p0"


def test_one_that_holds_nothing_gives_nothing_back() -> None:
    shares = Shares()
    shares.add("p")
    shares.remove("p")
    with pytest.raises(KeyError):
        shares.remove("p")
