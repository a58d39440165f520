"""A node that leaves: when this process goes to another one. Nothing may be lost by it, and nothing run twice.

From the node's `drain` on, new requests are kept for the next node (`Calls.begin`); nested ones still go out, the node
takes what its last requests need. A process goes when nothing is under way any more. Where the node named its peers,
they can reach the agents that went, and know of the requests that were under way: then it goes before the node's
deadline in any case. Where only our own list names another node, an agent stays until the node says goodbye, so that
the last requests still find it; and what is under way is waited for, since the other node would run it again.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from agent_sdk.errors import ReachError, ShuttingDown, Timeout
from agentreach.aio.clock import boot_time
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.registry_pb2 import DRAINING

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink
    from agent_sdk.pending import Call

_MARGIN_S = 1.0  # leave a draining node so long before its deadline
_LOOK_S = 0.05  # a few looks in a node's whole drain; an event would cost every call


def goes(owner: MeshLink, order: frames.Drain) -> bool:
    """Whether to go to another node before this one says goodbye."""
    return bool(order.peers) or (owner.elsewhere and not owner.hosts)


async def free(owner: MeshLink, order: frames.Drain) -> None:
    """Wait until this process may go. Its agents say that they take nothing more, so that nothing comes meanwhile."""
    limit_s = max(order.deadline_ms / 1000 - _MARGIN_S, 0.0) if order.peers else math.inf
    deadline = boot_time() + limit_s
    owner.moving = True
    number = 0
    for host in owner.hosts.values():
        change = frames.StatusChange(agent_id=host.agent_id, status=DRAINING)
        number = owner.signal(frames.Signal(status_change=change))
    while boot_time() < deadline and (owner.link.acknowledged < number or owner.calls.under_way or owner.busy):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


def late(owner: MeshLink, call: Call) -> ReachError:
    """What a call whose time is over ends with, if it waits here and no node has told."""
    executed = call.may_have_executed
    if call.item is None and owner.leaving:
        text = f"node {owner.node_id} is leaving, and no other took the request for {call.target} in time"
        return ShuttingDown(f"{text}; it was not started", retryable=True, trace_id=call.trace_id)
    where = "sent, not answered" if executed else "not sent: no node was reached"
    text = f"no answer from {call.target} in time; it was {where}"
    return Timeout(text, may_have_executed=executed, trace_id=call.trace_id)
