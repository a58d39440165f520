"""Many links of one loop: each waits a few turns for more, and none is counted when it has nothing to say."""

from __future__ import annotations

import asyncio

from agentreach.aio import outlet as outlets
from agentreach.aio.outlet import Outlet
from agentreach.v1.frame_pb2 import Frame
from agentreach.wire.link import Link


def woken() -> int:
    return outlets._crowds[asyncio.get_running_loop()].woken


async def started(count: int) -> list[tuple[Link, Outlet, asyncio.Task[bytes | None]]]:
    made = []
    for _ in range(count):
        link = Link()
        outlet = Outlet(link)
        made.append((link, outlet, asyncio.create_task(outlet.next_frame())))
    await asyncio.sleep(0)
    return made


async def test_an_idle_link_alone_flushes_at_once() -> None:
    ((link, outlet, frame),) = await started(1)
    link.put_bytes(b"", 0.0)
    outlet.wake()
    await asyncio.sleep(0)
    assert frame.done() and woken() == 0


async def test_in_a_crowd_what_comes_within_a_few_turns_shares_a_frame() -> None:
    made = await started(8)
    for link, outlet, _ in made:
        link.put_bytes(b"", 0.0)
        outlet.wake()
    assert woken() == 8
    await asyncio.sleep(0)
    for link, outlet, frame in made:
        assert not frame.done()
        link.put_bytes(b"", 0.0)
        outlet.wake()
    frames = await asyncio.gather(*(frame for _, _, frame in made))
    assert [len(Frame.FromString(frame or b"").envelopes) for frame in frames] == [2] * 8
    assert woken() == 0


async def test_a_link_that_ends_leaves_the_crowd() -> None:
    made = await started(8)
    for link, outlet, _ in made:
        link.put_bytes(b"", 0.0)
        outlet.wake()
    for _, outlet, frame in made[:4]:
        frame.cancel()
        outlet.abandon()
    await asyncio.gather(*(frame for _, _, frame in made), return_exceptions=True)
    assert woken() == 0
