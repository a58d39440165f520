"""A stream on which nothing was said yet: it counts among the few that may be so, until it says hello or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reach.core import quotas
from reach.core.ports import Identity, MeshFailure

if TYPE_CHECKING:
    from reach.node.engine import Engine

SOME_NODE = Identity("", "node")
"""Whoever opens a stream between nodes, before it has said which it is."""


class Silence:
    """Of one stream. Making it raises `MeshFailure` OVERLOADED if there are too many of these."""

    def __init__(self, engine: Engine, who: Identity) -> None:
        self._engine = engine
        self._who = who
        self._lasts = True
        with engine.step() as state:
            error = quotas.silent_fault(state, who)
        if error is not None:
            raise MeshFailure(error)

    def over(self) -> None:
        """Something was said, or never will be. Safe to call again."""
        if self._lasts:
            self._lasts = False
            with self._engine.step() as state:
                quotas.silent_over(state, self._who)
