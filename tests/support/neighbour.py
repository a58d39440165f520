"""A healthy neighbour: an agent and a caller, each on its own link, that must be served whatever else happens.

    async with neighbour(node) as served:
        ...                                     # the fault
        await served.more()                     # answered since

It fails the test if one of its requests was not answered, took longer than `SLOWEST_S`, or if its link was cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

from agent_sdk import Mesh, connect
from tests.support.agents import eventually, make, usable
from tests.support.node import NodeProcess

SLOWEST_S = 3.0  # of a machine that does many other things; a link that waits for another one would take longer
EVERY_S = 0.02


class Neighbour:
    """What was asked and answered so far."""

    def __init__(self, mesh: Mesh, agent_id: str) -> None:
        self._mesh, self._agent_id = mesh, agent_id
        self.answered = 0
        self.slowest_s = 0.0

    async def ask(self) -> None:
        """Ask for ever."""
        while True:
            began = time.monotonic()
            number = self.answered
            reply = await self._mesh.request({"n": number}, agent_id=self._agent_id, timeout=10)
            assert reply.data == number
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.answered += 1
            await asyncio.sleep(EVERY_S)

    async def more(self, count: int = 3) -> None:
        """Wait for so many further answers."""
        wanted = self.answered + count

        async def came() -> bool:
            return self.answered >= wanted

        await eventually(came, "the neighbour is served")


@contextlib.asynccontextmanager
async def neighbour(node: NodeProcess, *, slowest_s: float = SLOWEST_S) -> AsyncIterator[Neighbour]:
    """Serve and ask beside the block; no answer may take longer than `slowest_s`."""
    agent = make(f"neighbour/{secrets.token_hex(4)}", node.grpc, own_link=True)
    async with agent, connect(node.grpc, own_link=True, timeout=20) as mesh:
        await usable(mesh, agent_id=agent.agent_id)
        link_ids = _tokens(agent), mesh._link().resume_token
        served = Neighbour(mesh, agent.agent_id)
        asking = asyncio.create_task(served.ask(), name="neighbour")
        try:
            yield served
            await asyncio.wait([asking, asyncio.create_task(served.more())], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                await asking
            assert served.slowest_s < slowest_s
            assert (_tokens(agent), mesh._link().resume_token) == link_ids, "the neighbour's link was ended"
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


def _tokens(agent: object) -> bytes:
    return agent._link().resume_token  # type: ignore[attr-defined,no-any-return]
