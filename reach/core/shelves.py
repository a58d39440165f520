"""The queues of a node's wait queue, in the order in which a freed slot looks at them.

Queues stand on shelves, one for each property that every match of their selectors has (`Selector.anchor`): an agent
is looked for on the few shelves of its own properties. On a shelf the queue with the best head is first. Heads change
with every step; a queue's place in the heap is put right when it comes to the top, so it may be too good but never too
bad, and a step costs O(log queues) however many agents a queue could be served by.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import exp
from typing import TYPE_CHECKING, Generic, TypeVar

from agentreach.policy.wheel import Token
from reach.core.fair import FairLevel
from reach.core.shares import Shares

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.selector import Anchor, Selector

T = TypeVar("T", bound=Hashable)

LEVELS = 3

RATE_OVER_S = 10.0  # the drain rate is that of about the last so many seconds
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 0.1, 30.0
RETRY_AFTER_S_UNKNOWN = 1.0  # nothing has left yet
_HEAP_SLACK = 64  # stale entries a heap may hold beyond twice its live ones before it is built again

QueueKey = tuple["Selector", frozenset[str]]
"""Whom it waits for, and the agent_ids that must not get it (TASK's re-route)."""
Scope = tuple[str, str, "Anchor"]
"""(tenant, env, anchor) of a shelf."""


class Entry(Generic[T]):
    """One waiting item. `number` counts the entries of the node as they came; `since` is when it did."""

    __slots__ = (
        "age_s",
        "ages_at",
        "item",
        "level",
        "number",
        "principal",
        "queue",
        "since",
        "size",
        "token",
        "weight",
    )

    def __init__(
        self,
        item: T,
        queue: Queue[T],
        number: int,
        level: int,
        principal: Hashable,
        weight: float,
        size: int,
        since: float,
        age_s: float,
    ) -> None:
        self.item = item
        self.queue = queue
        self.number = number
        self.level = level
        self.principal = principal
        self.weight = weight
        self.size = size
        self.since = since
        self.age_s = age_s
        self.ages_at = since
        self.token: Token | None = None


class DrainRate:
    """How many entries a second leave for a slot; older ones count less, by e for every ten seconds."""

    __slots__ = ("_at", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def took(self, now: float) -> None:
        """One left."""
        self._rate = self.per_s(now) + 1.0 / RATE_OVER_S
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate now."""
        return self._rate * exp(min(0.0, self._at - now) / RATE_OVER_S)

    def retry_after_s(self, waiting: int, now: float) -> float:
        """When about half of those waiting will have left."""
        if not self._rate:
            return RETRY_AFTER_S_UNKNOWN
        rate = max(self.per_s(now), 1e-9)
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, waiting / 2 / rate))


class Queue(Generic[T]):
    """One selector's entries."""

    __slots__ = ("drain", "key", "levels", "posted", "shares", "shelf")

    def __init__(self, key: QueueKey, shelf: Shelf[T]) -> None:
        self.key = key
        self.shelf = shelf
        self.levels: list[FairLevel[Entry[T]]] = [FairLevel() for _ in range(LEVELS)]
        self.shares: Shares[Entry[T]] = Shares()
        self.drain = DrainRate()
        self.posted = (LEVELS, 0)
        """Where its shelf's heap has it: at its head's place, or ahead of that."""

    def head(self) -> Entry[T] | None:
        """The entry that is next, of the highest level in which one waits."""
        for level in self.levels:
            if level.size:
                return level.head()
        return None

    def serves(self, agent: Agent) -> bool:
        """Whether a slot of the agent is one that these wait for."""
        selector, without = self.key
        return selector.matches(agent) and agent.agent_id not in without


class Shelf(Generic[T]):
    """The queues of one anchor, best head first. A queue's place in the heap may be too good, never too bad."""

    __slots__ = ("heap", "queues", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.queues: dict[QueueKey, Queue[T]] = {}
        self.heap: list[tuple[tuple[int, int], int, Queue[T]]] = []

    def post(self, queue: Queue[T], serial: int) -> None:
        """The queue's head may have become better: see to its place."""
        head = queue.head()
        if head is None or queue.posted <= (head.level, head.number):
            return
        queue.posted = (head.level, head.number)
        if len(self.heap) > 2 * len(self.queues) + _HEAP_SLACK:
            self.heap = [place for place in self.heap if place[0] == place[2].posted]
            heapify(self.heap)
        heappush(self.heap, (queue.posted, serial, queue))

    def best(self, agent: Agent, better_than: tuple[int, int]) -> Queue[T] | None:
        """The queue that serves the agent with the best head, if that is better than another."""
        heap = self.heap
        others = []
        found = None
        while heap and heap[0][0] < better_than:
            place, serial, queue = heap[0]
            head = queue.head()
            if place != queue.posted or head is None:
                heappop(heap)
            elif place != (head.level, head.number):
                heappop(heap)
                queue.posted = (head.level, head.number)
                heappush(heap, (queue.posted, serial, queue))
            elif queue.serves(agent):
                found = queue
                break
            else:
                others.append(heappop(heap))
        for other in others:
            heappush(heap, other)
        return found
