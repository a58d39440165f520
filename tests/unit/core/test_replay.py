"""Outcomes are given again, and what was forgotten is never run a second time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import error_pb2
from agentreach.wire.ids import uuid7
from reach.core.replay import (
    CLOCK_AHEAD_MS_MAX,
    ENTRY_BYTES,
    Conflict,
    Elsewhere,
    MessageKey,
    Replay,
    Stored,
    TooOld,
    is_stored,
)

BORN_MS = 1_764_500_000_000
WALL_S = BORN_MS / 1000


def key(message_id: str, principal: str = "p") -> MessageKey:
    return ("tenant", principal, "production", message_id)


def dated(ms: int) -> MessageKey:
    """The key of a UUIDv7 made so many milliseconds after the test began."""
    return key(uuid7(BORN_MS + ms, ms))


def test_a_finished_outcome_is_given_again() -> None:
    replay = Replay()
    replay.store(key("m"), b"d", b"reply", now=0.0)
    found = replay.find(key("m"), b"d", 299.0)
    assert isinstance(found, Stored)
    assert found.outcome == b"reply"


def test_an_outcome_is_given_again_for_five_minutes_and_no_longer() -> None:
    replay = Replay()
    replay.store(key("m"), b"d", b"reply", now=0.0)
    assert replay.find(key("m"), b"d", 299.9) is not None
    assert replay.find(key("m"), b"d", 300.0) is None


def test_other_content_is_a_conflict() -> None:
    replay = Replay()
    replay.store(key("m"), b"d", b"reply", now=0.0)
    assert isinstance(replay.find(key("m"), b"other", 1.0), Conflict)


def test_two_principals_with_equal_ids_know_nothing_of_each_other() -> None:
    replay = Replay()
    replay.store(key("1", "alice"), b"d", b"for alice", now=0.0)
    assert replay.find(key("1", "bob"), b"other", 1.0) is None


def test_a_large_outcome_is_named_by_its_holder() -> None:
    replay = Replay()
    replay.store(key("m"), b"d", ("ner/1", b"incarnation"), now=0.0)
    found = replay.find(key("m"), b"d", 1.0)
    assert isinstance(found, Elsewhere)
    assert (found.agent_id, found.incarnation) == ("ner/1", b"incarnation")
    assert replay.bytes_held == ENTRY_BYTES


def test_a_later_outcome_replaces_an_earlier_one() -> None:
    replay = Replay()
    replay.store(key("m"), b"d", b"AGENT_LOST", now=0.0)
    replay.store(key("m"), b"d", b"late reply", now=10.0)
    found = replay.find(key("m"), b"d", 305.0)
    assert isinstance(found, Stored)
    assert found.outcome == b"late reply"


@pytest.mark.parametrize("way", ["number", "bytes", "age"])
def test_a_forgotten_message_and_older_unknown_ones_are_too_old_to_run(way: str) -> None:
    replay = Replay(entries_max=1) if way == "number" else Replay(bytes_max=ENTRY_BYTES + 10)
    if way == "age":
        replay = Replay()
    replay.store(dated(50), b"d", b"reply", now=0.0)
    now = 400.0 if way == "age" else 1.0
    replay.store(dated(900), b"d", b"reply", now=now)
    assert isinstance(replay.find(dated(50), b"d", now), TooOld)
    assert isinstance(replay.find(dated(20), b"d", now), TooOld)
    assert replay.find(dated(51), b"d", now) is None
    assert isinstance(replay.find(dated(900), b"d", now), Stored)


def test_the_age_counts_when_the_entry_itself_is_asked_for() -> None:
    replay = Replay()
    replay.store(dated(50), b"d", b"reply", now=0.0)
    assert isinstance(replay.find(dated(50), b"d", 300.0), TooOld)


def test_ids_that_carry_no_time_are_new_when_unknown_and_move_no_mark() -> None:
    replay = Replay(entries_max=1)
    replay.store(key("order-1"), b"d", b"reply", now=0.0)
    replay.store(key("order-2"), b"d", b"reply", now=1.0)
    assert replay.find(key("order-1"), b"d", 2.0) is None
    assert replay.find(dated(0), b"d", 2.0) is None


def test_a_clock_far_ahead_does_not_turn_everybody_away() -> None:
    replay = Replay(entries_max=1, unix_offset_s=WALL_S)
    year_ms = 365 * 24 * 3600 * 1000
    replay.store(dated(year_ms), b"d", b"reply", now=0.0)
    replay.store(dated(0), b"d", b"reply", now=0.0)
    assert replay.forgotten_unix_ms == BORN_MS + CLOCK_AHEAD_MS_MAX
    assert replay.find(dated(CLOCK_AHEAD_MS_MAX + 1), b"d", 600.0) is None


@given(st.lists(st.tuples(st.sampled_from(["run", "wait"]), st.integers(0, 12)), max_size=60))
def test_no_message_runs_twice(steps: list[tuple[str, int]]) -> None:
    """The invariant of the whole table, against a dumb twin that forgets nothing."""
    replay = Replay(entries_max=4, age_s=50.0, unix_offset_s=WALL_S)
    now = 0.0
    ran: set[MessageKey] = set()
    for step, number in steps:
        now += 1.0
        name = dated(number * 100)
        if step == "wait":
            now += number * 10
        elif replay.find(name, b"d", now) is None:
            assert name not in ran
            ran.add(name)
            replay.store(name, b"d", b"reply", now)
        assert len(replay) <= 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3_000)), max_size=40))
def test_number_and_bytes_stay_in_their_bounds(steps: list[tuple[int, int]]) -> None:
    replay = Replay(entries_max=3, bytes_max=5_000)
    for now, (number, size) in enumerate(steps):
        replay.store(key(str(number)), b"d", b"x" * size, now=float(now))
        assert len(replay) <= 3
        assert replay.bytes_held <= 5_000


@pytest.mark.parametrize(
    ("code", "retryable", "may_have_executed", "stored"),
    [
        ("ERROR_CODE_UNSPECIFIED", False, False, True),  # a result
        ("AGENT_LOST", False, True, True),
        ("TIMEOUT", False, True, True),
        ("TIMEOUT", False, False, False),  # was queued
        ("AGENT_ERROR", False, True, True),
        ("AGENT_ERROR", True, True, False),
        ("REJECTED", False, True, True),
        ("REJECTED", False, False, False),
        ("CANCELLED", False, True, False),
        ("NO_ROUTE", False, False, False),
        ("NO_ROUTE", False, True, True),  # let out of a nested call: the outer handler ran
        ("CONNECT_FAILED", True, False, False),
        ("OVERLOADED", True, False, False),
        ("BREAKER_OPEN", True, False, False),
        ("NO_AGENT_AVAILABLE", True, False, False),
        ("HOP_LIMIT", False, False, False),
        ("INTERNAL", False, True, True),
        ("SHUTTING_DOWN", True, False, False),
    ],
)
def test_what_may_have_run_is_stored_and_what_cannot_have_is_not(
    code: str, retryable: bool, may_have_executed: bool, stored: bool
) -> None:
    assert is_stored(error_pb2.ErrorCode.Value(code), retryable, may_have_executed) is stored
