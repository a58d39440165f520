from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.policy.wheel import TimerWheel, Token

actions = st.lists(
    st.tuples(
        st.sampled_from(["schedule", "schedule", "cancel", "advance"]),
        st.floats(0, 0.2) | st.floats(0, 50),
        st.integers(0, 1 << 16),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(actions, st.floats(0, 1e7), st.sampled_from([0.005, 0.05, 1.0, 0.001]))
def test_each_timer_fires_once_never_early_and_at_most_one_tick_late(
    actions: list[tuple[str, float, int]], start: float, tick_s: float
) -> None:
    wheel: TimerWheel[int] = TimerWheel(tick_s)
    now = start
    waiting: dict[int, tuple[Token, float]] = {}
    for item, (action, seconds, pick) in enumerate(actions):
        if action == "schedule":
            waiting[item] = (wheel.schedule(item, now + seconds), now + seconds)
        elif action == "cancel" and waiting:
            key = sorted(waiting)[pick % len(waiting)]
            token, _ = waiting.pop(key)
            assert wheel.cancel(token, key)
            assert not wheel.cancel(token, key)
        elif action == "advance":
            now += seconds
            for fired in wheel.due(now):
                token, when = waiting.pop(fired)
                assert when <= now
                assert not wheel.cancel(token, fired)
            assert all(when > now - tick_s for _, when in waiting.values())
        assert len(wheel) == len(waiting)
        at = wheel.next_at()
        assert (at is None) == (not waiting)
        if at is not None:
            first = min(when for _, when in waiting.values())
            assert first <= at <= first + tick_s
    assert sorted(wheel.due(now + 100)) == sorted(waiting)
    assert wheel.next_at() is None and len(wheel) == 0


@given(st.lists(st.floats(0, 1e8), min_size=1, max_size=20))
def test_something_is_due_at_the_time_that_was_announced(times: list[float]) -> None:
    wheel: TimerWheel[int] = TimerWheel()
    for item, when in enumerate(times):
        wheel.schedule(item, when)
    fired = 0
    while (at := wheel.next_at()) is not None:
        items = wheel.due(at)
        assert items
        fired += len(items)
    assert fired == len(times)


def test_timers_come_in_the_order_of_their_ticks() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    for name, when in (("late", 3.0), ("early", 1.0), ("middle", 2.0), ("early too", 1.0)):
        wheel.schedule(name, when)
    assert wheel.due(2.5) == ["early", "early too", "middle"]
    assert wheel.due(2.5) == []


def test_a_time_that_has_passed_is_due_at_once() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    wheel.due(100.0)
    wheel.schedule("past", 1.0)
    assert wheel.due(100.0) == ["past"]


def test_a_cancelled_item_is_let_go_at_once() -> None:
    class Request:
        pass

    wheel: TimerWheel[Request] = TimerWheel()
    request = Request()
    gone = weakref.ref(request)
    wheel.cancel(wheel.schedule(request, 600.0), request)
    del request
    gc.collect()
    assert gone() is None


def test_a_hundred_thousand_cancelled_timers_leave_nothing_behind() -> None:
    wheel: TimerWheel[int] = TimerWheel()
    for item in range(100_000):
        wheel.cancel(wheel.schedule(item, 600.0 + item * 0.003), item)
        if item % 100 == 0:
            wheel.schedule(-item, 601.0)
    assert len(wheel._heap) == len(wheel._buckets) < 1000


def test_cancelling_and_setting_in_one_tick_does_not_grow_the_heap() -> None:
    wheel: TimerWheel[int] = TimerWheel()
    for item in range(10_000):
        wheel.cancel(wheel.schedule(item, 5.0), item)
    assert len(wheel._heap) == 1
    wheel.schedule(1, 5.0)
    assert wheel.due(5.0) == [1]


@pytest.mark.parametrize("tick_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_tick_that_is_no_time_is_refused(tick_s: float) -> None:
    with pytest.raises(ValueError, match="tick_s"):
        TimerWheel(tick_s)
