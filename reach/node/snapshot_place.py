"""Where this node keeps sessions' states, as the settings say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from reach.adapters.snapshots import DirectorySnapshots, MemorySnapshots, RegistrySnapshots
from reach.core.snapshots import SnapshotStore, SnapshotsUnavailable
from reach.core.store import Store
from reach.node.settings import Config

KEPT_TTLS = 2  # a pin lives for one and a half times `session_ttl_s` after its last use at most


def make_snapshots(config: Config, store: Store, lease: Callable[[], Awaitable[int]]) -> SnapshotStore:
    """The place. `lease` is the one under which pins are written. Raises `SnapshotsUnavailable`."""
    kind = config.snapshots
    if kind == "auto":
        kind = "etcd" if config.registry != "memory" else "directory" if config.snapshots_dir else "memory"
    if kind == "memory":
        return MemorySnapshots()
    if kind == "etcd":
        return RegistrySnapshots(store, lease)
    try:
        return DirectorySnapshots(Path(config.snapshots_dir), KEPT_TTLS * config.session_ttl_s)
    except OSError as error:
        raise SnapshotsUnavailable(f"snapshots_dir {config.snapshots_dir}: {error.strerror or error}") from error
