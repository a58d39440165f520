"""Agents of other nodes: who they are by the store's view, and where they are now.

A remote agent stands in the directory like one of this node; its `Attachment` is on the link to its home. That it
exists is said by its registration (the view), how it is by its home (`loads`). When it has another home, what it had of
ours goes there; when it has none, that waits for it (`State.orphans`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire.errors import failure
from reach.core import (
    breakers,
    credit,
    deadlines,
    health,
    loads,
    losses,
    nodes,
    owners,
    relays,
    returning,
    settle,
    takeover,
    vanished,
)
from reach.core.agents import DEGRADED, HEALTHY, STARTING, UNREACHABLE, Agent
from reach.core.effects import DialNodes
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State

NEVER = float("inf")


# ---- the view ----


def node_seen(state: State, record: NodeRecord) -> None:
    """A node's key stands in the store."""
    if record.node_id != state.rules.node_id:
        node = nodes.of(state, record.node_id)
        if node.record.started_at != record.started_at:
            node.seen_at = state.now
        node.record = record
        if node.address != record.address:
            node.address = record.address
            state.effects.append(DialNodes())


def node_gone(state: State, node_id: str) -> None:
    """A node's key is not there any more. Its agents' keys go by themselves."""
    node = state.nodes.get(node_id)
    if node is not None:
        node.address, node.gone_at = "", state.now
        nodes.forget_if_gone(state, node)


def agent_seen(state: State, record: AgentRecord, generation: int) -> None:
    """An agent's key names another node as its home; `generation` is the revision that wrote it. Repeats do nothing."""
    if record.node_id == state.rules.node_id:
        return
    record.generation = generation
    agent = Agent.from_record(record)
    former = state.directory.get(agent.tenant, agent.env, agent.agent_id)
    if former is not None and former.generation >= generation:
        return
    node = nodes.of(state, record.node_id)
    node.unregistered.pop((agent.tenant, agent.env, agent.agent_id), None)
    if former is not None and former.incarnation == agent.incarnation and former.node_id == agent.node_id:
        attachment = takeover.replace_record(state, former, agent)
        loads.apply(state, attachment)
        send_forgotten(state, attachment)
        return
    attachment = Attachment(agent, node, state.now, remote=True)
    attachment.look_at = NEVER
    agent.link = attachment
    agent.status = STARTING
    was = STARTING if former is None else _was(former)
    if former is not None:
        _succeed(state, former, attachment)
    state.directory.add(agent)
    node.agents[agent.tenant, agent.env, agent.agent_id] = attachment
    state.remote_agents += 1
    state.stats.register(agent.agent_type)
    breakers.came(state, agent)
    if agent.suspect:
        health.look_soon(state, attachment)  # nobody else would see that its breaker's time is over
    loads.apply(state, attachment)
    if former is not None:
        if former.incarnation == agent.incarnation and agent.status == STARTING and was in (HEALTHY, DEGRADED):
            set_status(state, attachment, was)  # the same process: it is as well there, until its home says otherwise
        _take_over_requests(state, former, attachment)
    if state.orphans:
        adopt(state, attachment)


def _was(former: Agent) -> int:
    """What an agent was where it comes from; that its node is leaving, or has left, says nothing about it."""
    node = former.link.peer if isinstance(former.link, Attachment) else None
    if former.status not in (DEGRADED, UNREACHABLE) or not isinstance(node, nodes.NodePeer) or not node.draining:
        return former.status
    told = node.told.get((former.tenant, former.env, former.agent_id))
    return former.status if told is None or told.incarnation != former.incarnation else int(told.status)


def send_forgotten(state: State, attachment: Attachment) -> None:
    """The agent is at its home, which had refused what it may have, or was started anew and has forgotten it."""
    for request in list(attachment.attempts.values()):
        if request.forgotten and request.stage is not Stage.SETTLED:
            request.forgotten, request.lost_at = False, 0.0
            _send_again(state, attachment, request)


def _send_again(state: State, attachment: Attachment, request: Request) -> None:
    peer = attachment.peer
    request.repeats = request.items
    request.item = peer.link.put_bytes(takeover.resent(state, request), state.now, request.priority)
    state.woken.add(peer)
    deadlines.reschedule(state, request)


def left_behind(state: State, record: AgentRecord) -> None:
    """An agent's key names this node as its home, which has just started: its former life was killed."""
    vanished.left_behind(state, record)


def agent_gone(state: State, tenant: str, env: str, agent_id: str, generation: int) -> None:
    """A key of this generation was deleted: the agent left, or its home has lost the lease.

    While the home says over its link that it has the agent, it is given work as before: who has lost a lease writes
    its keys again. What it has of ours is its home's to tell: an answer may be on its way.
    """
    agent = state.directory.get(tenant, env, agent_id)
    if agent is None or agent.generation > generation:
        return
    attachment = agent.link
    if not isinstance(attachment, Attachment) or not attachment.remote:
        return
    node = attachment.peer
    assert isinstance(node, nodes.NodePeer)
    told = node.told.get((tenant, env, agent_id))
    if node.connected and told is not None and told.incarnation == agent.incarnation:
        node.unregistered[tenant, env, agent_id] = None
    else:
        _gone(state, attachment)


