"""Who holds an agent_id: a new agent, the same process with a new record or on a new link, or another process.

An agent that re-attaches with the same incarnation is the same agent: it keeps status, slots, sessions and what is in
flight, which is sent to it again. Another live process under the same agent_id takes over; the former is told so.
Whether it may, by its principal, was decided by `arrivals`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import failure
from reach.core import (
    arrivals,
    auditing,
    breakers,
    credit,
    departures,
    events,
    health,
    homes,
    leaving,
    losses,
    owners,
    remote,
    settle,
)
from reach.core.agents import Agent
from reach.core.peers import Peer
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from reach.core.state import State


def let_in(state: State, peer: Peer, each: arrivals.Attaching) -> None:
    """The store has registered it: attach it, unless a later registration of its agent_id was faster."""
    attachment = each.attachment
    remote_former: Agent | None = None
    if attachment is None:
        agent = each.agent
        assert agent is not None
        former = state.directory.get(agent.tenant, agent.env, agent.agent_id)
        if former is not None and former.generation > agent.generation:
            each.error = failure(codes.FENCED, f"another process registered as {agent.agent_id} after this one")
            return
        remote_former = former if former is not None and attached_elsewhere(former) else None
        if remote_former is None and former is not None and former.incarnation == agent.incarnation:
            attachment = replace_record(state, former, agent)
            auditing.attached(state, attachment, "agent.changed")
        else:
            if former is not None and remote_former is None:
                assert isinstance(former.link, Attachment)
                replaced(state, former.link, agent.incarnation)
            attachment = Attachment(agent, peer, state.now)
            agent.link = attachment
            state.directory.add(agent)
            state.stats.register(agent.agent_type)
            if remote_former is not None:
                breakers.left(state, remote_former)
            breakers.came(state, agent)
            health.begin(state, attachment)
            state.log("info", "agent attached", agent=agent.agent_id, env=agent.env, version=agent.version)
            auditing.attached(state, attachment)
            if remote_former is not None:
                remote.comes_home(state, remote_former, attachment)
        each.attachment = attachment
    _move_to(state, attachment, peer)
    if remote_former is not None and remote_former.incarnation == attachment.agent.incarnation:
        assert isinstance(remote_former.link, Attachment)
        remote.move_requests(state, remote_former.link, attachment)
    if state.orphans:
        remote.adopt(state, attachment)


def attached_elsewhere(agent: Agent) -> bool:
    """Whether the agent's home is another node."""
    return isinstance(agent.link, Attachment) and agent.link.remote


def replace_record(state: State, former: Agent, agent: Agent) -> Attachment:
    """The same process declares other capabilities or settings: a new record with the old life."""
    attachment = former.link
    assert isinstance(attachment, Attachment)
    for name in (
        "status",
        "in_flight",
        "load",
        "leftovers",
        "saturated",
        "warm_since",
        "pinned_sessions",
        "registered_at",
        "recent_failures",
        "avoid_until",
        "breaker",
        "latency",
        "suspect",
        "shut",
    ):
        setattr(agent, name, getattr(former, name))
    agent.link = attachment
    state.directory.add(agent)
    attachment.agent = agent
    for request in attachment.attempts.values():
        request.agent = agent
    owners.changed(state, attachment)  # it may have more slots now
    return attachment


def _move_to(state: State, attachment: Attachment, peer: Peer) -> None:
    """The agent is on this link now. What it had not answered is sent again: its own table joins or replays."""
    agent = attachment.agent
    former = attachment.peer
    peer.attachments[agent.env, agent.agent_id] = attachment
    if former is peer:
        return
    former.attachments.pop((agent.env, agent.agent_id), None)
    events.drop_subscriptions(state, former, agent.agent_id)
    attachment.peer = peer
    attachment.overdue = None
    for request in attachment.attempts.values():
        item = request.item
        if item is None:
            continue
        former.link.withdraw(item)
        if request.stage is Stage.SETTLED:
            if not request.lost_at:
                settle.tell_cancelled(state, request, attachment)
            continue
        request.item = peer.link.put_bytes(resent(state, request), state.now, request.priority)
    for lane in attachment.pinned:
        homes.doubt(lane)
    losses.link_back(state, attachment, resumed=False)
    credit.grant_again(state, attachment)
    leaving.again(state, attachment)
    health.in_sight(state, attachment)
    health.unsaturate(state, attachment)
    owners.changed(state, attachment)
    state.woken.add(peer)


def resent(state: State, request: Request) -> bytes:
    """The request's envelope for another sending to the same process: not fresh, with the time that is left."""
    envelope = Envelope.FromString(request.data)
    request.tied = True
    envelope.fresh, envelope.resent = False, True
    envelope.timeout_ms = max(1, int((request.deadline - state.now) * 1000))
    return envelope.SerializeToString()


def replaced(state: State, attachment: Attachment, by: bytes) -> None:
    """Another process has taken the agent_id over, or the same one is linked with another node now."""
    agent, peer = attachment.agent, attachment.peer
    if by == agent.incarnation:
        state.log("info", "agent went to another node", agent=agent.agent_id)
    else:
        state.log("warning", "agent replaced by another process", agent=agent.agent_id)
    peer.link.signal(
        Signal(
            detached=pb.Detached(
                agent_id=agent.agent_id,
                code=pb.Goodbye.REPLACED,
                reason=f"another process registered as {agent.agent_id}",
                incarnation=by,
            )
        )
    )
    state.woken.add(peer)
    departures.dismiss(state, attachment, "another process took over its agent_id", deregister=False)
