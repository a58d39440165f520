"""How fast a crowd is let in: whoever comes alone at once, many evenly, nobody too late."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from reach.core.pace import BURST, EVEN_S, GROUP_EVERY_S, GROUP_MOST, PER_S, WITHIN_S, Pace


def let_in(pace: Pace[int], came: Iterable[float]) -> dict[int, float]:
    """When each of those who came at these times was let in, by a node that asks whenever it is told to."""
    at: dict[int, float] = {}
    events = sorted((when, number) for number, when in enumerate(came))
    while events or len(pace):
        if events and events[0][0] <= pace.next_at():
            now, number = events.pop(0)
            pace.come(number, now)
        else:
            now = pace.next_at()
        for each in pace.due(now):
            at[each] = now
    return at


def test_those_who_come_one_by_one_are_let_in_at_once() -> None:
    came = [1_000.0 + number / (PER_S - 1) for number in range(500)]
    assert let_in(Pace(), came) == dict(enumerate(came))


def test_a_burst_is_let_in_at_once_and_the_next_ones_at_an_even_pace() -> None:
    at = let_in(Pace(), [50.0] * (BURST + 60))
    times = [at[number] - 50.0 for number in range(len(at))]
    assert times[:BURST] == [0.0] * BURST
    assert times == sorted(times)
    assert 60 / PER_S <= times[-1] <= 60 / PER_S + 2 * GROUP_EVERY_S
    assert len(set(times[BURST:])) <= times[-1] / GROUP_EVERY_S + 2  # in groups: each is one write to the registry


def test_after_a_while_the_next_burst_is_let_in_at_once() -> None:
    pace: Pace[int] = Pace()
    first = let_in(pace, [50.0] * (BURST + 60))
    later = max(first.values()) + BURST / PER_S + 0.01
    assert set(let_in(pace, [later] * BURST).values()) == {later}


def test_a_third_of_two_thousand_is_in_within_twelve_seconds_and_never_comes_all_at_once() -> None:
    """667 lose their node and come to two others, each within 2.5 s of a second."""
    came = [100.0 + 1.0 + 2.5 * number / 333 for number in range(333)]
    at = let_in(Pace(), came)
    assert max(at.values()) - 100.0 <= 12.0
    for second in range(100, 112):
        assert sum(second <= when < second + 1 for when in at.values()) <= 2 * PER_S


def test_of_a_larger_crowd_nobody_waits_until_a_registration_is_given_up() -> None:
    came = [100.0 + 2.5 * number / 1_500 for number in range(1_500)]
    at = let_in(Pace(), came)
    assert max(when - came[number] for number, when in at.items()) <= WITHIN_S + 1.0
    groups: dict[float, int] = {}
    for when in at.values():
        groups[when] = groups.get(when, 0) + 1
    assert max(groups.values()) <= GROUP_MOST


def test_a_shorter_wait_can_be_asked_for() -> None:
    at = let_in(Pace(within_s=0.5), [100.0] * 150)
    assert max(at.values()) - 100.0 <= 1.0


def test_a_tenant_that_floods_the_line_shuts_no_other_one_out() -> None:
    """300 a second are let in at most: of ten thousand the last waits for half a minute, and so did all behind it."""
    pace: Pace[str] = Pace()
    for number in range(10_000):
        pace.come(f"loud-{number}", 100.0, "loud")
    at: dict[str, float] = {}
    now = 100.0
    for number in range(50):
        pace.come(f"quiet-{number}", 100.5, "quiet")
    while len(pace):
        now = max(now, pace.next_at())
        at |= dict.fromkeys(pace.due(now), now)
    quiet = [at[f"quiet-{number}"] for number in range(50)]
    assert quiet == sorted(quiet) and max(quiet) - 100.5 <= 1.0
    loud = [at[f"loud-{number}"] for number in range(10_000)]
    assert loud == sorted(loud) and max(loud) > 100.5 + 2 * WITHIN_S


@given(st.lists(st.floats(0.0, 20.0), max_size=200), st.floats(0.2, WITHIN_S))
def test_everybody_is_let_in_once_in_order_and_hardly_later_than_allowed(gaps: list[float], within_s: float) -> None:
    came, now = [], 10.0
    for gap in gaps:
        now += gap if gap > 19.0 else 0.0  # mostly at once
        came.append(now)
    at = let_in(Pace(within_s), came)
    assert sorted(at) == list(range(len(came)))
    ordered = [at[number] for number in range(len(came))]
    assert ordered == sorted(ordered)
    slack_s = GROUP_EVERY_S * (len(came) / GROUP_MOST + 2)
    assert all(0 <= at[number] - when <= within_s + slack_s for number, when in enumerate(came))
    assert EVEN_S < WITHIN_S