def _gone(state: State, attachment: Attachment) -> None:
    """It is registered nowhere. What it has of ours waits for its home's word, or for it to come to another node."""
    _vanished(state, attachment)
    _dismiss(state, attachment)
    agent = attachment.agent
    forget_orphans(state)
    if attachment.attempts:
        state.orphans[agent.tenant, agent.env, agent.agent_id] = attachment
        if not attachment.peer.connected:
            _wait_for(state, attachment)


def _wait_for(state: State, attachment: Attachment) -> None:
    for request in list(attachment.attempts.values()):
        if request.stage is not Stage.SETTLED:
            request.lost_at = request.lost_at or state.now
            deadlines.reschedule(state, request)


def adopt(state: State, attachment: Attachment) -> None:
    """An agent has come, here or at another node, that was registered nowhere: what it has of ours goes to it again."""
    agent = attachment.agent
    orphan = state.orphans.pop((agent.tenant, agent.env, agent.agent_id), None)
    if orphan is None:
        return
    if orphan.agent.incarnation == agent.incarnation:
        move_requests(state, orphan, attachment)
    else:
        losses.agent_gone(state, orphan, "another process took over its agent_id")


def forget_orphans(state: State) -> None:
    """Let go of those that have nothing of ours any more."""
    for key in [key for key, orphan in state.orphans.items() if not orphan.attempts]:
        del state.orphans[key]


def _orphans_of(state: State, node: NodePeer) -> list[Attachment]:
    return [orphan for orphan in state.orphans.values() if orphan.peer is node]


def left_home(state: State, attachment: Attachment) -> None:
    """Its home does not have it, for now at least: without a registration it is no agent any more."""
    node, agent = attachment.peer, attachment.agent
    assert isinstance(node, nodes.NodePeer)
    set_status(state, attachment, UNREACHABLE)
    if (agent.tenant, agent.env, agent.agent_id) in node.unregistered:
        _gone(state, attachment)


def _succeed(state: State, former: Agent, attachment: Attachment) -> None:
    """Another attachment has this agent_id now: let go of the former one. Its requests are `_take_over_requests`'."""
    old = former.link
    assert isinstance(old, Attachment)
    if not old.remote:
        same = former.incarnation == attachment.agent.incarnation
        if same:
            move_requests(state, old, attachment)
            owners.home_left(state, old)
        takeover.replaced(state, old, attachment.agent.incarnation)
        return
    if former.incarnation == attachment.agent.incarnation:
        attachment.agent.warm_since = former.warm_since
    else:
        _vanished(state, old)
    _dismiss(state, old)


def _take_over_requests(state: State, former: Agent, attachment: Attachment) -> None:
    old = former.link
    assert isinstance(old, Attachment)
    if former.incarnation == attachment.agent.incarnation:
        move_requests(state, old, attachment)
    else:
        losses.agent_gone(state, old, "another process took over its agent_id")


def _vanished(state: State, attachment: Attachment) -> None:
    node = attachment.peer
    assert isinstance(node, nodes.NodePeer)
    vanished.remember(state, attachment, node)


def _dismiss(state: State, attachment: Attachment) -> None:
    """Out of routing; what it has of ours is settled by others."""
    agent = attachment.agent
    if not state.directory.remove(agent):
        return
    node = attachment.peer
    assert isinstance(node, nodes.NodePeer)
    node.agents.pop((agent.tenant, agent.env, agent.agent_id), None)
    node.unregistered.pop((agent.tenant, agent.env, agent.agent_id), None)
    state.remote_agents -= 1
    health.end(state, attachment)
    breakers.left(state, agent)
    owners.home_left(state, attachment)
    nodes.forget_if_gone(state, node)


def move_requests(state: State, old: Attachment, new: Attachment) -> None:
    """The same process is attached elsewhere: what it had not answered is sent to it again, and it joins or replays."""
    for request in list(old.attempts.values()):
        if request.stage is Stage.SETTLED:
            continue
        if request.visitor is not None:
            moved = failure(codes.AGENT_LOST, f"{new.agent.agent_id} moved to another node", details={"moved": "true"})
            settle.fail(state, request, moved)
            continue
        old.attempts.pop(request.number, None)
        if request.holds_slot:
            state.directory.release(old.agent)
            state.directory.reserve(new.agent)
        if request.budgeted is old:
            state.budget.ended(old)
            state.budget.began(new)
            request.budgeted = new
        request.agent, request.attachment = new.agent, new
        new.attempts[request.number] = request
        request.lost_at = 0.0
        if old.peer is new.peer and not request.forgotten:
            deadlines.reschedule(state, request)  # it was registered anew: its home goes on with it where it is
            continue
        if request.item is not None:
            old.peer.link.withdraw(request.item)
        request.forgotten = False
        request.note("sent again", state.now, f"{new.agent.agent_id} moved to node {new.agent.node_id}")
        _send_again(state, new, request)


