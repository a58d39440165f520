"""One suite for both registry stores: what passes on the embedded store holds on real etcd, and the reverse."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import count

import pytest

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore
from reach.adapters.memory_store import MemoryStore
from reach.core.store import (
    TXN_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Change,
    Compacted,
    Compare,
    Delete,
    Field,
    Get,
    HeldLease,
    Item,
    LeaseGone,
    Op,
    Operation,
    Put,
    Store,
    StoreUnavailable,
    Summary,
    absent,
    unchanged,
)
from tests.support.etcd import EtcdCluster, start_etcd

LIMIT_S = 10.0
TTL_S = 2.0  # the smallest that etcd grants with its own election timeout

_prefixes = count()


class Bench:
    """A store to test, and what only its server can do."""

    def __init__(self, store: MemoryStore | EtcdStore, cluster: EtcdCluster | None, prefix: str) -> None:
        self.store: Store = store
        self._cluster = cluster
        self._prefix = prefix

    async def second(self) -> Store:
        """Another connection to the same keys."""
        if self._cluster is None:
            assert isinstance(self.store, MemoryStore)
            return self.store.share()
        return await EtcdStore.connect(self._cluster.endpoints, prefix=self._prefix)

    async def compact(self, revision: int) -> None:
        """Compact the history."""
        if self._cluster is None:
            assert isinstance(self.store, MemoryStore)
            self.store.compact(revision)
        else:
            await self._cluster.compact(revision)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    """One real member for the whole file; every test has its own prefix."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture(params=["memory", "etcd"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A fresh store of each kind."""
    prefix = f"/test{next(_prefixes)}/"
    if request.param == "memory":
        made = Bench(MemoryStore(), None, prefix)
    else:
        etcd: EtcdCluster = request.getfixturevalue("cluster")
        made = Bench(await EtcdStore.connect(etcd.endpoints, prefix=prefix), etcd, prefix)
    yield made
    await made.store.close()


@pytest.fixture
def store(bench: Bench) -> Store:
    """Its store."""
    return bench.store


async def put(store: Store, key: str, value: bytes = b"v", lease: int = 0) -> int:
    """Write one key; its revision."""
    return (await store.txn([], [Put(key, value, lease)])).revision


async def collect(changes: AsyncGenerator[Sequence[Change], None], number: int) -> list[Change]:
    """The next `number` changes of a watch."""
    found: list[Change] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < number:
            found.extend(await anext(changes))
    return found


async def gone(store: Store, key: str, from_revision: int) -> None:
    """Wait until a key is deleted."""
    async with asyncio.timeout(LIMIT_S), aclosing(store.watch(key, from_revision)) as changes:
        async for batch in changes:
            if any(change.key == key and change.item is None for change in batch):
                return


class TestReading:
    async def test_an_absent_key_is_none(self, store: Store) -> None:
        assert await store.get("nobody") is None

    async def test_a_key_reads_back_as_written(self, store: Store) -> None:
        revision = await put(store, "a/ü", b"\x00\xff")
        assert await store.get("a/ü") == Item("a/ü", b"\x00\xff", revision, revision, 0)

    async def test_writing_again_keeps_the_create_revision(self, store: Store) -> None:
        first = await put(store, "a", b"1")
        second = await put(store, "a", b"2")
        assert second > first
        assert await store.get("a") == Item("a", b"2", first, second, 0)

    async def test_a_list_has_the_keys_of_the_prefix_in_order(self, store: Store) -> None:
        for key in ["a/2", "a/10", "b/1", "a", "a0"]:
            await put(store, key)
        listing = await store.list("a/")
        assert [item.key for item in listing.items] == ["a/10", "a/2"]
        assert listing.revision == await store.revision()
        assert [item.key for item in (await store.list("")).items] == ["a", "a/10", "a/2", "a0", "b/1"]
        assert (await store.list("c")).items == ()

    async def test_a_summary_tells_how_many_keys_there_are_and_the_newest_of_their_revisions(
        self, store: Store
    ) -> None:
        nothing = await store.summary("a/")
        assert (nothing.count, nothing.newest, nothing.revision) == (0, 0, await store.revision())
        for key in ["a/1", "a/2", "a/3"]:
            await put(store, key)
        newest = await put(store, "a/1")
        later = await put(store, "b/1")
        assert await store.summary("a/") == Summary(later, 3, newest)
        removed = (await store.txn([], [Delete("a/2")])).revision
        assert await store.summary("a/") == Summary(removed, 2, newest)

    async def test_reading_and_empty_deletes_make_no_revision(self, store: Store) -> None:
        revision = await put(store, "a")
        await store.get("a")
        await store.list("")
        result = await store.txn([], [Delete("nobody"), Get("a")])
        assert result.revision == revision == await store.revision()


