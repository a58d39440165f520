"""Processes and their agents: hello, resume, attach, detach, cut, goodbye, expiry.

A registration is written to the store before the agent can be routed to (`RegisterAgents` → `registered`). An agent
that re-attaches with the same incarnation is the same agent: it keeps status, slots, sessions and what is in flight.
Another live process under the same agent_id takes over if it has the same principal; the former is told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire import limits
from agentreach.wire.checks import record_fault
from agentreach.wire.errors import failure
from agentreach.wire.names import is_name, normalise_env
from reach.core import credit, events, health, losses, outcomes, sessions, settle, waiters
from reach.core.agents import STARTING, Agent
from reach.core.effects import DeregisterAgent, EndStream, RegisterAgents
from reach.core.peers import Peer
from reach.core.requests import Attachment, Request, Stage
from reach.core.topics import Publishing

if TYPE_CHECKING:
    from agentreach.wire.link import Item
    from reach.core.ports import Identity
    from reach.core.state import State
_RANDOM_BITS = 128


@dataclass(slots=True)
class Attaching:
    """One agent on its way in: what it asked for, and what came of it."""

    agent_id: str
    agent: Agent | None = None
    error: Error | None = None
    sessions: Sequence[pb.SessionRef] = ()
    attachment: Attachment | None = None
    """Set when the agent is attached already: nothing needs to be written."""


@dataclass(slots=True)
class Arrival:
    """The agents of one hello, or of one `attach` signal, in their order."""

    agents: list[Attaching] = field(default_factory=list)
    with_welcome: bool = False
    resumed: bool = False
    hello: int = 0
    """Which hello of its link it answers."""


# ---- links ----


def hello(state: State, who: Identity, message: pb.Hello) -> Peer | None:
    """A stream said hello: go on with its link, or begin a new one. None: the node takes no more links."""
    peer = state.tokens.get(bytes(message.resume_token)) if message.resume_token else None
    same = peer is not None and peer.who == who and message.incarnation in (peer.incarnation, b"")
    if peer is not None and same:
        peer.hellos += 1
        peer.link.cut()
        resumed = not peer.restarts and peer.link.resume(message.last_seq)
        peer.restarts = not resumed
        _back(state, peer)
        confirmed(state, peer.link.confirmed)
        if resumed:
            state.stats.link_resumes += 1
            welcome(state, peer, Arrival(resumed=True))
            return peer
        _dismiss_undeclared(state, peer, message)
    else:
        if len(state.peers) >= state.rules.links_max:
            return None
        peer = _new_peer(state, who, message)
    events.drop_subscriptions(state, peer)
    arrive(state, peer, message.agents, with_welcome=True)
    return peer


def _dismiss_undeclared(state: State, peer: Peer, message: pb.Hello) -> None:
    """A link that begins anew declares its agents anew: whoever is not among them has left meanwhile."""
    declared = {(normalise_env(each.record.env or peer.env), each.record.agent_id) for each in message.agents}
    for key, attachment in list(peer.attachments.items()):
        if key not in declared:
            dismiss(state, attachment, "not declared again by its process")


def _new_peer(state: State, who: Identity, message: pb.Hello) -> Peer:
    link_id = f"{state.rng.getrandbits(64):016x}"
    token = state.rng.getrandbits(_RANDOM_BITS).to_bytes(16, "big")
    peer = Peer(state, link_id, token, who)
    name = message.name if is_name(message.name) else who.principal
    peer.caller_id = f"caller/{name}-{link_id[:8]}"
    peer.env = normalise_env(message.env)
    # Hand-written processes may leave it out; they must not all be taken for one and the same.
    peer.incarnation = bytes(message.incarnation) or state.rng.getrandbits(_RANDOM_BITS).to_bytes(16, "big")
    state.peers[link_id] = peer
    state.tokens[token] = peer
    state.log("info", "link opened", link=link_id, caller=peer.caller_id, sdk=message.sdk[:64])
    peer.timer = state.checks.schedule(peer, state.now + state.rules.heartbeat_interval_s)
    return peer


def welcome(state: State, peer: Peer, arrival: Arrival) -> None:
    """Answer hello. It is the first thing on the new stream."""
    if peer.restarts:  # only now: nothing numbered may come before the welcome that says so
        peer.restarts = False
        peer.link.restart()
        for attachment in peer.attachments.values():
            credit.grant_again(state, attachment)
    rules = state.rules
    interval_s, ttl_s = heartbeat_times(state)
    message = pb.Welcome(
        link_id=peer.link_id,
        resume_token=peer.token,
        resumed=arrival.resumed,
        last_seq=peer.link.last_accepted,
        node_id=rules.node_id,
        agents=[_attached(each) for each in arrival.agents],
        caller_id=peer.caller_id,
        heartbeat_interval_ms=int(interval_s * 1000),
        lease_ttl_ms=int(ttl_s * 1000),
        limits=pb.Limits(
            payload_bytes_max=rules.payload_bytes_max,
            frame_envelopes_max=limits.FRAME_ENVELOPES_MAX,
            frame_bytes_max=limits.FRAME_BYTES_MAX,
            timeout_ms_min=limits.TIMEOUT_MS_MIN,
            timeout_ms_max=limits.TIMEOUT_MS_MAX,
            headers_max=limits.HEADERS_MAX,
            headers_bytes_max=limits.HEADERS_BYTES_MAX,
            resume_window_ms=int(rules.resume_window_s * 1000),
        ),
    )
    peer.welcomed = True
    peer.link.signal(Signal(welcome=message))
    state.woken.add(peer)


def confirmed(state: State, items: list[Item]) -> None:
    """The peer acknowledged these: replies of fresh ids are done with, events are counted."""
    for item in items:
        owner = item.owner
        item.owner = None
        if isinstance(owner, Request):
            outcomes.confirmed(state, owner)
        elif isinstance(owner, Publishing):
            events.acknowledged(state, owner, item)
    items.clear()


def heartbeat_times(state: State) -> tuple[float, float]:
    """(interval, lease TTL) in seconds: half as long again where there are many agents."""
    factor = 1.5 if len(state.directory) > state.rules.many_agents else 1.0
    return state.rules.heartbeat_interval_s * factor, state.rules.lease_ttl_s * factor


def cut(state: State, peer: Peer) -> None:
    """The stream ended without goodbye: no new work, and a while to come back."""
    if not peer.connected:
        return
    peer.connected = False
    peer.cut_at = state.now
    peer.link.cut()
    for attachment in peer.attachments.values():
        health.out_of_sight(state, attachment)
        losses.link_cut(state, attachment)
    state.log("info", "link cut", link=peer.link_id, agents=len(peer.attachments))
    _check_at(state, peer, state.now + state.rules.resume_window_s)


def _back(state: State, peer: Peer) -> None:
    """A new stream carries the link again, whether or not the old one was seen to end."""
    peer.connected = True
    peer.cut_at = 0.0
    peer.heard_at = peer.acked_seen_at = peer.back_at = state.now
    for attachment in peer.attachments.values():
        losses.link_back(state, attachment, resumed=not peer.restarts)
        health.in_sight(state, attachment)
    _check_at(state, peer, state.now + state.rules.heartbeat_interval_s)


def _check_at(state: State, peer: Peer, when: float) -> None:
    if peer.timer is not None:
        state.checks.cancel(peer.timer, peer)
    peer.timer = state.checks.schedule(peer, when)


def on_timer(state: State, peer: Peer) -> None:
    """Judge the link: not back in time, silent, or not taking anything."""
    if state.peers.get(peer.link_id) is not peer:
        return  # it was removed in this very tick
    peer.timer = None
    now, rules = state.now, state.rules
    if not peer.connected:
        if now >= peer.cut_at + rules.resume_window_s:
            remove(state, peer, "its link was cut and did not come back")
        else:
            _check_at(state, peer, peer.cut_at + rules.resume_window_s)
        return
    interval_s, _ = heartbeat_times(state)
    if peer.attachments and now - peer.heard_at > 3 * interval_s:
        state.log("warning", "nothing heard for three heartbeats: link counted as cut", link=peer.link_id)
        cut(state, peer)
        state.effects.append(EndStream(peer))
        return
    if peer.link.acknowledged != peer.acked_seen or not peer.link.unacked:
        peer.acked_seen, peer.acked_seen_at = peer.link.acknowledged, now
    elif now - peer.acked_seen_at > rules.slow_consumer_s:
        state.stats.slow_consumers += 1
        farewell(state, peer, pb.Goodbye.SLOW_CONSUMER, f"nothing acknowledged for {rules.slow_consumer_s:g} s")
        return
    _check_at(state, peer, now + min(rules.slow_consumer_s, interval_s) / 3)


def farewell(state: State, peer: Peer, code: pb.Goodbye.Code.ValueType, reason: str) -> None:
    """End a link from this side, saying why."""
    if peer.closing:
        return
    peer.closing = True
    peer.link.signal(Signal(goodbye=pb.Goodbye(code=code, reason=reason)))
    state.woken.add(peer)
    state.effects.append(EndStream(peer))
    name = pb.Goodbye.Code.Name(code)
    state.log(
        "info" if code == pb.Goodbye.SHUTDOWN else "warning", "link ended", link=peer.link_id, code=name, why=reason
    )
    remove(state, peer, f"its link was ended with {name}")


def goodbye(state: State, peer: Peer, message: pb.Goodbye) -> None:
    """The process leaves for good. What its final ack does not cover was never accepted."""
    peer.closing = True
    remove(state, peer, f"said goodbye ({message.reason[:100] or 'no reason given'})", said_goodbye=True)
    state.effects.append(EndStream(peer))


def remove(state: State, peer: Peer, why: str, *, said_goodbye: bool = False) -> None:
    """Forget a link and everything that hangs on it."""
    peer.closing = True
    if state.peers.pop(peer.link_id, None) is None:
        return
    state.tokens.pop(peer.token, None)
    if peer.timer is not None:
        state.checks.cancel(peer.timer, peer)
        peer.timer = None
    for attachment in list(peer.attachments.values()):
        dismiss(state, attachment, why, said_goodbye=said_goodbye)
    waiters.port_gone(state, peer, list(peer.requests.values()), said_goodbye=said_goodbye)
    events.drop_subscriptions(state, peer)
    for item in peer.link.outstanding():
        owner, item.owner = item.owner, None
        if isinstance(owner, Request):
            outcomes.keep_unconfirmed(state, owner)
        elif isinstance(owner, Publishing) and item.seq == 0:
            events.never_sent(state, owner, item)
    state.log("info", "link closed", link=peer.link_id, why=why)


# ---- agents ----


def arrive(state: State, peer: Peer, attaches: Iterable[pb.Attach], *, with_welcome: bool) -> None:
    """Agents ask to be attached: check them, and have the new ones written to the store."""
    arrival = Arrival(with_welcome=with_welcome, hello=peer.hellos)
    new = 0
    for attach in attaches:
        each = _checked(state, peer, attach)
        arrival.agents.append(each)
        if each.agent is not None and each.attachment is None:
            new += 1
            _claim(state, peer, each.agent, 1)
    if new:
        state.effects.append(RegisterAgents(peer, arrival))
    else:
        registered(state, peer, arrival)


def _claim(state: State, peer: Peer, agent: Agent, count: int) -> None:
    """Note that the store is asked for a registration (1), or has answered (-1)."""
    key = (agent.tenant, agent.env, agent.agent_id)
    who, claims = state.arriving.get(key, (peer.who, 0))
    peer.arriving += count
    if claims + count > 0:
        state.arriving[key] = (who, claims + count)
    else:
        state.arriving.pop(key, None)


def _checked(state: State, peer: Peer, attach: pb.Attach) -> Attaching:
    record = attach.record
    if not record.agent_id and record.agent_type:
        record.agent_id = f"{record.agent_type}/{state.rng.getrandbits(32):08x}"
    record.agent_type = record.agent_type or record.agent_id.partition("/")[0]
    record.env = normalise_env(record.env or peer.env)
    record.tenant = peer.who.tenant
    record.incarnation = peer.incarnation
    attaching = Attaching(record.agent_id, sessions=list(attach.sessions))
    error = record_fault(record)
    former = state.directory.get(record.tenant, record.env, record.agent_id)
    if error is None:
        error = _ownership_fault(state, peer, record, former)
    if error is None and (former is None or former.incarnation != peer.incarnation):
        error = _room_fault(state, peer)
    if error is not None:
        attaching.error = error
        return attaching
    agent = attaching.agent = Agent.from_record(record)
    agent.status, agent.in_flight, agent.load, agent.generation = STARTING, 0, 0.0, 0
    agent.node_id = state.rules.node_id
    agent.registered_at = agent.heartbeat_at = state.unix
    if former is not None and former.incarnation == peer.incarnation and _same_offer(former, agent):
        assert isinstance(former.link, Attachment)
        attaching.attachment = former.link
    return attaching


def _ownership_fault(state: State, peer: Peer, record: AgentRecord, former: Agent | None) -> Error | None:
    """An agent_id belongs to the principal that is attached under it, or whose registration is on its way."""
    who, _ = state.arriving.get((record.tenant, record.env, record.agent_id), (peer.who, 0))
    if former is not None:
        assert isinstance(former.link, Attachment)
        who = former.link.peer.who if who == peer.who else who
    if who == peer.who:
        return None
    return failure(codes.PERMISSION_DENIED, f"{record.agent_id} is registered by somebody else")


def _room_fault(state: State, peer: Peer) -> Error | None:
    """Why no further agent may come, on this link or on any."""
    rules = state.rules
    if state.draining:
        return failure(codes.SHUTTING_DOWN, f"node {rules.node_id} is leaving: use another node")
    present = len(state.directory) + len(state.arriving)
    if present >= rules.agents_max:
        return failure(codes.OVERLOADED, f"this node holds {present} agents, its limit", retry_after_ms=5_000)
    if len(peer.attachments) + peer.arriving >= rules.agents_per_link_max:
        return failure(codes.OVERLOADED, f"one link carries at most {rules.agents_per_link_max} agents")
    return None


_OFFER = (
    "version",
    "capabilities",
    "labels",
    "weight",
    "priority",
    "max_concurrency",
    "session_concurrency",
    "reentrant",
    "description",
    "endpoints",
)


def _same_offer(one: Agent, other: Agent) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _OFFER)


def registered(state: State, peer: Peer, arrival: Arrival) -> None:
    """The store has answered for every agent of an arrival: let them in and tell their process."""
    for each in arrival.agents:
        if each.agent is not None and each.attachment is None:
            _claim(state, peer, each.agent, -1)
    if state.peers.get(peer.link_id) is not peer:
        for each in arrival.agents:
            if each.error is None and each.agent is not None and each.attachment is None:
                state.effects.append(DeregisterAgent(each.agent, each.agent.generation))
        return
    if _gone_meanwhile(state, peer, arrival):
        state.effects.append(RegisterAgents(peer, arrival))
        return
    for each in arrival.agents:
        if each.error is None:
            _let_in(state, peer, each)
    if arrival.with_welcome and arrival.hello != peer.hellos:
        return  # its stream is gone; the next one's hello is answered by itself
    if arrival.with_welcome:
        welcome(state, peer, arrival)
    else:
        for each in arrival.agents:
            peer.link.signal(Signal(attached=_attached(each)))
        state.woken.add(peer)
    for each in arrival.agents:
        if each.error is None and each.attachment is not None:
            for session in each.sessions:
                sessions.came_back(state, each.attachment, session.session_id, session.epoch)
            if each.attachment.agent.status == STARTING:
                health.probe(state, each.attachment)


def _gone_meanwhile(state: State, peer: Peer, arrival: Arrival) -> bool:
    """Agents that were attached when they came, and were dismissed while the store answered, are registered anew."""
    gone = False
    for each in arrival.agents:
        attachment, agent = each.attachment, each.agent
        if attachment is None or agent is None or each.error is not None:
            continue
        if state.directory.get(agent.tenant, agent.env, agent.agent_id) is not attachment.agent:
            each.attachment, gone = None, True
            _claim(state, peer, agent, 1)
    return gone


def _let_in(state: State, peer: Peer, each: Attaching) -> None:
    attachment = each.attachment
    if attachment is None:
        agent = each.agent
        assert agent is not None
        former = state.directory.get(agent.tenant, agent.env, agent.agent_id)
        if former is not None and former.generation > agent.generation:
            each.error = failure(codes.FENCED, f"another process registered as {agent.agent_id} after this one")
            return
        if former is not None and former.incarnation == agent.incarnation:
            attachment = _replace_record(state, former, agent)
        else:
            if former is not None:
                assert isinstance(former.link, Attachment)
                replaced(state, former.link, agent.incarnation)
            attachment = Attachment(agent, peer, state.now)
            agent.link = attachment
            state.directory.add(agent)
            state.stats.register(agent.agent_type)
            health.begin(state, attachment)
            state.log("info", "agent attached", agent=agent.agent_id, env=agent.env, version=agent.version)
        each.attachment = attachment
    _move_to(state, attachment, peer)


def _replace_record(state: State, former: Agent, agent: Agent) -> Attachment:
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
    ):
        setattr(agent, name, getattr(former, name))
    agent.link = attachment
    state.directory.add(agent)
    attachment.agent = agent
    for request in attachment.attempts.values():
        request.agent = agent
    sessions.owner_changed(state, attachment)  # it may have more slots now
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
        request.item = peer.link.put_bytes(_resent(state, request), state.now, request.priority)
    losses.link_back(state, attachment, resumed=False)
    credit.grant_again(state, attachment)
    health.in_sight(state, attachment)
    health.unsaturate(state, attachment)
    sessions.owner_changed(state, attachment)
    state.woken.add(peer)


def _resent(state: State, request: Request) -> bytes:
    """The request's envelope for another sending to the same process: not fresh, with the time that is left."""
    envelope = Envelope.FromString(request.data)
    envelope.fresh = False
    envelope.timeout_ms = max(1, int((request.deadline - state.now) * 1000))
    return envelope.SerializeToString()


