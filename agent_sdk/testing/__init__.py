"""A mesh inside the test: a real node without sockets, agents and callers as in production, and faults on demand.

    from agent_sdk.testing import InProcessMesh
    from extractor import agent

    async def test_names_are_found() -> None:
        async with InProcessMesh() as mesh:
            await mesh.add(agent)
            reply = await mesh.request({"text": "Ada met Alan"}, capabilities=["ner"], timeout=5)
            assert reply.data == {"entities": ["Ada", "Alan"]}

The node is the one that `reach serve` runs, with its registry in memory; frames travel as bytes, one turn of the event
loop each way. `InProcessMesh(nodes=3)` runs several that share a registry and are linked with one another. Without
pytest-asyncio (or anyio) put the body into a coroutine and call `asyncio.run`. Needs the whole distribution, which
`agent_sdk` alone does not.
"""

from __future__ import annotations

from agent_sdk.testing.mesh import InProcessMesh, InProcessTransport
from agent_sdk.testing.nodes import InProcessNode

__all__ = ["InProcessMesh", "InProcessNode", "InProcessTransport"]
