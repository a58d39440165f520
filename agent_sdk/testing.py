"""A mesh inside the test: a real node without sockets, agents and callers as in production, and faults on demand.

    from agent_sdk.testing import InProcessMesh
    from extractor import agent

    async def test_names_are_found() -> None:
        async with InProcessMesh() as mesh:
            await mesh.add(agent)
            reply = await mesh.request({"text": "Ada met Alan"}, capabilities=["ner"], timeout=5)
            assert reply.data == {"entities": ["Ada", "Alan"]}

The node is the one that `reach serve` runs, with its registry in memory; frames travel as bytes, one turn of the event
loop each way. Without pytest-asyncio (or anyio) put the body into a coroutine and call `asyncio.run`. Needs the whole
distribution, which `agent_sdk` alone does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from agent_sdk import connection
from agent_sdk.agent import Agent
from agent_sdk.client import Mesh
from agent_sdk.connecting import Connecting, connect
from agent_sdk.link import MeshLink
from agent_sdk.settings import Access
from agentreach.aio.transport import Refused, StreamBroken
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.error_pb2 import AGENT_LOST
from reach.adapters.memory_store import MemoryStore
from reach.core.ports import ANYBODY, NodeStream
from reach.node.admission import Admission
from reach.node.app import make_engine
from reach.node.config import load
from reach.node.election import Election
from reach.node.engine import Engine
from reach.node.pins import PinBook
from reach.node.policies import Policies
from reach.node.registrar import Registrar
from reach.node.settings import Config

__all__ = ["InProcessMesh", "InProcessTransport"]

ADDRESS = "in-process:1"  # for messages only
START_S = 5.0


class InProcessNode:
    """What `reach serve` runs, without its servers."""

    def __init__(self, config: Config) -> None:
        self._store = MemoryStore()
        record = NodeRecord(node_id=config.node_id, address=ADDRESS)
        self.engine: Engine = make_engine(config, time.time())
        self._election = Election(self._store, config.node_id, ttl_s=config.election_ttl_s)
        self._registrar = Registrar(
            self._store,
            record,
            lease_ttl_s=config.node_lease_ttl_s,
            register_wait_s=config.register_wait_s,
            admission=Admission(self._store, self._election, config.node_id, agents_max=config.agents_max),
            replaced=self.engine.replaced,
        )
        contact = self._registrar.contact
        self.engine.use(
            self._registrar, PinBook(self._store, config.node_id, config.session_ttl_s, lambda: contact.away)
        )
        self.engine.policies = self._policies = Policies(
            self._store, self._election, self.engine.state, step=self.engine.step
        )
        self.engine.node, self.engine.registry_name = record, config.registry
        self._duties: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin; then streams can be opened."""
        await self._registrar.start()
        await self._policies.start()
        await self._election.start()
        self._duties = asyncio.create_task(self._run(), name="in-process node")

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._registrar.run(), name="registrar")
            group.create_task(self._election.run(), name="election")
            group.create_task(self._policies.run(), name="policies")

    async def stop(self) -> None:
        """End at once, without a goodbye."""
        if self._duties is not None:
            self._duties.cancel()
            await asyncio.gather(self._duties, return_exceptions=True)
        await self._registrar.stop()
        await self._store.close()
        await self.engine.close()


class InProcessStream:
    """One stream: a frame is one loop turn under way in each direction, and a cut loses what is."""

    def __init__(self, node: NodeStream, carries: asyncio.Event) -> None:
        self._node = node
        self._over = False
        self._carries = carries
        self.why_ended = ""

    async def write(self, data: bytes) -> None:
        """Give one message to the node."""
        await asyncio.sleep(0)
        if self._over:
            raise StreamBroken(self.why_ended or "the stream has ended")
        self._node.received(data)

    async def read(self) -> bytes | None:
        """The node's next message; None when the stream has ended."""
        frame = await self._node.next_frame()
        await asyncio.sleep(0)
        if self._over:
            return None
        if not self._carries.is_set():
            self._carries.set()  # the first one is the welcome
        return frame

    async def half_close(self) -> None:
        """Nothing more is written."""
        self._node.ended()

    def cancel(self) -> None:
        """End the stream both ways."""
        if not self._over:
            self._over = True
            self._carries.clear()
            self._node.ended()

    def cut(self) -> None:
        """End it as a broken network does."""
        self.why_ended = self.why_ended or "UNAVAILABLE: cut"
        self.cancel()

    async def close(self) -> None:
        """The same as `cancel`: there is nothing to give back."""
        self.cancel()


