from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.breaker import (
    BUCKET_S,
    CLOSED,
    HALF_OPEN,
    OPEN,
    PROBE_S,
    RAMPING,
    TRANSITIONS,
    Breaker,
    counts_as_failure,
)
from reach.core.retry import Failed

RNG = Random(1)


def tripped(at: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(5):
        breaker.outcome(False, at, at)
    return breaker


def half_open(at: float = 100.0) -> Breaker:
    breaker = tripped(at)
    assert breaker.state(at + 30) is HALF_OPEN
    return breaker


def ramping(at: float) -> Breaker:
    """One whose probe succeeded at `at`."""
    breaker = half_open(at - 30)
    breaker.began(at)
    assert breaker.outcome(True, at, at)
    return breaker


# ---- closed ----


def test_five_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    assert [breaker.outcome(False, 1.0, 0.5) for _ in range(5)] == [False] * 4 + [True]
    assert breaker.state(1.0) is OPEN and not breaker.admits(1.0, RNG)


def test_a_success_between_begins_the_row_anew() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.outcome(False, 1.0, 1.0)
    breaker.outcome(True, 1.0, 1.0)
    for _ in range(4):
        breaker.outcome(False, 1.0, 1.0)
    assert breaker.is_closed  # 8 of 9: too few to speak of a share


def test_more_failures_than_successes_of_ten_open_it_and_half_do_not() -> None:
    pattern = [True, False] * 20
    breaker = Breaker()
    for success in pattern:
        assert not breaker.outcome(success, 5.0, 5.0)
    assert breaker.outcome(False, 5.0, 5.0)


def test_the_tenth_outcome_shows_the_share_even_if_it_is_a_success() -> None:
    breaker = Breaker()
    for success in [False, False, False, True, False, False, False, True, True]:
        assert not breaker.outcome(success, 5.0, 5.0)
    assert breaker.outcome(True, 5.0, 5.0)


def test_failures_that_are_older_than_the_window_are_forgotten() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.outcome(False, 0.0, 0.0)
        breaker.outcome(False, 0.0, 0.0)
        breaker.outcome(True, 0.0, 0.0)
    assert breaker.is_closed
    for _ in range(4):
        breaker.outcome(True, 31.0, 31.0)
        breaker.outcome(False, 31.0, 31.0)
    assert breaker.is_closed


steps = st.lists(st.tuples(st.booleans(), st.floats(0, 1) | st.floats(0, 40)), max_size=120)


@settings(deadline=None)
@given(steps, st.floats(0, 1e7))
def test_it_trips_exactly_when_one_who_remembers_everything_would(
    steps: list[tuple[bool, float]], start: float
) -> None:
    breaker, history, in_a_row, now = Breaker(), list[tuple[int, bool]](), 0, start
    for success, seconds in steps:
        now += seconds
        history.append((int(now // BUCKET_S), success))
        in_a_row = 0 if success else in_a_row + 1
        recent = [good for bucket, good in history if bucket > int(now // BUCKET_S) - 10]
        bad = recent.count(False)
        trips = in_a_row >= 5 or (len(recent) >= 10 and bad > len(recent) / 2)
        assert breaker.outcome(success, now, now) == trips
        if trips:
            assert breaker.state(now) is OPEN
            return
        assert breaker.is_closed and breaker.share(now) == 1.0 and breaker.next_at(now) == inf


# ---- what counts ----


@pytest.mark.parametrize(
    ("failed", "waited_s", "p95_s", "expected"),
    [
        (Failed.CONNECT, 0.0, 0.0, True),
        (Failed.UNKNOWN, 5.0, 0.0, True),
        (Failed.LOST, 0.1, 9.0, True),
        (Failed.TIMEOUT, 0.05, 0.0, None),  # one caller's 50 ms trip nobody
        (Failed.TIMEOUT, 1.0, 0.2, True),
        (Failed.TIMEOUT, 4.0, 12.0, None),  # it usually takes longer
        (Failed.AGENT_ERROR, 1.0, 0.0, False),
        (Failed.OVERLOADED, 1.0, 0.0, None),
        (Failed.REJECTED, 1.0, 0.0, None),
    ],
)
def test_only_what_the_agent_is_to_blame_for_counts(
    failed: Failed, waited_s: float, p95_s: float, expected: bool | None
) -> None:
    assert counts_as_failure(failed, waited_s, p95_s) is expected


def test_a_connect_without_a_hand_over_says_nothing() -> None:
    assert counts_as_failure(Failed.CONNECT, 0.0, 0.0, tried=False) is None


# ---- open, probe, ramp ----


def test_it_stays_open_for_30_seconds_times_the_trips_and_never_above_300() -> None:
    breaker, now, opened = tripped(0.0), 0.0, []
    for _ in range(12):
        opened.append(breaker.next_probe_s(now))
        assert breaker.next_at(now) == now + opened[-1]
        now += opened[-1]
        assert not breaker.admits(now - 0.001, RNG) and breaker.admits(now, RNG)
        breaker.began(now)
        assert breaker.outcome(False, now, now)
    assert opened == [30.0 * n for n in range(1, 11)] + [300.0, 300.0]


def test_half_open_admits_one_real_request_until_it_ends() -> None:
    breaker = half_open()
    assert breaker.admits(130.0, RNG) and breaker.admits(130.0, RNG)  # asking takes nothing
    breaker.began(130.0)
    assert not breaker.admits(131.0, RNG)
    assert breaker.next_probe_s(131.0) == PROBE_S - 1
    assert breaker.outcome(True, 132.0, 130.0)
    assert breaker.state(132.0) is RAMPING


def test_a_probe_that_never_returns_gives_its_place_back_by_time() -> None:
    breaker = half_open()
    breaker.began(130.0)
    assert breaker.next_at(131.0) == 130.0 + PROBE_S
    assert not breaker.admits(159.9, RNG) and breaker.admits(160.0, RNG)


def test_a_probe_that_says_nothing_gives_its_place_back_at_once() -> None:
    breaker = half_open()
    breaker.began(130.0)
    breaker.neither(131.0, 90.0)  # not the probe
    assert not breaker.admits(131.0, RNG)
    breaker.neither(131.0, 130.0)
    assert breaker.admits(131.0, RNG) and breaker.state(131.0) is HALF_OPEN


def test_the_ramp_doubles_from_a_twentieth_every_five_seconds_until_it_is_closed() -> None:
    breaker = ramping(200.0)
    shares = [breaker.share(200.0 + seconds) for seconds in (0, 4.9, 5, 10, 15, 20, 24.9, 25)]
    assert shares == pytest.approx([0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 0.8, 1.0])
    assert breaker.is_closed


def test_while_it_ramps_it_admits_its_share_of_the_requests() -> None:
    breaker, rng = ramping(200.0), Random(7)
    admitted = [sum(breaker.admits(at, rng) for _ in range(4000)) / 4000 for at in (200.0, 206.0, 211.0, 221.0)]
    assert admitted == pytest.approx([0.05, 0.1, 0.2, 0.8], abs=0.02)


def test_any_failure_while_it_ramps_opens_it_for_longer() -> None:
    breaker = ramping(200.0)
    breaker.outcome(True, 201.0, 200.5)
    assert breaker.outcome(False, 215.0, 214.0)
    assert breaker.next_probe_s(215.0) == 60.0


def test_after_the_ramp_it_counts_anew() -> None:
    breaker = ramping(200.0)
    for _ in range(4):
        assert not breaker.outcome(False, 226.0, 226.0)
    assert breaker.outcome(False, 226.0, 226.0)


def test_what_began_before_the_probing_says_nothing() -> None:
    breaker = tripped(100.0)
    assert not breaker.outcome(True, 110.0, 99.0) and not breaker.outcome(False, 110.0, 99.0)
    assert breaker.state(130.0) is HALF_OPEN
    breaker.began(130.0)
    assert not breaker.outcome(True, 131.0, 99.0) and not breaker.outcome(False, 131.0, 99.0)
    assert breaker.state(131.0) is HALF_OPEN
    assert breaker.outcome(True, 132.0, 130.0)
    assert not breaker.outcome(False, 133.0, 99.0)
    for _ in range(9):
        assert not breaker.outcome(False, 170.0, 99.0)
    assert breaker.is_closed


def test_trips_are_forgiven_by_time_in_health() -> None:
    breaker = ramping(200.0)
    breaker.state(225.0)
    assert breaker.is_closed and breaker.trips(524.0) == 1 and breaker.trips(525.0) == 0
    for _ in range(5):
        breaker.outcome(False, 600.0, 600.0)
    assert breaker.next_probe_s(600.0) == 30.0


def test_an_operator_can_close_it() -> None:
    breaker = tripped(100.0)
    breaker.reset(101.0)
    assert breaker.is_closed and breaker.admits(101.0, RNG) and breaker.trips(101.0) == 0
    breaker.reset(102.0)
    assert breaker.is_closed


# ---- whatever happens ----

moves = st.lists(
    st.tuples(
        st.sampled_from(["good", "bad", "bad", "neither", "began", "ask", "reset"]), st.floats(0, 2) | st.floats(0, 70)
    ),
    max_size=150,
)


@settings(max_examples=200, deadline=None)
@given(moves, st.integers(0, 99))
def test_it_moves_only_as_the_table_says_and_comes_back_by_itself(moves: list[tuple[str, float]], seed: int) -> None:
    breaker, rng, now, before = Breaker(), Random(seed), 0.0, CLOSED
    for move, seconds in moves:
        announced = breaker.next_at(now)
        assert announced > now
        now += seconds
        between, now_share = breaker.state(now), breaker.share(now)
        assert between is before or now >= announced
        changed = False
        if move in ("good", "bad"):
            changed = breaker.outcome(move == "good", now, now)
        elif move == "neither":
            breaker.neither(now, now)
        elif move == "began":
            breaker.began(now)
        elif move == "reset":
            breaker.reset(now)
        else:
            admitted = breaker.admits(now, rng)
            assert not (admitted and between is OPEN)
            assert admitted or between is not CLOSED
        after = breaker.state(now)
        assert after is between or after in TRANSITIONS[between]
        assert changed == (after is not between) or move == "reset"
        assert 0.0 <= now_share <= 1.0 and breaker.next_probe_s(now) <= 300.0
        before = after
    if breaker.state(now) is OPEN:
        now += 300
    breaker.neither(now, now)
    now += PROBE_S
    if breaker.state(now) is HALF_OPEN:
        assert breaker.admits(now, rng)
        breaker.began(now)
        breaker.outcome(True, now, now)
    assert breaker.state(now + 25.001) is CLOSED