def comes_home(state: State, former: Agent, attachment: Attachment) -> None:
    """An agent that was another node's is attached to this one now; it is in the directory already."""
    old = former.link
    assert isinstance(old, Attachment) and old.remote
    node = old.peer
    assert isinstance(node, nodes.NodePeer)
    node.agents.pop((former.tenant, former.env, former.agent_id), None)
    node.unregistered.pop((former.tenant, former.env, former.agent_id), None)
    state.remote_agents -= 1
    health.end(state, old)
    owners.home_left(state, old)
    vanished.remember(state, old, node)  # should it end here soon, only its former home knows all that it had
    nodes.forget_if_gone(state, node)
    if former.incarnation != attachment.agent.incarnation:
        losses.agent_gone(state, old, "another process took over its agent_id")
        return
    attachment.agent.warm_since = former.warm_since
    if (was := _was(former)) in (HEALTHY, DEGRADED):  # it comes back, which is no new start
        attachment.agent.status, attachment.proven = was, True
        state.directory.changed(attachment.agent)


# ---- the link to the home ----


def link_cut(state: State, node: NodePeer) -> None:
    """The link to a home was cut: no new work for its agents; what they have waits for the link, or for them."""
    for attachment in node.agents.values():
        set_status(state, attachment, UNREACHABLE)
    for attachment in [*node.agents.values(), *_orphans_of(state, node)]:
        losses.link_cut(state, attachment)
    relays.owner_lost(state, node)
    drop_unregistered(state, node)


def drop_unregistered(state: State, node: NodePeer) -> None:
    """Nobody says any more that agents without a registration are there: let go of them."""
    for key in list(node.unregistered):
        _gone(state, node.agents[key])


def link_back(state: State, node: NodePeer, *, resumed: bool) -> None:
    """The link to a home is back."""
    for attachment in node.agents.values():
        losses.link_back(state, attachment, resumed=resumed)
        if not resumed:
            attachment.overdue = None  # nothing that the former link carried will be acknowledged
            _signals_lost(state, attachment)
        health.unsaturate(state, attachment)
        loads.apply(state, attachment)
    for orphan in _orphans_of(state, node):
        losses.link_back(state, orphan, resumed=resumed)


def _signals_lost(state: State, attachment: Attachment) -> None:
    """The link to its home was numbered anew: what was said in signals on the former one may not have arrived.

    The home may have said that it refused a request, or that its agent was lost. It is sent there again: a home that
    has it at work drops it, and its agent joins or replays.
    """
    credit.grant_again(state, attachment)
    for request in list(attachment.attempts.values()):
        item = request.item
        under_way = request.stage is not Stage.SETTLED and not request.forgotten and not request.items
        if under_way and item is not None and item.accepted:
            _send_again(state, attachment, request)


def forgotten(state: State, node: NodePeer) -> None:
    """A home was started anew: of what it had accepted nobody knows there, until its agents come back to a node."""
    for attachment in [*node.agents.values(), *_orphans_of(state, node)]:
        vanished.remember(state, attachment, node)
        for request in list(attachment.attempts.values()):
            item = request.item
            if request.stage is Stage.SETTLED:
                settle.release(state, request)
            elif item is not None and item.accepted:
                request.lost_at = request.lost_at or state.now
                request.forgotten = True
                deadlines.reschedule(state, request)


def given_up(state: State, node: NodePeer, why: str) -> None:
    """A home is gone for good: what its agents had and did not answer is lost."""
    for attachment in list(node.agents.values()):
        set_status(state, attachment, UNREACHABLE)
        for request in list(attachment.attempts.values()):
            if request.stage is not Stage.SETTLED:
                request.lost_at = request.lost_at or state.now
                deadlines.reschedule(state, request)


def set_status(state: State, attachment: Attachment, status: int) -> None:
    """What a remote agent is now, for every decision."""
    agent = attachment.agent
    if agent.status == status:
        return
    attachment.unreachable_since = state.now if status == UNREACHABLE else 0.0
    agent.status = status
    state.directory.changed(agent)
    owners.changed(state, attachment)
    if status in (HEALTHY, DEGRADED):
        returning.stir(state)


def on_timer(state: State, attachment: Attachment) -> None:
    """Look after a remote agent that has work of ours, or whose breaker is not at rest."""
    agent = attachment.agent
    attachment.look_at = NEVER
    if state.directory.get(agent.tenant, agent.env, agent.agent_id) is not agent:
        return
    if agent.suspect or agent.recent_failures:
        breakers.look(state, agent)
    health.look_for_overdue(state, attachment)
    if attachment.attempts or agent.suspect or agent.recent_failures or attachment.overdue is not None:
        health.look_soon(state, attachment)
