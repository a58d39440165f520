from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.agents import Agent
from reach.core.requests import Request, Waiter
from reach.core.selector import Selector
from reach.core.waitqueue import HIGH, LOW, NORMAL, WaitQueues
from tests.unit.core.mesh_of_agents import agent

AGENTS = [
    agent("a/1", capabilities=["c"], labels={"zone": "x"}),
    agent("a/2"),
    agent("b/1", capabilities=["c", "d"], version="2.0"),
    agent("a/1", tenant="other"),
]
SELECTORS = [
    Selector("t", "production", agent_type="a"),
    Selector("t", "production", agent_type="a", labels=frozenset({("zone", "x")})),
    Selector("t", "production", agent_id="a/2"),
    Selector("t", "production", capabilities=frozenset({"c"})),
    Selector("t", "production", version=">=2"),
    Selector("t", "production", capabilities=frozenset({"c"}), labels=frozenset({("zone", "x")})),
    Selector("other", "production", agent_type="a"),
]
OF_A = SELECTORS[0]
A1, A2 = AGENTS[:2]

Key = tuple[Selector, frozenset[str]]


def push(
    queues: WaitQueues[str],
    item: str,
    *,
    principal: str = "p",
    level: int = NORMAL,
    now: float = 0.0,
    time_s: float = 1000.0,
    size: int = 100,
    selector: Selector = OF_A,
    weight: float = 1.0,
    without: frozenset[str] = frozenset(),
) -> list[str] | None:
    """Those displaced, or None if it was refused."""
    pushed = queues.push(
        item,
        selector,
        level=level,
        principal=principal,
        size=size,
        time_s=time_s,
        now=now,
        weight=weight,
        without=without,
    )
    return list(pushed.displaced) if pushed.waits else None


def drained(queues: WaitQueues[str], by: Agent = A1, now: float = 0.0) -> list[str]:
    found = []
    while (item := queues.take(by, now)) is not None:
        found.append(item)
    return found


# ---- beside one who looks at everything ----


@dataclass
class TwinEntry:
    item: str
    key: Key
    level: int
    principal: str
    number: int
    since: float
    age_s: float
    ages_at: float
    place: int = 0


@dataclass
class Twin:
    """The same queues as one list, searched from end to end each time."""

    entries: list[TwinEntry] = field(default_factory=list)
    start: dict[tuple[Key, int, str], float] = field(default_factory=dict)
    virtual: dict[tuple[Key, int], float] = field(default_factory=dict)
    number: int = 0
    place: int = 0

    def at(self, key: Key, level: int) -> list[TwinEntry]:
        return sorted(
            (entry for entry in self.entries if entry.key == key and entry.level == level), key=lambda e: e.place
        )

    def enter(self, entry: TwinEntry) -> None:
        turn, virtual = (entry.key, entry.level, entry.principal), self.virtual.get((entry.key, entry.level), 0.0)
        if entry.principal not in [other.principal for other in self.at(entry.key, entry.level)]:
            self.start[turn] = max(self.start.get(turn, 0.0), virtual)
        self.place += 1
        entry.place = self.place
        entry.ages_at += entry.age_s
        self.entries.append(entry)

    def push(self, item: str, key: Key, level: int, principal: str, time_s: float, now: float) -> None:
        self.age(now)
        self.number += 1
        self.enter(TwinEntry(item, key, level, principal, self.number, now, min(30.0, time_s / 4), now))

    def age(self, now: float) -> None:
        while due := [entry for entry in self.entries if entry.level and entry.ages_at <= now]:
            first = min(due, key=lambda entry: (entry.ages_at, entry.place))
            self.entries.remove(first)
            first.level -= 1
            self.enter(first)

    def head(self, key: Key) -> TwinEntry | None:
        for level in (HIGH, NORMAL, LOW):
            firsts = {entry.principal: entry for entry in reversed(self.at(key, level))}
            if firsts:
                return min(firsts.values(), key=lambda e: (self.start[key, level, e.principal], e.place))
        return None

    def best(self, by: Agent, now: float) -> TwinEntry | None:
        self.age(now)
        keys = {entry.key for entry in self.entries}
        heads = [self.head(key) for key in keys if key[0].matches(by) and by.agent_id not in key[1]]
        return min((head for head in heads if head), key=lambda head: (head.level, head.number), default=None)

    def take(self, by: Agent, now: float) -> str | None:
        entry = self.best(by, now)
        if entry is None:
            return None
        turn = (entry.key, entry.level, entry.principal)
        self.virtual[entry.key, entry.level] = self.start[turn]
        self.start[turn] += 1.0
        self.drop(entry)
        return entry.item

    def drop(self, entry: TwinEntry) -> None:
        self.entries.remove(entry)
        if not any(other.key == entry.key for other in self.entries):  # an empty queue is forgotten
            self.start = {turn: start for turn, start in self.start.items() if turn[0] != entry.key}
            self.virtual = {level: virtual for level, virtual in self.virtual.items() if level[0] != entry.key}


steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "take", "take", "remove", "wait", "head"]),
        st.integers(0, 6),
        st.sampled_from([HIGH, NORMAL, LOW]),
        st.sampled_from(["p", "q", "r"]),
        st.sampled_from([1.0, 4.0, 40.0, 400.0]),
        st.sampled_from([frozenset[str](), frozenset({"a/1"})]),
    ),
    max_size=120,
)


@settings(max_examples=250, deadline=None)
@given(steps, st.integers(0, 1000))
def test_it_serves_like_one_who_looks_at_everything(
    steps: list[tuple[str, int, int, str, float, frozenset[str]]], start: int
) -> None:
    queues: WaitQueues[str] = WaitQueues()
    twin, now = Twin(), float(start)
    for count, (step, number, level, principal, seconds, without) in enumerate(steps):
        if step == "push":
            item, selector = f"i{count}", SELECTORS[number]
            displaced = push(
                queues, item, selector=selector, level=level, principal=principal, time_s=seconds, now=now,
                without=without,
            )  # fmt: skip
            assert displaced == []
            twin.push(item, (selector, without), level, principal, seconds, now)
        elif step == "take":
            by = AGENTS[number % len(AGENTS)]
            assert queues.take(by, now) == twin.take(by, now)
        elif step == "head":
            by = AGENTS[number % len(AGENTS)]
            head = twin.best(by, now)
            assert queues.head(by, now) == (head.item if head else None)
        elif step == "remove" and twin.entries:
            entry = twin.entries[(number * 7 + level) % len(twin.entries)]
            assert queues.remove(entry.item) and not queues.remove(entry.item)
            twin.drop(entry)
        elif step == "wait":
            now += seconds / 4
        assert len(queues) == len(twin.entries)
        oldest = min([entry.since for entry in twin.entries], default=now)
        assert queues.oldest_s(now) == now - oldest
        sizes = Counter(entry.key for entry in twin.entries)
        assert queues.queues == len(sizes)
        assert all(queues.size(*key) == size for key, size in sizes.items())
    for by in AGENTS:
        while (left := queues.take(by, now)) is not None:
            assert left == twin.take(by, now)
        assert twin.take(by, now) is None
    assert queues.bytes_held == 100 * len(twin.entries)


# ---- order ----


def test_higher_levels_go_first_and_within_one_the_order_of_arrival() -> None:
    queues: WaitQueues[str] = WaitQueues()
    for number, level in enumerate([LOW, NORMAL, HIGH, LOW, NORMAL, HIGH]):
        push(queues, f"{level}.{number}", level=level)
    assert drained(queues) == ["0.2", "0.5", "1.1", "1.4", "2.0", "2.3"]


def test_one_tenants_flood_does_not_bury_anothers_one_request() -> None:
    queues: WaitQueues[str] = WaitQueues(selector_max=10_000)
    for number in range(9_999):
        push(queues, f"flood {number}", principal="flood")
    push(queues, "mine", principal="me")
    assert "mine" in (queues.take(A1, 0.0), queues.take(A1, 0.0))


def test_a_freed_slot_goes_to_the_highest_then_oldest_of_the_queues_that_its_agent_serves() -> None:
    queues: WaitQueues[str] = WaitQueues()
    by_id, by_capability = SELECTORS[2], SELECTORS[3]
    push(queues, "oldest", selector=OF_A, now=1.0)
    push(queues, "not for a/2", selector=by_capability, level=HIGH, now=2.0)
    push(queues, "by id", selector=by_id, now=3.0)
    push(queues, "high", selector=by_id, level=HIGH, now=4.0)
    assert drained(queues, A2, 5.0) == ["high", "oldest", "by id"]
    assert drained(queues, A1, 5.0) == ["not for a/2"]


def test_those_that_an_agent_failed_wait_for_another() -> None:
    queues: WaitQueues[str] = WaitQueues()
    push(queues, "rerouted", without=frozenset({"a/1"}))
    assert queues.take(A1, 0.0) is None
    assert queues.take(A2, 0.0) == "rerouted"


