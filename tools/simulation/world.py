"""One world: nodes, agents, callers, a network, a plan drawn from a seed, and the time in which it happens.

0 s to 16 s: requests begin, faults happen. 20 s: everything heals (what was killed is there again, what was slow is
fast). From then on all must settle: every request ends by its deadline, then every gauge is back to 0, and every agent
answers again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from . import invariants, node, of_messages, of_nodes, of_processes
from .asking import Asking
from .cast import TOPICS, Role, Troupe
from .faults import Faults
from .ledger import Ask, Ledger, Violation
from .load import Caller, Load
from .loop import Scheduler, VirtualLoop
from .outside import replaced
from .process import Process
from .registry import Registry

if TYPE_CHECKING:
    from .network import Connection

CHECKERS = (of_messages, of_nodes, of_processes)  # importing them fills `invariants.ALL`
NODES = {0: 10, 1: 1, 2: 4, 3: 4, 4: 1}  # how many share a store, and how often; 0: one with its own, embedded
LOAD_UNTIL_S = 16.0
HEALED_AT_S = 20.0
ANSWERED_BY_S = 34.0  # the last deadline, and what a process that did not run may add
SETTLED_BY_S = 54.0  # graces, resume windows and the expiry of dead links after it
PROBED_BY_S = 66.0
PROBES_APART_S = 0.2
ENDED_WITHIN_S = 30.0
LOOK_EVERY_TURNS = 8  # of the processes beside the node: their queues change slowly
LINKS_MAX_LATENCY_S = (0.0005, 0.005, 0.05)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wall:
    """A partition of the network: nothing gets through between some processes and some addresses of nodes."""

    here: frozenset[str]
    """Names of processes, or of nodes' addresses, whichever life of theirs."""
    there: frozenset[str]
    until: float

    def parts(self, process: Process, address: str) -> bool:
        """True if the process and the address are on different sides of it."""
        own = str(process.things.get("address", process.things["name"]))
        return (own in self.here and address in self.there) or (own in self.there and address in self.here)


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, *, trace: bool = False, follow: int | None = None, nodes: int | None = None) -> None:
        """`nodes` overrides what the seed draws."""
        self.seed = seed
        self.scheduler = Scheduler(Random(f"{seed}/turns"))
        self.scheduler.after_turn = self._after_turn
        self.network_rng = Random(f"{seed}/network")
        self.plan_rng = Random(f"{seed}/plan")
        self.ledger = Ledger(self, trace=trace, follow=follow)
        self.processes: list[Process] = []
        self.nodes: dict[str, Process] = {}
        self.connections: dict[Connection, None] = {}
        self.walls: list[Wall] = []
        drawn = Random(f"{seed}/nodes").choices(list(NODES), list(NODES.values()))[0]
        self.sharing = drawn if nodes is None else nodes
        """How many nodes share the store; 0: there is one, with the embedded store."""
        self.registry = Registry(self) if self.sharing else None
        self.addresses = tuple(f"node-{number}:7070" for number in range(1, max(1, self.sharing) + 1))
        self.lives: dict[bytes, Process] = {}
        """By the first bytes of the entries it makes: each start of a node."""
        self.faults: list[str] = []
        """What was logged as an error inside the node or the SDK."""
        self.fault_names: list[str] = []
        self.event_count = 0
        self.over = False
        self.node_flags: dict[str, Any] = {}
        self._numbers = 0
        self._latency_s = self.plan_rng.choice(LINKS_MAX_LATENCY_S)
        self._failed: Violation | None = None

    # ---- facts ----

    @property
    def now(self) -> float:
        """True seconds since the beginning."""
        return self.scheduler.now

    @property
    def current(self) -> Process:
        """The process whose turn it is."""
        loop = self.scheduler.current
        assert loop is not None and isinstance(loop.process, Process), "only processes look at clocks"
        return loop.process

    def known_addresses(self, process: Process) -> tuple[str, ...]:
        """The list that a process is configured with: not everybody's begins with the same node, or is whole."""
        rng = Random(f"{self.seed}/{process.name}/addresses")
        known = rng.sample(self.addresses, len(self.addresses))
        return tuple(known) if rng.random() < 0.8 else tuple(known[:1])

    def as_process(self, process: Process, look: Callable[[], T]) -> T:
        """Look at something that looks at the clocks of a process."""
        scheduler = self.scheduler
        before, scheduler.current = scheduler.current, process.loop
        try:
            return look()
        finally:
            scheduler.current = before

    def walled_until(self, process: Process, address: str) -> float:
        """Until when nothing gets through from a process to an address."""
        return max((wall.until for wall in self.walls if wall.parts(process, address)), default=0.0)

    def number(self) -> int:
        """The next number of anything."""
        self._numbers += 1
        return self._numbers

    def latency_s(self) -> float:
        """How long something takes on the network; sometimes much longer than usual."""
        rng = self.network_rng
        usual = rng.random() * self._latency_s
        return usual if rng.random() > 0.01 else usual + rng.random() * 0.3

    def store_away(self, seconds: float, *, refuses: bool) -> None:
        """Nobody reaches the store for so long; who starts meanwhile does not either."""
        assert self.registry is not None
        self.registry.away_until = max(self.registry.away_until, self.now + seconds)
        for process in self.nodes.values():
            if process.alive and "node" in process.things:
                process.things["node"].store.cut(seconds, refuses=refuses)

    # ---- the cast ----

    def _roles(self) -> list[tuple[Role, ...]]:
        rng = self.plan_rng

        def role(kind: str, limits: tuple[int, ...], **more: Any) -> Role:
            instance = rng.choice(("", f"i{self.number()}"))
            return Role(kind, instance, rng.choice(limits), **more)

        hosted: list[tuple[Role, ...]] = [
            (role("echo", (0, 1, 4), topic=TOPICS[0]),),
            (role("echo", (1, 2)), role("story", (0, 2))),
            (role("slow", (1, 2, 3)),),
            (role("slow", (1, 3)), role("chat", (1, 2))),
            (role("chat", (0, 1, 3)),),
            (role("relay", (1, 3), reentrant=rng.random() < 0.3), role("flaky", (0, 2))),
            (role("stubborn", (1, 2)), role("flaky", (1, 4))),
        ]
        if rng.random() < 0.5:
            hosted.append((role("story", (1, 3), topic=TOPICS[1]), role("relay", (0, 2))))
        return hosted

    def _settings(self) -> dict[str, Any]:
        """The node's settings: mostly the defaults, sometimes bounds so tight that they are met."""
        rng = self.plan_rng
        flags: dict[str, Any] = {"warm_up_s": rng.choice((0.0, 10.0))}
        if rng.random() < 0.25:
            flags["lane_max"] = rng.choice((1, 3))
        if rng.random() < 0.25:
            flags["replay_entries_max"] = rng.choice((0, 5, 30))
        if rng.random() < 0.15:
            flags["requests_in_flight_max"] = 12
        if rng.random() < 0.2:
            flags["resume_window_s"] = rng.choice((1.0, 3.0))
        if self.sharing:
            flags["election_ttl_s"] = rng.choice((2.0, 2.0, 5.0))
            flags["node_lease_ttl_s"] = rng.choice((3.0, 8.0, 20.0))
        return flags

    def _start(self, kind: str, name: str) -> Process:
        process = Process(self, name, kind)
        self.ledger.event("starts", process, kind)
        process.things["name"] = name
        return process

    def start_node(self, address: str) -> None:
        """A node with an empty memory."""
        process = self._start("node", "node" if len(self.addresses) == 1 else address.partition(":")[0])
        self.nodes[address] = process
        process.things["address"] = address
        process.loop.call_soon(
            process.loop.run_inside, node.serve(self, process, address, dict(self.node_flags)), "node"
        )

    def start_agents(self, name: str, roles: tuple[Role, ...]) -> None:
        """A process with these agents."""
        process = self._start("agents", name)
        process.loop.call_soon(self._play, process, roles)

    def _play(self, process: Process, roles: tuple[Role, ...]) -> None:
        process.loop.run_inside(Troupe(self, process, roles).serve(), "agents")

    def start_caller(self, name: str, topic: str) -> None:
        """A process of callers; it subscribes to a topic, if one is given."""
        process = self._start("callers", name)
        process.things["topic"] = topic
        process.loop.call_soon(self._call, process, topic)

    def _call(self, process: Process, topic: str) -> None:
        process.loop.run_inside(Caller(self, process).begin(topic), "caller")

    def restart(self, former: Process) -> None:
        """Start again what was killed or has left; a process that still drains is joined by its successor."""
        if former.things.get("succeeded"):
            return
        former.things["succeeded"] = True
        name = former.things["name"]
        match former.kind:
            case "node":
                self.start_node(former.things["address"])
            case "agents":
                self.start_agents(name, former.things["troupe"].roles if "troupe" in former.things else ())
            case _:
                self.start_caller(name, former.things["topic"])

    # ---- checks ----

    def check(self, when: str, fact: Any = None) -> None:
        """Let the invariants of a moment look; the first that is violated ends the world."""
        if self._failed is None and not self.over:
            for invariant in invariants.ALL[when]:
                detail = invariant.violated(self, fact)
                if detail:
                    group = getattr(fact, "group", None)
                    self._failed = Violation(invariant.name, invariant.statement, detail, group, self.now)
                    return

    def _after_turn(self, loop: VirtualLoop) -> None:
        process = loop.process
        assert isinstance(process, Process)
        if process.kind == "node":
            self.check("node turn", process)
        elif self.scheduler.turns % LOOK_EVERY_TURNS == 0 or loop.faults or self.faults:
            self.check("turn", process)
        if self._failed is not None:
            raise self._failed

    # ---- life ----

    def run(self) -> None:
        """Live through it. Raises `Violation`."""
        with replaced(self):
            try:
                self._live()
            finally:
                self._end()

    def _live(self) -> None:
        rng = self.plan_rng
        self.node_flags = self._settings()
        for address in self.addresses:
            self.start_node(address)
        for number, roles in enumerate(self._roles()):
            self.start_agents(f"a{number}", roles)
        for number in range(3):
            self.start_caller(f"c{number}", rng.choice(("", *TOPICS)))
        Load(self, Random(f"{self.seed}/load")).schedule(rng.randint(25, 70), LOAD_UNTIL_S)
        from .faults_of_nodes import FaultsOfNodes  # it needs a whole world

        kind = FaultsOfNodes if self.sharing else Faults
        faults = kind(self, Random(f"{self.seed}/faults"), HEALED_AT_S)
        self.fault_names = faults.schedule(rng.choice((0, 2, 4, 8, 12) if self.sharing else (0, 1, 2, 4, 8)))
        self.scheduler.at(HEALED_AT_S, self._heal)
        self._go(ANSWERED_BY_S, "answered")
        self._go(SETTLED_BY_S, "settled")
        self._probe()
        self._go(PROBED_BY_S, "rest")

    def _end(self) -> None:
        """Let every task of every process, the killed ones too, end by a cancel: nothing of it counts any more."""
        self.over = True
        self.scheduler.after_turn = None
        for process in self.processes:
            process.loop.end()
        self.scheduler.run(self.now + ENDED_WITHIN_S)
        for process in self.processes:
            process.loop.close()

    def _go(self, until: float, then: str) -> None:
        self.scheduler.run(until)
        self.ledger.event("LOOK", then)
        self.check(then)
        if self._failed is not None:
            raise self._failed

    def _heal(self) -> None:
        self.ledger.event("HEALED")
        for process in list(self.processes):
            if not process.alive or process.things.get("leaving"):
                self.restart(process)
        for connection in self.connections:
            for end in connection.ends:
                end.bytes_per_s = 0.0

    def _probe(self) -> None:
        """One last request to each agent that should be there, by a caller; and, of several nodes, by each of them."""
        caller = next(each for each in self.processes if each.alive and "caller" in each.things)
        ways = [caller, *self.nodes.values()] if self.sharing > 1 else [caller]
        at = self.now
        for process in self.processes:
            if process.alive and process.kind == "agents" and not process.things.get("leaving"):
                for role, _, agent_id in process.things["troupe"].agents:
                    for way in ways:
                        at += PROBES_APART_S / len(ways)
                        self.scheduler.at(at, way.loop.call_soon, _probe_now, self, way, role, agent_id)


def _probe_now(world: World, way: Process, role: Role, agent_id: str) -> None:
    number = world.number()
    ask = Ask(number, number, way, agent_id, "probe", 8.0)
    data: dict[str, Any] = {"ask": number, "root": number, "s": 0.0, "hops": 0, "items": 2, "gap": 0.0, "times": 0}
    data["fault"] = ""
    options: dict[str, Any] = {"agent_id": agent_id}
    if role.kind == "chat":
        ask.session = f"probe-{number}"
    asking = Asking(world, way)
    if way.kind == "node":
        way.loop.run_inside(asking.invoke(way.things["engine"], ask, data, options), "probe")
        return
    options["timeout"] = ask.timeout_s
    if ask.session:
        options["session"] = ask.session
    way.loop.run_inside(asking.ask(way.things["caller"].mesh, ask, data, options), "probe")
