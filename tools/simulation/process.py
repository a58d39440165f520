"""A simulated process: a loop, clocks of its own, an incarnation, and the ways in which it can stop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from .loop import VirtualLoop
from .network import knock

if TYPE_CHECKING:
    from .network import End
    from .world import World

UNIX = 1_790_000_000.0  # the wall clock at the beginning of every simulation


class Process:
    """One process of the world: a node, agents, or callers."""

    def __init__(self, world: World, name: str, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.number = world.number()
        self.name = f"{name}.{self.number}"
        """Unique: a restarted process is another one."""
        self.rng = Random(f"{world.seed}/{self.name}")
        self.loop = VirtualLoop(world.scheduler, self.name, self)
        self.incarnation = self.rng.getrandbits(128).to_bytes(16, "big")
        self.loop.knock = functools.partial(knock, world, self)
        self.loop.boot_base_s = self.rng.uniform(10, 1e6)
        self.wall_offset_s = self.rng.uniform(-2, 2)
        self.started_at = world.now
        self.died_at: float | None = None
        self.stopped: list[tuple[float, float]] = []
        """From when to when it did not run."""
        self.stops = 0
        self.isolated_until = 0.0
        """Until then nothing of the network reaches it."""
        self.isolated: list[tuple[float, float]] = []
        self.cut_off: list[tuple[float, float]] = []
        """From when to when nobody could reach it by its link: it was cut or silent, or the node stood still."""
        self._cut_since: float | None = None
        self.accept: Callable[[End], None] | None = None
        """A node's door; None: it does not listen."""
        self.things: dict[str, Any] = {}
        """What it holds, by name, for those who look at it."""
        world.processes.append(self)

    def __str__(self) -> str:
        return self.name

    # ---- clocks ----

    @property
    def unix(self) -> float:
        """The wall clock, which may jump."""
        return UNIX + self.world.now + self.wall_offset_s

    # ---- what happens to it ----

    @property
    def alive(self) -> bool:
        """True until it is killed."""
        return self.died_at is None

    def stop(self, seconds: float, *, suspended: bool = False) -> None:
        """Freeze it (SIGSTOP), or suspend its machine: then its timers do not count the time, its boot clock does."""
        if self.loop.frozen or not self.alive:
            return
        world = self.world
        self.stops += 1
        self.loop.frozen = True
        if suspended:
            self.loop.asleep_s += seconds
        self.stopped.append((world.now, world.now + seconds))
        for connection in list(world.connections):
            if any(end.process is self for end in connection.ends):
                connection.ends[0].process.was_cut(seconds)
                connection.peer_stopped(self)
        world.scheduler.after(seconds, self._goes_on)

    def _goes_on(self) -> None:
        if self.alive:
            self.world.ledger.event("goes on", self)
            self.loop.frozen = False
            self.world.scheduler.has_work(self.loop)

    def kill(self, *, power: bool = False) -> None:
        """SIGKILL, or the machine's power: then nobody tells the other ends, and their pings find out."""
        if not self.alive:
            return
        world = self.world
        self.died_at = world.now
        self.things["power lost"] = power
        self.loop.dead = True
        self.accept = None
        for connection in list(world.connections):
            if any(end.process is self for end in connection.ends):
                if power:
                    connection.silence(60.0)
                else:
                    at = world.latency_s()
                    connection.cut((at, at))
        world.ledger.died(self)

    def isolate(self, seconds: float) -> None:
        """Nothing of the network reaches it for so long, and nobody is told."""
        world = self.world
        self.isolated_until = max(self.isolated_until, world.now + seconds)
        self.isolated.append((world.now, world.now + seconds))
        for connection in list(world.connections):
            if any(end.process is self for end in connection.ends):
                connection.silence(seconds)

    @property
    def ran_since(self) -> float:
        """Since when it has not stood still."""
        return max((end for _, end in self.stopped), default=self.started_at)

    def was_cut(self, seconds: float = 0.0) -> None:
        """Its link is cut; with `seconds`, it is silent for so long."""
        now = self.world.now
        if seconds:
            self.cut_off.append((now, now + seconds))
        elif self._cut_since is None:
            self._cut_since = now

    def has_linked(self) -> None:
        """A new stream leads to a node."""
        if self._cut_since is not None:
            self.cut_off.append((self._cut_since, self.world.now))
            self._cut_since = None

    def longest_cut_s(self, since: float) -> float:
        """How long it could not be reached in one go, counting only what lasted after a time."""
        now = self.world.now
        spans = self.cut_off if self._cut_since is None else [*self.cut_off, (self._cut_since, now)]
        return max((min(end, now) - begin for begin, end in spans if end >= since), default=0.0)

    def lost_s(self, since: float, until: float) -> float:
        """For how much of a time it did not run."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.stopped)
