"""A node that leaves: when this process goes to another one. Nothing may be lost by it, and nothing run twice.

From the node's `drain` on, new requests are kept for the next node (`Calls.begin`); nested ones still go out, the node
takes what its last requests need. Requests of our own that are under way get a moment to be answered; what then still
runs is asked for again at the next node, which finds out who has it and joins it.

Agents go on working, and taking work, while they move: the next node registers them before this one is left, and what
they still have to answer goes there. That needs nodes that are linked, as those are that name their peers. Where only
our own list names another node, an agent that is registered stays until the node says goodbye, so that the last
requests still find it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_sdk.errors import ReachError, ShuttingDown, Timeout
from agent_sdk.redial import SPREAD_S
from agentreach.aio.clock import boot_time
from agentreach.v1.error_pb2 import SHUTTING_DOWN, Error

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink
    from agent_sdk.pending import Call

_ANSWERS_S = 2.0  # for answers that come soon; new requests wait for the next node meanwhile
SEEN_S = 0.2  # for all nodes to see that an agent is registered at the next one, before it leaves this one
_REFUSED_S = 3.0  # of nothing but refusals: another node may know better
_LOOK_S = 0.05  # a few looks in a node's whole drain; an event would cost every call


def goes(owner: MeshLink, peers: Sequence[str]) -> bool:
    """Whether to go to another node before this one says goodbye."""
    return bool(peers) or owner.homeless


def turned_away(owner: MeshLink, error: Error, refused_s: float) -> bool:
    """Whether to try another node, after one has refused an agent, and had for `refused_s`.

    A node that is leaving lets nobody in, nor does one that has lost its registry.
    """
    return owner.homeless and (error.code == SHUTTING_DOWN or (error.retryable and refused_s >= _REFUSED_S))


async def free(owner: MeshLink, within_s: float | None) -> None:
    """Wait until this process may go, for `within_s` at most (None: as long as it takes).

    A fleet that is told to go in the same moment does so over a while.
    """
    limit_s = math.inf if within_s is None else min(within_s / 2, _ANSWERS_S)
    if owner.hosts and within_s is not None:
        await asyncio.sleep(min(SPREAD_S, within_s / 4) * random.random())
    deadline = boot_time() + limit_s
    while boot_time() < deadline and owner.calls.under_way:  # noqa: ASYNC110
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
