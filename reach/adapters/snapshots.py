"""Places for sessions' states: this process's memory, a directory, the registry's etcd.

The directory writes each state to a file of its own, beside it first, then by renaming, so that there is a whole state
or none. What nobody has kept for longer than a session lives is swept away: pins end by themselves, and nobody is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from reach.core.snapshots import SnapshotsUnavailable, is_name, name_of
from reach.core.store import Delete, LeaseGone, Put, Store, StoreUnavailable, unchanged

MEMORY_BYTES_MAX = 256 << 20  # the states that were not used for longest give way
DIRECTORY_BYTES_MAX = 4 << 30  # beyond, nothing new is kept until the sweep has made room
FILE_S = 5.0  # a disk that does not answer for so long counts as away
SWEEP_EVERY_S = 60.0

T = TypeVar("T")


class MemorySnapshots:
    """In this process: gone with it, as are the registry in memory and its pins."""

    def __init__(self, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self.bytes_held = 0

    async def put(self, key: str, epoch: int, turn: int, data: bytes) -> str:
        """See `SnapshotStore.put`."""
        name = name_of(key, epoch, turn)
        if len(data) > self._bytes_max:
            raise SnapshotsUnavailable(f"a state of {len(data)} bytes is more than is kept in memory")
        await self.delete(name)
        self._held[name] = data
        self.bytes_held += len(data)
        while self.bytes_held > self._bytes_max:
            _, old = self._held.popitem(last=False)
            self.bytes_held -= len(old)
        return name

    async def get(self, reference: str) -> bytes | None:
        """See `SnapshotStore.get`."""
        return self._held.get(reference)

    async def keep(self, reference: str) -> None:
        """See `SnapshotStore.keep`."""
        if reference in self._held:
            self._held.move_to_end(reference)

    async def delete(self, reference: str) -> None:
        """See `SnapshotStore.delete`."""
        self.bytes_held -= len(self._held.pop(reference, b""))


class DirectorySnapshots:
    """In a directory: outlives the node. Several nodes may share it if it is one that all of them see."""

    def __init__(self, directory: Path, kept_s: float, bytes_max: int = DIRECTORY_BYTES_MAX) -> None:
        """`kept_s`: how long a state stays that nobody keeps. Raises `OSError` if the directory cannot be used."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.closing(_Open(directory)) as opened:
            opened.sync()
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, "cannot be written to", str(directory))
        self._directory = directory
        self._kept_s = kept_s
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._swept_at = float("-inf")
        self._sweeping = asyncio.Lock()

    async def put(self, key: str, epoch: int, turn: int, data: bytes) -> str:
        """See `SnapshotStore.put`."""
        name = name_of(key, epoch, turn)
        await self._sweep()
        if self._held_bytes + len(data) > self._bytes_max:
            raise SnapshotsUnavailable(f"{self._directory} holds {self._held_bytes} bytes of states, its limit")
        await self._run(lambda: self._write(name, data))
        self._held_bytes += len(data)
        return name

    async def get(self, reference: str) -> bytes | None:
        """See `SnapshotStore.get`."""
        if not is_name(reference):
            return None
        return await self._run(lambda: _read(self._directory / reference))

    async def keep(self, reference: str) -> None:
        """See `SnapshotStore.keep`."""
        if is_name(reference):
            await self._run(lambda: _touch(self._directory / reference))

    async def delete(self, reference: str) -> None:
        """See `SnapshotStore.delete`."""
        if is_name(reference):
            self._held_bytes -= await self._run(lambda: _remove(self._directory / reference))

    def _write(self, name: str, data: bytes) -> None:
        beside = self._directory / f".{name}.{os.getpid()}.{time.monotonic_ns():x}"
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._directory / name)
        except OSError:
            _remove(beside)
            raise
        with contextlib.closing(_Open(self._directory)) as opened:
            opened.sync()

    async def _sweep(self) -> None:
        async with self._sweeping:
            if time.monotonic() - self._swept_at >= min(SWEEP_EVERY_S, self._kept_s):
                self._held_bytes = await self._run(self._swept)
                self._swept_at = time.monotonic()

    def _swept(self) -> int:
        """Remove what is too old; how many bytes are left."""
        oldest, held = time.time() - self._kept_s, 0
        for entry in os.scandir(self._directory):
            with contextlib.suppress(FileNotFoundError):
                if is_name(entry.name) or entry.name.startswith("."):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_mtime < oldest:
                        _remove(Path(entry.path))
                    else:
                        held += found.st_size
        return held

    async def _run(self, work: Callable[[], T]) -> T:
        """In a thread, since a disk may stand still."""
        try:
            async with asyncio.timeout(FILE_S):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise SnapshotsUnavailable(f"{self._directory} did not answer within {FILE_S:g} s") from None
        except OSError as error:
            raise SnapshotsUnavailable(f"{self._directory}: {error.strerror or error}") from error


class _Open:
    """A directory, open for `fsync`: only then is a renamed file there after a crash."""

    def __init__(self, directory: Path) -> None:
        self._number = os.open(directory, os.O_RDONLY)

    def sync(self) -> None:
        os.fsync(self._number)

    def close(self) -> None:
        os.close(self._number)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _touch(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)


def _remove(path: Path) -> int:
    """How many bytes that gave back."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0


class RegistrySnapshots:
    """Beside the pins, under the lease of the time in which they were written: seen by all nodes, gone with the pin."""

    def __init__(self, store: Store, lease: Callable[[], Awaitable[int]]) -> None:
        self._store = store
        self._lease = lease

    async def put(self, key: str, epoch: int, turn: int, data: bytes) -> str:
        """See `SnapshotStore.put`."""
        name = name_of(key, epoch, turn)
        try:
            await self._store.txn([], [Put(_key(name), data, await self._lease())])
        except (StoreUnavailable, LeaseGone) as error:
            raise SnapshotsUnavailable(str(error)) from error
        return name

    async def get(self, reference: str) -> bytes | None:
        """See `SnapshotStore.get`."""
        if not is_name(reference):
            return None
        try:
            item = await self._store.get(_key(reference))
        except StoreUnavailable as error:
            raise SnapshotsUnavailable(str(error)) from error
        return None if item is None else item.value

    async def keep(self, reference: str) -> None:
        """See `SnapshotStore.keep`. A key changes its lease only by being written again."""
        if not is_name(reference):
            return
        try:
            item = await self._store.get(_key(reference))
            lease = await self._lease()
            if item is not None and item.lease != lease:
                await self._store.txn([unchanged(item)], [Put(item.key, item.value, lease)])
        except (StoreUnavailable, LeaseGone) as error:
            raise SnapshotsUnavailable(str(error)) from error

    async def delete(self, reference: str) -> None:
        """See `SnapshotStore.delete`."""
        if is_name(reference):
            try:
                await self._store.txn([], [Delete(_key(reference))])
            except StoreUnavailable as error:
                raise SnapshotsUnavailable(str(error)) from error


def _key(name: str) -> str:
    return f"snapshots/{name}"
