"""How fast the agents of a crowd of processes are let in: at once if few come, spread over seconds if many do.

A process whose node died is welcomed by another one, which has a registration to write, changes to tell to all nodes,
and a probe and heartbeats to answer for it: some 2 ms of its loop in all. Hundreds that come within a second leave no
loop to those who are there already. So whoever comes past a burst waits in line, and the line moves at an even pace;
the longer it is, the faster, and nobody waits longer than the SDK waits for its welcome. It moves in small groups,
because a group costs the registry one write.

Tenants take turns: one that sends thousands of processes, again and again, has its own wait, and does not fill the time
in which the others' must be in.

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
        self._lines: dict[str, deque[tuple[float, T]]] = {}
        """By tenant, in the order of their turns. No line is empty."""
        self._waiting = 0
        self._room = float(BURST)
        """How many may be let in now."""
        self._counted_at = 0.0
        self._next_group_at = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    def come(self, who: T, now: float, tenant: str = "") -> None:
        """One more, at the end of its tenant's line."""
        self._count(now)
        self._lines.setdefault(tenant, deque()).append((now, who))
        self._waiting += 1

    def due(self, now: float) -> list[T]:
        """Take those whose turn it is out of their lines."""
        self._count(now)
        group: list[T] = []
        if now < self._next_group_at:
            return group
        while len(group) < GROUP_MOST and (tenant := self._next(now)) is not None:
            line = self._lines.pop(tenant)
            group.append(line.popleft()[1])
            self._waiting -= 1
            self._room = max(0.0, self._room - 1.0)
            if line:
                self._lines[tenant] = line  # behind the others
        if self._waiting:
            self._next_group_at = now + GROUP_EVERY_S
        return group

    def _next(self, now: float) -> str | None:
        """The tenant whose turn it is; where there is no room, of those with somebody who has waited long enough."""
        for tenant, line in self._lines.items():
            if self._room >= 1.0 or now >= line[0][0] + self._within_s:
                return tenant
        return None

    def next_at(self) -> float:
        """When to ask for the next group; infinity while nobody waits."""
        if not self._waiting:
            return float("inf")
        room_at = self._counted_at + (1.0 - self._room) / self._per_s
        eldest = min(line[0][0] for line in self._lines.values())
        return max(self._next_group_at, min(room_at, eldest + self._within_s))

    @property
    def _per_s(self) -> float:
        return max(PER_S, self._waiting / EVEN_S)

    def _count(self, now: float) -> None:
        self._room = min(float(BURST), self._room + (now - self._counted_at) * self._per_s)
        self._counted_at = now
