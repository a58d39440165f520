"""Agents on their way out, one at a time or with their link: everything that hangs on an agent lets go of it.

Decides the order only: out of routing, then its requests (`losses`), its sessions, its subscriptions, its registration.
Why an agent leaves is known to whoever asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from reach.core import auditing, breakers, events, health, leaving, losses, owners
from reach.core.effects import DeregisterAgent
from reach.core.peers import Peer
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from reach.core.state import State


def detach(state: State, peer: Peer, message: pb.Detach) -> None:
    """The process takes one of its agents off the link."""
    attachment = peer.attachment(message.agent_id, message.env)
    if attachment is not None:
        if message.after_moves and leaving.depart(state, attachment, message.reason):
            return
        dismiss(state, attachment, f"detached ({message.reason[:100] or 'no reason given'})", said_goodbye=True)
    signal = pb.Detached(agent_id=message.agent_id, code=pb.Goodbye.NORMAL)
    peer.link.signal(Signal(detached=signal))
    state.woken.add(peer)


def dismiss(
    state: State, attachment: Attachment, why: str, *, said_goodbye: bool = False, deregister: bool = True
) -> None:
    """An agent is no longer attached: out of routing, its requests settled, its sessions without an owner."""
    agent = attachment.agent
    attachment.peer.attachments.pop((agent.env, agent.agent_id), None)
    if not state.directory.remove(agent):
        return
    health.end(state, attachment)
    breakers.left(state, agent)
    losses.agent_gone(state, attachment, why, said_goodbye=said_goodbye)
    owners.gone(state, attachment)
    events.drop_subscriptions(state, attachment.peer, agent.agent_id)
    if deregister:
        state.effects.append(DeregisterAgent(agent, agent.generation))
    state.log("info", "agent detached", agent=agent.agent_id, why=why)
    auditing.detached(state, attachment, why)
