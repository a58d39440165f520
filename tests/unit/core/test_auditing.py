"""How many lines of one kind the audit log takes, and what becomes of the rest."""

from __future__ import annotations

import pytest

from reach.core.auditing import LINES_PER_S, SUMMARY_S, Bounded

DENIED = ("gate.refused", "UNAUTHENTICATED")


def test_what_a_stranger_causes_is_written_up_to_a_bound_and_counted_beyond() -> None:
    bounded = Bounded()
    admitted = [bounded.admits(*DENIED, now=100.0 + n / 1000) for n in range(500)]
    assert admitted == [True] * LINES_PER_S + [False] * (500 - LINES_PER_S)
    assert bounded.due_at == 100.0 + LINES_PER_S / 1000 + SUMMARY_S
    assert bounded.sums() == [(*DENIED, 500 - LINES_PER_S)]
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
    assert bounded.sums() == [(*DENIED, 10)]


def test_one_kind_does_not_take_the_room_of_another() -> None:
    bounded = Bounded()
    for _ in range(LINES_PER_S + 1):
        bounded.admits(*DENIED, now=1.0)
    assert bounded.admits("gate.refused", "PERMISSION_DENIED", now=1.0)
    assert bounded.admits("message.denied", "PERMISSION_DENIED", now=1.0)


def test_what_needs_a_right_is_always_written() -> None:
    bounded = Bounded()
    assert all(bounded.admits("admin.CreateKey", "OK", now=1.0) for _ in range(10 * LINES_PER_S))
    assert all(bounded.admits("agent.attached", "OK", now=1.0) for _ in range(10 * LINES_PER_S))
