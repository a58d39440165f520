"""The load: closed loops, the same for every system."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import string
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

Call = Callable[[bytes], Awaitable[Any]]
"""One request-reply; gives the reply's bytes."""
Stream = Callable[[bytes], AsyncIterator[Any]]
"""One streamed reply, item by item."""


def payload_of(size: int) -> bytes:
    """The same text for every system, so that none profits from a special content."""
    return "".join(random.Random(size).choices(string.ascii_letters + string.digits, k=size)).encode()


def quantile(ordered: list[float], share: float) -> float:
    """A quantile of sorted values; NaN of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


class Tally:
    """What one measurement counts. Errors are counted, never hidden."""

    def __init__(self) -> None:
        self.latencies = array("d")
        self.units = 0
        self.errors = 0
        self.first_error = ""

    def failed(self, error: Exception) -> None:
        """Count an error; the first one's text is kept."""
        self.errors += 1
        self.first_error = self.first_error or repr(error)[:300]

    def result(self, elapsed_s: float) -> dict[str, Any]:
        """The measurement as JSON has it."""
        ordered = sorted(self.latencies)
        return {
            "units": self.units,
            "elapsed_s": elapsed_s,
            "per_s": self.units / elapsed_s if elapsed_s else 0.0,
            "p50_ms": quantile(ordered, 0.50) * 1e3,
            "p99_ms": quantile(ordered, 0.99) * 1e3,
            "errors": self.errors,
            "first_error": self.first_error,
        }


async def requests(call: Call, size: int, in_flight: int, seconds: float, limit: int) -> dict[str, Any]:
    """Keep `in_flight` requests under way for so many seconds, or until `limit` of them were begun."""
    payload, tally, now = payload_of(size), Tally(), perf_counter
    left = limit

    async def one_after_another() -> None:
        nonlocal left
        while left > 0:
            begin = now()
            if begin >= deadline:
                return
            left -= 1
            try:
                reply = await call(payload)
                if len(reply) != size:
                    raise ValueError(f"a reply of {len(reply)} bytes to {size}")
            except Exception as error:
                tally.failed(error)
                await asyncio.sleep(0.01)  # a system that refuses at once is not asked a million times
            else:
                tally.latencies.append(now() - begin)
                tally.units += 1

    gc.collect()
    start = now()
    deadline = start + seconds
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    return tally.result(now() - start)


async def streams(stream: Stream, size: int, in_flight: int, items: int, seconds: float) -> dict[str, Any]:
    """Read so many streamed replies at once, each to its end, beginning new ones for so many seconds."""
    payload, tally, now = payload_of(size), Tally(), perf_counter

    async def one_after_another() -> None:
        while (begin := now()) < deadline:
            got = 0
            try:
                async for item in stream(payload):
                    if len(item) != size:
                        raise ValueError(f"an item of {len(item)} bytes to {size}")
                    got += 1
                if got != items:
                    raise ValueError(f"{got} items of {items}")
            except Exception as error:
                tally.failed(error)
                await asyncio.sleep(0.01)
            else:
                tally.latencies.append(now() - begin)
            tally.units += got

    gc.collect()
    start = now()
    deadline = start + seconds
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    return tally.result(now() - start)
