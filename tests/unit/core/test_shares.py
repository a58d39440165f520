from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.shares import Shares

steps = st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(1, 9)), max_size=60)


@settings(deadline=None)
@given(steps, st.sampled_from("abcd"), st.integers(1, 9), st.integers(1, 20), st.integers(1, 4))
def test_room_is_made_only_by_the_largest_and_only_for_one_below_the_average(
    steps: list[tuple[bool, str, int]], newcomer: str, size: int, wanted: int, entries_max: int
) -> None:
    shares: Shares[int] = Shares()
    held: dict[str, dict[int, int]] = {}
    for entry, (adds, principal, amount) in enumerate(steps):
        if adds:
            shares.add(entry, principal, amount)
            held.setdefault(principal, {})[entry] = amount
        elif held.get(principal):
            gone = sorted(held[principal])[amount % len(held[principal])]
            shares.remove(gone, principal)
            del held[principal][gone]
    held = {name: entries for name, entries in held.items() if entries}
    sizes = {name: sum(entries.values()) for name, entries in held.items()}
    assert shares.size == sum(sizes.values())
    assert sorted(shares) == sorted(entry for entries in held.values() for entry in entries)

    leaving = shares.give_way(newcomer, size, wanted, entries_max)
    is_small = bool(held) and sizes.get(newcomer, 0) + size < sum(sizes.values()) / len(held)
    if leaving is None:
        youngest = [sorted(held[name])[-entries_max:] for name in sizes if sizes[name] == max(sizes.values())]
        rooms = [sum(amount for entry, amount in _all(held).items() if entry in entries) for entries in youngest]
        assert not is_small or min(rooms) < wanted
        return
    assert is_small
    (owner,) = {name for name, entries in held.items() if set(leaving) & entries.keys()}
    assert sizes[owner] == max(sizes.values()) and owner != newcomer
    assert leaving == sorted(held[owner], reverse=True)[: len(leaving)]
    freed = [held[owner][entry] for entry in leaving]
    assert sum(freed) >= wanted > sum(freed[:-1])


def _all(held: dict[str, dict[int, int]]) -> dict[int, int]:
    return {entry: amount for entries in held.values() for entry, amount in entries.items()}


def test_equal_holders_do_not_push_one_another_out() -> None:
    shares: Shares[int] = Shares()
    for entry in range(9):
        shares.add(entry, f"p{entry % 3}")
    assert [shares.give_way(f"p{n}", 1, 1) for n in range(3)] == [None] * 3
    assert shares.give_way("new", 1, 1) == [6]
