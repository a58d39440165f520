"""Several real nodes on one etcd: each `reach serve` in a process of its own, as `tests.support.node` starts them.

    async with etcd_cluster() as etcd, node_cluster(etcd) as nodes:       # node-1, node-2, node-3, all ready
        async with connect(nodes.url) as mesh: ...                        # all addresses; nodes[0].grpc is one
        nodes[1].kill()                                                   # pause(), resume(), await term()
        await nodes[1].restart()

On a `WiredEtcd` every node has wires of its own (`etcd.cut_client("node-2")`); any other `EtcdCluster` will do too.
Settings are those of `start_node`, with times shrunk. Left with an error, it prints the end of each node's log.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from reach.adapters.binding import PortTaken, require_free
from tests.support.etcd import EtcdCluster
from tests.support.etcd_cluster import WiredEtcd
from tests.support.node import QUICK, READY_S, NodeProcess
from tools.cluster import COUNT, Place

_LOG_SHOWN_CHARS = 4_000


class ClusterNode(NodeProcess):
    """One node of several."""

    def __init__(self, node_id: str, settings: Mapping[str, object]) -> None:
        super().__init__({"node_id": node_id, **settings})
        self.node_id = node_id

    @property
    def running(self) -> bool:
        """True from its start to its end, also while paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process as last started, 0 before."""
        return self._process.pid if self._process is not None else 0

    def kill(self) -> None:
        """SIGKILL, and wait for the process to be gone. Works on a paused one; nothing if it is not running."""
        if self.running:
            self.process.kill()
            self.process.wait(10)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers. Returns when every thread of it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def term(self, limit_s: float = 30.0) -> int:
        """SIGTERM, and wait until it has drained and ended; its exit code."""
        return await self.end(signal.SIGTERM, limit_s)


class NodeCluster:
    """The nodes; started on entering the context, killed on leaving it."""

    def __init__(self, etcd: EtcdCluster, size: int, settings: Mapping[str, object]) -> None:
        self.etcd = etcd
        self.nodes: list[ClusterNode] = []
        for number in range(1, size + 1):
            node_id = f"node-{number}"
            self.nodes.append(ClusterNode(node_id, {**self.own(node_id), **settings}))

    def own(self, node_id: str) -> dict[str, object]:
        """The settings that this node alone has."""
        return {"registry": _registry(self.etcd, node_id)}

    def __getitem__(self, place: int) -> ClusterNode:
        return self.nodes[place]

    def __iter__(self) -> Iterator[ClusterNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def url(self) -> str:
        """What callers and agents dial: every node's address."""
        return ",".join(node.grpc for node in self.nodes)

    def url_from(self, place: int) -> str:
        """The same, this node's first."""
        return ",".join(node.grpc for node in [*self.nodes[place:], *self.nodes[:place]])

    def by_id(self, node_id: str) -> ClusterNode:
        """The node of this id. Raises `KeyError`."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise KeyError(node_id)

    def others(self, *nodes: ClusterNode) -> list[ClusterNode]:
        """All but these."""
        return [node for node in self.nodes if node not in nodes]

    async def ready(self, limit_s: float = READY_S) -> None:
        """Start what is not running, resume what is paused, and wait until every node is ready."""
        for node in self.nodes:
            if not node.running:
                node.start()
            node.resume()
        await asyncio.gather(*(node.ready(limit_s) for node in self.nodes))

    def logs(self) -> str:
        """The end of each node's log, for a failure's message."""
        return "\n".join(f"---- {node.node_id}\n{node.log[-_LOG_SHOWN_CHARS:]}" for node in self.nodes)

    def close(self) -> None:
        """Kill every node and remove its log."""
        for node in self.nodes:
            node.close()

    async def __aenter__(self) -> NodeCluster:
        try:
            await self.ready()
        except BaseException:
            self._end(failed=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(failed=error is not None)

    def _end(self, *, failed: bool) -> None:
        if failed:
            print(self.logs())
        self.close()


def node_cluster(etcd: EtcdCluster, size: int = 3, **settings: Any) -> NodeCluster:
    """Nodes to use in an `async with`: node-1, node-2, … on this etcd."""
    return NodeCluster(etcd, size, {**QUICK, **settings})


def free_first_port() -> int:
    """A port from which on all that `make cluster` takes is free."""
    chance = random.SystemRandom()
    for _ in range(1_000):
        first = chance.randrange(20_000, 31_000)
        places = [Place(number, first) for number in range(1, COUNT + 1)]
        if all(_is_free(each) for place in places for each in (place.grpc, place.http, place.etcd, place.etcd_peer)):
            return first
    raise RuntimeError("no free ports")


def _is_free(address: str) -> bool:
    try:
        require_free(address, "a test", "")
    except PortTaken:
        return False
    return True


def _registry(etcd: EtcdCluster, node_id: str) -> str:
    if isinstance(etcd, WiredEtcd):
        return etcd.registry_for(node_id)
    return f"etcd://{','.join(etcd.endpoints)}"
