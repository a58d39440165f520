"""The watch over an event loop's stalls: one per loop, however many links it has."""

from __future__ import annotations

import asyncio
import weakref

from agentreach.aio.clock import StallWatch

_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, StallWatch] = weakref.WeakKeyDictionary()


def stall_watch(loop: asyncio.AbstractEventLoop) -> StallWatch:
    """The one watch of an event loop: ten wake-ups a second."""
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = StallWatch(loop)
    return watch
