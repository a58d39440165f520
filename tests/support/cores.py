"""Several nodes' cores on one virtual clock: linked with each other, and all seeing one store at once.

`Cores` links every pair, tells each node of the others' registrations, and carries frames until all are silent.
`cut` and `link` break and mend one pair; `restart` gives a node another life under its id.
"""

from __future__ import annotations

from itertools import combinations

from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.frame_pb2 import Frame
from reach.core import between, nodes, remote, returning
from reach.core.agents import Agent
from reach.core.arrivals import Arrival
from reach.core.effects import DeregisterAgent, DialNodes
from tests.support.core import CoreMesh

_ROUNDS_MAX = 2_000


class NodeCore(CoreMesh):
    """One node of `Cores`."""

    def __init__(self, cores: Cores, node_id: str, life: int, **rules: object) -> None:
        super().__init__(seed=life, nonce=f"{node_id}{life:>6}".encode()[-8:], node_id=node_id, **rules)
        self.cores = cores
        self.node_id = node_id
        self.state.now = cores.now
        self.alive = True

    def _register(self, arrival: Arrival) -> None:
        new = [each.agent for each in arrival.agents if each.agent is not None and each.attachment is None]
        self.revision = self.cores.revision
        super()._register(arrival)
        self.cores.revision = self.revision
        self.cores.registered.extend((self, agent) for agent in new if agent.generation)

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, DialNodes):
            return
        if isinstance(effect, DeregisterAgent):
            self.cores.gone.append((self, effect.agent, effect.generation))
        super()._carry_out(effect)

    def see(self, other: NodeCore) -> None:
        """Another node's key stands in the store."""
        record = NodeRecord(node_id=other.node_id, address=f"{other.node_id}:1", incarnation=other.state.incarnation)
        record.started_at.seconds = int.from_bytes(other.state.nonce[-4:], "big")  # each life has its own
        with self.step() as state:
            remote.node_seen(state, record)

    def pump(self) -> None:
        """All nodes go on until nobody has anything to say."""
        self.cores.pump()

    def pump_alone(self) -> None:
        """Only this node and its processes do."""
        super().pump()

    def advance(self, seconds: float) -> None:
        """Let time pass, for all nodes."""
        self.cores.advance(seconds)

    def advance_alone(self, seconds: float) -> None:
        """Let time pass for this node."""
        super().advance(seconds)


