"""Carries out what the core asks of sessions' pins and states; each ends with a step, whatever comes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog

from reach.core import homes, moves, owners
from reach.core.effects import (
    CreatePin,
    DropSnapshot,
    LoadSnapshot,
    ReadPin,
    RefreshPin,
    SessionEffect,
    StoreSnapshot,
    VoidPin,
)
from reach.core.snapshots import SnapshotsUnavailable
from reach.core.state import State
from reach.core.store import StoreUnavailable
from reach.node.pins import Fenced, PinBook

log = structlog.get_logger("reach")

_FAULT = "a fault of this node; see its log"


class SessionWork:
    """The effects of sessions."""

    def __init__(self, pins: PinBook, step: Callable[[], AbstractContextManager[State]]) -> None:
        self._pins = pins
        self._step = step

    async def carry_out(self, effect: SessionEffect) -> None:
        """One effect, to its end. Nobody may wait for what is not being done: a fault of ours ends it too."""
        match effect:
            case CreatePin():
                await self._create(effect)
            case RefreshPin():
                await self._refresh(effect)
            case ReadPin():
                await self._read(effect)
            case VoidPin():
                await self._pins.void(effect)
            case StoreSnapshot():
                await self._store(effect)
            case LoadSnapshot():
                await self._load(effect)
            case DropSnapshot(reference):
                await self._pins.drop(reference)

    async def _create(self, effect: CreatePin) -> None:
        why, holder = _FAULT, None
        try:
            holder = await self._pins.create(effect)
        except StoreUnavailable as error:
            why = str(error)
        finally:
            if holder is None:
                with self._step() as state:
                    owners.not_pinned(state, effect.lane, why)
        if holder is None:
            return
        with self._step() as state:
            if holder.made:
                owners.pinned(state, effect.lane, effect.attachment, holder)
            else:
                owners.pinned_elsewhere(state, effect.lane, holder)

    async def _refresh(self, effect: RefreshPin) -> None:
        epoch = effect.lane.epoch
        holder = await self._pins.refresh(effect)
        if holder is not None:
            with self._step() as state:
                owners.taken(state, effect.lane, epoch, holder)

    async def _read(self, effect: ReadPin) -> None:
        why, holder = _FAULT, None
        try:
            holder = await self._pins.holder(effect.lane.key)
            why = ""
        except StoreUnavailable as error:
            why = str(error)
        finally:
            with self._step() as state:
                homes.pin_read(state, effect.lane, holder, why)

    async def _store(self, effect: StoreSnapshot) -> None:
        reference, why, fenced = "", _FAULT, False
        try:
            reference = await self._pins.store_snapshot(effect)
        except (StoreUnavailable, SnapshotsUnavailable) as error:
            why = str(error)
        except Fenced:
            fenced = True
        finally:
            with self._step() as state:
                if fenced:
                    moves.fenced(state, effect)
                else:
                    moves.stored(state, effect, reference, why)

    async def _load(self, effect: LoadSnapshot) -> None:
        content, why = None, _FAULT
        try:
            content = await self._pins.snapshots.get(effect.reference)
            why = ""
        except SnapshotsUnavailable as error:
            why = str(error)
        finally:
            with self._step() as state:
                moves.loaded(state, effect, content, why)
