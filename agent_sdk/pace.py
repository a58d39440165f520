"""How often news are told: a handler's progress ten times a second and message, the last one kept; dropped events at
most every ten seconds. No clock."""

from __future__ import annotations

import logging

from agent_sdk.work import Work

log = logging.getLogger("agent_sdk")

TELL_EVERY_S = 0.1
TELL_DROPPED_EVERY_S = 10.0

Told = tuple[float | None, str]
"""Percent and text."""


class Pace:
    """The works that have said how far they are in the last moment, and what they said since."""

    __slots__ = ("_kept", "_told")

    def __init__(self) -> None:
        self._told: dict[Work, float] = {}
        self._kept: dict[Work, Told] = {}

    def may_tell(self, work: Work, now: float, news: Told) -> bool:
        """True: tell it now. False: it is kept, instead of what was kept before, until it is `due`."""
        if work in self._told:
            self._kept[work] = news
            return False
        self._told[work] = now
        return True

    def due(self, now: float) -> list[tuple[Work, Told]]:
        """What may be told by now. An answer is the better news: of works that have ended nothing is told."""
        found: list[tuple[Work, Told]] = []
        for work, at in list(self._told.items()):
            if now - at < TELL_EVERY_S and not work.ended:
                continue
            del self._told[work]
            kept = self._kept.pop(work, None)
            if kept is not None and not work.ended:
                self._told[work] = now
                found.append((work, kept))
        return found

    @property
    def waiting(self) -> bool:
        """True while there is anything to look after."""
        return bool(self._told)


class Dropped:
    """Events that came faster than they were handled."""

    __slots__ = ("_count", "_told_at")

    def __init__(self) -> None:
        self._count = 0
        self._told_at = float("-inf")

    def one(self, agent_id: str, handler: str, now: float) -> None:
        """One more was dropped."""
        self._count += 1
        if now - self._told_at >= TELL_DROPPED_EVERY_S:
            self._told_at = now
            told = "%s: events come faster than handler %s takes them; %d dropped so far"
            log.warning(told, agent_id, handler, self._count)
