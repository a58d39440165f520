"""A real node under a rain of frames, valid and not: it stays up, logs no fault of its own, grows by nothing that
stays, and serves a healthy neighbour throughout.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.agents import eventually
from tests.support.neighbour import neighbour
from tests.support.node import NodeProcess, start_node
from tools.fuzzing.live import Thrower

FRAMES = 30_000
SOAK_FRAMES = 1_000_000
WARM_FRAMES = 100_000  # after these, all tables with a bound have met it
PATIENT = {"heartbeat_interval_s": 3.0, "lease_ttl_s": 9.0, "resume_window_s": 3.0, "settle_min_s": 1.0}
"""This process throws, and serves as the neighbour: its loop is no proof of how soon a healthy one is heard."""
GROWTH_MIB_MAX = 64
SLOWEST_S = 8.0  # a frame of 3,000 envelopes holds the node for a moment; several may come at once, on a busy machine
FAULTS = re.compile(
    r"could not be handled|internal error|a tick failed|Traceback|never retrieved|\"level\": ?\"(error|critical)\""
)


def resident_mib(node: NodeProcess) -> float:
    """The node's memory."""
    text = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


async def quiet_again(node: NodeProcess) -> None:
    """Nothing of the attackers is left, and nothing was a fault of ours."""

    async def settled() -> bool:
        in_flight = await node.metric("reach_requests_in_flight", agent_type="evil")
        agents = await node.metric("reach_agents", agent_type="evil")
        return in_flight == 0 and agents == 0

    await eventually(settled, "nothing of the attackers is left", limit_s=30)
    assert node.process.poll() is None
    faults = [line for line in node.log.splitlines() if FAULTS.search(line)]
    assert faults == [], "\n".join(faults[:5])


async def rain(node: NodeProcess, thrower: Thrower, frames: int) -> None:
    """Throw, beside a neighbour that must be served."""
    began = time.monotonic()
    async with neighbour(node, slowest_s=SLOWEST_S) as served:
        await thrower.throw(frames)
        seconds = time.monotonic() - began
    print(
        f"\n{thrower.thrown} frames over {thrower.streams} streams, the last {frames} at {frames / seconds:.0f}/s; "
        f"neighbour: {served.answered} answers, the slowest after {served.slowest_s:.2f} s; "
        f"node: {resident_mib(node):.0f} MiB; {dict(thrower.kinds)}; goodbyes {dict(thrower.goodbyes)}"
    )


@pytest.mark.timeout(180)
async def test_thirty_thousand_frames_of_any_kind_harm_only_their_senders() -> None:
    async with start_node(**PATIENT) as node:
        thrower = Thrower(node.grpc, seed=int(time.time()))
        await rain(node, thrower, FRAMES)
        assert thrower.thrown >= FRAMES
        await quiet_again(node)


@pytest.mark.soak
async def test_a_million_frames_leave_the_node_as_large_as_it_was() -> None:
    async with start_node(**PATIENT) as node:
        thrower = Thrower(node.grpc, seed=int(time.time()))
        await rain(node, thrower, WARM_FRAMES)
        before = resident_mib(node)
        await rain(node, thrower, SOAK_FRAMES - WARM_FRAMES)
        await quiet_again(node)
        grown = resident_mib(node) - before
        assert grown < GROWTH_MIB_MAX, f"{before:.0f} MiB grew by {grown:.0f}"
