"""Every invariant of the design that a run can show, each a small function whose name and docstring state it.

A function gets the world and a fact (what it is about depends on the moment) and returns what is wrong, or nothing.
Moments: `start` of a handler (Run), `outcome` of a request (Ask), `heard` event, `turn` of any process, `node turn`,
`led` (the store has applied what only a leader may do), `answered` (all deadlines are over), `settled` (all graces are
over), `rest` (the end). They stand in `of_messages`, `of_processes` and `of_nodes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World

Check = Callable[["World", Any], str]


@dataclass(frozen=True, slots=True)
class Invariant:
    """One checker."""

    name: str
    statement: str
    violated: Check


ALL: dict[str, list[Invariant]] = {
    moment: [] for moment in ("start", "outcome", "heard", "turn", "node turn", "led", "answered", "settled", "rest")
}


def invariant(moment: str) -> Callable[[Check], Check]:
    """Make a function a checker of a moment; its name in words is the invariant's, its docstring the statement."""

    def declare(check: Check) -> Check:
        statement = " ".join((check.__doc__ or "").split())
        ALL[moment].append(Invariant(check.__name__.replace("_", " "), statement, check))
        return check

    return declare
