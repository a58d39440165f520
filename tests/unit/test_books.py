"""The books of the chaos tests see what they are there for."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from agent_sdk import Mesh
from agentreach.aio.clock import boot_time
from tests.support import turns
from tests.support.chaos import Book, Outcome
from tests.support.reigns import overlaps
from tests.support.turns import Turn

ONE, OTHER = ("chat/1", "a"), ("chat/2", "b")


def turn(owner: tuple[str, str], epoch: int, began: float, ended: float, session: str = "s") -> Turn:
    return Turn(session, "1", owner, epoch, began, ended)


def test_turns_one_after_another_at_owners_of_growing_epochs_are_right() -> None:
    assert turns.faults([turn(ONE, 1, 0, 1), turn(ONE, 1, 1, 2), turn(OTHER, 2, 3, 4)]) == []
    assert turns.faults([turn(ONE, 1, 0, 9), turn(OTHER, 2, 1, 4, "another session")]) == []


def test_turns_at_the_same_time_are_seen_at_two_owners_and_at_one() -> None:
    for owner, epoch in ((OTHER, 2), (ONE, 1)):
        (fault,) = turns.faults([turn(ONE, 1, 0, 5), turn(owner, epoch, 4, 6)])
        assert "at the same time" in fault
    long, *short = turn(ONE, 1, 0, 9), turn(OTHER, 2, 1, 2), turn(OTHER, 2, 3, 4)
    assert len(turns.faults([long, *short])) == 2


def test_an_epoch_that_goes_down_or_has_two_owners_is_seen() -> None:
    (fault,) = turns.faults([turn(ONE, 2, 0, 1), turn(OTHER, 1, 2, 3)])
    assert "goes down" in fault
    (fault,) = turns.faults([turn(ONE, 2, 0, 1), turn(OTHER, 2, 2, 3)])
    assert "two owners" in fault


def test_a_turn_without_an_end_ended_with_its_process_or_never(tmp_path: Path) -> None:
    record = tmp_path / "turns"
    begun = {"turn": "t", "session": "s", "agent": "chat/1", "incarnation": "a", "epoch": 1, "n": "1", "pid": 7}
    record.write_text(json.dumps({**begun, "began": 1.0}) + "\n")
    assert turns.read(record)[0].ended == turns.NEVER
    assert turns.read(record, {7: 2.0})[0].ended == 2.0


async def test_a_process_that_stands_still_after_a_deadline_tells_nobody_in_time(tmp_path: Path) -> None:
    late = Outcome(1, "TIMEOUT", True, False, took_s=22.0, timeout_s=20.0, told="", what="request")
    assert "answered after" in late.faults(0)[0]
    assert replace(late, stood_s=0.6).faults(0) == []
    book = Book(tmp_path)
    book.begin(cast(Mesh, None), "nobody", count=0)
    began = boot_time()
    await asyncio.sleep(0.15)  # the watch ticks
    time.sleep(0.5)  # noqa: ASYNC251  # the fault it is made for
    between = boot_time()
    assert 0.3 <= book.stood_s(began) <= between - began
    assert book.stood_s(boot_time()) == 0.0


def test_reigns_that_overlap_are_seen() -> None:
    assert overlaps([(0, 1, "n1"), (1, 2, "n2")]) == []
    assert len(overlaps([(0, 3, "n1"), (1, 2, "n2")])) == 1