class TestTransactions:
    async def test_all_writes_of_one_share_a_revision(self, store: Store) -> None:
        await put(store, "old/1")
        await put(store, "old/2")
        result = await store.txn([], [Put("a", b"1"), Put("b", b"2"), Delete("old/", prefix=True)])
        async with aclosing(store.watch("", result.revision)) as changes:
            seen = await collect(changes, 4)
        assert {change.key for change in seen} == {"a", "b", "old/1", "old/2"}
        assert {change.revision for change in seen} == {result.revision}

    async def test_the_other_branch_runs_if_a_compare_fails(self, store: Store) -> None:
        await put(store, "a", b"1")
        result = await store.txn([absent("b"), absent("a")], [Put("b", b"")], [Get("a"), Put("c", b"")])
        assert not result.succeeded
        assert [[item.value for item in read] for read in result.reads] == [[b"1"], []]
        assert await store.get("b") is None
        assert await store.get("c") is not None

    async def test_a_get_sees_what_the_transaction_wrote_before_it(self, store: Store) -> None:
        result = await store.txn([], [Get("a"), Put("a", b"1"), Get("a")])
        item = Item("a", b"1", result.revision, result.revision, 0)
        assert result.reads == ((), (), (item,))

    async def test_a_get_by_prefix_reads_all(self, store: Store) -> None:
        await put(store, "a/1")
        await put(store, "a/2")
        result = await store.txn([], [Get("a/", prefix=True), Get("b/", prefix=True)])
        assert [[item.key for item in read] for read in result.reads] == [["a/1", "a/2"], []]

    async def test_unchanged_holds_until_somebody_writes(self, store: Store) -> None:
        await put(store, "a", b"1")
        item = await store.get("a")
        assert item is not None
        assert (await store.txn([unchanged(item)], [Put("a", b"2")])).succeeded
        assert not (await store.txn([unchanged(item)], [Put("a", b"3")])).succeeded

    @pytest.mark.parametrize(
        ("compare", "holds"),
        [
            (Compare("a", Field.VALUE, Op.EQUAL, b"m"), True),
            (Compare("a", Field.VALUE, Op.NOT_EQUAL, b"m"), False),
            (Compare("a", Field.VALUE, Op.LESS, b"n"), True),
            (Compare("a", Field.VALUE, Op.GREATER, b"a"), True),
            (Compare("a", Field.CREATE, Op.GREATER, 0), True),
            (Compare("a", Field.MOD, Op.LESS, 1), False),
            (Compare("nobody", Field.CREATE, Op.EQUAL, 0), True),
            (Compare("nobody", Field.MOD, Op.EQUAL, 0), True),
            (Compare("nobody", Field.MOD, Op.NOT_EQUAL, 0), False),
            (Compare("nobody", Field.VALUE, Op.EQUAL, b""), False),
            (Compare("nobody", Field.VALUE, Op.NOT_EQUAL, b"m"), False),
        ],
        ids=lambda value: f"{value.key}.{value.field.name}{value.op.value}" if isinstance(value, Compare) else "",
    )
    async def test_compares(self, store: Store, compare: Compare, holds: bool) -> None:
        await put(store, "a", b"m")
        assert (await store.txn([compare], [])).succeeded is holds

    async def test_of_many_who_claim_a_key_one_wins(self, bench: Bench) -> None:
        second = await bench.second()
        try:
            claims = [
                claimant.txn([absent("leader")], [Put("leader", f"{i}".encode())])
                for i, claimant in enumerate([bench.store, second] * 10)
            ]
            results = await asyncio.gather(*claims)
        finally:
            await second.close()
        winners = [i for i, result in enumerate(results) if result.succeeded]
        item = await bench.store.get("leader")
        assert item is not None
        assert [item.value] == [f"{i}".encode() for i in winners]

    async def test_the_full_number_of_operations_is_taken(self, store: Store) -> None:
        await store.txn([], [Put(f"k{i:03}", b"v") for i in range(TXN_OPERATIONS_MAX)])
        assert len((await store.list("k")).items) == TXN_OPERATIONS_MAX

    async def test_the_full_size_is_taken(self, store: Store) -> None:
        await put(store, "a", bytes(TXN_BYTES_MAX - 1))
        item = await store.get("a")
        assert item is not None
        assert len(item.value) == TXN_BYTES_MAX - 1

    @pytest.mark.parametrize(
        "branch",
        [
            [Put(f"k{i}", b"v") for i in range(TXN_OPERATIONS_MAX + 1)],
            [Put("a", bytes(TXN_BYTES_MAX))],
            [Put("a", b"1"), Put("a", b"2")],
            [Put("a", b"1"), Delete("a")],
            [Put("a/1", b"1"), Delete("a/", prefix=True)],
        ],
        ids=["too many", "too big", "put twice", "put and deleted", "put and deleted by prefix"],
    )
    async def test_what_etcd_never_takes_is_a_value_error(self, store: Store, branch: list[Operation]) -> None:
        with pytest.raises(ValueError, match="transaction"):
            await store.txn([], branch)
        assert (await store.list("")).items == ()


