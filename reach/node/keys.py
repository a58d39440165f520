"""The API keys of this node: who shows which, and what ends when a key does.

They are kept by a `KeyStore`, a file or the registry. This node follows it; what it cannot read leaves what it knows
in force, but a key that expires ends all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

import structlog

from agentreach.v1.peer_pb2 import StoredKey
from reach.core import keyring
from reach.core.access import Rights
from reach.core.keyring import Kept, Keyring, KeysUnusable
from reach.core.ports import Change, Identity

log = structlog.get_logger("reach.keys")

LOOK_S = 0.25
"""How late an expired key, and a changed file, may be noticed."""
USED_TOLD_S = 60.0
_AT_A_TIME = 2  # slow hashes: threads, and 4 MiB of memory each


class KeyStore(Protocol):
    """Where keys are kept: `reach.node.key_stores`."""

    async def read(self) -> Kept:
        """All keys. Raises `KeysUnusable`."""
        ...

    def follow(self) -> AsyncGenerator[Kept | KeysUnusable, None]:
        """All keys, now and each time after something has changed, or why they cannot be read now."""
        ...

    async def refreshed(self) -> Kept | None:
        """What `follow` would give soon, if that can be known by a glance; None: nothing new. Raises `KeysUnusable`."""
        ...

    async def change(self, decide: Callable[[Kept], Kept]) -> Kept:
        """Put what `decide` makes of the keys in their place; what stands there then.

        `decide` may be called more than once. Raises `KeysUnusable`, and what `decide` raises.
        """
        ...

    async def used(self) -> dict[str, float]:
        """When keys were used last, on any node, in Unix seconds."""
        ...

    async def put_used(self, used: Mapping[str, float]) -> None:
        """Remember when these keys were used. What fails is left out until the next time."""
        ...


class ApiKeys:
    """Implements `reach.node.gate.Keys`. `start` it, then `run` in a task."""

    def __init__(self, store: KeyStore, secret: bytes, unix: Callable[[], float]) -> None:
        """`secret` is random and this process's own; `unix` the time."""
        self.store = store
        self._unix = unix
        self._ring = Keyring(secret)
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._told: Callable[[Change], None] = lambda change: None
        self._used: dict[str, float] = {}
        self.stale = False
        """The store cannot be read: what was known goes on."""

    # ---- whose key it is ----

    def known(self, key: str) -> Identity | None:
        """See `reach.node.gate.Keys`."""
        now = self._unix()
        who = self._ring.known(key, now)
        if who is not None:
            self._used[who.key_id] = now
        return who

    async def verified(self, key: str) -> Identity | None:
        """See `reach.node.gate.Keys`."""
        if not keyring.looks_like_a_key(key):
            return None
        if self._ring.candidate(key, self._unix()) is None:
            with contextlib.suppress(KeysUnusable):
                await self.refresh()  # it may have been made just now
        if self._ring.candidate(key, self._unix()) is None:
            return None
        async with self._slots:
            who = self.known(key)  # by a call that came just before this one
            record = self._ring.candidate(key, self._unix())
            if who is not None or record is None:
                return who
            if not await asyncio.to_thread(keyring.proves, key, record):
                return None
        if self._ring.verified(key, record, self._unix()) is None:
            return None
        return self.known(key)

    def principals(self) -> dict[tuple[str, str], Rights]:
        """See `reach.node.gate.Keys`."""
        return self._ring.principals()

    def on_change(self, told: Callable[[Change], None]) -> None:
        """See `reach.node.gate.Keys`."""
        self._told = told

    # ---- its life ----

    async def start(self) -> None:
        """Learn the keys. Raises `KeysUnusable`, also if none of them holds: nobody could get in."""
        kept = await self.store.read()
        self._ring.take(kept, self._unix())
        if not self._ring.usable:
            all_of_them = f"all {len(kept.records)} have ended" if kept.records else "there is none"
            raise KeysUnusable(f"no API key can be used: {all_of_them}; make one by `reach keys create`")

    async def run(self) -> None:
        """Follow them until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="keys-follow")
            group.create_task(self._look(), name="keys-look")
            group.create_task(self._tell_used(), name="keys-used")

    async def _follow(self) -> None:
        async with contextlib.aclosing(self.store.follow()) as states:
            async for state in states:
                if isinstance(state, KeysUnusable):
                    if not self.stale:
                        log.error("the keys cannot be read; those that are known go on", why=str(state))
                    self.stale = True
                else:
                    self._take(state)

    async def refresh(self) -> None:
        """Look whether there is anything new. Raises `KeysUnusable`."""
        kept = await self.store.refreshed()
        if kept is not None:
            self._take(kept)

    @property
    def usable(self) -> int:
        """How many hold."""
        return self._ring.usable

    def holding(self) -> dict[str, StoredKey]:
        """By key_id, the records of those that hold."""
        return self._ring.holding(self._unix())

    def _take(self, kept: Kept) -> None:
        if self.stale:
            log.info("the keys can be read again")
        self.stale = False
        self._changed(*self._ring.take(kept, self._unix()))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._changed(*self._ring.look(self._unix()))

    def _changed(self, anything: bool, change: Change) -> None:
        if not anything:
            return
        log.info("API keys", usable=self._ring.usable, ended=sorted(keyring.key_id_of(who) for who, _ in change.ended))
        self._told(change)

    async def _tell_used(self) -> None:
        while True:
            await asyncio.sleep(USED_TOLD_S)
            used, self._used = self._used, {}
            if used:
                await self.store.put_used({key_id.partition("#")[0]: at for key_id, at in used.items()})
