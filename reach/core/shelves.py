"""The queues of a node's wait queue, in the order in which a freed slot looks at them.

Queues stand on shelves, one for each property that every match of their selectors has: an agent's waiters are on the
few shelves of its own properties. The rarest kind of property names the shelf, so that few stand there which ask for
something else besides. On a shelf the queue with the best head is first. Heads change
with every step; a queue's place in the heap is put right when it comes to the top, so it may be too good but never too
bad, and a step costs O(log queues) however many agents a queue could be served by.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import TYPE_CHECKING, Generic, TypeVar

from agentreach.policy.wheel import Token
from reach.core.fair import FairLevel
from reach.core.selector import anchors_of
from reach.core.shares import Shares

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.selector import Selector

T = TypeVar("T", bound=Hashable)

LEVELS = 3

RATE_OVER_S = 10.0  # the drain rate is that of about the last so many seconds
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 0.1, 30.0
RETRY_AFTER_S_UNKNOWN = 1.0  # nothing has left yet
_SERVED_MAX = 4096  # agents whose match with a queue's selector is remembered
_HEAP_SLACK = 64  # stale entries a heap may hold beyond twice its live ones before it is built again

QueueKey = tuple["Selector", frozenset[str]]
"""Whom it waits for, and the agent_ids that must not get it (TASK's re-route)."""


Property = tuple[str, str]
"""A kind of property ("id", "label", "capability", "type", or "any" for selectors with none) and its value."""


def property_of(selector: Selector) -> Property:
    """The shelf that a selector's queue stands on."""
    if selector.labels and not selector.agent_id:
        key, value = min(selector.labels)
        return ("label", f"{key}={value}")
    if selector.capabilities and not selector.agent_id:
        return ("capability", min(selector.capabilities))
    return selector.anchor


def properties_of(agent: Agent) -> list[Property]:
    """All shelves on which queues may stand that an agent serves."""
    return [*anchors_of(agent), *[("label", f"{key}={value}") for key, value in agent.labels.items()]]


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

    __slots__ = ("_at", "_new", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        self._new = 0
        self._at = 0.0

    def took(self, now: float) -> None:
        """One left."""
        self._new += 1
        if now - self._at >= 1.0:
            self.per_s(now)

    def per_s(self, now: float) -> float:
        """The rate now."""
        self._rate = self._rate * exp(min(0.0, self._at - now) / RATE_OVER_S) + self._new / RATE_OVER_S
        self._new = 0
        self._at = now
        return self._rate

    def retry_after_s(self, waiting: int, now: float) -> float:
        """When about half of those waiting will have left."""
        rate = self.per_s(now)
        if not rate:
            return RETRY_AFTER_S_UNKNOWN
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, waiting / 2 / max(rate, 1e-9)))


class Queue(Generic[T]):
    """One selector's entries."""

    __slots__ = ("_served", "drain", "entries", "key", "levels", "posted", "shares", "shelf")

    def __init__(self, key: QueueKey, shelf: Shelf[T]) -> None:
        self.key = key
        self.shelf = shelf
        self.entries: dict[Entry[T], None] = {}
        """As they came."""
        self.levels: list[FairLevel[Entry[T]]] = [FairLevel() for _ in range(LEVELS)]
        self.shares = Shares()
        self.drain = DrainRate()
        self.posted = (LEVELS, 0)
        """Where its shelf's heap has it: at its head's place, or ahead of that."""
        self._served: dict[Agent, bool] = {}

    def head(self) -> Entry[T] | None:
        """The entry that is next, of the highest level in which one waits."""
        for level in self.levels:
            if level.size:
                return level.head()
        return None

    def pop(self) -> Entry[T]:
        """Take it out of its level. `IndexError` if there is none."""
        for level in self.levels:
            if level.size:
                return level.pop()
        raise IndexError("nothing is waiting")

    def serves(self, agent: Agent) -> bool:
        """Whether a slot of the agent is one that these wait for. (What decides that does not change; it is kept.)"""
        found = self._served.get(agent)
        if found is None:
            selector, without = self.key
            if len(self._served) >= _SERVED_MAX:
                self._served.clear()
            found = self._served[agent] = selector.matches(agent) and agent.agent_id not in without
        return found


class Shelf(Generic[T]):
    """The queues of one property, best head first. A queue's place in the heap may be too good, never too bad."""

    __slots__ = ("heap", "property", "queues", "scope")

    def __init__(self, scope: tuple[str, str], named: Property) -> None:
        self.scope = scope
        self.property = named
        self.queues: dict[QueueKey, Queue[T]] = {}
        self.heap: list[tuple[tuple[int, int], int, Queue[T]]] = []

    def concerns(self, agent: Agent) -> bool:
        """Whether the agent, which is of the same tenant and env, has the property."""
        kind, name = self.property
        if kind == "type":
            return agent.agent_type == name
        if kind == "capability":
            return name in agent.offers
        if kind == "id":
            return agent.agent_id == name
        return kind != "label" or any(f"{key}={value}" == name for key, value in agent.labels.items())

    def post(self, queue: Queue[T], serial: int) -> None:
        """The queue's head may have changed: see that it is not better than its place says."""
        head = queue.head()
        if head is None:
            return
        place = (head.level, head.number)
        heap = self.heap
        if heap and heap[0][2] is queue and heap[0][0] == queue.posted:
            queue.posted = place
            heapreplace(heap, (place, serial, queue))
        elif place < queue.posted:
            queue.posted = place
            if len(heap) > 2 * len(self.queues) + _HEAP_SLACK:
                heap[:] = [other for other in heap if other[0] == other[2].posted]
                heapify(heap)
            heappush(heap, (place, serial, queue))

    def best(self, agent: Agent, better_than: tuple[int, int]) -> Queue[T] | None:
        """The queue that serves the agent with the best head, if that is better than another."""
        heap = self.heap
        others = []
        found = None
        while heap and heap[0][0] < better_than:
            place, serial, queue = heap[0]
            if place != queue.posted:
                heappop(heap)
                continue
            head = queue.head()
            if head is None:
                heappop(heap)
            elif head.number != place[1] or head.level != place[0]:
                queue.posted = (head.level, head.number)
                heapreplace(heap, (queue.posted, serial, queue))
            elif queue.serves(agent):
                found = queue
                break
            else:
                others.append(heappop(heap))
        for other in others:
            heappush(heap, other)
        return found
