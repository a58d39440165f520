"""Agents on their way in: what they may call themselves, whether there is room, and their registration.

A registration is written to the store before the agent can be routed to (`RegisterAgents` → `registered`). Decides who
is let in and tells the process; what becomes of a former holder of the agent_id is `takeover`'s. How the store writes
is the registrar's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire.checks import record_fault
from agentreach.wire.errors import failure
from agentreach.wire.names import normalise_env
from reach.core import access, actors, auditing, configs, events, health, links, owners, quotas, returning, takeover
from reach.core.agents import DRAINING, STARTING, Agent
from reach.core.effects import DeregisterAgent, RegisterAgents
from reach.core.peers import Peer
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from reach.core.state import State


@dataclass(slots=True)
class Attaching:
    """One agent on its way in: what it asked for, and what came of it."""

    agent_id: str
    agent: Agent | None = None
    error: Error | None = None
    sessions: Sequence[pb.SessionRef] = ()
    holding: Sequence[pb.Holding] = ()
    leaving: bool = False
    """Its process is finishing what it works on: it gets no new work here either."""
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
    in_line = peer.arriving and not with_welcome  # answers come in the order of the attaches
    if new or in_line:
        state.effects.append(RegisterAgents(peer, arrival))
    else:
        registered(state, peer, arrival)


def is_there(state: State, peer: Peer, arrival: Arrival) -> bool:
    """Whether the process of an arrival is still linked as it was when it asked."""
    if state.peers.get(peer.link_id) is not peer or not peer.connected:
        return False
    return not arrival.with_welcome or arrival.hello == peer.hellos


def _claim(state: State, peer: Peer, agent: Agent, count: int) -> None:
    """Note that the store is asked for a registration (1), or has answered (-1)."""
    if peer.account is not None:
        peer.account.take(quotas.AGENTS, count)
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
    record.tenant, record.principal = peer.who.tenant, peer.who.principal
    record.incarnation = peer.incarnation
    attaching = Attaching(record.agent_id, sessions=list(attach.sessions), holding=list(attach.holding))
    error = record_fault(record)
    former = known = state.directory.get(record.tenant, record.env, record.agent_id)
    if error is None:
        error = _rights_fault(state, peer, record)
    if error is None:
        error = _ownership_fault(state, peer, record, former)
    if error is None:
        error = _succeeded_fault(record, former)
    if former is not None and takeover.attached_elsewhere(former):
        former = None  # it comes from another node: the store says whether it may
    if error is None and (former is None or former.incarnation != peer.incarnation):
        error = _room_fault(state, peer)
        if error is None and known is None and peer.account is not None:
            error = quotas.agents_fault(state, peer.account, peer.who)
    if error is not None:
        attaching.error = error
        if error.code == codes.PERMISSION_DENIED:
            about = {"agent": record.agent_id, "env": record.env}
            auditing.denied(state, "agent.denied", peer.who, peer, about, error.message)
        return attaching
    attaching.leaving = record.status == DRAINING
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
    if former is not None and not takeover.attached_elsewhere(former):
        assert isinstance(former.link, Attachment)
        who = former.link.peer.who if who == peer.who else who
    if who == peer.who:
        return None
    return failure(codes.PERMISSION_DENIED, f"{record.agent_id} is registered by somebody else")


def _rights_fault(state: State, peer: Peer, record: AgentRecord) -> Error | None:
    rights = peer.who.rights
    if rights is None:
        return None
    who = f"principal {peer.who.principal}"
    decision = access.may_register(rights, record.agent_id, record.capabilities, record.env, who=who)
    return None if decision.allowed else actors.denied(state, decision)


def _succeeded_fault(record: AgentRecord, former: Agent | None) -> Error | None:
    """A process that is leaving, and dials again, does not take its agent_id back from its successor."""
    if record.status != DRAINING or former is None or former.incarnation == record.incarnation:
        return None
    if former.status == DRAINING:
        return None
    return failure(codes.REJECTED, f"another process serves {record.agent_id} already, and this one is leaving")


def _room_fault(state: State, peer: Peer) -> Error | None:
    """Why no further agent may come, on this link or on any."""
    rules = state.rules
    if state.draining:
        return failure(codes.SHUTTING_DOWN, f"node {rules.node_id} is leaving: use another node")
    present = len(state.directory) - state.remote_agents + len(state.arriving)
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
        if each.error is not None and peer.attachment(each.agent_id) is None:
            events.drop_subscriptions(state, peer, each.agent_id)  # they may have come before the answer
        if each.error is None:
            takeover.let_in(state, peer, each)
            if each.leaving and each.attachment is not None:
                health.said(state, each.attachment, DRAINING)
    if arrival.with_welcome and arrival.hello != peer.hellos:
        return  # its stream is gone; the next one's hello is answered by itself
    if arrival.with_welcome:
        links.welcome(state, peer, arrival)
    else:
        for each in arrival.agents:
            peer.link.signal(Signal(attached=attached(each)))
        state.woken.add(peer)
    for each in arrival.agents:
        if each.error is None and each.attachment is not None:
            for session in each.sessions:
                owners.came_back(state, each.attachment, session.session_id, session.epoch)
            returning.holds(state, each.attachment, each.holding)
            configs.tell(state, each.attachment)
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


def attached(each: Attaching) -> pb.Attached:
    """What the process is told of this agent: its generation, or why it may not come in."""
    if each.error is not None:
        return pb.Attached(agent_id=each.agent_id, error=each.error)
    assert each.attachment is not None
    agent = each.attachment.agent
    return pb.Attached(agent_id=agent.agent_id, generation=agent.generation)