def replaced(state: State, attachment: Attachment, by: bytes) -> None:
    """Another process has taken the agent_id over."""
    agent, peer = attachment.agent, attachment.peer
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
    dismiss(state, attachment, "another process took over its agent_id", deregister=False)


def dismiss(
    state: State, attachment: Attachment, why: str, *, said_goodbye: bool = False, deregister: bool = True
) -> None:
    """An agent is no longer attached: out of routing, its requests settled, its sessions without an owner."""
    agent = attachment.agent
    attachment.peer.attachments.pop((agent.env, agent.agent_id), None)
    if not state.directory.remove(agent):
        return
    health.end(state, attachment)
    losses.agent_gone(state, attachment, why, said_goodbye=said_goodbye)
    sessions.owner_gone(state, attachment)
    events.drop_subscriptions(state, attachment.peer, agent.agent_id)
    if deregister:
        state.effects.append(DeregisterAgent(agent, agent.generation))
    state.log("info", "agent detached", agent=agent.agent_id, why=why)


def detach(state: State, peer: Peer, message: pb.Detach) -> None:
    """The process takes one of its agents off the link."""
    attachment = _own(peer, message.agent_id, message.env)
    if attachment is not None:
        dismiss(state, attachment, f"detached ({message.reason[:100] or 'no reason given'})", said_goodbye=True)
    signal = pb.Detached(agent_id=message.agent_id, code=pb.Goodbye.NORMAL)
    peer.link.signal(Signal(detached=signal))
    state.woken.add(peer)


