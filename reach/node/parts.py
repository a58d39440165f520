"""What a node is made of around its engine, put together once: for `reach serve`, and for nodes without a server."""

from __future__ import annotations

import asyncio

from agentreach.aio.transport import Transport
from agentreach.v1.admin_pb2 import NodeRecord
from reach.core import fence, remote
from reach.core.snapshots import SnapshotStore
from reach.core.store import Store
from reach.node.admission import Admission
from reach.node.config import Config
from reach.node.election import Election
from reach.node.engine import Engine
from reach.node.everywhere import Peers
from reach.node.forwarding import Forwarding
from reach.node.lineage_key import LineageKeeper
from reach.node.nodelinks import NodeLinks
from reach.node.pin_keeper import PinKeeper
from reach.node.pins import PinBook
from reach.node.policies import Policies, wishes
from reach.node.registrar import Registrar
from reach.node.snapshot_place import make_snapshots
from reach.node.view import View


class Parts:
    """`start` it once the node can be reached, `run` its duties, `leave` the registry, `close` it when all is over."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        store: Store,
        record: NodeRecord,
        between: Transport,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """`record` is the node's own, its addresses filled in before `start`; `between` leads to other nodes.

        `snapshots` is for nodes that share more than their settings say. Raises `SnapshotsUnavailable`.
        """
        self._engine = engine
        engine.node_links = self._node_links = NodeLinks(engine, between)
        self._election = election = Election(store, config.node_id, ttl_s=config.election_ttl_s)
        admission = Admission(store, election, config.node_id, agents_max=config.agents_max)
        self._registrar = registrar = Registrar(
            store,
            record,
            lease_ttl_s=config.node_lease_ttl_s,
            register_wait_s=config.register_wait_s,
            admission=admission,
            replaced=engine.replaced,
            unread_s=engine.standstill.unread_s,
        )
        engine.policies = self._policies = Policies(store, election, engine.state, step=engine.step)
        leads = wishes(admission, self._policies)
        engine.forwarding = self._forwarding = Forwarding(engine.step, lambda: election.leader_id, leads)
        admission.connect(self._forwarding)
        self._policies.connect(self._forwarding)
        self._view = view = View(store, record, registrar, step=engine.step, remote=remote)
        contact = registrar.contact
        pins = PinBook(store, config.node_id, config.session_ttl_s, lambda: contact.away)
        pins.snapshots = snapshots or make_snapshots(config, store, pins.lease)
        engine.use(registrar, pins)
        self._lineage = LineageKeeper(store, election, engine.step)
        self._pin_keeper = PinKeeper(store, pins, engine.state, engine.step)
        engine.node, engine.registry_name = record, config.registry.partition(":")[0]
        engine.leader = lambda: election.leader
        engine.registry_age, engine.registry_grace_s = lambda: view.age_s, config.registry_grace_s
        engine.registry_revision, engine.look_up = lambda: view.revision, view.look_up

    async def start(self, peers: Peers | None = None) -> None:
        """Show the node in the registry, and see who else is there. Raises `StoreUnavailable`.

        Raises `NameTaken` if `peers` shows that another node of its node_id lives.
        """
        await self._registrar.start(peers)
        with self._engine.step() as state:
            fence.use(state, self._registrar.lease)
        await self._view.start()
        await self._policies.start()
        await self._election.start()

    async def run(self) -> None:
        """What a node does for the registry, and for other nodes, as long as it lives."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._registrar.run(), name="registrar")
            group.create_task(self._view.run(), name="view")
            group.create_task(self._election.run(), name="election")
            group.create_task(self._node_links.run(), name="node-links")
            group.create_task(self._policies.run(), name="policies")
            group.create_task(self._pin_keeper.run(), name="pin-keeper")
            group.create_task(self._lineage.run(), name="lineage")

    def let_nodes_in_anew(self, why: str) -> None:
        """End the streams between this node and others; who still may, links again, and loses nothing."""
        self._node_links.part(why)

    def resign(self) -> None:
        """Lead no more."""
        self._election.resign()

    async def parted(self) -> None:
        """Wait, within a limit, until other nodes have heard the goodbye that draining ends with."""
        await self._node_links.left()

    async def leave(self) -> None:
        """Take the node, and what it registered, out of the registry. `run` must have ended."""
        await asyncio.gather(self._registrar.stop(), self._election.stop())

    async def close(self) -> None:
        """Give the rest back."""
        await self._forwarding.close()
