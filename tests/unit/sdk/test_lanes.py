"""Slots and session lanes, beside a model that is too simple to be wrong."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from agent_sdk.lanes import Lanes


class Work:
    def __init__(self, number: int, session: Hashable | None) -> None:
        self.number = number
        self.session = session
        self.admitted = False
        self.place = 0


def test_one_of_a_session_runs_and_the_next_follows_it() -> None:
    lanes: Lanes[Work] = Lanes(0, 1)
    first, second, other = Work(1, "s"), Work(2, "s"), Work(3, "t")
    assert lanes.admit(first) and not lanes.admit(second) and lanes.admit(other)
    assert lanes.release(first) == [second]
    assert lanes.release(second) == [] and lanes.release(other) == []
    assert lanes.active == lanes.queued == 0


def test_a_withdrawn_work_gives_its_lane_to_the_next() -> None:
    lanes: Lanes[Work] = Lanes(1, 1)
    running, waiting, behind = Work(1, None), Work(2, "s"), Work(3, "s")
    assert lanes.admit(running)
    assert not lanes.admit(waiting) and not lanes.admit(behind)
    assert lanes.withdraw(waiting) == []
    assert lanes.release(running) == [behind]


@given(
    st.integers(0, 3),
    st.integers(1, 2),
    st.lists(st.tuples(st.sampled_from(["admit", "release", "withdraw"]), st.integers(0, 3)), max_size=80),
)
def test_bounds_hold_order_is_kept_and_nothing_is_forgotten(
    limit: int, per_session: int, steps: list[tuple[str, int]]
) -> None:
    lanes: Lanes[Work] = Lanes(limit, per_session)
    running: list[Work] = []
    waiting: list[Work] = []
    started: dict[Hashable | None, list[int]] = {}

    def start(works: list[Work]) -> None:
        for work in works:
            assert work.admitted
            running.append(work)
            if work in waiting:
                waiting.remove(work)
            started.setdefault(work.session, []).append(work.number)

    for number, (step, pick) in enumerate(steps):
        if step == "admit":
            work = Work(number, pick or None)
            if lanes.admit(work):
                start([work])
            else:
                waiting.append(work)
        elif step == "release" and running:
            start(lanes.release(running.pop(pick % len(running))))
        elif step == "withdraw" and waiting:
            start(lanes.withdraw(waiting.pop(pick % len(waiting))))
        assert lanes.active == len(running) and lanes.queued == len(waiting)
        assert not limit or lanes.active <= limit
        for session in {work.session for work in running if work.session is not None}:
            assert sum(work.session == session for work in running) <= per_session
    while running:
        start(lanes.release(running.pop()))
    assert not waiting and lanes.active == lanes.queued == 0
    assert all(numbers == sorted(numbers) for session, numbers in started.items() if session is not None)
