"""What names this process, and the ids it makes."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from hashlib import blake2b
from typing import Final

from agentreach.wire import ids

_incarnations: dict[int, bytes] = {}
_made: Counter[str] = Counter()
_bits = random.SystemRandom().getrandbits(64)
_rng: Final = random.Random(_bits)  # ids must be unique, not secret: seeded once from the system, fast after that


def incarnation() -> bytes:
    """128 random bits, the same over every reconnect; a forked child gets its own."""
    pid = os.getpid()
    found = _incarnations.get(pid)
    if found is None:
        _incarnations.clear()
        found = _incarnations[pid] = os.urandom(16)
    return found


class _MessageIds:
    """UUIDv7s of the time, 46 bits that are random for each process, and a count of 28, so that making one is cheap."""

    __slots__ = ("_count", "_head", "_middle", "_nibble", "_unix_ms")

    def __init__(self, random_bits: int) -> None:
        """`random_bits`: `RANDOM_BITS_OF_UUID7` of them, of which 46 are used."""
        self._count = 0
        self.seed(random_bits)

    def seed(self, random_bits: int) -> None:
        """Take other random bits: this is another process now."""
        drawn = ids.uuid7(0, random_bits)
        self._middle = drawn[13:28]
        """What stands between the time and the last 32 bits."""
        self._nibble = int(drawn[28], 16) << 28
        """The first four of these."""
        self._unix_ms, self._head = 0, ""

    def new(self) -> str:
        """An id that no other process makes, nor this one again."""
        self._count = count = (self._count + 1) & 0xFFFFFFF
        unix_ms = time.time_ns() // 1_000_000
        if unix_ms != self._unix_ms:
            self._unix_ms, self._head = unix_ms, f"{unix_ms >> 16:08x}-{unix_ms & 0xFFFF:04x}{self._middle}"
        return self._head + (self._nibble | count).to_bytes(4, "big").hex()


_message_ids: Final = _MessageIds(random.SystemRandom().getrandbits(ids.RANDOM_BITS_OF_UUID7))


def _after_fork() -> None:
    _message_ids.seed(random.SystemRandom().getrandbits(ids.RANDOM_BITS_OF_UUID7))
    _rng.seed(random.SystemRandom().getrandbits(256))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # a child must not make its parent's ids


def place_among(agent_type: str) -> int:
    """The how-manieth agent of its type this process makes, from 0."""
    place = _made[agent_type]
    _made[agent_type] += 1
    return place


def instance(place: int) -> str:
    """The instance of an agent that was given none: 8 hex digits, others for each one of its type in this process."""
    own = incarnation()
    return own.hex()[:8] if place == 0 else blake2b(own + place.to_bytes(8, "big"), digest_size=4).hexdigest()


def new_message_id() -> str:
    """A message_id: a UUIDv7."""
    return _message_ids.new()


def new_trace_id() -> str:
    """A W3C trace id."""
    return ids.trace_id(_rng.getrandbits(128))
