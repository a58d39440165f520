"""This node's own key in the store: written at its start, written again when it is lost, never over a living node's.

Two nodes of one node_id would take each other's links and agents for their own, so the second does not start. Which
one lives is asked of the address in the record that stands there: nobody but a node answers with its incarnation.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1.admin_pb2 import NodeRecord
from reach.core.ports import ANYBODY, MeshFailure, NoAnswer
from reach.core.store import Change, Item, LeaseGone, Put, Store, absent, unchanged
from reach.node.everywhere import Peers
from reach.node.nodelinks import refuses
from reach.node.records import NODES, Unreadable, read_node
from reach.node.shards import Shards

log = structlog.get_logger("reach.registry")

MEND_JITTER_S = 0.5  # after an outage all nodes write again: not all in the same instant
ANSWER_S = 2.0
TRIES = 5  # to write at the start while others write as well


class NameTaken(Exception):
    """Another node of this node_id lives, or may live; the text is one line that says what to do."""


class OwnKey:
    """The key of `node`, which stands under one of the leases."""

    def __init__(self, store: Store, node: NodeRecord, shards: Shards, lease_ttl_s: float) -> None:
        self._store = store
        self._node = node
        self._shards = shards
        self._lease_ttl_s = lease_ttl_s
        self.key = f"{NODES}{node.node_id}"
        self._revision = 0
        self._namesake = b""
        """The incarnation that has been complained of."""

    async def take(self, peers: Peers | None) -> None:
        """Write it at the node's start, over a dead node's at most. `peers` None: whoever had it is dead.

        Raises `NameTaken`, `StoreUnavailable` and `LeaseGone`.
        """
        for _ in range(TRIES):
            item = await self._store.get(self.key)
            former = self._other(item)
            if former is not None and peers is not None and not await self._is_dead(former, peers):
                if await self._store.get(self.key) != item:
                    continue
                raise NameTaken(
                    f"node {former.node_id} is registered at {former.address} and does not answer: if it is gone, its "
                    f"registration ends within {self._lease_ttl_s:g} s; if not, give this node another --node-id"
                )
            if await self._put(item):
                return
        raise NameTaken(f"others start as node {self._node.node_id} as well; give this node another --node-id")

    def doubtful(self, change: Change) -> bool:
        """True if a change of the key shows that it may not stand as it should."""
        if change.item is None:
            return change.revision > self._revision
        return self._other(change.item) is not None

    async def mend(self) -> bool:
        """Write it if it is not there. False: somebody else wrote at the same time, look again.

        Another node's is left alone, and complained of once. Raises `StoreUnavailable` and `LeaseGone`.
        """
        item = await self._store.get(self.key)
        other = self._other(item)
        if other is not None:
            self._revision = 0  # whenever it goes, this node's own comes back
            if other.incarnation != self._namesake:
                self._namesake = other.incarnation
                log.warning(  # one that leaves sees its successor here
                    "another node runs with this node's node_id: one of them must be given another",
                    node=self._node.node_id, address=other.address, incarnation=other.incarnation.hex(),
                )  # fmt: skip
            return True
        self._namesake = b""
        if item is not None and self._shards.holds(item.lease):
            return True
        await asyncio.sleep(random.random() * MEND_JITTER_S)
        return await self._put(item)

    def _other(self, item: Item | None) -> NodeRecord | None:
        """The other node whose record stands there. What cannot be read is nobody's, to be written over."""
        if item is None:
            return None
        try:
            record = read_node(item)
        except Unreadable:
            return None
        return record if record.incarnation != self._node.incarnation else None

    async def _put(self, former: Item | None) -> bool:
        shard = await self._shards.room_for(1)
        condition = absent(self.key) if former is None else unchanged(former)
        try:
            result = await self._store.txn(
                [condition], [Put(self.key, self._node.SerializeToString(), shard.lease.id)], []
            )
        except LeaseGone:
            self._shards.drop(shard)
            raise
        if result.succeeded:
            self._revision = result.revision
            self._shards.wrote(self.key, shard)
        return result.succeeded

    async def _is_dead(self, former: NodeRecord, peers: Peers) -> bool:
        """True if its process is gone for certain, False if nobody can tell. Raises `NameTaken` if it lives."""
        if former.address == self._node.address or await refuses(former.address):
            return True  # this node has its port, or nobody has
        try:
            question = ("GetNode", admin.GetNodeRequest(), admin.GetNodeReply)
            reply = await peers.ask(former.address, *question, ANSWER_S, ANYBODY)
        except (NoAnswer, MeshFailure):
            return False
        if reply.node.incarnation != former.incarnation:
            return True  # its address is another's
        raise NameTaken(f"node {former.node_id} runs at {former.address}; give this node another --node-id")
