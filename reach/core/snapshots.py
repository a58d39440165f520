"""What the node needs of a place for sessions' states, and how a state is named there.

Three implementations (`reach.adapters.snapshots`) pass one contract suite: memory, a directory, the registry's etcd. A
fourth is a class with these four methods: docs/howto/sessions.md. This module knows no I/O.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Protocol

_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}-[0-9a-f]{16}")


class SnapshotsUnavailable(Exception):
    """The place cannot be reached or refuses. Nothing is known of the outcome; the text is for an operator."""


class SnapshotStore(Protocol):
    """A place for states. Every call is bounded in time and raises `SnapshotsUnavailable` when that passes."""

    async def put(self, key: str, epoch: int, turn: int, data: bytes) -> str:
        """Keep a session's state, whole or not at all; returns its reference, which names this state for ever.

        `key` is the session's. The same key, epoch and turn again replace the state. Once it has returned, the state
        outlives a crash of this process, unless the place is this process's memory.
        """
        ...

    async def get(self, reference: str) -> bytes | None:
        """The state; None if there is none (any more), or the reference is none of this place."""
        ...

    async def keep(self, reference: str) -> None:
        """The session is in use: its state must stay for another `session_ttl_s`. Unknown references are ignored."""
        ...

    async def delete(self, reference: str) -> None:
        """Nobody needs the state any more. Unknown references are ignored."""
        ...


def name_of(key: str, epoch: int, turn: int) -> str:
    """A name for a state: a digest and numbers, whatever the session's own id holds."""
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
    return f"{digest}-{epoch:016x}-{turn:016x}"


def is_name(text: str) -> bool:
    """True for what `name_of` makes: nothing that leads out of a directory."""
    return _NAME.fullmatch(text) is not None
