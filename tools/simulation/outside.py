"""What the node and the SDK take from outside, replaced while a world runs: clocks, randomness, logs, orders of sets.

Nothing of our own logic is replaced. Sets of objects are walked in the order of their addresses, which no seed
decides, so `set` inside the modules of the node and the SDK is one that remembers the order of insertion.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import time
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import structlog

import agent_sdk.identity

if TYPE_CHECKING:
    from .world import World

OURS = ("reach.core", "reach.node", "reach.adapters.memory_store", "agent_sdk", "agentreach.aio")
WITH_SETS = ("reach.core", "reach.node", "agent_sdk")
EXPECTED = (
    "handler %s of %s failed",  # ours raise on purpose
    "no events of %r come to %s: %s",  # while the agent is not attached; it asks again
    "the registry's lease is over",  # the fence
)


class OrderedSet(dict[Any, None]):
    """What of `set` the node and the SDK use, in the order of insertion."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__((item, None) for item in items)

    def add(self, item: Any) -> None:
        """See `set`."""
        self[item] = None

    def discard(self, item: Any) -> None:
        """See `set`."""
        self.pop(item, None)

    remove = dict.__delitem__

    def update(self, *others: Any) -> None:
        """See `set`."""
        for other in others:
            for item in other:
                self[item] = None

    def difference_update(self, *others: Any) -> None:
        """See `set`."""
        for other in others:
            for item in other:
                self.pop(item, None)

    def isdisjoint(self, other: Any) -> bool:
        """See `set`."""
        return not any(item in self for item in other)

    def __or__(self, other: Any) -> Any:
        return OrderedSet([*self, *other])

    def __ror__(self, other: Any) -> Any:
        return OrderedSet([*other, *self])

    def __sub__(self, other: Any) -> Any:
        return OrderedSet(item for item in self if item not in other)

    def __and__(self, other: Any) -> Any:
        return OrderedSet(item for item in self if item in other)


class _Incarnations(MutableMapping[int, bytes]):
    """`identity._incarnations`: whose turn it is decides."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, pid: int) -> bytes:
        return self._world.current.incarnation

    def get(self, pid: int, default: Any = None) -> Any:
        return self._world.current.incarnation

    def __setitem__(self, pid: int, value: bytes) -> None: ...

    def __delitem__(self, pid: int) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Made:
    """`identity._made`: how many agents of a type the process whose turn it is has made."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, agent_type: str) -> int:
        made: dict[str, int] = self._world.current.things.setdefault("made", {})
        return made.get(agent_type, 0)

    def __setitem__(self, agent_type: str, count: int) -> None:
        self._world.current.things["made"][agent_type] = count


def _clock(world: World) -> types.SimpleNamespace:
    """Stands for the module `time`: the clocks of the process whose turn it is."""
    scheduler = world.scheduler

    def boot_s(_: int = 0) -> float:
        loop = scheduler.current
        assert loop is not None, "only processes look at clocks"
        return scheduler.now + loop.boot_base_s

    return types.SimpleNamespace(
        clock_gettime=boot_s,
        monotonic=boot_s,
        time=lambda: world.current.unix,
        time_ns=lambda: int(world.current.unix * 1e9),
    )


def _seeded(rng: random.Random) -> types.SimpleNamespace:
    """Stands for the modules `random` and `os`."""
    return types.SimpleNamespace(
        random=rng.random,
        uniform=rng.uniform,
        getrandbits=rng.getrandbits,
        randrange=rng.randrange,
        choice=rng.choice,
        sample=rng.sample,
        shuffle=rng.shuffle,
        Random=random.Random,
        SystemRandom=lambda: rng,
        urandom=lambda size: rng.getrandbits(8 * size).to_bytes(size, "big"),
        getpid=lambda: 1,
        access=os.access,
        environ={},
    )


class _Faults(logging.Handler):
    """Errors that the SDK logs are faults of ours, except those of handlers that fail on purpose."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(EXPECTED):
            self._world.faults.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")


def _node_logs(world: World) -> Any:
    def take(logger: Any, method: str, line: Mapping[str, Any]) -> Any:
        if method in ("error", "exception", "critical") and not str(line.get("event")).startswith(EXPECTED):
            world.faults.append(f"{line.get('event')}: {sys.exc_info()[1]!r} {line}")
        raise structlog.DropEvent

    return take


@contextlib.contextmanager
def replaced(world: World) -> Iterator[None]:
    """Let everything that is not ours come from the world."""
    stands_for = {time: _clock(world)}
    stands_for[random] = stands_for[os] = _seeded(random.Random(f"{world.seed}/outside"))
    places: list[tuple[Any, str, Any]] = [
        (agent_sdk.identity, "_rng", random.Random(f"{world.seed}/ids")),
        (agent_sdk.identity, "_message_ids", agent_sdk.identity._MessageIds(0)),
        (agent_sdk.identity, "_incarnations", _Incarnations(world)),
        (agent_sdk.identity, "_made", _Made(world)),
    ]
    for name, module in list(sys.modules.items()):
        if name.startswith(OURS) and isinstance(module, types.ModuleType):
            for outer in ("time", "random", "os"):
                if module.__dict__.get(outer) in stands_for:
                    places.append((module, outer, stands_for[module.__dict__[outer]]))
        if name.startswith(WITH_SETS) and isinstance(module, types.ModuleType):
            places.append((module, "set", OrderedSet))
    missing = object()
    before = [(place, name, place.__dict__.get(name, missing)) for place, name, _ in places]
    logs, faults = structlog.get_config(), _Faults(world)
    sdk = logging.getLogger("agent_sdk")
    level, propagate = sdk.level, sdk.propagate
    collecting = gc.isenabled()
    gc.disable()  # what a collection finalises, and when, no seed decides
    try:
        for place, name, value in places:
            setattr(place, name, value)
        structlog.configure(
            processors=[_node_logs(world)], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
        )
        sdk.setLevel(logging.ERROR)
        sdk.propagate = False
        sdk.addHandler(faults)
        yield
    finally:
        sdk.removeHandler(faults)
        sdk.setLevel(level)
        sdk.propagate = propagate
        structlog.configure(**logs)
        for place, name, value in before:
            if value is missing:
                delattr(place, name)
            else:
                setattr(place, name, value)
        if collecting:
            gc.enable()
