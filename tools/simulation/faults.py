"""The faults of a world: what goes wrong, with whom, when, for how long. All of it is over by the time of healing."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .network import Connection
from .process import Process

if TYPE_CHECKING:
    from .world import World

LONG_S = (0.05, 0.4, 1.5, 4.0, 9.0, 14.0)


class Faults:
    """Draws and carries out the faults of one seed."""

    def __init__(self, world: World, rng: Random, heal_at: float) -> None:
        self._world = world
        self._rng = rng
        self._heal_at = heal_at
        self._kinds = {
            "cut": (5, self._cut),
            "cut all": (1, self._cut_all),
            "silence": (2, self._silence),
            "isolate": (2, self._isolate),
            "pause": (3, self._pause),
            "suspend": (1, self._suspend),
            "crash": (3, self._crash),
            "leave": (2, self._leave),
            "caller crash": (1, self._caller_crash),
            "node crash": (2, self._node_crash),
            "slow reader": (2, self._slow_reader),
            "wall jump": (1, self._wall_jump),
        }

    def schedule(self, count: int) -> list[str]:
        """Let so many faults happen; returns their names."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        drawn = self._rng.choices(names, weights, k=count)
        for name in drawn:
            self._world.scheduler.at(self._rng.uniform(1.0, self._heal_at - 1.0), self._happen, name)
        return drawn

    def _happen(self, name: str) -> None:
        what = self._kinds[name][1]()
        if what:
            self._world.ledger.event("FAULT", name, what)

    # ---- helpers ----

    def _for_s(self) -> float:
        """How long a fault takes; it is over before the world heals."""
        return min(self._rng.choice(LONG_S) * self._rng.uniform(0.5, 1.5), self._heal_at - self._world.now - 0.1)

    def _some(self, *kinds: str) -> Process | None:
        found = [each for each in self._world.processes if each.alive and each.kind in kinds]
        return self._rng.choice(found) if found else None

    def _connection(self) -> Connection | None:
        connections = list(self._world.connections)
        return self._rng.choice(connections) if connections else None

    # ---- what can happen ----

    def _cut(self) -> str:
        connection = self._connection()
        if connection is None:
            return ""
        rng = self._rng
        notice = (rng.choice((0.001, 0.1, 2.0)) * rng.random(), rng.choice((0.001, 0.1, 2.0)) * rng.random())
        connection.cut(notice)
        return f"{connection}, noticed after {notice[0]:.3f} s and {notice[1]:.3f} s"

    def _cut_all(self) -> str:
        for connection in list(self._world.connections):
            connection.cut((self._rng.random() * 0.1, self._rng.random() * 0.1))
        return "every connection"

    def _silence(self) -> str:
        connection, seconds = self._connection(), self._for_s()
        if connection is None:
            return ""
        connection.silence(seconds)
        return f"{connection} for {seconds:.3f} s"

    def _isolate(self) -> str:
        process, seconds = self._some("agents", "callers"), self._for_s()
        if process is None:
            return ""
        process.isolate(seconds)
        return f"{process} for {seconds:.3f} s"

    def _pause(self) -> str:
        process, seconds = self._some("agents", "agents", "callers", "node"), self._for_s()
        if process is None:
            return ""
        process.stop(seconds)
        return f"{process} for {seconds:.3f} s"

    def _suspend(self) -> str:
        process, seconds = self._some("agents", "callers", "node"), self._for_s()
        if process is None:
            return ""
        process.stop(seconds, suspended=True)
        return f"{process} for {seconds:.3f} s"

    def _crash(self) -> str:
        process = self._some("agents")
        if process is None:
            return ""
        power = self._rng.random() < 0.3
        process.kill(power=power)
        self._world.scheduler.after(self._rng.uniform(0.05, 6.0), self._world.restart, process)
        return f"{process}{' by power' if power else ''}"

    def _leave(self) -> str:
        process = self._some("agents")
        if process is None or process.things.get("leaving"):
            return ""
        process.things["leaving"] = True
        process.loop.call_soon(process.loop.run_inside, process.things["troupe"].leave(), "leave")
        self._world.scheduler.after(self._rng.uniform(0.05, 3.0), self._world.restart, process)
        return f"{process}"

    def _caller_crash(self) -> str:
        process = self._some("callers")
        if process is None:
            return ""
        process.kill()
        self._world.scheduler.after(1.0, self._world.restart, process)
        return f"{process}"

    def _node_crash(self) -> str:
        process = self._some("node")
        if process is None:
            return ""
        process.kill(power=self._rng.random() < 0.3)
        self._world.scheduler.after(self._rng.uniform(0.05, 4.0), self._world.restart, process)
        return f"{process}"

    def _slow_reader(self) -> str:
        connection, seconds = self._connection(), self._for_s()
        if connection is None:
            return ""
        end = self._rng.choice(connection.ends)
        end.bytes_per_s = self._rng.choice((2_000.0, 20_000.0, 200_000.0))
        self._world.scheduler.after(seconds, setattr, end, "bytes_per_s", 0.0)
        return f"{end.other.process} reads {end.bytes_per_s:g} bytes/s of {connection} for {seconds:.3f} s"

    def _wall_jump(self) -> str:
        process = self._some("agents", "callers", "node")
        if process is None:
            return ""
        by = self._rng.choice((-3600.0, -30.0, 30.0, 3600.0))
        process.wall_offset_s += by
        return f"{process} by {by:+g} s"