def test_a_queue_whose_head_went_away_loses_its_place_before_others() -> None:
    queues: WaitQueues[str] = WaitQueues()
    other = frozenset({"b/9"})
    push(queues, "1")
    push(queues, "2", without=other)
    push(queues, "3")
    push(queues, "4", without=other)
    queues.remove("2")
    assert drained(queues) == ["1", "3", "4"]


def test_waiters_for_other_labels_cost_a_freed_slot_nothing() -> None:
    queues: WaitQueues[str] = WaitQueues()
    strange = [Selector("t", "production", agent_type="a", labels=frozenset({("n", str(n))})) for n in range(500)]
    for number, selector in enumerate(strange):
        push(queues, f"x{number}", selector=selector, level=HIGH)
    push(queues, "mine", selector=SELECTORS[1])
    shelves = {id(queues.shelf_of(selector)) for selector in strange}
    assert len(shelves) == 500 and id(queues.shelf_of(SELECTORS[1])) not in shelves
    assert queues.take(A1, 0.0) == "mine"


# ---- ageing ----


@pytest.mark.parametrize(("time_s", "age_s"), [(8.0, 2.0), (60.0, 15.0), (600.0, 30.0)])
def test_one_level_up_after_a_quarter_of_its_time_and_thirty_seconds_at_most(time_s: float, age_s: float) -> None:
    queues: WaitQueues[str] = WaitQueues()
    push(queues, "low", level=LOW, time_s=time_s, now=100.0)
    levels = []
    for factor in (0.0, 0.99, 1.01, 1.99, 2.01, 5.0):
        queues.age(100.0 + factor * age_s)
        levels.append(queues.level_of("low"))
    assert levels == [LOW, LOW, NORMAL, NORMAL, HIGH, HIGH]


def test_ageing_happens_though_nobody_asked_for_long() -> None:
    queues: WaitQueues[str] = WaitQueues()
    push(queues, "low", level=LOW, time_s=40.0)
    push(queues, "high", level=HIGH, principal="q", now=19.0)
    push(queues, "late", level=HIGH, now=21.0)
    assert drained(queues, now=21.0) == ["high", "low", "late"]


@pytest.mark.parametrize("principal", ["me", "flood"])
def test_low_is_done_within_its_bound_under_steady_high(principal: str) -> None:
    queues: WaitQueues[str] = WaitQueues()
    backlog, done = 20, {}
    for number in range(backlog):
        push(queues, f"high {number}", level=HIGH, principal="flood")
    for number in range(10):
        push(queues, f"low {number}", level=LOW, principal=principal, time_s=60.0)
    for step in range(10 * 60):  # ten a second come, and ten are served
        now = step / 10
        push(queues, f"high {backlog + step}", level=HIGH, principal="flood", now=now)
        served = queues.take(A1, now)
        assert served is not None
        if served.startswith("low"):
            done[served] = now
    assert len(done) == 10
    assert min(done.values()) >= 15.0  # not before its time either
    assert max(done.values()) <= 30.0 + (backlog + 10) / 10 + 2


# ---- bounds ----


def test_a_full_selector_refuses_its_flooder_and_makes_room_for_another() -> None:
    queues: WaitQueues[str] = WaitQueues()
    for number in range(1000):
        assert push(queues, f"flood {number}", principal="flood") == []
    assert push(queues, "one more", principal="flood") is None
    assert push(queues, "mine", principal="me") == ["flood 999"]
    assert queues.size(OF_A) == len(queues) == 1000
    assert "flood 999" not in queues and "one more" not in queues
    assert push(queues, "elsewhere", principal="flood", selector=SELECTORS[3]) == []


def test_many_with_their_part_are_refused_when_it_is_full() -> None:
    queues: WaitQueues[str] = WaitQueues(selector_max=30)
    for number in range(3000):
        push(queues, f"{number}", principal=f"p{number % 3}")
    held = Counter(int(item) % 3 for item in queues.waiting(OF_A))
    assert held == {0: 10, 1: 10, 2: 10}
    assert list(map(int, queues.waiting(OF_A))) == list(range(30))  # nobody was displaced for an equal


def test_a_full_node_takes_no_more_but_from_one_with_less() -> None:
    queues: WaitQueues[str] = WaitQueues(entries_max=10, selector_max=6)
    for number in range(5):
        push(queues, f"x{number}", principal="flood")
        push(queues, f"y{number}", principal="flood", selector=SELECTORS[3])
    assert push(queues, "more", principal="flood") is None
    assert push(queues, "mine", principal="me", selector=SELECTORS[2]) == ["y4"]
    assert len(queues) == 10


