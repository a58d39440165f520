"""Agent-Reach for the harness that compares a dozen message systems: copy this file to its peers/agent_reach.py.

    cp tools/peers_agent_reach.py HARNESS/peers/agent_reach.py
    cd HARNESS && python run.py agent_reach grpc_direct nats

The interpreter needs Agent-Reach and the harness's own requirements; if Agent-Reach lives in an environment of its own
(which needs uvloop and psutil too), name its interpreter in PEERBENCH_AGENT_REACH_PYTHON.

Everything goes through the public SDK with bytes payloads, and the node has its defaults. The node runs in the
harness's broker process, and so on the same kind of event loop as the other systems' Python parts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, ClassVar

from peers.base import HOST, Peer, Requester  # type: ignore[import-not-found]

TIMEOUT_S = 30.0
AT_ONCE = 512  # one-way messages whose acceptance is still awaited; the mesh tells of each, so the sender waits for it


class AgentReach(Peer):  # type: ignore[misc]  # the harness is not typed
    """A node, agents and a `connect()` client."""

    title = "Agent-Reach"
    path = "dispatcher (Python)"
    group = "broker"
    python: ClassVar[str] = os.environ.get("PEERBENCH_AGENT_REACH_PYTHON", sys.executable)

    @property
    def url(self) -> str:
        """The node's address."""
        return f"{HOST}:{self.ctx.port}"

    async def start_server(self) -> None:
        """Start the node's process and wait until it listens."""
        self.spawn_serve()
        await self.wait_port()

    async def serve(self) -> None:
        """Start a node on this process's event loop."""
        from reach.node.app import run_node
        from reach.node.config import load

        config = load(flags={"listen": self.url, "http": ""}, environment={})
        self.node = asyncio.create_task(run_node(config), name="node")

    async def _attach(self, name: str, index: int, own_link: bool) -> Any:
        from agent_sdk import Agent

        agent = Agent(name, url=self.url, own_link=own_link)

        async def echo(data: bytes) -> Any:
            return await self.on_request(data, index)

        async def note(data: bytes) -> None:
            await self.on_event(data)

        agent.handler(echo)
        agent.on_event("bench.event")(note)
        return await agent.__aenter__()

    async def responder(self, n: int) -> None:
        """`n` agents of one type; several have a connection each."""
        self.agents = [await self._attach(f"echo/agent-{i}", i, n > 1) for i in range(n)]

    async def requester(self) -> Any:
        """A client: requests to the type, one-way messages to the topic."""
        from agent_sdk import connect

        self.mesh = mesh = await connect(self.url)
        places = asyncio.Semaphore(AT_ONCE)
        under_way: set[asyncio.Task[None]] = set()

        async def call(payload: bytes) -> Any:
            return (await mesh.request(payload, agent_type="echo", timeout=TIMEOUT_S)).data

        async def publish(payload: bytes) -> None:
            try:
                await mesh.publish("bench.event", payload, timeout=TIMEOUT_S)
            finally:
                places.release()

        async def send(payload: bytes) -> None:
            await places.acquire()
            task = asyncio.create_task(publish(payload))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        async def flush() -> None:
            await asyncio.gather(*under_way)

        return Requester(call, send, flush)

    async def idle(self, n: int) -> None:
        """`n` agents that do nothing, each on its own connection."""
        self.agents = [await self._attach(f"idle/agent-{i}", 0, True) for i in range(n)]


PEER = AgentReach
