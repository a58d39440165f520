"""Leaving on order: an agent that an operator drains, and what a node that leaves tells its links.

A drained agent gets no new work from this moment on, whatever it says of itself. Its process is told (`drain`), ends
what it works on and detaches. A process that does not understand is detached (`DRAINED`) as soon as it works on
nothing, what it brought along from before included; and any process when its time and the grace of a cancel are over.
Its conversations move to other owners, each once its running turn is over: that is for `leaving` and `moves` to decide.
Sending an agent away is `departures`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import DRAINING
from reach.core import departures, elsewhere, health, leaving, loads
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from reach.core.peers import Peer
    from reach.core.state import State

LOOK_S = 0.25  # so often it is looked whether a drained agent still works on something
MOVE_S = 5.0  # for agents to be registered elsewhere; a fleet spreads over half of it (agent_sdk.redial)
REASON_CHARS_MAX = 200


class Drain:
    """An order to an agent: to be done until a time."""

    __slots__ = ("attachment", "reason", "until")

    def __init__(self, attachment: Attachment, until: float, reason: str) -> None:
        self.attachment = attachment
        self.until = until
        self.reason = reason


def agent(state: State, attachment: Attachment, limit_s: float, reason: str) -> None:
    """Drain an agent within `limit_s`. A second order replaces the first one's time and reason."""
    former, record = attachment.drain, attachment.agent
    drain = attachment.drain = Drain(attachment, state.now + limit_s, reason[:REASON_CHARS_MAX])
    state.log("info", "agent drains", agent=record.agent_id, limit_s=limit_s, why=drain.reason)
    attachment.keeps_sessions = False
    if former is None:
        health.said(state, attachment, DRAINING)
        leaving.begin(state, attachment)
    peer = attachment.peer
    order = pb.Drain(agent_id=record.agent_id, env=record.env, deadline_ms=int(limit_s * 1000), reason=drain.reason)
    peer.link.signal(Signal(drain=order))
    state.woken.add(peer)
    state.checks.schedule(drain, state.now + LOOK_S)


def on_timer(state: State, drain: Drain) -> None:
    """See whether the agent may go."""
    attachment = drain.attachment
    record, peer = attachment.agent, attachment.peer
    if attachment.drain is not drain or peer.attachments.get((record.env, record.agent_id)) is not attachment:
        return
    if leaving.is_busy(state, attachment) and state.now < drain.until + state.rules.cancel_grace_s:
        state.checks.schedule(drain, state.now + LOOK_S)
        return
    departures.dismiss(state, attachment, f"drained ({drain.reason or 'no reason given'})")
    gone = pb.Detached(agent_id=record.agent_id, code=pb.Goodbye.DRAINED, reason=drain.reason)
    peer.link.signal(Signal(detached=gone))
    state.woken.add(peer)


def node(state: State, limit_s: float) -> None:
    """This node takes no new requests from now on; every link is told to go elsewhere within `limit_s`."""
    if state.draining:
        return
    state.draining = True
    state.leaves_at = state.now + limit_s
    state.moved_by = state.now + (min(MOVE_S, limit_s) if state.peer_addresses else 0.0)
    _tell_all(state)
    loads.tell_draining(state)


def node_came(state: State) -> None:
    """This node is linked with one that was not there: a process that was told of nowhere to go to can go there."""
    if state.draining:
        _tell_all(state)


def _tell_all(state: State) -> None:
    for peer in state.peers.values():
        if peer.welcomed and not peer.restarts:
            tell(state, peer)


def moved(state: State) -> bool:
    """True when no agent is left here that may still go elsewhere."""
    return state.now >= state.moved_by or len(state.directory) == state.remote_agents


def tell(state: State, peer: Peer) -> None:
    """Tell a link that this node is leaving."""
    left_s = max(0.0, state.leaves_at - state.now)
    reason = f"node {state.rules.node_id} is leaving"
    order = pb.Drain(deadline_ms=int(left_s * 1000), peers=elsewhere.addresses(state), reason=reason)
    peer.link.signal(Signal(drain=order))
    state.woken.add(peer)
