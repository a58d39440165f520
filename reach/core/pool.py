"""The agents that match one selector, sorted at all times into tiers by whether they can be given work.

A pool is changed as agents come, go and change state, so that a decision looks only at the tier it takes from and
costs the same with ten agents or ten thousand. It also keeps what policies remember for one selector: whose turn it is
(ROUND_ROBIN), the ring (CONSISTENT_HASH, sessions) and the levels of priority (SCORE), each built when first asked for.

Pools belong to a `Directory`, which alone changes them. Look one up for each decision; do not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from reach.core.agents import (
    BROKEN,
    FULL,
    LEAVING,
    LOST,
    NOT_STARTED,
    READY,
    READY_AVOIDED,
    STATUSES,
    TIERS,
    USABLE_TIERS,
    WEAK,
    WEAK_AVOIDED,
    Agent,
)
from reach.core.ring import Ring
from reach.core.selector import Selector
from reach.core.tiers import AgentList, Levels, Turns

_HEAP_SLACK: Final = 64  # stale entries a heap may hold beyond twice its live ones before it is built again
_REBUILD_SHARE: Final = 8  # more than this fraction (1/n) of a ring changed: building it anew is cheaper


class Avoidance:
    """Ends the avoidance of agents that answered OVERLOADED when their time is over. Shared by a directory's pools.

    At most one waiting entry an agent counts; decisions look only at `next_at`.
    """

    __slots__ = ("_counter", "_heap", "_queued", "next_at")

    def __init__(self) -> None:
        self.next_at = float("inf")
        """The earliest time at which somebody's avoidance may end."""
        self._heap: list[tuple[float, int, Agent]] = []
        self._queued: dict[Agent, float] = {}
        self._counter = 0

    def watch(self, agent: Agent) -> None:
        """Take note of the agent's `avoid_until`."""
        until = agent.avoid_until
        if until >= self._queued.get(agent, float("inf")):
            return  # looked at again when the earlier entry is due
        if len(self._heap) > 2 * len(self._queued) + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[0]]
            heapify(self._heap)
        self._push(agent, until)

    def forget(self, agent: Agent) -> None:
        """The agent is gone."""
        self._queued.pop(agent, None)

    def expire(self, now: float) -> None:
        """Put agents whose time is over back among the others, in every pool that holds them."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, agent = heappop(heap)
            if self._queued.get(agent) != due:
                continue
            del self._queued[agent]
            if agent.avoid_until > now:
                self._push(agent, agent.avoid_until)
            elif agent.avoid_until > 0:
                agent.avoid_until = 0.0
                retier(agent)
        self.next_at = heap[0][0] if heap else float("inf")

    def _push(self, agent: Agent, until: float) -> None:
        self._counter += 1
        self._queued[agent] = until
        heappush(self._heap, (until, self._counter, agent))
        self.next_at = self._heap[0][0]


def retier(agent: Agent) -> bool:
    """Move the agent to the tier of its present state in every pool that holds it. False if it is there already."""
    old, new = agent.tier, agent.tier_now()
    if old == new:
        return False
    agent.tier = new
    for pool in agent.pools:
        pool.move(agent, old, new)
    return True


class Pool:
    """The matching agents of one selector."""

    __slots__ = (
        "_levels",
        "_ring",
        "_stale_names",
        "_turns",
        "avoidance",
        "evicted",
        "members",
        "narrowed",
        "pinned",
        "selector",
        "tiers",
        "used",
        "weight_max",
        "weights",
    )

    def __init__(self, selector: Selector, avoidance: Avoidance) -> None:
        self.selector = selector
        self.avoidance = avoidance
        self.members: dict[str, Agent] = {}
        """All matching agents by agent_id, whatever their state."""
        self.tiers = [AgentList() for _ in range(TIERS)]
        self.weight_max = 1
        """No member weighs more (it may be higher than needed)."""
        self.weights = [0] * STATUSES
        """By status: the weights of its members together."""
        self.pinned = [0] * STATUSES
        """By status: the sessions pinned to its members, whatever selector they came by."""
        self.used = False
        """Looked up since the cache last went round; the cache's own."""
        self.evicted = False
        """No longer kept up to date."""
        self.narrowed: dict[tuple[str, str], Pool] = {}
        """By (agent type, version): pools of a part of the members; `version_policy`'s own."""
        self._turns: Turns | None = None
        self._levels: Levels | None = None
        self._ring: Ring | None = None
        self._stale_names: set[str] = set()

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.members.values())

    @property
    def has_usable(self) -> bool:
        """Whether some member can be given a request now."""
        return any(self.tiers[number].agents for number in range(USABLE_TIERS))

    def first_usable(self, limit: int) -> list[Agent]:
        """Up to so many members that can be given a request now, best tier first."""
        found: list[Agent] = []
        for number in range(USABLE_TIERS):
            found += self.tiers[number].agents[: limit - len(found)]
        return found

    @property
    def is_full(self) -> bool:
        """Whether capacity alone is why nobody can be given a request: OVERLOADED, not NO_AGENT_AVAILABLE."""
        return bool(self.tiers[FULL].agents) and not self.has_usable

    def counts(self) -> dict[str, int]:
        """How many members are in which state, zeros left out, in the order of a sentence."""
        sizes = [len(tier.agents) for tier in self.tiers]
        named = {
            "ready": sizes[READY] + sizes[READY_AVOIDED],
            "degraded": sizes[WEAK] + sizes[WEAK_AVOIDED],
            "full": sizes[FULL],
            "shut out by a breaker": sizes[BROKEN],
            "draining": sizes[LEAVING],
            "starting": sizes[NOT_STARTED],
            "unreachable": sizes[LOST],
        }
        return {name: size for name, size in named.items() if size}

    def why_unusable(self) -> str:
        """The counts as text for messages, e.g. `3 draining, 2 starting`."""
        return ", ".join(f"{size} {name}" for name, size in self.counts().items()) or "none registered"

    @property
    def turns(self) -> Turns:
        """Whose turn it is."""
        if self._turns is None:
            self._turns = Turns(self.tiers)
        return self._turns

    @property
    def levels(self) -> Levels:
        """The usable tiers by priority."""
        if self._levels is None:
            self._levels = Levels(self.tiers)
        return self._levels

    @property
    def ring(self) -> Ring:
        """All members, whatever their state, by weight: a passing failure moves no other keys. Built on first use."""
        ring, stale = self._ring, self._stale_names
        if ring is None or len(stale) * _REBUILD_SHARE > len(self.members):
            ring = self._ring = Ring({name: agent.weight for name, agent in self.members.items()})
        else:
            for name in stale:
                agent = self.members.get(name)
                if agent is None:
                    ring.remove(name)
                else:
                    ring.add(name, agent.weight)
        stale.clear()
        return ring

    def add(self, agent: Agent) -> None:
        """The directory's: a matching agent came."""
        self.members[agent.agent_id] = agent
        self.weights[agent.status_placed] += agent.weight_placed
        self.pinned[agent.status_placed] += agent.pinned_sessions
        self.tiers[agent.tier].add(agent)
        if self._turns is not None:
            self._turns.enter(agent, agent.tier)
        if self._levels is not None:
            self._levels.enter(agent, agent.tier)
        self._weigh(agent)

    def remove(self, agent: Agent) -> None:
        """The directory's: a matching agent went."""
        del self.members[agent.agent_id]
        self.weights[agent.status_placed] -= agent.weight_placed
        self.pinned[agent.status_placed] -= agent.pinned_sessions
        self.tiers[agent.tier].remove(agent)
        if self._turns is not None:
            self._turns.leave(agent)
        if self._levels is not None:
            self._levels.leave(agent)
        if self._ring is not None:
            self._stale_names.add(agent.agent_id)

    def recount(self, agent: Agent) -> None:
        """The directory's: a member's status or weight differs from what is placed."""
        old, new = agent.status_placed, agent.status
        self.weights[old] -= agent.weight_placed
        self.weights[new] += agent.weight
        self.pinned[old] -= agent.pinned_sessions
        self.pinned[new] += agent.pinned_sessions
        if agent.weight != agent.weight_placed:
            self._weigh(agent)

    def _weigh(self, agent: Agent) -> None:
        if agent.weight > self.weight_max:
            self.weight_max = agent.weight
        if self._ring is not None:
            self._stale_names.add(agent.agent_id)

    def move(self, agent: Agent, old: int, new: int) -> None:
        """Put a member from one tier into another."""
        self.tiers[old].remove(agent)
        self.tiers[new].add(agent)
        if self._turns is not None:
            self._turns.enter(agent, new)
        if self._levels is not None:
            self._levels.enter(agent, new)

    def set_aside(self, agent: Agent) -> None:
        """Take a member out of its tier until `put_back`, within one decision (it is excluded from that)."""
        self.tiers[agent.tier].remove(agent)
        if self._levels is not None:
            self._levels.leave(agent)

    def put_back(self, agent: Agent) -> None:
        """End `set_aside`."""
        self.tiers[agent.tier].add(agent)
        if self._turns is not None:
            self._turns.enter(agent, agent.tier)
        if self._levels is not None:
            self._levels.enter(agent, agent.tier)
