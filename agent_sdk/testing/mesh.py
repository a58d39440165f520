"""The mesh of `agent_sdk.testing`: its life, who is on it, and what befalls them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from agent_sdk import connection
from agent_sdk.agent import Agent
from agent_sdk.client import Mesh
from agent_sdk.connecting import Connecting, connect
from agent_sdk.link import MeshLink
from agent_sdk.settings import Access
from agent_sdk.testing.nodes import InProcessNode, InProcessStream, Others, Streams, node_at
from agentreach.aio.transport import Refused
from agentreach.v1.admin_pb2 import GetConfigRequest, SetConfigRequest
from agentreach.v1.error_pb2 import AGENT_LOST
from reach.adapters.memory_store import MemoryStore
from reach.adapters.snapshots import MemorySnapshots
from reach.core.ports import ANYBODY
from reach.node.config import load
from reach.node.settings import Config

START_S = 5.0


class InProcessTransport:
    """Opens streams to the nodes of an `InProcessMesh`. One for each process that the test plays."""

    def __init__(self, mesh: InProcessMesh) -> None:
        self._mesh = mesh
        self._streams = Streams()
        self._carries = asyncio.Event()
        self.unreachable = False
        """True: as if no network led to any node."""

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> InProcessStream:
        """A new stream. Raises `Refused` while the node is down or unreachable."""
        await asyncio.sleep(0)
        node = self._mesh._at(address)
        if node is None or self.unreachable:
            raise Refused("UNAVAILABLE", f"no node at {address} in this process", False)
        stream = InProcessStream(node.engine.open_stream(ANYBODY, "in-process"), self._carries)
        return node.streams.keep(self._streams.keep(stream))

    def cut(self) -> None:
        """Break every stream of this process; its link resumes on a new one."""
        self._streams.cut()

    async def back(self) -> None:
        """Wait until a stream carries the link (again)."""
        await self._carries.wait()


class InProcessMesh(Mesh):
    """A mesh for one test: `async with InProcessMesh() as mesh`. It sends like what `connect()` gives.

    `nodes` of them share a registry; all agents and callers dial node 0 first. `settings` are each node's
    (`resume_window_s=0.5`, `max_hops=3`, …); a new agent gets its whole share at once (`warm_up_s=0`). `transport` is
    for `connect(transport=…)` and `Agent(…, transport=…)` in places that `connect` and `add` do not reach.
    """

    def __init__(self, *, nodes: int = 1, env: str = "", **settings: Any) -> None:
        super().__init__(self._link, env)
        self._settings = {"warm_up_s": 0.0, **settings}
        self._env = env
        self._registry: MemoryStore | None = None
        self._snapshots = MemorySnapshots()
        self._nodes: list[InProcessNode | None] = [None] * nodes
        self._ways = [Others(self._nodes) for _ in range(nodes)]
        self._addresses = tuple(f"in-process:{place + 1}" for place in range(nodes))
        self._transports: list[InProcessTransport] = []
        self._agents: dict[Agent, tuple[connection.Lease, InProcessTransport]] = {}
        self._lease: connection.Lease | None = None
        self.transport = self.new_transport()
        self._config_of(0)  # a setting that there is not is told here

    # ---- life ----

    async def __aenter__(self) -> InProcessMesh:
        up = False
        try:
            for place in range(len(self._nodes)):
                await self._start_node(place)
            self._lease = self._take(self.transport, self._env)
            await self._lease.link.connected(START_S)
            up = True
        finally:
            if not up:
                await self.close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drain the agents, leave, and stop the node."""
        try:
            await asyncio.gather(*(self.remove(agent) for agent in list(self._agents)))
            lease, self._lease = self._lease, None
            if lease is not None:
                await connection.release(lease)
        finally:
            running, self._nodes[:] = list(self._nodes), [None] * len(self._nodes)
            for node in running:
                if node is not None:
                    await node.stop()
            registry, self._registry = self._registry, None
            if registry is not None:
                await registry.close()

    def _link(self) -> MeshLink:
        if self._lease is None:
            raise RuntimeError("this mesh is closed: use it inside `async with`")
        return self._lease.link

    def _take(self, transport: InProcessTransport, env: str) -> connection.Lease:
        return connection.take(Access(self._addresses), env=env, own_link=True, transport=transport)

    def _config_of(self, place: int) -> Config:
        several = len(self._nodes) > 1
        node_id = f"node-{place}" if several else "in-process"
        return load(environment={}, flags={"node_id": node_id, **self._settings})

    async def _start_node(self, place: int) -> None:
        if self._registry is None:
            self._registry = MemoryStore()
        way = self._ways[place] = Others(self._nodes)
        node = InProcessNode(self._config_of(place), place, self._registry.share(), self._snapshots)
        await node.start(way)
        self._nodes[place] = node

    def _at(self, address: str) -> InProcessNode | None:
        if address in self._addresses:
            return node_at(self._nodes, address)
        return next(filter(None, self._nodes), None)  # of an agent that was told a real one

    def new_transport(self) -> InProcessTransport:
        """The way to the node for one more process that the test plays."""
        transport = InProcessTransport(self)
        self._transports.append(transport)
        return transport

    # ---- agents and callers ----

    async def add(self, agent: Agent) -> Agent:
        """Attach an agent, whatever its `url`; returns when requests reach it. It leaves with the mesh, or before
        by `remove`. Raises what the node refuses it with."""
        if agent in self._agents:
            await self.remove(agent)
        transport = self.new_transport()
        lease = self._take(transport, agent._record.env)
        self._agents[agent] = lease, transport
        attached = False
        try:
            await agent.start(START_S, lease)
            attached = True
        finally:
            if not attached:
                await self.remove(agent)
        return agent

    async def remove(self, agent: Agent) -> None:
        """Drain an agent and take it off the mesh, as SIGTERM does."""
        lease, transport = self._agents.pop(agent)
        await agent.drain()
        await connection.release(lease)
        self._transports.remove(transport)

    def connect(self, *, env: str = "", name: str = "") -> Connecting:
        """One more caller, with a connection of its own; as `agent_sdk.connect`."""
        return connect(
            ",".join(self._addresses), env=env or self._env, name=name, own_link=True, transport=self.new_transport()
        )

    async def set_config(self, settings: Mapping[str, str], agent_type: str = "") -> None:
        """Give all agents settings, or those of one type, in place of what they were given before.

        As `reach config set` does; `agent.config` and `on_config` handlers follow.
        """
        node = next((node for node in self._nodes if node is not None), None)
        if node is None:
            raise RuntimeError("no node of this mesh is up: use it inside `async with`")
        name = f"agents/{agent_type}" if agent_type else "agents"
        version = node.engine.get_config(GetConfigRequest(name=name), ANYBODY).version
        await node.engine.set_config(SetConfigRequest(name=name, settings=settings, version=version), ANYBODY)

    # ---- faults ----

    def cut(self, agent: Agent | None = None) -> None:
        """Break the stream of an agent, or every one. The links resume; nothing under way is lost.

        Until its link is `back`, new requests do not reach an agent: alone of its kind, `NoAgentAvailable`.
        """
        for transport in self._transports if agent is None else (self._agents[agent][1],):
            transport.cut()

    async def back(self) -> None:
        """Wait until all agents are reachable after a `cut`. Raises `TimeoutError` if one is not within 5 s."""
        async with asyncio.timeout(START_S):
            for transport in (self.transport, *(each for _, each in self._agents.values())):
                await transport.back()

    async def kill(self, agent: Agent) -> None:
        """End an agent as SIGKILL ends its process: no goodbye, its handlers cut off (a `def` handler goes on unheard).

        Its requests end with `AgentLost`. `add` starts it again.
        """
        lease, transport = self._agents.pop(agent)
        transport.unreachable = True
        transport.cut()
        host = agent._host
        if host is not None:
            for work in host.works():
                host.stop(work, AGENT_LOST, "killed")
        await connection.release(lease)
        await agent._leave()
        self._transports.remove(transport)

    def node_of(self, agent: Agent) -> int:
        """The place of the node that an agent is linked with. Raises `LookupError` while it is with none."""
        for place, node in enumerate(self._nodes):
            link = self._agents[agent][0].link
            if link.up and node is not None and node.engine.node_id == link.node_id:
                return place
        raise LookupError(f"{agent.agent_id} is linked with no node")

    async def kill_node(self, place: int = 0) -> None:
        """End a node as SIGKILL does. Its agents and callers go to the others, which takes them one to four seconds.

        What was under way goes on where its agent lives. `restart_node` starts it again.
        """
        node, self._nodes[place] = self._nodes[place], None
        if node is not None:
            await node.stop(kill=True)

    async def drain_node(self, place: int = 0) -> None:
        """Let a node leave as SIGTERM does: what runs ends, its agents and callers go to the others."""
        node = self._nodes[place]
        if node is not None:
            await node.drain()
            self._nodes[place] = None

    def part(self, place: int) -> None:
        """Cut a node off from the registry and from the other nodes; its own agents and callers still reach it."""
        node = self._nodes[place]
        if node is not None:
            node.store.set_available(False)
        for other, way in enumerate(self._ways):
            for address in self._addresses[place : place + 1] if other != place else self._addresses:
                way.part(address)

    def heal(self) -> None:
        """Undo every `part`."""
        for node in self._nodes:
            if node is not None:
                node.store.set_available(True)
        for way in self._ways:
            way.without.clear()

    async def restart_node(self, place: int = 0) -> None:
        """Kill a node and start a new one that remembers nothing: no stored replies; the only one: no sessions either.

        Links dial again and declare what they hold. Requests under way are sent again; one that comes before its agent
        is back meets `NoRoute` or `NoAgentAvailable`. Returns when all agents are back; raises `TimeoutError` if they
        do not come.
        """
        hosts = [agent._host for agent in self._agents if agent._host is not None]
        node = self._nodes[place]
        for host in hosts:
            if node is not None and host.owner.node_id == node.engine.node_id:
                host.ready.clear()
        await self.kill_node(place)
        if len(self._nodes) == 1:
            self._registry = None
        await self._start_node(place)
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(host.ready.wait() for host in hosts))