class Cores:
    """Nodes `n0`, `n1`, …, each linked to each."""

    STEP_S = 0.05

    def __init__(self, count: int = 2, **rules: object) -> None:
        self.now = 1000.0
        self.revision = 1_000_000
        self.registered: list[tuple[NodeCore, Agent]] = []
        """Not yet seen by the others."""
        self.gone: list[tuple[NodeCore, Agent, int]] = []
        self.seen: list[tuple[NodeCore, Agent]] = []
        """All that was registered and has not gone since, in order."""
        self._lives = count
        self._rules = rules
        self._cut: set[frozenset[str]] = set()
        self.views_stand = False
        """True: no node sees what the store says, until it is False again."""
        self.nodes = [NodeCore(self, f"n{number}", number + 1, **rules) for number in range(count)]
        for core in self.nodes:
            self._introduce(core)
        for one, other in combinations(self.nodes, 2):
            self.link(one, other)
        self.pump()

    def _introduce(self, core: NodeCore) -> None:
        """It and the others stand in the store, as the starts that they are."""
        for other in self.nodes:
            if other is not core:
                core.see(other)
                other.see(core)

    def link(self, one: NodeCore, other: NodeCore) -> None:
        """The node with the smaller id dials the other."""
        one, other = sorted((one, other), key=lambda core: core.node_id)
        self._cut.discard(frozenset((one.node_id, other.node_id)))
        hello = nodes.hello_for(one.state, nodes.of(one.state, other.node_id))
        assert not nodes.refusal(other.state, hello)
        with other.step() as state:
            nodes.hello(state, hello)
        self.pump()

    def cut(self, one: NodeCore, other: NodeCore) -> None:
        """The stream between two nodes breaks."""
        self._cut.add(frozenset((one.node_id, other.node_id)))
        for core, peer in ((one, other), (other, one)):
            if core.alive:
                with core.step() as state:
                    nodes.cut(state, nodes.of(state, peer.node_id), "cut by the test")
        self.pump()

    def kill(self, core: NodeCore) -> None:
        """A node is gone, without a word to anybody; its machine refuses whoever dials it."""
        core.alive = False
        for other in self.nodes:
            if other is not core and (peer := other.state.nodes.get(core.node_id)) is not None:
                peer.dead = True
        for other in self.nodes:
            if other is not core and other.alive:
                self.cut(other, core)
        for process in core.processes:
            process.connected = False

    def start_again(self, core: NodeCore) -> NodeCore:
        """Another life of a killed node, in its place; it sees what its former one and the others left in the store."""
        self._lives += 1
        again = NodeCore(self, core.node_id, self._lives, **self._rules)
        self.nodes[self.nodes.index(core)] = again
        self._introduce(again)
        present = {agent.agent_id: (home, agent) for home, agent in self.seen}
        with again.step() as state:
            for home, agent in present.values():
                record = agent.to_record()
                if home.node_id == again.node_id:
                    remote.left_behind(state, record)
                else:
                    remote.agent_seen(state, record, agent.generation)
            returning.opened(state)
        for other in self.nodes:
            if other is not again and other.alive:
                self.link(again, other)
        return again

    def _carry(self, core: NodeCore, other: NodeCore) -> bool:
        peer = core.state.nodes.get(other.node_id)
        back = other.state.nodes.get(core.node_id)
        if peer is None or back is None or frozenset((core.node_id, other.node_id)) in self._cut:
            return False
        if not (core.alive and other.alive) or not (peer.connected or peer.link.signals_waiting):
            return False
        data = peer.link.next_frame(core.state.now)
        if data is None:
            return False
        received = Frame.FromString(data)
        with other.step() as state:
            for signal in received.signals:
                if signal.HasField("welcome"):
                    assert nodes.welcomed(state, back, signal.welcome)
            between.frame(state, back, received, 0)
        return True

    def pump(self) -> None:
        """Carry frames and what the store says until all is silent."""
        for _ in range(_ROUNDS_MAX):
            for core in self.nodes:
                if core.alive:
                    core.pump_alone()
            moved = False
            for core in self.nodes:
                for other in self.nodes:
                    if other is not core:
                        moved = self._carry(core, other) or moved
            if not self.views_stand:
                moved = self._tell_views() or moved
            if not moved:
                return
        raise AssertionError("nodes answer each other for ever")

    def _tell_views(self) -> bool:
        registered, self.registered = self.registered, []
        gone, self.gone = self.gone, []
        left = {(agent.agent_id, generation) for _, agent, generation in gone}
        self.seen = [each for each in [*self.seen, *registered] if (each[1].agent_id, each[1].generation) not in left]
        for core in self.nodes:
            if not core.alive:
                continue
            with core.step() as state:
                for home, agent in registered:
                    if home is not core:
                        remote.agent_seen(state, agent.to_record(), agent.generation)
                for home, agent, generation in gone:
                    if home is not core:
                        remote.agent_gone(state, agent.tenant, agent.env, agent.agent_id, generation)
        return bool(registered or gone)

    def advance(self, seconds: float) -> None:
        """Let time pass for all, in small steps."""
        end = self.now + seconds
        while self.now < end:
            step = min(self.STEP_S, end - self.now)
            self.now += step
            for core in self.nodes:
                if core.alive:
                    core.advance_alone(self.now - core.state.now)
            self.pump()

    def assert_settled(self) -> None:
        """Nothing of any request is left at any node."""
        self.pump()
        for core in self.nodes:
            if core.alive:
                core.assert_settled()
