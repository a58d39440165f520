from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.policy.backoff import Backoff


def almost_one() -> float:
    return 1.0 - 2**-53


@given(st.floats(0.001, 10), st.floats(1, 1000), st.floats(1, 4), st.integers(1, 2000), st.integers(0, 1 << 30))
def test_each_wait_is_within_a_bound_that_grows_to_the_cap(
    first_s: float, times: float, factor: float, tries: int, seed: int
) -> None:
    cap_s = first_s * times
    backoff = Backoff(first_s, cap_s, factor)
    rng = random.Random(seed)
    bound_s = first_s
    for _ in range(min(tries, 100)):
        assert 0 <= backoff.next_s(rng.random) <= bound_s <= cap_s
        bound_s = min(cap_s, bound_s * factor)


def test_thousands_of_tries_do_not_overflow() -> None:
    backoff = Backoff(0.1, 30.0)
    waits = [backoff.next_s(almost_one) for _ in range(5000)]
    assert waits[-1] == pytest.approx(30.0)


def test_jitter_is_full() -> None:
    backoff = Backoff(1.0, 1.0)
    rng = random.Random(7)
    waits = [backoff.next_s(rng.random) for _ in range(2000)]
    assert min(waits) < 0.05 and max(waits) > 0.95 and 0.45 < sum(waits) / len(waits) < 0.55


def test_the_first_redial_is_at_once_and_the_next_ones_back_off() -> None:
    backoff = Backoff(1.0, 8.0, at_once_s=0.2)
    assert [round(backoff.next_s(almost_one), 3) for _ in range(6)] == [0.2, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_connection_that_held_for_the_stable_period_starts_over() -> None:
    backoff = Backoff(1.0, 8.0, at_once_s=0.2, stable_s=10.0)
    for _ in range(4):
        backoff.next_s(almost_one)
    backoff.connected(100.0)
    backoff.failed(110.0)
    assert backoff.next_s(almost_one) == pytest.approx(0.2)


def test_a_connection_that_breaks_at_once_does_not_start_over() -> None:
    backoff = Backoff(1.0, 8.0, at_once_s=0.2, stable_s=10.0)
    waits = []
    for attempt in range(5):
        waits.append(round(backoff.next_s(almost_one), 3))
        backoff.connected(attempt * 100.0)
        backoff.failed(attempt * 100.0 + 9.9)
    assert waits == [0.2, 1.0, 2.0, 4.0, 8.0]


def test_failures_without_a_connection_in_between_do_not_add_up_to_a_stable_period() -> None:
    backoff = Backoff(1.0, 8.0, stable_s=10.0)
    backoff.connected(0.0)
    backoff.failed(1.0)
    backoff.next_s(almost_one)
    backoff.failed(50.0)
    assert backoff.next_s(almost_one) == pytest.approx(2.0)


def test_it_says_when_a_wait_was_drawn_up_to_the_cap_until_a_connection_gathers_the_crowd_again() -> None:
    backoff = Backoff(1.0, 4.0)
    drawn = []
    for _ in range(4):
        backoff.next_s(almost_one)
        drawn.append(backoff.capped)
    assert drawn == [False, False, True, True]
    backoff.connected(0.0)
    assert not backoff.capped
    backoff.failed(1.0)
    backoff.next_s(almost_one)
    assert backoff.capped
    backoff.reset()
    assert not backoff.capped


@pytest.mark.parametrize("wrong", [(0.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 0.5), (float("nan"), 1.0, 2.0)])
def test_settings_that_make_no_sense_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="first_s"):
        Backoff(*wrong)
