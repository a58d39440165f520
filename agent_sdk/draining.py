"""How an agent leaves: no new work, finish what is under way, then off the mesh."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from agent_sdk.host import Host
from agentreach.v1 import error_pb2, registry_pb2
from agentreach.v1 import frame_pb2 as frames

log = logging.getLogger("agent_sdk")

_ACKNOWLEDGED_S = 5.0  # for the node to take note of each step; without one the agent leaves all the same
_CANCEL_GRACE_S = 5.0  # for handlers to end after their cancel


async def drain(host: Host, timeout_s: float) -> None:
    """Drain an agent; handlers still at work after `timeout_s` are cancelled. Bounded by that and 15 s.

    The node routes nothing here once it has acknowledged the new status; what it sent before is still handled.
    """
    owner = host.owner
    if not host.draining:
        host.draining = True
        if owner.up:
            change = frames.StatusChange(agent_id=host.agent_id, status=registry_pb2.DRAINING)
            await _within(owner.flushed(owner.signal(frames.Signal(status_change=change))), _ACKNOWLEDGED_S)
    if not await _within(host.idle(), timeout_s):
        works = host.works()
        log.warning("%s: %d handlers did not finish in time; cancelling", host.agent_id, len(works))
        for work in works:
            host.stop(work, error_pb2.AGENT_LOST, f"{host.agent_id} is shutting down")
        await _within(host.idle(), _CANCEL_GRACE_S)
    number = owner.detach(host, "drained")
    if number:
        await _within(owner.flushed(number), _ACKNOWLEDGED_S)
    host.gone.set()
    host.close()


async def _within(wait: Coroutine[Any, Any, None], limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await wait
    except TimeoutError:
        return False
    return True
