"""Faults of worlds whose nodes share a store: partitions, nodes that leave or stay away, trouble with the store."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .faults import Faults
from .process import Process
from .registry import Registry
from .storelink import StoreLink
from .world import Wall

if TYPE_CHECKING:
    from .world import World

SLOW_S = (0.05, 0.5, 1.5, 3.0, 6.0)
BY_HAND = ("agents/", "nodes/", "election/")


class FaultsOfNodes(Faults):
    """Those of every world, and these."""

    def __init__(self, world: World, rng: Random, heal_at: float) -> None:
        super().__init__(world, rng, heal_at)
        assert world.registry is not None
        self._registry: Registry = world.registry
        self._kinds |= {
            "half open": (2, self._half_open),
            "one way": (2, self._one_way),
            "node stays away": (2, self._node_stays_away),
            "node leaves": (2, self._node_leaves),
            "node and agents crash": (2, self._node_and_agents_crash),
            "node pause": (3, self._node_pause),
            "partition": (4 if len(world.addresses) > 1 else 0, self._partition),
            "island": (2 if len(world.addresses) > 1 else 0, self._island),
            "store cut": (4, self._store_cut),
            "store away": (2, self._store_away),
            "store slow": (2, self._store_slow),
            "answers lost": (2, self._answers_lost),
            "watches late": (2, self._watches_late),
            "compaction": (2, self._compaction),
            "store election": (1, self._store_election),
            "lease by hand": (1, self._lease_by_hand),
            "key by hand": (1, self._key_by_hand),
        }

    def _some_node(self) -> Process | None:
        """A node; half of the time the one that leads."""
        process = self._some("node")
        leader = self._registry.leader_id()
        leading = next((each for each in self._world.nodes.values() if each.alive and _id_of(each) == leader), None)
        return leading if leading is not None and self._rng.random() < 0.5 else process

    # ---- the network ----

    def _half_open(self) -> str:
        """One end sees it break at once, the other only by its pings."""
        connection = self._connection()
        if connection is None:
            return ""
        notice = [0.0, self._rng.uniform(2.0, 8.0)]
        self._rng.shuffle(notice)
        connection.cut((notice[0], notice[1]))
        return f"{connection}, noticed after {notice[0]:.3f} s and {notice[1]:.3f} s"

    def _one_way(self) -> str:
        connection, seconds = self._connection(), self._for_s()
        if connection is None:
            return ""
        end = self._rng.choice(connection.ends)
        connection.deafen(end, seconds)
        return f"{connection}: nothing of {end.process} arrives for {seconds:.3f} s"

    def _partition(self) -> str:
        """Some nodes do not reach the others; all of them reach the store and whoever is attached."""
        nodes = list(self._world.addresses)
        here = frozenset(self._rng.sample(nodes, self._rng.randint(1, len(nodes) - 1)))
        return self._wall(here, frozenset(nodes) - here)

    def _island(self) -> str:
        """A node and some processes on one side of a wall, everybody else and, perhaps, the store on the other."""
        rng, world = self._rng, self._world
        node = rng.choice(world.addresses)
        beside = {str(each.things["name"]) for each in world.processes if each.kind != "node" and rng.random() < 0.4}
        others = {str(each.things["name"]) for each in world.processes if each.kind != "node"} - beside
        told = self._wall(frozenset({node, *beside}), frozenset({*world.addresses, *others}) - {node})
        link = self._link_of(world.nodes.get(node))
        if link is not None and rng.random() < 0.7:
            link.cut(world.walls[-1].until - world.now, refuses=False)
            told += ", without the store"
        return told

    def _wall(self, here: frozenset[str], there: frozenset[str]) -> str:
        world, seconds = self._world, self._for_s()
        wall = Wall(here, there, world.now + seconds)
        world.walls.append(wall)
        for connection in list(world.connections):
            client, node = connection.ends
            if wall.parts(client.process, str(node.process.things["address"])):
                connection.silence(seconds)
        return f"{sorted(here)} and {sorted(there)} for {seconds:.3f} s"

    # ---- nodes ----

    def _node_stays_away(self) -> str:
        """Killed, and started again only after its leases may have ended."""
        process = self._some_node()
        if process is None:
            return ""
        process.kill(power=self._rng.random() < 0.3)
        self._world.scheduler.after(self._rng.uniform(5.0, 15.0), self._world.restart, process)
        return f"{process}"

    def _node_and_agents_crash(self) -> str:
        """Agents and the node that they are linked with, one shortly after the other; both are back soon."""
        rng, world = self._rng, self._world
        process = self._some("agents")
        links = [each for each in world.connections if process in [end.process for end in each.ends]]
        if process is None or not links:
            return ""
        node = next(end.process for end in links[-1].ends if end.process is not process)
        both, apart_s = [process, node], rng.uniform(0.0, 1.0)
        rng.shuffle(both)
        for victim, at in zip(both, (0.0, apart_s), strict=True):
            world.scheduler.after(at, victim.kill)
            world.scheduler.after(at + rng.uniform(0.05, 3.0), world.restart, victim)
        return f"{both[0]} and {apart_s:.3f} s later {both[1]}"

    def _node_leaves(self) -> str:
        process = self._some_node()
        node = process.things.get("node") if process is not None else None
        if process is None or node is None or process.things.get("leaving") or not node.serving:
            return ""
        process.things["leaving"] = True
        process.loop.call_soon(process.loop.run_inside, node.leave(), "leave")
        return f"{process}"

    def _node_pause(self) -> str:
        process, seconds = self._some_node(), self._for_s()
        if process is None:
            return ""
        process.stop(seconds, suspended=self._rng.random() < 0.3)
        return f"{process} for {seconds:.3f} s"

    # ---- the store ----

    def _link_of(self, process: Process | None) -> StoreLink | None:
        return process.things["node"].store if process is not None and "node" in process.things else None

    def _some_link(self) -> tuple[Process | None, StoreLink | None]:
        process = self._some_node()
        return process, self._link_of(process)

    def _store_cut(self) -> str:
        """One node does not reach the store."""
        (process, link), seconds = self._some_link(), self._for_s()
        if link is None:
            return ""
        link.cut(seconds, refuses=self._rng.random() < 0.5)
        return f"of {process} for {seconds:.3f} s"

    def _store_away(self) -> str:
        """Nobody reaches it."""
        seconds, refuses = self._for_s(), self._rng.random() < 0.5
        self._world.store_away(seconds, refuses=refuses)
        return f"for {seconds:.3f} s"

    def _store_slow(self) -> str:
        (process, link), seconds = self._some_link(), self._for_s()
        if link is None:
            return ""
        link.slow_s, link.slow_until = self._rng.choice(SLOW_S), self._world.now + seconds
        return f"{link.slow_s:g} s each way for {process}, for {seconds:.3f} s"

    def _answers_lost(self) -> str:
        (process, link), seconds = self._some_link(), self._for_s()
        if link is None:
            return ""
        link.answers_lost_until = self._world.now + seconds
        return f"to {process} for {seconds:.3f} s"

    def _watches_late(self) -> str:
        (process, link), seconds = self._some_link(), self._for_s()
        if link is None:
            return ""
        link.watches_late_until = self._world.now + seconds
        return f"of {process} by {seconds:.3f} s"

    def _compaction(self) -> str:
        """While one node hears nothing of the store."""
        told = self._store_cut()
        self._world.scheduler.after(self._rng.uniform(0.0, 3.0), self._registry.compact)
        return f"and the store is cut {told}"

    def _store_election(self) -> str:
        """The store is away for a second or two, and then all leases begin anew."""
        seconds = self._rng.uniform(0.5, 2.5)
        self._world.store_away(seconds, refuses=True)
        self._world.scheduler.after(seconds, self._registry.extend)
        return f"for {seconds:.3f} s"

    def _lease_by_hand(self) -> str:
        """Somebody revokes a lease."""
        leases = [lease for lease, held in self._registry.keys._leases.items() if any(map(_may_go, held.keys))]
        if not leases:
            return ""
        lease = self._rng.choice(leases)
        self._registry.revoke(lease)
        return f"{lease}"

    def _key_by_hand(self) -> str:
        """Somebody deletes a key."""
        names = [item.key for item in self._registry.keys.below("") if _may_go(item.key)]
        if not names:
            return ""
        name = self._rng.choice(names)
        self._registry.delete(name)
        return name


def _id_of(process: Process) -> str:
    return str(process.things["address"]).partition(":")[0]


def _may_go(key: str) -> bool:
    """Deleting a pin by hand gives the session away: nobody promises anything then."""
    return key.startswith(BY_HAND)
