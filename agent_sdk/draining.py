"""How an agent leaves: no new work, finish what is under way, then off the mesh.

By its own wish (`agent.drain()`, SIGTERM), or because the node orders it (`reach drain`): the way is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from agent_sdk.host import Host
from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2, registry_pb2
from agentreach.v1 import frame_pb2 as frames

log = logging.getLogger("agent_sdk")

_ACKNOWLEDGED_S = 5.0  # for the node to take note of each step; without one the agent leaves all the same
_CANCEL_GRACE_S = 5.0  # for handlers to end after their cancel
_LOOK_S = 0.005
_DISMISSED_S = 5.0  # for events that still run when the node has let the agent go


async def drain(host: Host, timeout_s: float) -> None:
    """Drain an agent; handlers still at work after `timeout_s` are cancelled. Bounded by that and 20 s.

    The node routes nothing here once it has acknowledged the new status; what it sent before is still handled. Its
    conversations go to other agents, where there are hooks for that. May be called again while it goes on: the
    shortest time counts.
    """
    owner, until = host.owner, boot_time() + timeout_s
    if not host.draining:
        host.draining = True
        if owner.up:
            owner.topics.withdraw_agent(host.agent_id)
            change = frames.StatusChange(agent_id=host.agent_id, status=registry_pb2.DRAINING)
            await _within(owner.flushed(owner.signal(frames.Signal(status_change=change))), _ACKNOWLEDGED_S)
    if not await _within(host.idle(), timeout_s):
        works = host.works()
        log.warning("%s: %d handlers did not finish in time; cancelling", host.agent_id, len(works))
        host.expired = True
        for work in works:
            host.stop(work, error_pb2.AGENT_LOST, f"{host.agent_id} is shutting down")
        await _within(host.idle(), _CANCEL_GRACE_S)
    await _within(_told(host), _ACKNOWLEDGED_S)
    if owner.up and host.sessions.to_hand_over:
        await _within(_handed_over(host), max(until - boot_time(), _ACKNOWLEDGED_S))
    number = owner.detach(host, "drained")
    owner.topics.remove_agent(host.agent_id)
    if number:
        await _within(owner.flushed(number), _ACKNOWLEDGED_S)
    host.gone.set()
    host.close()


def ordered(host: Host, order: frames.Drain) -> None:
    """The node orders the agent to drain within the order's time. A later order replaces the time of this one."""
    limit_s = order.deadline_ms / 1000
    log.info("%s is to drain within %g s: %s", host.agent_id, limit_s, order.reason or "no reason given")
    _begin(host, limit_s)


def dismissed(host: Host, reason: str) -> None:
    """The node has let the drained agent go: whoever waited for what still runs here has been told that it is lost."""
    log.info("%s was drained and detached by the node: %s", host.agent_id, reason or "no reason given")
    host.draining = host.expired = True
    if host.let_go is not None:
        host.let_go.set()
    host.owner.hosts.pop(host.agent_id, None)
    for work in host.works():
        if work.replies:
            host.stop(work, error_pb2.AGENT_LOST, f"{host.agent_id} was drained")
    if host.ordered is None:
        _begin(host, _DISMISSED_S)


def _begin(host: Host, limit_s: float) -> None:
    if host.ordered is not None:
        host.ordered.cancel()
    host.ordered = host.owner.loop.create_task(drain(host, limit_s), name=f"{host.agent_id} drains")


async def _told(host: Host) -> None:
    """Wait until the node has every answer: in one frame with them the detach would count before them."""
    while not host.told and host.owner.failure is None:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)  # an event would cost every answer


async def _handed_over(host: Host) -> None:
    """Wait until the node has given every conversation to somebody else, or has stored its state, and lets us go."""
    host.let_go = asyncio.Event()
    detach = frames.Detach(agent_id=host.agent_id, reason="drained", env=host.env, after_moves=True)
    host.owner.signal(frames.Signal(detach=detach))
    await host.let_go.wait()
    host.owner.hosts.pop(host.agent_id, None)


async def _within(wait: Coroutine[Any, Any, None], limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await wait
    except TimeoutError:
        return False
    return True
