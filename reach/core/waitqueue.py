"""Where requests wait for a slot: one queue per selector, and which waiter a freed slot goes to (behaviour.md §6).

Three levels, HIGH before NORMAL before LOW. After min(30 s, a quarter of its time) an entry goes one level up, behind
who is there, so the lowest has passed all levels in half its time. Within a level principals take turns (`fair`). A
freed slot goes to the best head among the queues whose selector matches the agent: the highest level, then the oldest.

An entry leaves by `take`, by `remove` (its deadline came, its caller cancelled), or because somebody with less than an
equal part needed its place (`push` says so). Deadlines are not watched here: every request has its own timer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from agentreach.policy.wheel import TimerWheel
from reach.core.shares import Shares
from reach.core.shelves import LEVELS, DrainRate, Entry, Property, Queue, QueueKey, Shelf, T, properties_of, property_of

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.selector import Selector

HIGH, NORMAL, LOW = range(LEVELS)

ENTRIES_MAX = 10_000
SELECTOR_MAX = 1_000
BYTES_MAX = 32 << 20
AGE_S_MAX = 30.0
AGE_SHARE = 0.25
FEW_SHELVES = 8  # are looked through; of more, those of the agent's properties are looked up
DISPLACED_MAX = 64  # entries that may make room, by bytes, for one; if it took more the newcomer is refused


class Pushed(NamedTuple, Generic[T]):
    """Whether the item waits now, and those who lost their place to it (mostly nobody)."""

    waits: bool
    displaced: tuple[T, ...]


_WAITS: Pushed[Any] = Pushed(True, ())
_REFUSED: Pushed[Any] = Pushed(False, ())


class WaitQueues(Generic[T]):
    """All that waits on one node. `now` is the boot clock, in seconds, and does not run backwards.

    Items are hashable and wait at most once. Pushing, taking and removing cost O(log waiting), besides a look at each
    better queue on the agent's shelves that does not serve it.
    """

    def __init__(
        self, *, entries_max: int = ENTRIES_MAX, selector_max: int = SELECTOR_MAX, bytes_max: int = BYTES_MAX
    ) -> None:
        self._entries_max = entries_max
        self._selector_max = selector_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[T, Entry[T]] = OrderedDict()
        self._queues: dict[QueueKey, Queue[T]] = {}
        self._scopes: dict[tuple[str, str], dict[Property, Shelf[T]]] = {}
        self._counts = Shares()
        self._bytes = Shares()
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

    def keys_now(self) -> list[QueueKey]:
        """Selector and exclusions of every queue that is not empty."""
        return list(self._queues)

    def size(self, selector: Selector, without: frozenset[str] = frozenset()) -> int:
        """How many wait for a selector."""
        queue = self._queues.get((selector, without))
        return 0 if queue is None else len(queue.entries)

    def waiting(self, selector: Selector, without: frozenset[str] = frozenset()) -> Iterator[T]:
        """Those who wait for a selector, as they came."""
        queue = self._queues.get((selector, without))
        if queue is not None:
            for entry in queue.entries:
                yield entry.item

    def first(self, selector: Selector, now: float) -> T | None:
        """Whose turn it is of those who wait for a selector, wherever a slot comes free."""
        self.age(now)
        queue = self._queues.get((selector, frozenset()))
        head = queue.head() if queue is not None else None
        return head.item if head is not None else None

    def shelf_of(self, selector: Selector) -> Shelf[T] | None:
        """The shelf that a selector's queue stands on, if any queue stands there."""
        return self._scopes.get((selector.tenant, selector.env), {}).get(property_of(selector))

    def level_of(self, item: T) -> int:
        """The level it has come to. `KeyError` if it does not wait."""
        return self._entries[item].level

    def oldest_s(self, now: float) -> float:
        """How long the one that came first has waited; 0.0 if nobody waits."""
        return now - self._entries[next(iter(self._entries))].since if self._entries else 0.0

    def retry_after_s(self, selector: Selector, now: float, without: frozenset[str] = frozenset()) -> float:
        """What to tell one who is refused: when about half of those who wait before it will have left."""
        queue = self._queues.get((selector, without))
        if queue is not None and len(queue.entries) >= self._selector_max:
            return queue.drain.retry_after_s(len(queue.entries), now)
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

        `level` is HIGH, NORMAL or LOW, `size` its bytes (0 counts as 1), `time_s` the time from its arrival to its
        deadline. Those who lost their place wait no longer: they are OVERLOADED, and were never started. `ValueError`
        if it waits already.
        """
        if item in self._entries:
            raise ValueError("it waits already")
        self.age(now)
        key = (selector, without)
        queue = self._queues.get(key)
        size = size or 1
        pushed: Pushed[T] = _WAITS
        is_full = queue is not None and len(queue.entries) >= self._selector_max
        if is_full or len(self._entries) >= self._entries_max or self.bytes_held + size > self._bytes_max:
            leaving = self._who_gives_way(queue if is_full else None, principal, size)
            if leaving is None:
                return _REFUSED
            pushed = Pushed(True, tuple([entry.item for entry in leaving]))
            for displaced in pushed.displaced:
                self.remove(displaced)
            queue = self._queues.get(key)  # it may have been closed with its last
        if queue is None:
            queue = self._open(key)
        self._number += 1
        age_s = min(AGE_S_MAX, AGE_SHARE * time_s)
        entry = Entry(item, queue, self._number, level, principal, weight, size, now, age_s)
        self._entries[item] = entry
        queue.entries[entry] = None
        queue.shares.add(principal)
        self._counts.add(principal)
        self._bytes.add(principal, size)
        self._enter(entry)
        return pushed

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
        entry = queue.pop()
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
        for shelf in self._shelves_for(agent):
            queue = shelf.best(agent, place)
            if queue is not None:
                found, place = queue, queue.posted
        return found

    def _shelves_for(self, agent: Agent) -> Iterable[Shelf[T]]:
        shelves = self._scopes.get((agent.tenant, agent.env))
        if shelves is None:
            return ()
        if len(shelves) <= FEW_SHELVES:
            return [shelf for shelf in shelves.values() if shelf.concerns(agent)]
        return [shelves[named] for named in properties_of(agent) if named in shelves]

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
        del queue.entries[entry]
        principal = entry.principal
        queue.shares.remove(principal)
        self._counts.remove(principal)
        self._bytes.remove(principal, entry.size)
        if not queue.entries:
            self._close(queue)
            return
        self._serial += 1
        queue.shelf.post(queue, self._serial)

    def _who_gives_way(self, full: Queue[T] | None, principal: Hashable, size: int) -> Iterable[Entry[T]] | None:
        """Those who make room for one more entry, in a full queue or on the node; None: it would not be fair."""
        leaving: dict[Entry[T], None] = {}
        if full is not None or len(self._entries) >= self._entries_max:
            shares = full.shares if full is not None else self._counts
            largest = shares.who_gives_way(principal)
            if largest is None:
                return None
            youngest = reversed(full.entries) if full is not None else reversed(self._entries.values())
            leaving[next(entry for entry in youngest if entry.principal == largest)] = None
        excess = self.bytes_held + size - self._bytes_max
        if excess > 0:
            largest = self._bytes.who_gives_way(principal, size)
            if largest is None:
                return None
            found = 0
            for entry in reversed(self._entries.values()):
                if entry.principal == largest:
                    leaving[entry] = None
                    found += 1
                    excess -= entry.size
                    if excess <= 0 or found == DISPLACED_MAX:
                        break
        return leaving if excess <= 0 else None

    def _open(self, key: QueueKey) -> Queue[T]:
        selector = key[0]
        scope, named = (selector.tenant, selector.env), property_of(selector)
        shelves = self._scopes.setdefault(scope, {})
        shelf = shelves.get(named)
        if shelf is None:
            shelf = shelves[named] = Shelf(scope, named)
        queue = self._queues[key] = shelf.queues[key] = Queue(key, shelf)
        return queue

    def _close(self, queue: Queue[T]) -> None:
        queue.posted = (-1, 0)  # no place in the heap is like this: those it has are stale
        del self._queues[queue.key]
        shelf = queue.shelf
        del shelf.queues[queue.key]
        if not shelf.queues:
            shelves = self._scopes[shelf.scope]
            del shelves[shelf.property]
            if not shelves:
                del self._scopes[shelf.scope]
