"""A writer that waits because the peer acknowledges nothing goes on when it does, though nobody sends any more."""

from __future__ import annotations

import asyncio

from agentreach.aio.outlet import Outlet
from agentreach.v1.frame_pb2 import Frame
from agentreach.wire import limits
from agentreach.wire.link import Link


async def test_an_ack_that_opens_a_full_window_wakes_the_writer() -> None:
    link = Link()
    outlet = Outlet(link)
    waiting = limits.UNACKED_ENVELOPES_MAX + 100
    for _ in range(waiting):
        link.put_bytes(b"", 0.0)
    last = Frame()
    while link.unacked < limits.UNACKED_ENVELOPES_MAX:
        data = await asyncio.wait_for(outlet.next_frame(), 5)
        assert data is not None
        last = Frame.FromString(data)
    blocked = asyncio.create_task(outlet.next_frame())
    await asyncio.wait([blocked], timeout=0.05)
    assert not blocked.done() and link.waiting
    link.receive(Frame(ack=last.seq))
    outlet.received()
    following = await asyncio.wait_for(blocked, 5)
    assert following is not None and Frame.FromString(following).seq == last.seq + 1
    outlet.abandon()
