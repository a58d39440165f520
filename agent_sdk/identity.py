"""What names this process, and the ids it makes."""

from __future__ import annotations

import os
import random
import time

from agentreach.wire import ids

_incarnations: dict[int, bytes] = {}
_bits = random.SystemRandom().getrandbits(64)
_rng = random.Random(_bits)  # ids must be unique, not secret: seeded once from the system, fast after that


def incarnation() -> bytes:
    """128 random bits, the same over every reconnect; a forked child gets its own."""
    pid = os.getpid()
    found = _incarnations.get(pid)
    if found is None:
        _incarnations.clear()
        _rng.seed(random.SystemRandom().getrandbits(256))
        found = _incarnations[pid] = os.urandom(16)
    return found


def instance() -> str:
    """The instance of agents that were given none: 8 hex digits of the incarnation."""
    return incarnation().hex()[:8]


def new_message_id() -> str:
    """A UUIDv7."""
    return ids.uuid7(time.time_ns() // 1_000_000, _rng.getrandbits(ids.RANDOM_BITS_OF_UUID7))


def new_trace_id() -> str:
    """A W3C trace id."""
    return ids.trace_id(_rng.getrandbits(128))
