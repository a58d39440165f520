"""What the gate costs a call: who is calling, and whether this door is open to it.

    python tools/bench_gate.py [ROUNDS]

Measured is all that the node does for it: the headers, the key by its fast digest, the table of doors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator

import structlog

from reach.core.access import Patterns, Rights
from reach.core.lineage import LineageKeys
from reach.core.ports import Identity, MeshFailure
from reach.core.rules import Rules
from reach.core.state import State
from reach.node.config import load
from reach.node.gate import Gatekeeper
from reach.node.holders import Holders

METHOD = "/agentreach.v1.MeshService/Connect"
KEY = "reach_0123abcd_" + "k" * 43


class OneKey:
    """Keys of which one was verified before."""

    def __init__(self) -> None:
        rights = Rights(register=Patterns(["*"]), call=Patterns(["*"]))
        self._found = {KEY: Identity("default", "bench", rights, "0123abcd")}

    def known(self, key: str) -> Identity | None:
        """See `reach.node.gate.Keys`."""
        return self._found.get(key)

    async def verified(self, key: str) -> Identity | None:
        """See `reach.node.gate.Keys`."""
        return None

    def principals(self) -> dict[tuple[str, str], Rights]:
        """See `reach.node.gate.Keys`."""
        return {}

    def on_change(self, told: Callable[[frozenset[str]], None]) -> None:
        """They never change."""


def gatekeeper() -> Gatekeeper:
    """That of a node with keys."""
    rng = random.Random(1)
    state = State(Rules(), rng=rng, nonce=b"12345678", lineage=LineageKeys((1, b"k" * 32)), now=0.0, unix=1.8e9)

    @contextlib.contextmanager
    def step() -> Iterator[State]:
        yield state

    config = load(environment={}, flags={"auth": "keys", "keys_file": "unread"})
    return Gatekeeper(
        config, step, OneKey(), None, secret=b"s" * 32, address=lambda: "127.0.0.1:7070", holders=Holders()
    )


async def _cost_us(rounds: int, metadata: tuple[tuple[str, str], ...]) -> float:
    gate = gatekeeper()
    before = time.perf_counter()
    for _ in range(rounds):
        with contextlib.suppress(MeshFailure):
            await gate.admit(METHOD, metadata)
    return (time.perf_counter() - before) / rounds * 1e6


def measured(rounds: int) -> dict[str, float]:
    """Microseconds of one call with a known key, and of one that shows nothing."""
    shown = (("user-agent", "grpc-python-asyncio/1.76"), ("authorization", f"Bearer {KEY}"))
    return {
        "gate_us": asyncio.run(_cost_us(rounds, shown)),
        "stranger_us": asyncio.run(_cost_us(max(1, rounds // 20), shown[:1])),
    }


def main(rounds: int) -> None:
    """Print it, and nothing of what a node would log."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(json.dumps(measured(rounds)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
