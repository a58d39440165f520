"""Progress is told ten times a second; of more, the last."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_sdk.pace import TELL_EVERY_S, Pace


class Piece(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def new_work() -> Any:
    return Piece(ended=False)


def test_the_first_is_told_and_of_those_that_follow_the_last() -> None:
    pace, work = Pace(), new_work()
    assert pace.may_tell(work, 10.0, (1.0, ""))
    assert not pace.may_tell(work, 10.01, (2.0, ""))
    assert not pace.may_tell(work, 10.02, (3.0, "x"))
    assert pace.due(10.05) == []
    assert pace.due(10.11) == [(work, (3.0, "x"))]
    assert pace.due(10.3) == []
    assert not pace.waiting


def test_nothing_is_told_of_what_has_ended() -> None:
    pace, work = Pace(), new_work()
    pace.may_tell(work, 10.0, (1.0, ""))
    pace.may_tell(work, 10.01, (2.0, ""))
    work.ended = True
    assert pace.due(10.02) == []
    assert not pace.waiting


@given(st.lists(st.floats(0.001, 0.3), min_size=1, max_size=60))
def test_never_more_than_ten_a_second_and_never_without_the_last(gaps: list[float]) -> None:
    pace, work = Pace(), new_work()
    now, told, said = 0.0, [], []
    for number, gap in enumerate(gaps):
        now += gap
        told += [(now, news) for _, news in pace.due(now)]
        said.append((float(number), ""))
        if pace.may_tell(work, now, said[-1]):
            told.append((now, said[-1]))
    told += [(now + 1, news) for _, news in pace.due(now + 1)]
    assert told[-1][1] == said[-1]
    assert [news for _, news in told] == sorted(news for _, news in told)
    assert all(b - a >= TELL_EVERY_S - 1e-9 for (a, _), (b, _) in itertools.pairwise(told))
