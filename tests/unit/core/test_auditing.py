"""How many lines of one kind the audit log takes, and what becomes of the rest."""

from __future__ import annotations

import pytest

from reach.core.auditing import FLEET_LINES, LINES_PER_S, SUMMARY_S, Bounded

DENIED = ("gate.refused", "UNAUTHENTICATED")


def test_what_a_stranger_causes_is_written_up_to_a_bound_and_counted_beyond() -> None:
    bounded = Bounded()
    admitted = [bounded.admits(*DENIED, now=100.0 + n / 1000) for n in range(500)]
    assert admitted == [True] * LINES_PER_S + [False] * (500 - LINES_PER_S)
    assert bounded.due_at == 100.0 + LINES_PER_S / 1000 + SUMMARY_S
    assert bounded.sums() == [(*DENIED, ("", ""), 500 - LINES_PER_S)]
    assert bounded.due_at is None and bounded.sums() == []


@pytest.mark.parametrize(
    "action", ["gate.refused", "message.denied", "message.restamped", "agent.denied", "topic.denied"]
)
def test_whatever_needs_no_right_is_bounded(action: str) -> None:
    bounded = Bounded()
    assert sum(bounded.admits(action, "PERMISSION_DENIED", now=1.0) for _ in range(500)) == LINES_PER_S


def test_in_the_next_second_lines_are_written_again_and_the_sum_goes_on() -> None:
    bounded = Bounded()
    for second in (7.0, 8.0):
        assert sum(bounded.admits(*DENIED, now=second) for _ in range(LINES_PER_S + 5)) == LINES_PER_S
    assert bounded.sums() == [(*DENIED, ("", ""), 10)]


def test_one_kind_does_not_take_the_room_of_another() -> None:
    bounded = Bounded()
    for _ in range(LINES_PER_S + 1):
        bounded.admits(*DENIED, now=1.0)
    assert bounded.admits("gate.refused", "PERMISSION_DENIED", now=1.0)
    assert bounded.admits("message.denied", "PERMISSION_DENIED", now=1.0)


def test_what_needs_a_right_is_always_written() -> None:
    bounded = Bounded()
    assert all(bounded.admits("admin.CreateKey", "OK", now=1.0) for _ in range(10 * LINES_PER_S))


FLEET, FLAPPING = ("acme", "fleet"), ("acme", "flapping")


@pytest.mark.parametrize("action", ["agent.attached", "agent.changed", "agent.detached"])
def test_agents_that_come_and_go_all_the_time_are_written_up_to_a_bound_and_a_fleet_one_by_one(action: str) -> None:
    bounded = Bounded()
    flaps = [bounded.admits(action, "OK", 100.0 + n / 1000, FLAPPING) for n in range(60_000)]
    assert all(flaps[:FLEET_LINES]) and sum(flaps) <= FLEET_LINES + 60 * LINES_PER_S + 1
    assert all(bounded.admits(action, "OK", 160.0, FLEET) for _ in range(2_500)), "another one's count for nothing"
    assert bounded.sums() == [(action, "OK", FLAPPING, 60_000 - sum(flaps))]
    rested = 160.0 + FLEET_LINES / LINES_PER_S
    assert all(bounded.admits(action, "OK", rested, FLAPPING) for _ in range(FLEET_LINES))


def test_those_whose_agents_stay_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reach.core.auditing.OWNERS_MAX", 10)
    bounded = Bounded()
    for number in range(100):
        bounded.admits("agent.attached", "OK", float(number), ("acme", f"p{number}"))
    assert len(bounded._fleets) <= 10
