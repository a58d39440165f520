"""Fake-alive agents leave routing although their processes live and their links are up; busy ones do not (J2, A15)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from agent_sdk import Mesh, connect
from tests.support.agents import BUSY_S, agent_process, make, make_pooled, outcome, usable
from tests.support.node import NodeProcess, start_node

LEAVES_ROUTING = 4  # probe times: one is found missing, then another one


async def status_of(node: NodeProcess, kind: str) -> str:
    """The status of the one agent of a type."""
    for status in ("HEALTHY", "DEGRADED", "UNREACHABLE", "STARTING", "DRAINING"):
        if await node.metric("reach_agents", agent_type=kind, status=status):
            return status
    return "gone"


async def _wedge_some_and_keep_others_busy(probe_s: float, caplog: pytest.LogCaptureFixture) -> None:
    block_s = LEAVES_ROUTING * probe_s + BUSY_S + 1  # a second longer than leaving may take
    settings = {"probe_interval_busy_s": probe_s, "probe_timeout_s": probe_s, "cancel_grace_s": 0.5}
    quiet = {"heartbeat_interval_s": 4 * probe_s, "lease_ttl_s": 12 * probe_s, "accept_timeout_s": 60}
    async with start_node(**settings, **quiet) as node, connect(node.grpc, own_link=True) as mesh:
        here: dict[str, Any] = {"own_link": True, "max_concurrency": 2}
        async with contextlib.AsyncExitStack() as agents:
            workers = {
                kind: agents.enter_context(agent_process(node.grpc, kind, *options))
                for kind, options in (("wedged", ()), ("held", ("--pool",)))
            }
            await agents.enter_async_context(make_pooled("stuck", node.grpc, **here))
            await agents.enter_async_context(make_pooled("busy", node.grpc, **here))
            await agents.enter_async_context(make("deep", node.grpc, **here))
            for kind in ("wedged", "held", "stuck", "busy", "deep"):
                await usable(mesh, agent_type=kind, limit_s=60)
            long = 2 * block_s + 30
            asked = [
                ask(mesh, "wedged", {"n": 1, "block": block_s}, long),
                ask(mesh, "held", {"n": 1, "gil": block_s}, long),
                *(
                    ask(mesh, "stuck", {"n": n, "block": block_s}, 1.0) for n in (1, 2)
                ),  # their time is over long before
                *(ask(mesh, "busy", {"n": n, "block": block_s}, long) for n in (1, 2)),
                *(ask(mesh, "deep", {"n": n, "sleep": block_s}, long) for n in (1, 2)),
            ]
            began = time.monotonic()
            left: dict[str, float] = {}
            healed: set[str] = set()
            while len(healed) < 3:
                await asyncio.sleep(0.05)
                age_s = time.monotonic() - began
                assert age_s < block_s + 3 * probe_s + 4 * BUSY_S, (left, healed)
                for kind in ("wedged", "held", "stuck"):
                    status = await status_of(node, kind)
                    if status == "UNREACHABLE" and kind not in left:
                        left[kind] = age_s
                    elif status == "HEALTHY" and kind in left:
                        healed.add(kind)
                for kind in ("busy", "deep"):
                    assert await status_of(node, kind) == "HEALTHY", kind
            assert left.keys() == healed
            assert max(left.values()) < LEAVES_ROUTING * probe_s + BUSY_S, left
            assert min(left.values()) > probe_s, "one answer that is late is no verdict"
            found = await asyncio.gather(*asked)
            assert found == ["OK", "OK", "TIMEOUT", "TIMEOUT", "OK", "OK", "OK", "OK"]
            for worker in workers.values():
                assert worker.process.poll() is None and worker.runs() == ["1"], "nothing has run twice"
            for kind in ("wedged", "held", "stuck"):
                await usable(mesh, agent_type=kind)
            assert "all of its 2 threads are held" in caplog.text


def ask(mesh: Mesh, kind: str, data: dict[str, object], timeout: float) -> asyncio.Task[str]:
    """A request under way."""
    return asyncio.create_task(outcome(mesh, data, agent_type=kind, timeout=timeout))


async def test_wedged_agents_leave_routing_and_come_back_and_busy_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    await _wedge_some_and_keep_others_busy(1.5, caplog)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_the_same_with_the_default_times_within_20_s(caplog: pytest.LogCaptureFixture) -> None:
    await _wedge_some_and_keep_others_busy(5.0, caplog)