def test_bytes_are_bounded_with_what_lanes_hold() -> None:
    queues: WaitQueues[str] = WaitQueues(bytes_max=1000)
    queues.held_elsewhere = 500
    for number in range(5):
        assert push(queues, f"{number}", principal="flood") == []
    assert queues.bytes_held == 1000
    assert push(queues, "more", principal="flood") is None
    assert push(queues, "mine", principal="me", size=150) == ["4", "3"]
    assert queues.bytes_held == 950
    assert push(queues, "too large", principal="other", size=600) is None
    assert len(queues) == 4


bounded_steps = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("pqrs"), st.integers(1, 40), st.booleans()), max_size=150
)


@settings(deadline=None)
@given(bounded_steps)
def test_no_bound_is_ever_passed_and_everyone_is_accounted_for(steps: list[tuple[int, str, int, bool]]) -> None:
    queues: WaitQueues[str] = WaitQueues(entries_max=12, selector_max=5, bytes_max=200)
    there: set[str] = set()
    for count, (number, principal, size, takes) in enumerate(steps):
        displaced = push(queues, f"i{count}", principal=principal, size=size, selector=SELECTORS[number])
        if displaced is not None:
            there.add(f"i{count}")
            assert there.issuperset(displaced) and f"i{count}" not in displaced
            there.difference_update(displaced)
        if takes:
            there.discard(queues.take(AGENTS[number % len(AGENTS)], 0.0) or "")
        assert len(queues) == len(there) <= 12 and queues.bytes_held <= 200
        assert all(queues.size(selector) <= 5 for selector in SELECTORS)
        assert all(item in queues for item in there)


def test_what_waits_already_is_not_put_in_twice() -> None:
    queues: WaitQueues[str] = WaitQueues()
    push(queues, "x")
    with pytest.raises(ValueError, match="waits already"):
        push(queues, "x")


def test_nothing_is_left_of_those_who_came_and_went() -> None:
    queues: WaitQueues[str] = WaitQueues()
    push(queues, "stays", time_s=1e6)
    shelf = queues.shelf_of(OF_A)
    for number in range(3000):
        selector = Selector("t", "production", agent_type="a", version=f"1.{number}")
        push(queues, f"x{number}", selector=selector, principal=f"p{number}", level=HIGH)
        queues.remove(f"x{number}")
        push(queues, f"y{number}", principal=f"p{number}", level=HIGH)
        queues.remove(f"y{number}")
    assert queues.queues == 1 and len(queues) == 1
    assert shelf is not None and len(shelf.heap) < 200
    assert queues.take(A1, 0.0) == "stays"
    assert queues.queues == 0 and queues.shelf_of(OF_A) is None


# ---- when to come again ----


def test_one_who_is_refused_is_told_when_half_of_those_before_it_have_left() -> None:
    queues: WaitQueues[str] = WaitQueues(selector_max=100)
    assert queues.retry_after_s(OF_A, 0.0) == 1.0  # nothing is known
    for step in range(2000):
        now = step / 20  # twenty a second, for 100 s
        while queues.size(OF_A) < 100:
            push(queues, f"{step}.{len(queues)}", now=now)
        queues.take(A1, now)
    push(queues, "full", now=100.0)
    assert queues.retry_after_s(OF_A, 100.0) == pytest.approx(2.5, rel=0.1)
    assert queues.retry_after_s(OF_A, 1000.0) == 30.0


# ---- requests ----


class Nowhere:
    streaming = False

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> None:
        return None


def test_requests_themselves_wait() -> None:
    def request(number: int, priority: int) -> Request:
        waiter = Waiter(Nowhere(), f"m{number}", 10.0)
        key = ("t", "p", "production", f"m{number}")
        return Request(number, key, b"", 0.0, 10.0, waiter, "trace", "", priority, True, False)

    queues: WaitQueues[Request] = WaitQueues()
    low, high = request(1, LOW), request(2, HIGH)
    for one in (low, high):
        pushed = queues.push(
            one,
            OF_A,
            level=one.priority,
            principal=one.key[:2],
            size=len(one.data),
            time_s=one.deadline - one.received,
            now=0.0,
        )
        assert pushed == (True, ())
    assert queues.remove(high) and queues.take(A1, 0.0) is low
