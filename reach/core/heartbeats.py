"""What a process says of its agents at regular times, and what it is told in return.

Load and leftovers are believed as they come; a status is `health`'s to judge. That a heartbeat did not come is noticed
by `links`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from reach.core import configs, elsewhere, health, owners, returning
from reach.core.peers import Peer
from reach.core.requests import Attachment, Stage

if TYPE_CHECKING:
    from reach.core.state import State


def heard(state: State, peer: Peer, message: pb.Heartbeat) -> None:
    """Take note of what the process says of its agents; answer which of them are unknown here."""
    unknown: list[str] = []
    for load in message.agents:
        attachment = peer.attachment(load.agent_id)
        if attachment is None:
            if not peer.arriving:  # one whose registration is under way is answered by `attached`
                unknown.append(load.agent_id)
            continue
        agent = attachment.agent
        agent.heartbeat_at = state.unix
        agent.load = load.load
        agent.config_version = load.config_version
        configs.tell(state, attachment)
        leftovers = _leftovers(attachment, load.leftovers)
        if leftovers != agent.leftovers:
            agent.leftovers = leftovers
            state.directory.changed(agent)
            owners.changed(state, attachment)
        if attachment.held and not load.in_flight:
            returning.nothing_runs(state, attachment)
        if load.status:
            health.said(state, attachment, load.status)
    interval_s, ttl_s = times(state)
    ack = pb.HeartbeatAck(
        config_version=state.configs.version,
        heartbeat_interval_ms=int(interval_s * 1000),
        lease_ttl_ms=int(ttl_s * 1000),
        unknown=unknown,
        peers=elsewhere.told(state, peer),
    )
    peer.link.signal(Signal(heartbeat_ack=ack))
    state.woken.add(peer)


def _leftovers(attachment: Attachment, told: int) -> int:
    """Handlers that outlived their cancel and take a slot that the node no longer counts.

    While one has its time to end (`cancel_grace_s`) its slot is still reserved here, and would be counted twice.
    """
    if told:
        told -= sum(request.stage is Stage.SETTLED and request.holds_slot for request in attachment.attempts.values())
    return max(0, told)


def times(state: State) -> tuple[float, float]:
    """(interval, lease TTL) in seconds: half as long again where there are many agents."""
    factor = 1.5 if len(state.directory) - state.remote_agents > state.rules.many_agents else 1.0
    return state.rules.heartbeat_interval_s * factor, state.rules.lease_ttl_s * factor
