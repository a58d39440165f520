"""The book of dead letters: bounded by number, bytes and age, and true about what it let go of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.error_pb2 import HOP_LIMIT, Error
from reach.core.dead_letter_book import LETTER_BYTES, DeadLetterBook, Letter
from reach.core.stats import Stats


def letter(name: str, at: float = 0.0, size: int = 10, tenant: str = "default") -> Letter:
    key = (tenant, "anonymous", "production", name)
    return Letter(key, (), "t", "caller/x", Error(code=HOP_LIMIT), b"x" * size, size, at, at)


def book(entries_max: int = 3, bytes_max: int = 1 << 20, age_s: float = 100.0) -> tuple[DeadLetterBook, dict[str, int]]:
    counts = Stats().dead_letters
    return DeadLetterBook(entries_max=entries_max, bytes_max=bytes_max, age_s=age_s, counts=counts), counts


def ids(letters: list[Letter]) -> list[str]:
    return [each.key[3] for each in letters]


def test_the_oldest_give_way_and_the_youngest_are_shown_first() -> None:
    letters, counts = book()
    for number in range(5):
        assert letters.keep(letter(f"m{number}", at=number))
    assert ids(letters.find("default")) == ["m4", "m3", "m2"]
    assert counts == {"kept": 5, "dropped": 2, "expired": 0, "redriven": 0}


def test_what_is_too_old_goes_and_counts_as_expired() -> None:
    letters, counts = book()
    letters.keep(letter("old"))
    letters.keep(letter("young", at=60))
    letters.expire(100)
    assert ids(letters.find("default")) == ["young"]
    assert counts["expired"] == 1 and counts["dropped"] == 0


def test_what_is_larger_than_all_the_room_is_not_kept_and_costs_no_other_its_place() -> None:
    letters, counts = book(bytes_max=5_000)
    letters.keep(letter("small"))
    assert not letters.keep(letter("large", size=10_000))
    assert ids(letters.find("default")) == ["small"]
    assert counts["kept"] == 1 and counts["dropped"] == 1


def test_with_no_entries_allowed_everything_is_dropped() -> None:
    letters, counts = book(entries_max=0)
    assert not letters.keep(letter("m"))
    assert len(letters) == 0 and counts["dropped"] == 1


def test_a_message_that_dies_again_replaces_its_letter() -> None:
    letters, _ = book()
    letters.keep(letter("m"))
    letters.find("default")[0].redriven_as = "n"
    letters.keep(letter("m", at=1))
    (found,) = letters.find("default", "m")
    assert found.at == 1 and not found.redriven_as


def test_tenants_see_their_own() -> None:
    letters, _ = book()
    letters.keep(letter("m"))
    letters.keep(letter("m", tenant="other"))
    assert len(letters.find("default", "m")) == len(letters.find("other")) == 1
    assert not letters.find("nobody")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3_000), st.floats(0, 30)), max_size=60))
def test_the_bounds_hold_and_every_letter_is_accounted_for(deaths: list[tuple[int, int, float]]) -> None:
    letters, counts = book(entries_max=5, bytes_max=10_000)
    now, replaced = 0.0, 0
    for number, size, pause_s in deaths:
        now += pause_s
        letters.expire(now)
        replaced += bool(letters.find("default", f"m{number}"))
        letters.keep(letter(f"m{number}", at=now, size=size))
        held = letters.find("default")
        assert len(held) == len(letters) <= 5
        assert letters.bytes_held == sum(LETTER_BYTES + len(each.data) for each in held) <= 10_000
        assert all(now - each.at < 100 for each in held)
    assert len(deaths) == len(letters) + counts["dropped"] + counts["expired"] + replaced
