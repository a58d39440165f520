"""Where requests wait for a slot: one queue per selector, and which waiter a freed slot goes to (behaviour.md §6).

Three levels, HIGH before NORMAL before LOW. After min(30 s, a quarter of its time) an entry goes one level up, behind
who is there, so the lowest has passed all levels in half its time. Within a level principals take turns (`fair`). A
freed slot goes to the best head among the queues whose selector matches the agent: the highest level, then the oldest.

An entry leaves by `take`, by `remove` (its deadline came, its caller cancelled), or because somebody with less than an
equal part needed its place (`push` says so). Deadlines are not watched here: every request has its own timer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple

from agentreach.policy.wheel import TimerWheel
from reach.core.selector import anchors_of
from reach.core.shares import Shares
from reach.core.shelves import LEVELS, DrainRate, Entry, Queue, QueueKey, Scope, Shelf, T

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.selector import Selector

HIGH, NORMAL, LOW = range(LEVELS)

ENTRIES_MAX = 10_000
SELECTOR_MAX = 1_000
BYTES_MAX = 32 << 20
AGE_S_MAX = 30.0
AGE_SHARE = 0.25
DISPLACED_MAX = 64  # entries that may make room, by bytes, for one; if it took more the newcomer is refused


class Pushed(NamedTuple, Generic[T]):
    """Whether the item waits now, and those who lost their place to it (mostly nobody)."""

    waits: bool
    displaced: list[T]


class WaitQueues(Generic[T]):
    """All that waits on one node. `now` is the boot clock, in seconds, and does not run backwards.

    Items are hashable and wait at most once. Pushing, taking and removing cost O(log waiting), besides a look at each
    better queue of the same type or capability that does not serve the agent.
    """

    def __init__(
        self, *, entries_max: int = ENTRIES_MAX, selector_max: int = SELECTOR_MAX, bytes_max: int = BYTES_MAX
    ) -> None:
        self._entries_max = entries_max
        self._selector_max = selector_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[T, Entry[T]] = OrderedDict()
        self._queues: dict[QueueKey, Queue[T]] = {}
        self._shelves: dict[Scope, Shelf[T]] = {}
        self._counts: Shares[Entry[T]] = Shares()
        self._bytes: Shares[Entry[T]] = Shares()
        self._ageing: TimerWheel[Entry[T]] = TimerWheel()
        self._drain = DrainRate()
        self._number = 0
        self._serial = 0
        self.held_elsewhere = 0
        """Bytes in lanes and move buffers, which are under the same bound; their owners keep this."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    @property
    def bytes_held(self) -> int:
        """What is under the node's bound of bytes: what waits here, and `held_elsewhere`."""
        return self._bytes.size + self.held_elsewhere

    @property
    def queues(self) -> int:
        """Queues that are not empty."""
        return len(self._queues)

    def size(self, selector: Selector, without: frozenset[str] = frozenset()) -> int:
        """How many wait for a selector."""
        queue = self._queues.get((selector, without))
        return 0 if queue is None else queue.shares.size

    def waiting(self, selector: Selector, without: frozenset[str] = frozenset()) -> Iterator[T]:
        """Those who wait for a selector, in no particular order."""
        queue = self._queues.get((selector, without))
        if queue is not None:
            for entry in queue.shares:
                yield entry.item

    def shelf_of(self, selector: Selector) -> Shelf[T] | None:
        """The shelf that a selector's queue stands on, if any queue stands there."""
        return self._shelves.get((selector.tenant, selector.env, selector.anchor))

    def level_of(self, item: T) -> int:
        """The level it has come to. `KeyError` if it does not wait."""
        return self._entries[item].level

    def oldest_s(self, now: float) -> float:
        """How long the one that came first has waited; 0.0 if nobody waits."""
        return now - self._entries[next(iter(self._entries))].since if self._entries else 0.0

    def retry_after_s(self, selector: Selector, now: float, without: frozenset[str] = frozenset()) -> float:
        """What to tell one who is refused: when about half of those who wait before it will have left."""
        queue = self._queues.get((selector, without))
        if queue is not None and queue.shares.size >= self._selector_max:
            return queue.drain.retry_after_s(queue.shares.size, now)
        return self._drain.retry_after_s(len(self._entries), now)

    def push(
        self,
        item: T,
        selector: Selector,
        *,
        level: int,
        principal: Hashable,
        size: int,
        time_s: float,
        now: float,
        weight: float = 1.0,
        without: frozenset[str] = frozenset(),
    ) -> Pushed[T]:
        """Let an item wait, if there is room or can be made.

        `level` is HIGH, NORMAL or LOW, `size` its bytes, `time_s` the time it has from its arrival to its deadline.
        Those who lost their place wait no longer: they are OVERLOADED, and were never started. `ValueError` if it
        waits already.
        """
        if item in self._entries:
            raise ValueError("it waits already")
        self.age(now)
        key = (selector, without)
        displaced = self._make_room(key, principal, size)
        if displaced is None:
            return Pushed(False, [])
        queue = self._queues.get(key) or self._open(key)
        self._number += 1
        age_s = min(AGE_S_MAX, AGE_SHARE * time_s)
        entry = Entry(item, queue, self._number, level, principal, weight, size, now, age_s)
        self._entries[item] = entry
        for shares, amount in ((queue.shares, 1), (self._counts, 1), (self._bytes, size)):
            shares.add(entry, principal, amount)
        self._enter(entry)
        return Pushed(True, displaced)

    def remove(self, item: T) -> bool:
        """The item waits no longer. False if it did not."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        entry.queue.levels[entry.level].remove(entry, entry.principal)
        self._left(entry)
        return True

    def take(self, agent: Agent, now: float) -> T | None:
        """The one to whom a free slot of the agent goes; it waits no longer. None: nobody waits for this agent."""
        queue = self._best(agent, now)
        if queue is None:
            return None
        entry = next(level for level in queue.levels if level.size).pop()
        self._left(entry)
        queue.drain.took(now)
        self._drain.took(now)
        return entry.item

    def head(self, agent: Agent, now: float) -> T | None:
        """The one that `take` would give."""
        queue = self._best(agent, now)
        head = queue.head() if queue is not None else None
        return head.item if head is not None else None

    def age(self, now: float) -> None:
        """Let those whose time has come go one level up. `push`, `take` and `head` do it by themselves."""
        while (at := self._ageing.next_at()) is not None and at <= now:
            for entry in self._ageing.due(at):
                entry.queue.levels[entry.level].remove(entry, entry.principal)
                entry.level -= 1
                self._enter(entry)

    def _best(self, agent: Agent, now: float) -> Queue[T] | None:
        if not self._entries:
            return None
        self.age(now)
        found, place = None, (LEVELS, 0)
        for anchor in anchors_of(agent):
            shelf = self._shelves.get((agent.tenant, agent.env, anchor))
            queue = shelf.best(agent, place) if shelf is not None else None
            if queue is not None:
                found, place = queue, queue.posted
        return found

    def _enter(self, entry: Entry[T]) -> None:
        queue = entry.queue
        queue.levels[entry.level].add(entry, entry.principal, entry.weight)
        entry.token = None
        if entry.level:
            entry.ages_at += entry.age_s
            entry.token = self._ageing.schedule(entry, entry.ages_at)
        self._serial += 1
        queue.shelf.post(queue, self._serial)

    def _left(self, entry: Entry[T]) -> None:
        """Give back all that an entry holds but its place in its level."""
        queue = entry.queue
        if entry.token is not None:
            self._ageing.cancel(entry.token, entry)
        del self._entries[entry.item]
        for shares in (queue.shares, self._counts, self._bytes):
            shares.remove(entry, entry.principal)
        if not queue.shares.size:
            self._close(queue)
            return
        self._serial += 1
        queue.shelf.post(queue, self._serial)

    def _make_room(self, key: QueueKey, principal: Hashable, size: int) -> list[T] | None:
        """Those who give way for one more entry, taken out; None if it would take more than is fair."""
        queue = self._queues.get(key)
        leaving: list[Entry[T]] | None = []
        if queue is not None and queue.shares.size >= self._selector_max:
            leaving = queue.shares.give_way(principal, 1, 1)
        elif self._counts.size >= self._entries_max:
            leaving = self._counts.give_way(principal, 1, 1)
        excess = self.bytes_held + size - self._bytes_max
        if leaving is not None and excess > 0:
            more = self._bytes.give_way(principal, size, excess, DISPLACED_MAX)
            leaving = None if more is None else list(dict.fromkeys(leaving + more))
        if leaving is None:
            return None
        items = [entry.item for entry in leaving]
        for item in items:
            self.remove(item)
        return items

    def _open(self, key: QueueKey) -> Queue[T]:
        selector = key[0]
        shelf = self.shelf_of(selector)
        if shelf is None:
            scope = (selector.tenant, selector.env, selector.anchor)
            shelf = self._shelves[scope] = Shelf(scope)
        queue = self._queues[key] = shelf.queues[key] = Queue(key, shelf)
        return queue

    def _close(self, queue: Queue[T]) -> None:
        queue.posted = (-1, 0)  # no place in the heap is like this: those it has are stale
        del self._queues[queue.key]
        shelf = queue.shelf
        del shelf.queues[queue.key]
        if not shelf.queues:
            del self._shelves[shelf.scope]
