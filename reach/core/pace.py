"""How fast the agents of a crowd of processes are let in: at once if few come, spread over seconds if many do.

A process whose node died is welcomed by another one, which has a registration to write, changes to tell to all nodes,
and a probe and heartbeats to answer for it: some 2 ms of its loop in all. Hundreds that come within a second leave no
loop to those who are there already. So whoever comes past a burst waits in line, and the line moves at an even pace;
the longer it is, the faster, and nobody waits longer than the SDK waits for its welcome. It moves in small groups,
because a group costs the registry one write.

Why the node paces, and not the processes: they cannot know how many they are. Those who only resume their link, bring
no agents, or attach one to a link that stands, never wait: they cost little.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

BURST = 20  # processes let in at once: 40 ms of the loop; a node of a small mesh has not many more
PER_S = 30.0  # let in a second past that, 6 % of the loop; hundreds are in within ten seconds
EVEN_S = 6.0
"""A longer line moves by this part of it a second: of a thousand that wait three quarters are in after 8 s."""
WITHIN_S = 8.0
"""Then those who still wait may go: a registration has 10 s (`register_wait_s`), the SDK gives a welcome 12 s."""
GROUP_EVERY_S = 0.1
GROUP_MOST = 30  # 8 ms of the loop, when the registry has written them; so 300 a second are let in at most

T = TypeVar("T")


class Pace(Generic[T]):
    """The line before the registry. Times are seconds of the caller's clock."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        """Nobody waits much longer than `within_s`."""
        self._within_s = within_s
        self._line: deque[tuple[float, T]] = deque()
        self._room = float(BURST)
        """How many may be let in now."""
        self._counted_at = 0.0
        self._next_group_at = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def come(self, who: T, now: float) -> None:
        """One more, at the end of the line."""
        self._count(now)
        self._line.append((now, who))

    def due(self, now: float) -> list[T]:
        """Take those whose turn it is out of the line."""
        self._count(now)
        group: list[T] = []
        if now < self._next_group_at:
            return group
        while self._line and len(group) < GROUP_MOST:
            came_at, who = self._line[0]
            if self._room < 1.0 and now < came_at + self._within_s:
                break
            self._line.popleft()
            self._room = max(0.0, self._room - 1.0)
            group.append(who)
        if self._line:
            self._next_group_at = now + GROUP_EVERY_S
        return group

    def next_at(self) -> float:
        """When to ask for the next group; infinity while nobody waits."""
        if not self._line:
            return float("inf")
        room_at = self._counted_at + (1.0 - self._room) / self._per_s
        return max(self._next_group_at, min(room_at, self._line[0][0] + self._within_s))

    @property
    def _per_s(self) -> float:
        return max(PER_S, len(self._line) / EVEN_S)

    def _count(self, now: float) -> None:
        self._room = min(float(BURST), self._room + (now - self._counted_at) * self._per_s)
        self._counted_at = now