def heartbeat(state: State, peer: Peer, message: pb.Heartbeat) -> None:
    """Take note of what the process says of its agents; answer which of them are unknown here."""
    unknown: list[str] = []
    for load in message.agents:
        attachment = _own(peer, load.agent_id, "")
        if attachment is None:
            if not peer.arriving:  # one whose registration is under way is answered by `attached`
                unknown.append(load.agent_id)
            continue
        agent = attachment.agent
        agent.heartbeat_at = state.unix
        agent.load = load.load
        if load.leftovers != agent.leftovers:
            agent.leftovers = load.leftovers
            state.directory.changed(agent)
            sessions.owner_changed(state, attachment)
        if load.status:
            health.said(state, attachment, load.status)
    interval_s, ttl_s = heartbeat_times(state)
    ack = pb.HeartbeatAck(heartbeat_interval_ms=int(interval_s * 1000), lease_ttl_ms=int(ttl_s * 1000), unknown=unknown)
    peer.link.signal(Signal(heartbeat_ack=ack))
    state.woken.add(peer)


def _own(peer: Peer, agent_id: str, env: str) -> Attachment | None:
    """The agent of this link; without an env the one in the link's own, else the only one of that id."""
    attachment = peer.attachments.get((normalise_env(env or peer.env), agent_id))
    if attachment is None and not env:
        found = [each for (_, name), each in peer.attachments.items() if name == agent_id]
        return found[0] if len(found) == 1 else None
    return attachment


def own(peer: Peer, agent_id: str) -> Attachment | None:
    """The agent of this link by its id."""
    return _own(peer, agent_id, "")


def _attached(each: Attaching) -> pb.Attached:
    if each.error is not None:
        return pb.Attached(agent_id=each.agent_id, error=each.error)
    assert each.attachment is not None
    agent = each.attachment.agent
    return pb.Attached(agent_id=agent.agent_id, generation=agent.generation)