class TestWatching:
    async def test_the_first_batch_is_empty_and_says_that_the_watch_stands(self, store: Store) -> None:
        async with asyncio.timeout(LIMIT_S), aclosing(store.watch("", await store.revision() + 1)) as changes:
            assert await anext(changes) == ()

    async def test_past_and_coming_changes_come_in_order(self, store: Store) -> None:
        first = await put(store, "a/1", b"1")
        await put(store, "b/1")
        await put(store, "a/1", b"2")
        async with aclosing(store.watch("a/", first)) as changes:
            past = await collect(changes, 2)
            await store.txn([], [Delete("a/1")])
            await put(store, "a/2", b"3")
            coming = await collect(changes, 2)
        seen = [(change.key, change.item.value if change.item else None) for change in [*past, *coming]]
        assert seen == [("a/1", b"1"), ("a/1", b"2"), ("a/1", None), ("a/2", b"3")]
        revisions = [change.revision for change in [*past, *coming]]
        assert revisions == sorted(set(revisions))
        assert all(change.item.mod_revision == change.revision for change in past if change.item)

    async def test_a_watch_after_a_list_sees_exactly_what_the_list_did_not(self, store: Store) -> None:
        async def write() -> None:
            for i in range(300):
                await put(store, f"k{i:03}")

        writer = asyncio.create_task(write())
        await put(store, "first")
        listing = await store.list("k")
        async with aclosing(store.watch("k", listing.revision + 1)) as changes:
            seen = await collect(changes, 300 - len(listing.items))
        await writer
        keys = [item.key for item in listing.items] + [change.key for change in seen]
        assert keys == [f"k{i:03}" for i in range(300)]

    async def test_a_watch_of_deletions_alone_sees_those_and_no_write(self, bench: Bench) -> None:
        store = bench.store
        first = await put(store, "a/1")
        await put(store, "a/2")
        lease = await store.hold_lease(TTL_S)
        await put(store, "a/3", lease=lease.id)
        deleted = (await store.txn([], [Delete("a/1")])).revision
        async with aclosing(store.watch("a/", first, deletes_only=True)) as changes:
            assert await anext(changes) == ()
            assert await collect(changes, 1) == [Change("a/1", deleted, None)]
            for _ in range(20):
                await put(store, "a/1")
            await put(store, "b/1")
            await store.txn([], [Delete("b/1")])
            await store.revoke(lease.id)
            last = (await store.txn([], [Delete("a/2")])).revision
            await put(store, "a/2")
            coming = await collect(changes, 2)
            assert [change.key for change in coming] == ["a/3", "a/2"] and coming[1].revision == last
            assert all(change.item is None for change in coming)
        async with aclosing(store.watch("a/", coming[0].revision + 1, deletes_only=True)) as changes:
            assert await collect(changes, 1) == coming[1:]
        await bench.compact(last)
        with pytest.raises(Compacted):
            async with aclosing(store.watch("a/", first, deletes_only=True)) as changes:
                await collect(changes, 1)

    async def test_a_compacted_revision_raises_compacted(self, bench: Bench) -> None:
        first = await put(bench.store, "a", b"1")
        last = await put(bench.store, "a", b"2")
        await put(bench.store, "a", b"3")
        await bench.compact(last)
        with pytest.raises(Compacted):
            async with aclosing(bench.store.watch("", first)) as changes:
                await collect(changes, 1)

    async def test_the_compacted_revision_itself_cannot_be_watched(self, bench: Bench) -> None:
        await put(bench.store, "a")
        deleted = (await bench.store.txn([], [Delete("a")])).revision
        await bench.compact(deleted)
        with pytest.raises(Compacted):  # etcd 3.5.1 keeps silent about the deletion here
            async with aclosing(bench.store.watch("", deleted)) as changes:
                await collect(changes, 1)

    async def test_compaction_does_not_touch_a_watch_that_has_caught_up(self, bench: Bench) -> None:
        revision = await put(bench.store, "a", b"1")
        async with aclosing(bench.store.watch("", revision)) as changes:
            await collect(changes, 1)
            await bench.compact(revision)
            await put(bench.store, "a", b"2")
            assert [change.item.value for change in await collect(changes, 1) if change.item] == [b"2"]

    async def test_a_revision_that_the_store_has_never_reached_raises_compacted(self, store: Store) -> None:
        revision = await put(store, "a")
        with pytest.raises(Compacted):
            async with asyncio.timeout(LIMIT_S), aclosing(store.watch("", revision + 1_000)) as changes:
                async for _ in changes:
                    pass

    async def test_closing_the_store_ends_a_watch_and_refuses_calls(self, store: Store) -> None:
        async with asyncio.timeout(LIMIT_S), aclosing(store.watch("", await store.revision() + 1)) as changes:
            await anext(changes)
            following = asyncio.ensure_future(anext(changes, None))
            await asyncio.sleep(0)
            await store.close()
            assert await following is None
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.get("a")

    async def test_many_watches_come_and_go_without_threads_or_tasks_left(self, store: Store) -> None:
        revision = await store.revision()
        tasks, threads = len(asyncio.all_tasks()), threading.active_count()
        for _ in range(200):
            async with aclosing(store.watch("", revision + 1)) as changes:
                assert await anext(changes) == ()
        assert len(asyncio.all_tasks()) <= tasks + 2  # gRPC's own task of the last one may need one more turn
        assert threading.active_count() <= threads


