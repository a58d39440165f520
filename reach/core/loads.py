"""What nodes tell each other of their agents: status at once, load and slots twice a second where they changed.

None of this goes to the store. For a remote agent, what others have given it counts as `leftovers`: slots that are
taken, though not by this node. So every decision sees them, and nothing else needs to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.frame_pb2 import Loads, Signal
from agentreach.v1.registry_pb2 import AgentLoad, AgentStatus
from reach.core import nodes, remote, wants
from reach.core.agents import DEGRADED, HEALTHY, STARTING, UNREACHABLE, Agent
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.nodes import NodePeer
    from reach.core.state import State

EVERY_S = 0.5
AGENTS_A_SIGNAL = 500

Told = tuple[int, float, int, int, int]


class LoadsDue:
    """When loads are compared and told next, and what was told last."""

    __slots__ = ("timer", "told")

    def __init__(self) -> None:
        self.timer: Token | None = None
        self.told: dict[Agent, Told] = {}


def _telling(state: State) -> bool:
    return any(node.connected for node in state.nodes.values())


def _now(agent: Agent) -> Told:
    return (agent.status, agent.load, agent.in_flight, agent.leftovers + agent.saturated, agent.config_version)


def _of(agent: Agent, told: Told) -> AgentLoad:
    status, load, in_flight, leftovers, config_version = told
    return AgentLoad(
        agent_id=agent.agent_id,
        tenant=agent.tenant,
        env=agent.env,
        incarnation=agent.incarnation,
        status=AgentStatus.ValueType(status),
        load=load,
        in_flight=in_flight,
        leftovers=leftovers,
        config_version=config_version,
    )


def _local(state: State) -> list[Agent]:
    return [agent for peer in state.peers.values() for agent in (each.agent for each in peer.attachments.values())]


def tell_all(state: State, node: NodePeer) -> None:
    """A link to a node begins: say all, and keep on saying what changes."""
    state.directory.telling = True
    loads = [_of(agent, _now(agent)) for agent in _local(state)]
    _send(state, node, loads, complete=True)
    if state.loads.timer is None:
        state.loads.timer = state.checks.schedule(state.loads, state.now + EVERY_S)


def _send(state: State, node: NodePeer, loads: list[AgentLoad], *, complete: bool = False) -> None:
    for at in range(0, len(loads) or 1, AGENTS_A_SIGNAL):
        part = Loads(agents=loads[at : at + AGENTS_A_SIGNAL], complete=complete and at == 0, draining=state.draining)
        node.link.signal(Signal(loads=part))
    state.woken.add(node)


def _spread(state: State, loads: list[AgentLoad]) -> None:
    for node in state.nodes.values():
        if node.connected and (loads or state.draining):
            _send(state, node, loads)


def tell_news(state: State) -> None:
    """Agents came, left, or changed their status in this step: every node hears it at once."""
    news = dict.fromkeys(state.directory.news)
    state.directory.news.clear()
    loads = []
    for agent in news:
        attachment = agent.link
        if not isinstance(attachment, Attachment) or attachment.remote:
            continue
        here = state.directory.get(agent.tenant, agent.env, agent.agent_id)
        if here is agent:
            told = state.loads.told[agent] = _now(agent)
            loads.append(_of(agent, told))
        else:
            state.loads.told.pop(agent, None)
            if here is None:
                loads.append(_of(agent, (UNREACHABLE, 0.0, 0, 0, 0)))
    if loads:
        _spread(state, loads)


def on_timer(state: State, due: LoadsDue) -> None:
    """Tell what else has changed."""
    due.timer = None
    if not _telling(state):
        state.directory.telling = False
        state.directory.news.clear()
        due.told.clear()
        return
    changed = []
    for agent in _local(state):
        now = _now(agent)
        if due.told.get(agent) != now:
            due.told[agent] = now
            changed.append(_of(agent, now))
    if changed:
        _spread(state, changed)
    wants.tell_again(state)
    if state.orphans:
        remote.forget_orphans(state)
    due.timer = state.checks.schedule(due, state.now + EVERY_S)


def tell_draining(state: State) -> None:
    """This node leaves: nothing new for its agents."""
    _spread(state, [])


# ---- hearing ----


def heard(state: State, node: NodePeer, message: Loads) -> None:
    """A node tells of its agents."""
    if message.complete:
        node.told.clear()
    node.draining = message.draining
    for load in message.agents:
        key = (load.tenant, load.env, load.agent_id)
        if load.status == UNREACHABLE:
            node.told.pop(key, None)
            attachment = node.agents.get(key)
            if attachment is not None and attachment.agent.incarnation == load.incarnation:
                remote.left_home(state, attachment)
            continue
        if len(node.told) >= state.rules.agents_max and key not in node.told:
            continue
        node.told[key] = load
        attachment = node.agents.get(key)
        if attachment is not None:
            apply(state, attachment)
    if message.complete or message.draining:
        for attachment in node.agents.values():
            apply(state, attachment)


def apply(state: State, attachment: Attachment) -> None:
    """Let a remote agent be what its home said of it last."""
    agent, node = attachment.agent, attachment.peer
    assert isinstance(node, nodes.NodePeer)
    load = node.told.get((agent.tenant, agent.env, agent.agent_id))
    if not node.connected:
        remote.set_status(state, attachment, UNREACHABLE)
        return
    if load is None or load.incarnation != agent.incarnation:
        remote.set_status(state, attachment, STARTING if load is None else UNREACHABLE)
        return
    agent.load, agent.config_version = load.load, load.config_version
    agent.heartbeat_at = state.unix
    elsewhere = max(0, load.in_flight + load.leftovers - agent.in_flight)
    if elsewhere != agent.leftovers:
        agent.leftovers = elsewhere
        state.directory.changed(agent)
    status = int(load.status) or STARTING
    if node.draining and status == HEALTHY:
        status = DEGRADED  # it is about to go elsewhere: work for it only if nobody else can take it
    arrived = agent.status == UNREACHABLE
    remote.set_status(state, attachment, status)
    if arrived:
        remote.send_forgotten(state, attachment)


def count_full(state: State, agent: Agent) -> None:
    """Its home has refused work for want of a slot: it is full until its home says more."""
    if agent.max_concurrency:
        agent.leftovers = max(agent.leftovers, agent.max_concurrency - agent.in_flight + 1)
        state.directory.changed(agent)
