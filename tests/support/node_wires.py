"""Several real nodes that can be cut from each other: each is reached by the others through wires of its own.

    async with etcd_cluster() as etcd, wired_nodes(etcd) as nodes:
        nodes.isolate(nodes[2])                  # from the other nodes and from etcd; its agents and callers stay
        nodes.heal()

What is cut is held, as TCP knows a partition: nothing passes, nothing is refused. Whoever is told of a node by another
one reaches it through a wire too, which is cut for nobody but nodes: `nodes[2].grpc` is the node itself. Which node
dialled is told by the kernel (`tests.support.dialled.CAN_TELL`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.cluster import ClusterNode, NodeCluster
from tests.support.dialled import who_dialled
from tests.support.etcd import free_port
from tests.support.etcd_cluster import WiredEtcd
from tests.support.node import QUICK
from tools.faultproxy import FaultProxy


class WiredNodes(NodeCluster):
    """The nodes and the wires between them. Started and ended like `NodeCluster`."""

    def __init__(self, etcd: WiredEtcd, size: int, settings: dict[str, object]) -> None:
        self.wired_etcd = etcd
        self._at: dict[str, str] = {}
        self._wires: dict[tuple[str, str], FaultProxy] = {}
        self._doors: list[asyncio.Server] = []
        super().__init__(etcd, size, settings)
        for node in self.nodes:
            for dialler in ("", *(each.node_id for each in self.others(node))):
                self._wires[dialler, node.node_id] = FaultProxy(node.grpc)
            self._doors.append(etcd.do(self._door_of(node)))

    def own(self, node_id: str) -> dict[str, object]:
        """Others are told to dial its door."""
        self._at[node_id] = f"127.0.0.1:{free_port()}"
        return {**super().own(node_id), "advertise": self._at[node_id]}

    def cut(self, one: ClusterNode, other: ClusterNode) -> None:
        """These two hear nothing of each other any more."""
        self.wired_etcd.soon(self._wires[one.node_id, other.node_id].hold)
        self.wired_etcd.soon(self._wires[other.node_id, one.node_id].hold)

    def isolate(self, node: ClusterNode) -> None:
        """This node hears nothing of the others any more, nor of etcd."""
        for other in self.others(node):
            self.cut(node, other)
        self.wired_etcd.cut_client(node.node_id)

    def rejoin(self, node: ClusterNode) -> None:
        """This node hears the others again, and etcd, and they hear it."""
        for names, wire in self._wires.items():
            if node.node_id in names:
                self.wired_etcd.soon(wire.heal)
        self.wired_etcd.heal_client(node.node_id)

    def heal(self) -> None:
        """All wires pass again, also to etcd, and what they held arrives."""
        for wire in self._wires.values():
            self.wired_etcd.soon(wire.heal)
        self.wired_etcd.heal()

    def close(self) -> None:
        """Kill every node and end the wires."""
        super().close()
        self.wired_etcd.do(self._wires_closed())

    async def _wires_closed(self) -> None:
        for door in self._doors:
            door.close()
        for wire in self._wires.values():
            await wire.close()

    async def _door_of(self, node: ClusterNode) -> asyncio.Server:
        """Where the others dial a node: each connection goes to the wire of whoever dialled."""

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled = who_dialled(writer, self.others(node))
            name = "" if dialled is None else dialled.node_id
            self._wires[name, node.node_id].relay(reader, writer)

        host, _, port = self._at[node.node_id].rpartition(":")
        return await asyncio.start_server(accepted, host, int(port))


def wired_nodes(etcd: WiredEtcd, size: int = 3, **settings: Any) -> WiredNodes:
    """Nodes to use in an `async with`: node-1, node-2, … on this etcd."""
    return WiredNodes(etcd, size, {**QUICK, **settings})
