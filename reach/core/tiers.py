"""What a pool's tiers are made of: lists that are cheap to change, whose turn it is, and levels of priority."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from reach.core.agents import USABLE_TIERS, Agent

_HEAP_SLACK = 64  # stale entries a heap may hold beyond twice its live ones before it is built again


class AgentList:
    """A set of agents that is also a list to draw from: adding and removing cost the same at any size."""

    __slots__ = ("agents", "at")

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.at: dict[Agent, int] = {}

    def add(self, agent: Agent) -> None:
        """Append it; it must not be there."""
        self.at[agent] = len(self.agents)
        self.agents.append(agent)

    def remove(self, agent: Agent) -> None:
        """Take it out; the last one takes its place. `KeyError` if it is not there."""
        position = self.at.pop(agent)
        last = self.agents.pop()
        if last is not agent:
            self.agents[position] = last
            self.at[last] = position


class Turns:
    """Whose turn it is: in each tier the one that was chosen longest ago; newcomers queue up behind the others."""

    __slots__ = ("_heaps", "_last", "_next", "_queued", "_tiers")

    def __init__(self, tiers: list[AgentList]) -> None:
        self._tiers = tiers
        self._last: dict[Agent, int] = {}
        self._next = 0
        self._heaps: list[list[tuple[int, Agent]]] = [[] for _ in range(USABLE_TIERS)]
        self._queued: list[set[Agent]] = [set() for _ in range(USABLE_TIERS)]
        for number in range(USABLE_TIERS):
            for agent in tiers[number].agents:
                self.enter(agent, number)

    def enter(self, agent: Agent, number: int) -> None:
        """The agent came into a tier."""
        if number >= USABLE_TIERS:
            return
        if agent not in self._last:
            self._last[agent] = self._take_number()
        if agent in self._queued[number]:
            return
        heap = self._heaps[number]
        if len(heap) > 2 * len(self._tiers[number].agents) + _HEAP_SLACK:
            self._rebuild(number)
        self._queued[number].add(agent)
        heappush(heap, (self._last[agent], agent))

    def leave(self, agent: Agent) -> None:
        """The agent left the pool."""
        self._last.pop(agent, None)

    def take(self, number: int) -> Agent:
        """The one whose turn it is in a tier, which must not be empty; its next turn is after everybody else's."""
        heap, queued, members = self._heaps[number], self._queued[number], self._tiers[number].at
        while True:
            turn, agent = heappop(heap)
            if agent not in members:
                queued.discard(agent)
            elif turn != self._last[agent]:
                heappush(heap, (self._last[agent], agent))
            else:
                self._last[agent] = self._take_number()
                heappush(heap, (self._last[agent], agent))
                return agent

    def copy_state(self) -> dict[Agent, int]:
        """Everybody's last turn, for `restore_state` (a decision that is only looked at)."""
        return self._last.copy()

    def restore_state(self, last: dict[Agent, int]) -> None:
        """Take back the turns taken since."""
        self._last = last
        for number in range(USABLE_TIERS):
            self._rebuild(number)

    def _take_number(self) -> int:
        self._next += 1
        return self._next

    def _rebuild(self, number: int) -> None:
        members = self._tiers[number].at
        live = [agent for agent in self._queued[number] if agent in members and agent in self._last]
        heap = self._heaps[number]
        heap[:] = [(self._last[agent], agent) for agent in live]
        heapify(heap)
        self._queued[number] = set(live)


class Levels:
    """The usable tiers split by priority, for SCORE: a level's agents differ only in what changes all the time."""

    __slots__ = ("_level_of", "_lists")

    def __init__(self, tiers: list[AgentList]) -> None:
        self._lists: list[dict[int, AgentList]] = [{} for _ in range(USABLE_TIERS)]
        self._level_of: dict[Agent, tuple[int, int]] = {}
        for number in range(USABLE_TIERS):
            for agent in tiers[number].agents:
                self.enter(agent, number)

    def enter(self, agent: Agent, number: int) -> None:
        """The agent came into a tier."""
        self.leave(agent)
        if number < USABLE_TIERS:
            self._lists[number].setdefault(agent.priority, AgentList()).add(agent)
            self._level_of[agent] = (number, agent.priority)

    def leave(self, agent: Agent) -> None:
        """The agent left its tier."""
        place = self._level_of.pop(agent, None)
        if place is not None:
            level = self._lists[place[0]][place[1]]
            level.remove(agent)
            if not level.agents:
                del self._lists[place[0]][place[1]]

    def of_tier(self, number: int) -> dict[int, AgentList]:
        """Priority -> the tier's agents of it; no level is empty."""
        return self._lists[number]
