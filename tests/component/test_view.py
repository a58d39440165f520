"""The view of the registry beside a store with faults: whatever the watch loses, it ends up true, and knows its age."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from reach.adapters.memory_store import MemoryStore
from reach.core.store import Change, Delete, Put
from reach.node import contact, view
from reach.node.view import STEP_CHANGES, View
from tests.support.core import CoreMesh
from tests.support.views import OWN, Agents, Book, OwnKeys, all_were_true, key_of, put_agent, truth

LIMIT_S = 10.0


class LossyStore(MemoryStore):
    """A store whose watches can repeat what they have brought, keep it to themselves, or end."""

    repeats = False
    loses = False
    ends = False

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        former: Sequence[Change] = ()
        async with contextlib.aclosing(super().watch(prefix, from_revision, deletes_only=deletes_only)) as batches:
            async for batch in batches:
                if self.ends:
                    self.ends = False
                    return
                if self.loses and batch:
                    continue
                yield batch
                if self.repeats:
                    yield batch
                    yield [*former, *batch]
                former = batch or former


@dataclass
class Bench:
    """A view at work on `store`, and `other`: a connection to the same state that never fails."""

    store: LossyStore
    other: MemoryStore
    own: OwnKeys
    view: View
    book: Book

    async def put(self, name: str, node_id: str = "n2", **more: str) -> int:
        """Register an agent as another node does."""
        return (await self.other.txn([], [put_agent(name, node_id, **more)])).revision

    async def delete(self, name: str) -> None:
        """Let an agent's key vanish."""
        await self.other.txn([], [Delete(key_of(name))])

    async def truth(self) -> Agents:
        """What the core should know of other nodes' agents."""
        return await truth(self.other)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds."""

        async def held() -> bool:
            return holds()

        await eventually(held, what)

    async def until_true(self) -> None:
        """Wait until the core knows what the store knows."""

        async def equal() -> bool:
            return self.book.agents == await self.truth()

        await eventually(equal, f"the view is true: {self.book.agents}")


@contextlib.asynccontextmanager
async def bench(store: LossyStore | None = None) -> AsyncIterator[Bench]:
    store = store or LossyStore()
    book = Book()
    own = OwnKeys()
    made = View(store, OWN, own, step=book.step, remote=book)
    await made.start()
    duty = asyncio.create_task(made.run())
    try:
        yield Bench(store, MemoryStore(state=store._state), own, made, book)
    finally:
        duty.cancel()
        await asyncio.wait([duty])
        await store.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every 50 ms."""
    monkeypatch.setattr(contact, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(contact, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(view, "LIST_AGAIN_S", 0.02)


async def test_what_other_nodes_register_write_again_and_delete_is_told_and_what_this_node_does_is_not() -> None:
    store = LossyStore()
    await store.txn(
        [], [put_agent("early/1"), Put("nodes/n2", NodeRecord(node_id="n2", address="a:2").SerializeToString())]
    )
    async with bench(store) as at:
        assert at.book.agents == await at.truth() and len(at.book.agents) == 1  # before it is run
        assert at.book.nodes == {"n2": "a:2"}
        await at.put("late/1")
        await at.put("early/1", version="2")
        await at.put("own/1", node_id="n1")
        await at.until_true()
        await at.delete("late/1")
        await at.until_true()
        assert at.book.agents.keys() == {("default", "production", "early/1")}
        assert at.book.state.node_addresses == {"n1": OWN.address, "n2": "a:2"}
        assert at.book.state.peer_addresses == ("a:2",)
        await at.other.txn([], [Delete("nodes/n2")])
        await at.until(lambda: not at.book.nodes, "the node is gone")
        assert at.book.state.node_addresses == {"n1": OWN.address} and at.book.state.peer_addresses == ()


async def test_a_node_that_comes_is_told_at_once_to_a_process_that_knows_of_no_other() -> None:
    async with bench() as at:
        core = CoreMesh()
        at.book.state = core.state
        process = core.agent()
        record = NodeRecord(node_id="n2", address="a:2")
        await at.other.txn([], [Put("nodes/n2", record.SerializeToString())])
        await at.until(lambda: bool(at.book.nodes), "the node is seen")
        core.pump()
        assert [list(signal.peers.addresses) for signal in process.got_signals("peers")] == [["a:2"]]


async def test_what_a_former_life_of_this_node_left_in_the_store_is_told_once_at_the_start() -> None:
    store = LossyStore()
    await store.txn([], [put_agent("own/1", node_id="n1"), put_agent("early/1")])
    async with bench(store) as at:
        assert at.book.behind == ["own/1"]
        await at.put("own/2", node_id="n1")
        await at.put("late/1")
        await at.until_true()
        assert at.book.behind == ["own/1"]


async def test_an_agent_that_came_here_and_left_again_is_no_more_its_former_nodes() -> None:
    async with bench() as at:
        first = await at.put("a/1")
        await at.until_true()
        await at.put("a/1", node_id="n1")  # whoever is let in here replaces it in the core
        await at.put("b/1")
        await at.until(lambda: len(at.book.agents) == 2, "the view has gone on")
        assert at.book.agents["default", "production", "a/1"] == first
        await at.delete("a/1")
        await at.until_true()


async def test_what_somebody_read_before_the_watch_brought_it_is_not_undone_by_what_came_before_it() -> None:
    async with bench() as at:
        at.store.set_available(False)
        await at.put("a/1")
        await at.delete("a/1")
        last = await at.put("a/1", node_id="n3")
        item = await at.other.get(key_of("a/1"))
        assert item is not None
        at.own.overtaken(Change(item.key, last, item))
        assert list(at.book.agents.values()) == [last]
        at.store.set_available(True)
        await at.put("b/1")
        await at.until(lambda: len(at.book.agents) == 2, "the watch has brought all")
        assert all(known["default", "production", "a/1"] == last for known in at.book.after_steps if known)


class LateStore(LossyStore):
    """A store whose watches bring what happens one by one, when the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        async with contextlib.aclosing(super().watch(prefix, from_revision, deletes_only=deletes_only)) as batches:
            async for batch in batches:
                await self.gate.wait()
                for change in batch:
                    yield [change]


async def test_nor_is_it_for_a_moment_where_the_watch_brings_one_change_after_the_other() -> None:
    store = LateStore()
    async with bench(store) as at:
        await at.put("a/1")
        await at.delete("a/1")
        last = await at.put("a/1", node_id="n3")
        item = await at.other.get(key_of("a/1"))
        assert item is not None
        at.own.overtaken(Change(item.key, last, item))
        early = len(at.book.after_steps)
        store.gate.set()
        await at.put("b/1")
        await at.until(lambda: len(at.book.agents) == 2, "the watch has brought all")
        assert all(known["default", "production", "a/1"] == last for known in at.book.after_steps[early - 1 :])


async def test_repeated_events_do_nothing() -> None:
    async with bench() as at:
        at.store.repeats = True
        for _ in range(3):
            await at.put("a/1")
            await at.put("b/1")
            await at.delete("a/1")
            await at.until_true()
        assert at.book.calls == 3 * 3


@pytest.mark.parametrize("compacted", [False, True])
async def test_what_happened_during_a_cut_is_made_up_for_also_after_a_compaction(compacted: bool) -> None:
    async with bench() as at:
        for number in range(20):
            await at.put(f"stays/{number}")
            await at.put(f"goes/{number}")
        await at.until_true()
        at.store.set_available(False)
        for number in range(20):
            await at.delete(f"goes/{number}")
            await at.put(f"comes/{number}")
        await at.put("stays/0", node_id="n3")
        if compacted:
            at.other.compact(await at.other.revision())
        before = at.book.calls
        at.store.set_available(True)
        await at.until_true()
        assert at.book.calls - before == 41


@pytest.mark.usefixtures("quick")
async def test_a_watch_that_loses_changes_is_found_out_and_the_view_made_true() -> None:
    async with bench() as at:
        await at.put("a/1")
        await at.put("a/2")
        await at.until_true()
        at.store.loses = True
        await at.delete("a/1")
        await at.until_true()  # the number of keys gave it away
        await at.put("a/2", version="2")
        await at.until_true()  # its revision did
        assert at.view.age_s == 0.0


@pytest.mark.usefixtures("quick")
async def test_a_watch_that_ends_is_begun_again() -> None:
    async with bench() as at:
        for number in range(3):
            at.store.ends = True
            await at.put(f"a/{number}")
            await at.until_true()


@pytest.mark.usefixtures("quick")
async def test_the_view_is_fresh_while_others_write_other_keys_and_old_while_the_store_is_away() -> None:
    async with bench() as at:
        await at.put("a/1")
        await at.until_true()
        for number in range(5):
            written = (await at.other.txn([], [Put(f"pins/{number}", b"x")])).revision
            await at.until(lambda written=written: at.view.revision >= written, "it is known to be fresh")  # type: ignore[misc]
        assert at.view.age_s == 0.0
        at.store.set_available(False)
        await at.until(lambda: at.view.age_s > 0.3, "it is getting old")
        assert at.own.contact.away
        await at.put("b/1")
        known = at.view.revision
        at.store.set_available(True)
        await at.until(lambda: at.view.age_s == 0.0, "it is fresh again")
        assert at.view.revision > known and at.book.agents == await at.truth()


async def test_records_that_cannot_be_read_are_logged_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    async with bench() as at:
        good = await at.put("good/1")
        for _ in range(3):
            await at.other.txn([], [Put(key_of("bad/1"), b"\xff\xff")])
        elsewhere = AgentRecord(agent_id="x/1", tenant="default", env="production", node_id="n2").SerializeToString()
        await at.other.txn([], [Put("agents/oops", elsewhere), Put(key_of("y/1"), elsewhere)])
        await at.other.txn([], [Put("nodes/n9", b"\xff\xff"), Put("nodes/n8", b"")])
        await at.other.txn([], [put_agent("nobodys/1", node_id="")])
        last = await at.put("last/1")
        await at.until(lambda: len(at.book.agents) == 2, "the view goes on")
        assert set(at.book.agents.values()) == {good, last} and not at.book.nodes
        told = capsys.readouterr().out
        assert told.count("cannot be read") == 6 and told.count("bad/1") == 1
        await at.other.txn([], [Put(key_of("good/1"), b"\xff\xff")])
        await at.until(lambda: set(at.book.agents.values()) == {last}, "what cannot be read any more is gone")
        await at.put("good/1")
        await at.until(lambda: len(at.book.agents) == 2, "and is there again once it can")


async def test_a_store_that_went_back_in_time_is_the_truth_all_the_same() -> None:
    async with bench() as at:
        for number in range(3):
            await at.put(f"a/{number}")
        await at.until_true()
        restored = MemoryStore(first_revision=1_000)  # from a backup: its revisions are smaller
        await restored.txn([], [put_agent("a/1", version="old")])
        at.store._state.keys = restored._state.keys
        at.store._state.changed()
        await at.until_true()
        assert list(at.book.agents) == [("default", "production", "a/1")]


async def test_ten_thousand_agents_are_applied_in_parts_between_which_the_loop_turns() -> None:
    store = LossyStore()
    for at in range(0, 10_000, 100):
        await store.txn([], [put_agent(f"many/{number}") for number in range(at, at + 100)])
    async with bench(store) as bench_:
        assert len(bench_.book.agents) == 10_000 and bench_.book.most_calls <= STEP_CHANGES
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        await bench_.other.txn([], [Delete("agents/", prefix=True)])  # the end of many leases, in one revision
        await bench_.until_true()
        turning.cancel()
        assert bench_.book.most_calls <= STEP_CHANGES and turns >= 10_000 / STEP_CHANGES


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until it holds; there is no event for what the view has not seen."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + LIMIT_S
    while not await holds():
        assert loop.time() < give_up, f"not within {LIMIT_S:g} s: {what}"
        await asyncio.sleep(0.002)


NAMES = [f"a/{number}" for number in range(6)]
WRITES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.sampled_from(["n2", "n3"])),
    st.tuples(st.just("delete"), st.sampled_from(NAMES), st.just("")),
    st.tuples(st.just("pin"), st.sampled_from(NAMES), st.just("")),
)
FAULTS = st.sampled_from(["compact", "cut", "mend", "end", "repeat", "turn", "lose", "find"])
ACTIONS = st.one_of(WRITES, WRITES, st.tuples(FAULTS, st.just(""), st.just("")))


@settings(deadline=None, max_examples=100)
@given(script=st.lists(ACTIONS, max_size=60))
def test_after_any_faults_the_view_equals_the_store_and_it_never_was_what_the_store_never_was(
    script: list[tuple[str, str, str]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contact, "LOOK_EVERY_S", 0.01)
        patch.setattr(contact, "LOOK_AGAIN_S", 0.002)
        patch.setattr(view, "LIST_AGAIN_S", 0.002)
        asyncio.run(_play(script))


async def _play(script: list[tuple[str, str, str]]) -> None:
    async with bench() as at:
        truths = [await at.truth()]
        lost = False
        for what, name, node_id in script:
            await _do(at, what, name, node_id)
            lost = lost or what == "lose"
            truths.append(await at.truth())
        at.store.set_available(True)
        await at.until_true()
        if not lost:  # a watch that loses changes may show what never was, until it is found out
            assert all_were_true(at.book, truths)


async def _do(at: Bench, what: str, name: str, node_id: str) -> None:
    match what:
        case "put":
            await at.put(name, node_id)
        case "delete":
            await at.delete(name)
        case "pin":
            await at.other.txn([], [Put(f"pins/{name}", b"")])
        case "compact":
            at.other.compact(await at.other.revision())
        case "cut" | "mend":
            at.store.set_available(what == "mend")
        case "end":
            at.store.ends = True
        case "repeat":
            at.store.repeats = not at.store.repeats
        case "lose" | "find":
            at.store.loses = what == "lose"
        case "turn":
            for _ in range(20):
                await asyncio.sleep(0)