class TestLeases:
    async def test_a_held_lease_outlives_its_ttl(self, store: Store) -> None:
        lease = await store.hold_lease(TTL_S)
        await put(store, "a", lease=lease.id)
        first = lease.valid_until
        with pytest.raises(TimeoutError):  # the one wait of this suite for nothing to happen
            async with asyncio.timeout(1.5 * lease.ttl_s):
                await lease.wait_lost()
        assert not lease.lost
        assert lease.valid_until > first
        assert 0 < lease.valid_until - boot_time() <= lease.ttl_s
        item = await store.get("a")
        assert item is not None
        assert item.lease == lease.id

    async def test_releasing_deletes_its_keys_in_one_revision(self, store: Store) -> None:
        lease = await store.hold_lease(TTL_S)
        for i in range(10):
            revision = await put(store, f"k{i}", lease=lease.id)
        await put(store, "other")
        await lease.release()
        assert lease.lost
        await asyncio.wait_for(lease.wait_lost(), LIMIT_S)
        assert [item.key for item in (await store.list("")).items] == ["other"]
        async with aclosing(store.watch("k", revision + 1)) as changes:
            seen = await collect(changes, 10)
        assert {change.item for change in seen} == {None}
        assert len({change.revision for change in seen}) == 1

    async def test_a_lease_revoked_by_somebody_else_is_lost(self, bench: Bench) -> None:
        lease = await bench.store.hold_lease(TTL_S)
        second = await bench.second()
        await second.revoke(lease.id)
        await second.close()
        await asyncio.wait_for(lease.wait_lost(), TTL_S)
        assert lease.lost

    async def test_a_lease_that_nobody_keeps_expires_with_its_keys(self, bench: Bench) -> None:
        second = await bench.second()
        lease = await second.hold_lease(TTL_S)
        revision = await put(second, "a", lease=lease.id)
        await second.close()
        await gone(bench.store, "a", revision)
        assert await bench.store.get("a") is None

    async def test_a_key_under_an_unknown_lease_is_refused_and_nothing_written(self, store: Store) -> None:
        lease = await store.hold_lease(TTL_S)
        await lease.release()
        with pytest.raises(LeaseGone):
            await store.txn([], [Put("a", b"1"), Put("b", b"1", lease.id)])
        assert (await store.list("")).items == ()

    async def test_an_unknown_lease_in_the_branch_that_does_not_run_is_no_matter(self, store: Store) -> None:
        assert (await store.txn([absent("a")], [Put("a", b"1")], [Put("a", b"1", 12345)])).succeeded

    async def test_revoking_an_unknown_lease_is_no_error(self, store: Store) -> None:
        await store.revoke(12345)

    async def test_a_key_rewritten_without_the_lease_survives_it(self, store: Store) -> None:
        lease = await store.hold_lease(TTL_S)
        other = await store.hold_lease(TTL_S)
        await store.txn([], [Put("a", b"1", lease.id), Put("b", b"1", lease.id), Put("c", b"1", lease.id)])
        await store.txn([], [Put("a", b"2"), Put("b", b"2", other.id)])
        await lease.release()
        assert [(item.key, item.lease) for item in (await store.list("")).items] == [("a", 0), ("b", other.id)]

    async def test_one_store_keeps_many_leases(self, store: Store) -> None:
        leases: list[HeldLease] = [await store.hold_lease(TTL_S) for _ in range(300)]
        oldest = min(lease.valid_until for lease in leases)
        async with asyncio.timeout(LIMIT_S):
            while min(lease.valid_until for lease in leases) < oldest + TTL_S / 2:
                with suppress(TimeoutError):
                    await asyncio.wait_for(leases[0].wait_lost(), 0.1)
        assert not any(lease.lost for lease in leases)
        await asyncio.gather(*(lease.release() for lease in leases))
