"""Conversations: which lane a session's message belongs to, and whether it may wait there.

A session has one owner and one lane: messages go in order, one at a time. Decides the type of agent that holds the
session, and refuses what could never start. When it starts is `lanes`', with whom is `owners`'.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import lanes, loops, owners, quotas, route, settle
from reach.core.requests import Request

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.pool import Pool
    from reach.core.state import State


def enter(state: State, request: Request, envelope: Envelope, parent: Lineage | None) -> None:
    """A session's message was admitted: put it into its lane and let the lane go on."""
    target, session_id = envelope.target, envelope.session_id
    tenant, principal, env, _ = request.key
    pool = state.directory.pool_for(target, tenant, env)
    agent_type = target.agent_type.lower() or type_of(state, pool, session_id, target.agent_id)
    if not agent_type:
        settle.fail(state, request, route.nobody(state, pool, request))
        return
    owner, key = (tenant, principal), (tenant, env, agent_type, session_id)
    too_many = quotas.session_fault(state, owner, key)
    if too_many is not None:
        settle.fail(state, request, too_many)
        return
    lane = lanes.lane_of(state, key)
    if lane is None:
        settle.fail(state, request, _too_many(state))
        return
    if state.quotas is not None:
        state.quotas.session(key, owner, state.now)
    request.agent_type = agent_type
    request.parent = parent
    request.strict_session = envelope.strict_session
    request.epoch = envelope.epoch
    fault = _refusal(state, lane, pool, request, parent)
    if fault is not None:
        settle.fail(state, request, fault)
        return
    lane.used_at = state.now
    if request.reentrant and lane.owner is not None:
        lanes.start(state, lane, request, envelope)
        return
    request.data = envelope.SerializeToString()
    if state.queue.bytes_held + len(request.data) > state.rules.queue_bytes_max:
        settle.fail(state, request, _no_bytes(state))
        return
    lanes.put(state, lane, request)
    request.note("queued", state.now, f"session lane, {len(lane.waiting)} waiting")
    lanes.advance(state, lane)


def type_of(state: State, pool: Pool, session_id: str, agent_id: str) -> str:
    """One type for a target that names none: the one that holds the session, else by rendezvous hash."""
    if agent_id:
        return agent_id.partition("/")[0].lower()
    selector = pool.selector
    types = {agent.agent_type for agent in pool}
    for agent_type in types:
        if (selector.tenant, selector.env, agent_type, session_id) in state.lanes:
            return agent_type
    salt = session_id.encode("utf-8", "surrogateescape")
    return max(types, key=lambda name: blake2b(salt + b"\0" + name.encode(), digest_size=8).digest(), default="")


def _refusal(state: State, lane: lanes.Lane, pool: Pool, request: Request, parent: Lineage | None) -> Error | None:
    """Why this message cannot wait in the lane; also settles whether it uses its own call tree's place."""
    if len(lane.waiting) >= state.rules.lane_max:
        return failure(
            codes.OVERLOADED,
            f"session {lane.key[3]} has {len(lane.waiting)} messages waiting, its limit; wait for answers",
            retry_after_ms=owners.PIN_RETRY_AFTER_MS,
        )
    owner = lane.owner
    if owner is not None and owner.agent.agent_id not in pool.members:
        return failure(
            codes.NO_AGENT_AVAILABLE,
            f"session {lane.key[3]} is held by {owner.agent.agent_id}, which does not match {pool.selector}",
            agent_id=owner.agent.agent_id,
        )
    if not request.ancestors or parent is None:
        return None
    held = lanes.held_by_its_callers(lane, request)
    if not held:
        return None
    if owner is not None and owner.agent.reentrant and lanes.able(owner):
        request.reentrant = True
        return None
    state.stats.loops["would_deadlock"] += 1
    return loops.deadlock(parent.path, str(pool.selector), held)


def _no_bytes(state: State) -> Error:
    return failure(
        codes.OVERLOADED,
        f"what waits on node {state.rules.node_id} holds {state.queue.bytes_held} bytes, its limit; try again later",
        retry_after_ms=owners.PIN_RETRY_AFTER_MS,
    )


def _too_many(state: State) -> Error:
    return failure(
        codes.OVERLOADED,
        f"node {state.rules.node_id} holds {len(state.lanes)} sessions, its limit; try again later",
        retry_after_ms=owners.PIN_RETRY_AFTER_MS,
    )
