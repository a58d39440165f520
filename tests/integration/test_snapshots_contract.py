"""One suite for every place where sessions' states are kept: memory, a directory, and real etcd."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from reach.adapters.etcd import EtcdStore
from reach.adapters.memory_store import MemoryStore
from reach.adapters.snapshots import DirectorySnapshots, MemorySnapshots, RegistrySnapshots
from reach.core.snapshots import SnapshotStore, SnapshotsUnavailable, name_of
from reach.core.store import Store
from tests.support.etcd import EtcdCluster, start_etcd

KEY = "pins/default/production/notes/5e551"
KEPT_S = 60.0


def _in_registry(store: Store) -> RegistrySnapshots:
    async def lease() -> int:
        return (await store.hold_lease(KEPT_S)).id

    return RegistrySnapshots(store, lease)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member for all tests; each has a prefix of its own."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture(params=["memory", "directory", "registry in memory", "etcd"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SnapshotStore]:
    kind = request.param
    if kind == "memory":
        yield MemorySnapshots()
    elif kind == "directory":
        yield DirectorySnapshots(tmp_path / "states", KEPT_S)
    elif kind == "registry in memory":
        store = MemoryStore()
        yield _in_registry(store)
        await store.close()
    else:
        etcd: EtcdCluster = request.getfixturevalue("etcd")
        connected = await EtcdStore.connect(etcd.endpoints, prefix=f"/snapshots/{os.urandom(4).hex()}/")
        yield _in_registry(connected)
        await connected.close()


async def test_what_was_put_is_there_byte_by_byte_until_it_is_deleted(place: SnapshotStore) -> None:
    data = bytes(range(256)) * 1024
    reference = await place.put(KEY, 7, 3, data)
    assert await place.get(reference) == data
    await place.keep(reference)
    assert await place.get(reference) == data
    await place.delete(reference)
    assert await place.get(reference) is None
    await place.delete(reference)
    await place.keep(reference)


async def test_each_epoch_and_turn_has_a_reference_of_its_own(place: SnapshotStore) -> None:
    references = [await place.put(KEY, epoch, turn, b"%d %d" % (epoch, turn)) for epoch in (7, 8) for turn in (1, 2)]
    assert len(set(references)) == 4
    assert [await place.get(each) for each in references] == [b"7 1", b"7 2", b"8 1", b"8 2"]
    other = await place.put(KEY + "a", 7, 1, b"another session")
    assert await place.get(references[0]) == b"7 1" and await place.get(other) == b"another session"


async def test_the_same_turn_again_replaces_the_state(place: SnapshotStore) -> None:
    first = await place.put(KEY, 7, 3, b"first")
    again = await place.put(KEY, 7, 3, b"again")
    assert again == first and await place.get(first) == b"again"


async def test_an_empty_state_is_a_state(place: SnapshotStore) -> None:
    assert await place.get(await place.put(KEY, 1, 1, b"")) == b""


@pytest.mark.parametrize("reference", ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a" * 5000, "x\0y", "ä/ö"])
async def test_references_that_it_did_not_give_lead_nowhere(place: SnapshotStore, reference: str) -> None:
    assert await place.get(reference) is None
    await place.keep(reference)
    await place.delete(reference)


async def test_what_a_session_is_called_is_no_part_of_any_name(place: SnapshotStore) -> None:
    reference = await place.put("../" * 30 + "x\0\n ä" + "\udcff", 1, 1, b"state")
    assert await place.get(reference) == b"state"
    assert set(reference) <= set("0123456789abcdef-")


async def test_many_at_once_do_not_meet(place: SnapshotStore) -> None:
    async with asyncio.timeout(30):
        references = await asyncio.gather(*(place.put(f"{KEY}{n}", 1, 1, b"%d" % n * 100) for n in range(100)))
        assert await asyncio.gather(*map(place.get, references)) == [b"%d" % n * 100 for n in range(100)]


class TestMemory:
    """What only memory does."""

    async def test_what_was_not_used_for_longest_gives_way(self) -> None:
        place = MemorySnapshots(bytes_max=300)
        references = [await place.put(f"{KEY}{n}", 1, 1, bytes(100)) for n in range(3)]
        await place.keep(references[0])
        await place.put(f"{KEY}3", 1, 1, bytes(100))
        assert [await place.get(each) is not None for each in references] == [True, False, True]
        assert place.bytes_held == 300

    async def test_one_that_is_larger_than_all_is_refused(self) -> None:
        place = MemorySnapshots(bytes_max=300)
        with pytest.raises(SnapshotsUnavailable):
            await place.put(KEY, 1, 1, bytes(301))


class TestDirectory:
    """What only a directory does."""

    async def test_it_outlives_the_node_and_is_for_its_user_alone(self, tmp_path: Path) -> None:
        reference = await DirectorySnapshots(tmp_path / "a/b", KEPT_S).put(KEY, 1, 1, b"state")
        assert await DirectorySnapshots(tmp_path / "a/b", KEPT_S).get(reference) == b"state"
        assert (tmp_path / "a/b").stat().st_mode & 0o077 == 0
        assert (tmp_path / "a/b" / reference).stat().st_mode & 0o077 == 0

    async def test_what_nobody_has_kept_for_too_long_is_swept_away_and_nothing_else(self, tmp_path: Path) -> None:
        place = DirectorySnapshots(tmp_path, kept_s=0.05)
        (tmp_path / "notes.txt").write_text("somebody else's")
        (tmp_path / ".half-written").write_text("of a node that died")
        old, kept = await place.put(KEY, 1, 1, b"old"), await place.put(KEY, 1, 2, b"kept")
        long_ago = time.time() - 1000
        for name in (old, kept, "notes.txt", ".half-written"):
            os.utime(tmp_path / name, (long_ago, long_ago))
        await place.keep(kept)
        again = DirectorySnapshots(tmp_path, kept_s=10.0)
        await again.put(KEY, 1, 3, b"new")
        assert await again.get(old) is None and await again.get(kept) == b"kept"
        assert (tmp_path / "notes.txt").exists() and not (tmp_path / ".half-written").exists()

    async def test_a_full_one_takes_nothing_new(self, tmp_path: Path) -> None:
        place = DirectorySnapshots(tmp_path, KEPT_S, bytes_max=250)
        first = await place.put(KEY, 1, 1, bytes(100))
        await place.put(KEY, 1, 2, bytes(100))
        with pytest.raises(SnapshotsUnavailable, match="its limit"):
            await place.put(KEY, 1, 3, bytes(100))
        await place.delete(first)
        await place.put(KEY, 1, 3, bytes(100))

    async def test_a_state_that_could_not_be_written_leaves_the_former_one_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = DirectorySnapshots(tmp_path, KEPT_S)
        reference = await place.put(KEY, 1, 1, b"whole")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(SnapshotsUnavailable, match="No space left"):
                await place.put(KEY, 1, 1, b"half")
        assert await place.get(reference) == b"whole"
        assert [path.name for path in tmp_path.iterdir()] == [reference]  # noqa: ASYNC240

    async def test_a_directory_that_goes_away_is_told(self, tmp_path: Path) -> None:
        place = DirectorySnapshots(tmp_path / "states", KEPT_S)
        await place.put(KEY, 1, 1, b"x")
        for path in (tmp_path / "states").iterdir():
            path.unlink()
        (tmp_path / "states").rmdir()
        with pytest.raises(SnapshotsUnavailable, match="states"):
            await place.put(KEY, 1, 2, b"x")


class TestRegistry:
    """What only the registry does."""

    async def test_a_state_goes_with_the_lease_under_which_it_stands_unless_it_was_kept_under_a_newer_one(self) -> None:
        store = MemoryStore()
        leases = [await store.hold_lease(KEPT_S), await store.hold_lease(KEPT_S)]
        current = [leases[0].id]

        async def lease() -> int:
            return current[0]

        place = RegistrySnapshots(store, lease)
        left, kept = await place.put(KEY, 1, 1, b"left"), await place.put(KEY, 1, 2, b"kept")
        current[0] = leases[1].id
        await place.keep(kept)
        await store.revoke(leases[0].id)
        assert await place.get(left) is None and await place.get(kept) == b"kept"
        await store.close()

    async def test_a_lease_that_is_gone_is_told_as_such(self) -> None:
        store = MemoryStore()

        async def lease() -> int:
            return 4711

        with pytest.raises(SnapshotsUnavailable):
            await RegistrySnapshots(store, lease).put(KEY, 1, 1, b"x")
        await store.close()


def test_names_tell_sessions_epochs_and_turns_apart() -> None:
    names = {name_of(key, epoch, turn) for key in ("a", "b") for epoch in (1, 2**63) for turn in (0, 1)}
    assert len(names) == 8 and all(len(name) == 74 for name in names)
