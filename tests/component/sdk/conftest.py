"""A small node in the process, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agent_sdk import ConnectedMesh, connect
from tests.support.fake_node import FakeNode


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
async def mesh(node: FakeNode) -> AsyncIterator[ConnectedMesh]:
    async with connect(transport=node) as mesh:
        yield mesh
