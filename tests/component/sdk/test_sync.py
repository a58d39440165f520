"""The synchronous facade, over a real node's socket: from any thread, and with an event loop around it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_sdk import Agent, NoRoute, sync
from tests.support.fake_node import FakeNode


@pytest.fixture
def served() -> Iterator[FakeNode]:
    """A node and an agent on the facade's own loop."""
    loop = sync._loop()
    node = FakeNode()
    agent = Agent("worker", capabilities=["work"], transport=node, drain_timeout=1.0)

    @agent.handler
    async def work(data: int) -> int:
        return data + 1

    @agent.on("count")
    async def count(n: int):  # type: ignore[no-untyped-def]  # a generator
        for i in range(n):
            yield i

    asyncio.run_coroutine_threadsafe(agent.start(5.0), loop).result(10)
    yield node
    asyncio.run_coroutine_threadsafe(agent.drain(), loop).result(10)


def test_a_request_a_stream_and_an_event_without_async(served: FakeNode) -> None:
    with sync.connect(transport=served) as mesh:
        assert mesh.request(1, capabilities=["work"], timeout=5).data == 2
        with mesh.stream(100, capabilities=["count"], timeout=5) as items:
            assert list(items) == list(range(100))
        with mesh.subscribe("news") as events:
            assert mesh.publish("news", "x").accepted == 1
            assert next(events).data == "x"
        with pytest.raises(NoRoute):
            mesh.request(1, capabilities=["nobody"], timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        mesh.request(1, capabilities=["work"], timeout=5)


def test_twenty_threads_share_one_client(served: FakeNode) -> None:
    with sync.connect(transport=served) as mesh, ThreadPoolExecutor(20) as threads:
        found = threads.map(lambda n: mesh.request(n, capabilities=["work"], timeout=10).data, range(200))
        assert list(found) == list(range(1, 201))


async def test_it_works_where_an_event_loop_is_running_already(served: FakeNode) -> None:
    """As in a notebook."""
    with sync.connect(transport=served) as mesh:
        assert mesh.request(1, capabilities=["work"], timeout=5).data == 2


def test_a_forked_child_is_told_at_once_and_the_parent_goes_on(
    served: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.connect(transport=served) as mesh:
        with monkeypatch.context() as patched:
            pid = os.getpid()
            patched.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(RuntimeError, match="fork"):
                mesh.request(1, capabilities=["work"], timeout=5)
        assert mesh.request(1, capabilities=["work"], timeout=5).data == 2


def test_all_clients_of_a_process_share_one_thread(served: FakeNode) -> None:
    with sync.connect(transport=served), sync.connect(transport=served):
        assert sum(thread.name == "agent_sdk sync" for thread in threading.enumerate()) == 1
