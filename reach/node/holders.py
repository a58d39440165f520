"""Coroutines that wait on behalf of a key: woken when it ends, so that no stream outlives the key that opened it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping

from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core.ports import End, Identity, MeshFailure

ENDED_MAX = 100_000  # key_ids that are remembered as ended, for calls that were let in before; certificates end hourly


class Holders:
    """The events that wait, by key. What was opened without a key is not held."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}
        self._calls: dict[str, set[Callable[[End], None]]] = {}
        self._ended: dict[str, End] = {}

    @contextlib.contextmanager
    def hold(self, who: Identity, event: asyncio.Event) -> Iterator[None]:
        """Set `event` too when the key of `who` ends."""
        if not who.key_id:
            yield
            return
        events = self._events.setdefault(who.key_id, set())
        events.add(event)
        try:
            yield
        finally:
            events.discard(event)
            if not events:
                self._events.pop(who.key_id, None)

    def call(self, who: Identity, end: Callable[[End], None]) -> Callable[[], None]:
        """Have `end` called, with the reason, once the key of `who` ends; what undoes this again is returned."""
        if not who.key_id:
            return lambda: None
        calls = self._calls.setdefault(who.key_id, set())
        calls.add(end)

        def undo() -> None:
            calls.discard(end)
            if not calls and self._calls.get(who.key_id) is calls:
                del self._calls[who.key_id]

        return undo

    def check(self, who: Identity, *, begun: bool = False) -> None:
        """Raise `MeshFailure` UNAUTHENTICATED if its key has ended. `begun`: what it asked for may have run."""
        if who.key_id and (end := self._ended.get(who.key_id)) is not None:
            raise MeshFailure(failure(codes.UNAUTHENTICATED, end.value, may_have_executed=begun))

    def wake(self, ended: Mapping[str, End]) -> None:
        """These keys, by key_id, have ended."""
        self._ended.update(ended)
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        for key_id, end in ended.items():
            for event in self._events.get(key_id, ()):
                event.set()
            for told in tuple(self._calls.get(key_id, ())):
                told(end)
