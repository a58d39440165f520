"""Sees to it that the pins of sessions owned here stand, whoever deletes them.

A pin that an operator deleted, whose lease was revoked, or that a restored store never had, would let another node give
its session to a second owner. So deletions are watched, and nothing else: sessions in use cost nothing here. What is
missing is written again as it was, if nobody else was faster; if somebody was, the core follows that pin.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Final

import structlog

from reach.core import owners
from reach.core.lanes import Lane
from reach.core.state import State
from reach.core.store import Compacted, Store, StoreUnavailable
from reach.node.pins import AT_ONCE, PinBook

log = structlog.get_logger("reach")

PREFIX: Final = "pins/"
AGAIN_S = 1.0  # until a store that does not answer is asked again


class PinKeeper:
    """This node's part in it; `run` it in a task."""

    def __init__(
        self, store: Store, pins: PinBook, state: State, step: Callable[[], AbstractContextManager[State]]
    ) -> None:
        self._store = store
        self._pins = pins
        self._state = state
        self._step = step
        self._next_revision = 0
        """The first one whose deletions have not been seen; 0: all pins are to be looked at."""
        self._known_revision = 0
        """The store has been here at least; with less it has gone back in time."""
        self._outlived = 0
        """Epochs up to this one may be of a time that the store does not know any more, and prove nothing."""
        self._missing: dict[str, None] = {}
        """Keys of pins to be written again."""

    async def run(self) -> None:
        """Watch until cancelled, or until the store is closed."""
        while True:
            try:
                await self._watch()
                return
            except Compacted:
                log.warning("deletions of pins may have been missed: looking at the pin of every session here")
                self._next_revision = 0
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _watch(self) -> None:
        if not self._next_revision:
            self._pins.seen_revision = 0
            self._known_revision = await self._store.revision()
            self._next_revision = self._known_revision + 1
            self._outlived = max((lane.epoch for lane in self._state.pins.values()), default=0)
            self._missing.update(dict.fromkeys(self._state.pins))
        watch = self._store.watch(PREFIX, self._next_revision, deletes_only=True)
        async with contextlib.aclosing(watch) as batches:
            async for batch in batches:
                if batch:
                    self._known_revision = batch[-1].revision
                    self._next_revision = self._known_revision + 1
                    self._missing.update((each.key, None) for each in batch if each.key in self._state.pins)
                else:
                    await self._look_back()
                await self._write_missing()

    async def _look_back(self) -> None:
        """The watch stands, perhaps anew: `Compacted` if the store does not know what it knew before."""
        epochs = (lane.epoch for lane in self._state.pins.values() if lane.epoch > self._outlived)
        known = max(self._known_revision, self._pins.seen_revision, max(epochs, default=0))
        self._known_revision = await self._store.revision()
        if self._known_revision < known:
            raise Compacted(known)

    async def _write_missing(self) -> None:
        while self._missing:
            keys = [key for key, _ in zip(self._missing, range(AT_ONCE), strict=False)]
            found = {key: lane for key in keys if (lane := self._state.pins.get(key)) is not None}
            await self._write_again(found.values())
            for key in keys:
                del self._missing[key]

    async def _write_again(self, lanes: Collection[Lane]) -> None:
        epochs = [lane.epoch for lane in lanes]
        writes = (self._pins.write_again(lane, epoch) for lane, epoch in zip(lanes, epochs, strict=True))
        holders = await asyncio.gather(*writes)
        with self._step() as state:
            for lane, epoch, holder in zip(lanes, epochs, holders, strict=True):
                if holder is not None:
                    owners.taken(state, lane, epoch, holder)
