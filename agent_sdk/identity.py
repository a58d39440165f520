"""What names this process, and the ids it makes."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from hashlib import blake2b

from agentreach.wire import ids

_incarnations: dict[int, bytes] = {}
_made: Counter[str] = Counter()
_bits = random.SystemRandom().getrandbits(64)
_rng = random.Random(_bits)  # ids must be unique, not secret: seeded once from the system, fast after that


def incarnation() -> bytes:
    """128 random bits, the same over every reconnect; a forked child gets its own."""
    pid = os.getpid()
    found = _incarnations.get(pid)
    if found is None:
        _incarnations.clear()
        found = _incarnations[pid] = os.urandom(16)
    return found


def _after_fork() -> None:
    global _middle
    _middle = _new_middle()
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
    """A UUIDv7: the time, 46 bits that are random for each process, and a count, so that making one is cheap."""
    global _count
    _count = (_count + 1) & 0xFFFFFFF
    unix_ms = time.time_ns() // 1_000_000
    return f"{unix_ms >> 16:08x}-{unix_ms & 0xFFFF:04x}{_middle}{_count:07x}"


def _new_middle() -> str:
    """The digits of a UUIDv7 between its time and its last 28 bits, from the system's randomness."""
    return ids.uuid7(0, random.SystemRandom().getrandbits(ids.RANDOM_BITS_OF_UUID7))[13:29]


_middle = _new_middle()
_count = 0


def new_trace_id() -> str:
    """A W3C trace id."""
    return ids.trace_id(_rng.getrandbits(128))