class InProcessTransport:
    """Opens streams to the node of an `InProcessMesh`. One for each process that the test plays."""

    def __init__(self, mesh: InProcessMesh) -> None:
        self._mesh = mesh
        self._streams: list[InProcessStream] = []
        self._carries = asyncio.Event()
        self.unreachable = False
        """True: as if no network led to the node."""

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> InProcessStream:
        """A new stream. Raises `Refused` while the node is down or unreachable."""
        await asyncio.sleep(0)
        node = self._mesh._node
        if node is None or self.unreachable:
            raise Refused("UNAVAILABLE", "no node in this process", False)
        stream = InProcessStream(node.engine.open_stream(ANYBODY, ADDRESS), self._carries)
        self._streams = [each for each in self._streams if not each._over]
        self._streams.append(stream)
        return stream

    def cut(self) -> None:
        """Break every stream of this process; its link resumes on a new one."""
        for stream in self._streams:
            stream.cut()

    async def back(self) -> None:
        """Wait until a stream carries the link (again)."""
        await self._carries.wait()


class InProcessMesh(Mesh):
    """A mesh for one test: `async with InProcessMesh() as mesh`. It sends like what `connect()` gives.

    `settings` are the node's (`resume_window_s=0.5`, `max_hops=3`, …); a new agent gets its whole share at once
    (`warm_up_s=0`). `transport` is for `connect(transport=…)` and `Agent(…, transport=…)` in places that
    `connect` and `add` do not reach.
    """

    def __init__(self, *, env: str = "", **settings: Any) -> None:
        super().__init__(self._link, env)
        flags = {"node_id": "in-process", "warm_up_s": 0.0, **settings}
        self._config: Config = load(environment={}, flags=flags)
        self._env = env
        self._node: InProcessNode | None = None
        self._transports: list[InProcessTransport] = []
        self._agents: dict[Agent, tuple[connection.Lease, InProcessTransport]] = {}
        self._lease: connection.Lease | None = None
        self.transport = self.new_transport()

    # ---- life ----

    async def __aenter__(self) -> InProcessMesh:
        await self._start_node()
        up = False
        try:
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
            node, self._node = self._node, None
            for transport in self._transports:
                transport.cut()
            if node is not None:
                await node.stop()

    def _link(self) -> MeshLink:
        if self._lease is None:
            raise RuntimeError("this mesh is closed: use it inside `async with`")
        return self._lease.link

    def _take(self, transport: InProcessTransport, env: str) -> connection.Lease:
        return connection.take(Access((ADDRESS,)), env=env, own_link=True, transport=transport)

    async def _start_node(self) -> None:
        node = InProcessNode(self._config)
        await node.start()
        self._node = node

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
        return connect(ADDRESS, env=env or self._env, name=name, own_link=True, transport=self.new_transport())

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

    async def restart_node(self) -> None:
        """Kill the node and start a new one that knows nothing: no agents, sessions, or stored replies.

        Links dial again and declare what they hold. Requests under way are sent again; one that comes before its agent
        is back meets `NoRoute` or `NoAgentAvailable`. Returns when all agents are back; raises `TimeoutError` if they
        do not come.
        """
        node, self._node = self._node, None
        hosts = [agent._host for agent in self._agents if agent._host is not None]
        for host in hosts:
            host.ready.clear()
        self.cut()
        if node is not None:
            await node.stop()
        await self._start_node()
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(host.ready.wait() for host in hosts))
