from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.budget import IN_FLIGHT_MAX, RetryBudget


class Twin:
    """The same budget by counting a list of everything that ever happened."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.running: Counter[str] = Counter()

    def recent(self, kind: str, target: str, now: float) -> int:
        return sum(
            1 for what, which, second in self.events if what == kind and which == target and second > int(now) - 10
        )

    def may_retry(self, target: str, instance: str, now: float) -> bool:
        allowed = max(0.2 * self.recent("request", target, now), 10)
        return self.recent("retry", target, now) + 1 <= allowed and self.running[instance] < IN_FLIGHT_MAX


steps = st.lists(
    st.tuples(
        st.sampled_from(["request", "requests", "retry", "retries", "end", "wait", "forget"]),
        st.sampled_from(["t1", "t2"]),
        st.sampled_from(["i1", "i2", "i3"]),
        st.floats(0, 3) | st.floats(0, 15),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.floats(0, 1e6))
def test_it_decides_like_one_who_remembers_everything(steps: list[tuple[str, str, str, float]], start: float) -> None:
    budget, twin, now = RetryBudget(), Twin(), start
    for step, target, instance, seconds in steps:
        if step.startswith("request"):
            for _ in range(1 if step == "request" else 30):
                budget.requested(target, now)
                twin.events.append(("request", target, int(now)))
        elif step == "retry":
            allowed = budget.may_retry(target, instance, now)
            assert allowed == twin.may_retry(target, instance, now)
            if allowed:
                budget.planned(target, now)
                budget.began(instance)
                twin.events.append(("retry", target, int(now)))
                twin.running[instance] += 1
        elif step == "retries":
            for number in range(8):  # each over at once
                allowed = budget.may_retry(target, f"short {number}", now)
                assert allowed == twin.may_retry(target, f"short {number}", now)
                if allowed:
                    budget.planned(target, now)
                    budget.began(f"short {number}")
                    budget.ended(f"short {number}")
                    twin.events.append(("retry", target, int(now)))
        elif step == "end" and twin.running[instance]:
            budget.ended(instance)
            twin.running[instance] -= 1
        elif step == "wait":
            now += seconds
        elif step == "forget":
            budget.forget(now)
        assert budget.in_flight == twin.running.total()


def test_a_target_that_always_fails_is_asked_little_more_than_it_was_meant_to_be() -> None:
    budget, reached, made = RetryBudget(), 0, 0
    for tick in range(60 * 500):  # a minute at 500 requests/s, each of which would like two retries
        now = tick / 500
        budget.requested("t", now)
        made += 1
        reached += 1
        for _ in range(2):
            if budget.may_retry("t", f"i{tick % 4}", now):
                budget.planned("t", now)
                budget.began(f"i{tick % 4}")
                budget.ended(f"i{tick % 4}")
                reached += 1
    assert reached / made <= 1.2


def test_a_target_with_few_requests_has_one_retry_a_second() -> None:
    budget = RetryBudget()
    budget.requested("t", 0.0)
    granted = 0
    for tick in range(100):
        if budget.may_retry("t", "i", tick / 10):
            budget.planned("t", tick / 10)
            budget.began("i")
            budget.ended("i")
            granted += 1
    assert granted == 10


def test_a_pause_forgets_no_more_than_has_passed() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.requested("t", 0.5)
    for tick in range(20):
        assert budget.may_retry("t", "i", 5.5 + tick / 100)
        budget.planned("t", 5.5 + tick / 100)
        budget.began("i")
        budget.ended("i")
    assert not budget.allows("t", 5.9)
    assert not budget.allows("t", 14.9)  # the requests are out of the window, the retries are not
    assert budget.allows("t", 15.0)


def test_three_retries_are_under_way_at_one_instance_and_no_more() -> None:
    budget = RetryBudget()
    for _ in range(3):
        assert budget.may_retry("t", "i", 0.0)
        budget.planned("t", 0.0)
        budget.began("i")
    assert not budget.may_retry("t", "i", 0.0)
    assert budget.may_retry("t", "j", 0.0)
    budget.ended("i")
    assert budget.may_retry("t", "i", 0.0)


def test_an_end_that_never_began_is_a_fault() -> None:
    budget = RetryBudget()
    with pytest.raises(ValueError, match="no retry is under way"):
        budget.ended("i")


def test_types_that_nobody_asks_any_more_are_forgotten() -> None:
    budget = RetryBudget()
    for number in range(5000):
        budget.requested(f"t{number}", float(number))
    assert len(budget) < 200
    budget.forget(1e6)
    assert len(budget) == 0


def test_more_types_than_the_bound_share_what_is_left() -> None:
    budget = RetryBudget(types_max=3)
    for number in range(100):
        budget.requested(f"t{number}", 0.0)
    assert len(budget) == 3
    for _ in range(20):
        if budget.allows("t50", 0.0):
            budget.planned("t50", 0.0)
            budget.began(object())
    assert not budget.allows("t99", 0.0)
    assert budget.allows("t0", 0.0)
