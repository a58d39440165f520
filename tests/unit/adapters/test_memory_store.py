"""What only the embedded store has: virtual time, faults to order, a bounded history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.adapters.memory_keyspace import Keyspace
from reach.adapters.memory_store import MemoryStore
from reach.core.store import Change, Compacted, Delete, Item, Put, StoreUnavailable, absent

pytestmark = pytest.mark.looptime


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    """A store on virtual time."""
    made = MemoryStore(asyncio.get_running_loop().time, first_revision=100)
    yield made
    await made.close()


async def put(store: MemoryStore, key: str, lease: int = 0) -> int:
    """Write one key; its revision."""
    return (await store.txn([], [Put(key, b"v", lease)])).revision


async def test_revisions_start_at_the_wall_clock() -> None:
    before = time.time_ns() // 1_000
    assert before <= await MemoryStore().revision() <= time.time_ns() // 1_000


async def test_an_hour_of_keeping_a_lease_passes_in_no_time(store: MemoryStore) -> None:
    lease = await store.hold_lease(20)
    await put(store, "a", lease.id)
    await asyncio.sleep(3_600)
    assert not lease.lost
    assert await store.get("a") is not None


async def test_a_cut_connection_loses_its_lease_at_its_time_and_others_see_the_keys_vanish(store: MemoryStore) -> None:
    node = store.share()
    lease = await node.hold_lease(20)
    revision = await put(node, "a", lease.id)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(10)  # kept alive at 6.67 s last
    node.set_available(False)
    cut_at = loop.time()
    with pytest.raises(StoreUnavailable):
        await node.get("a")
    await lease.wait_lost()
    assert 15 < loop.time() - cut_at < 20
    async with aclosing(store.watch("", revision + 1)) as changes:
        seen: list[Change] = []
        while not seen:
            seen.extend(await anext(changes))
    assert [(change.key, change.item) for change in seen] == [("a", None)]
    node.set_available(True)
    assert await node.get("a") is None
    await node.close()


async def test_a_short_cut_loses_nothing(store: MemoryStore) -> None:
    node = store.share()
    lease = await node.hold_lease(20)
    async with aclosing(node.watch("", 101)) as changes:
        assert await anext(changes) == ()
        node.set_available(False)
        following = asyncio.ensure_future(anext(changes))
        await put(store, "a")
        await asyncio.sleep(12)
        assert not following.done()
        node.set_available(True)
        assert await following == ()  # established again
        assert [change.key for change in await anext(changes)] == ["a"]
    await asyncio.sleep(100)
    assert not lease.lost
    await node.close()


async def test_a_lost_answer_leaves_the_transaction_done(store: MemoryStore) -> None:
    store.set_answers(False)
    with pytest.raises(StoreUnavailable):
        await store.txn([absent("a")], [Put("a", b"v")])
    store.set_answers(True)
    assert await store.get("a") is not None


async def test_a_watcher_further_behind_than_the_history_is_told(store: MemoryStore) -> None:
    small = MemoryStore(first_revision=100, history_max=5)
    for _ in range(10):
        await put(small, "a")
    with pytest.raises(Compacted):
        async with aclosing(small.watch("", 102)) as changes:
            await anext(changes)
    async with aclosing(small.watch("", 106)) as changes:
        assert await anext(changes) == ()
        assert len(await anext(changes)) == 5


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "delete", "grant", "revoke"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_the_history_replayed_gives_the_state(steps: list[tuple[str, str, int]]) -> None:
    """A watcher from the start that applies every change ends with what a list gives: the dumb twin."""
    keys, leases = Keyspace(100), [0]
    for key, step, number in steps:
        lease = leases[number % len(leases)]
        match step:
            case "put":
                keys.txn([], [Put(key, bytes([number]), lease)], [])
            case "delete":
                keys.txn([], [Delete(key)], [])
            case "grant":
                leases.append(keys.grant(10.0, 0.0))
            case "revoke" if lease:
                keys.revoke(lease)
                leases.remove(lease)
    twin: dict[str, Item] = {}
    changes, after = keys.changes("", 101, 1_000)
    for change in changes:
        if change.item is None:
            del twin[change.key]
        else:
            twin[change.key] = change.item
    assert after == keys.revision + 1
    assert tuple(twin[key] for key in sorted(twin)) == keys.below("")
    assert {change.revision for change in changes} == set(range(101, keys.revision + 1))
    keys.expire(10.0)
    assert all(item.lease == 0 for item in keys.below(""))
    assert keys.next_expiry() is None
