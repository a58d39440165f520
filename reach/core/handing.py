"""What a process is told, and says, of sessions that change hands: for whose lane it counts, and for whose no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import failure
from agentreach.wire.names import shown
from reach.core.moving import Step
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from reach.core.lanes import Lane
    from reach.core.peers import Peer
    from reach.core.state import State


def ask_for(state: State, lane: Lane, owner: Attachment) -> None:
    """Ask a session's owner for its state."""
    limit_s = state.rules.session_hook_s
    order = frames.SessionRelease(
        agent_id=owner.agent.agent_id,
        session_id=lane.key[3],
        epoch=lane.epoch,
        deadline_ms=max(1, int(limit_s * 1000 * 0.9)),  # its answer, or its error, is here before the time is over
    )
    owner.peer.link.signal(Signal(session_release=order))
    state.woken.add(owner.peer)


def lane_of(state: State, peer: Peer, agent_id: str, session_id: str, epoch: int) -> tuple[Lane, Attachment] | None:
    """The lane of a session that an agent of this process owns under this epoch; else what it says is fenced."""
    attachment = peer.attachment(agent_id)
    if attachment is not None:
        agent = attachment.agent
        lane = state.lanes.get((agent.tenant, agent.env, agent.agent_type, session_id))
        if lane is not None and lane.owner is attachment and lane.epoch == epoch:
            return lane, attachment
    state.stats.duplicates["fenced"] += 1
    return None


def give(state: State, lane: Lane, serialised: bytes) -> None:
    """Give a session's owner its state, a `SessionSnapshot`."""
    owner = lane.owner
    assert owner is not None
    agent, content = owner.agent, frames.SessionSnapshot.FromString(serialised)
    for each in content.handled:
        key = (agent.tenant, each.key.principal, agent.env, each.key.message_id)
        state.replay.reopen(key, state.now)  # "lost" is no longer the truth about it: the new owner knows the answer
    order = frames.SessionRestore(
        agent_id=agent.agent_id,
        session_id=lane.key[3],
        epoch=lane.epoch,
        turn=content.turn,
        handled=content.handled,
        state=content.state if content.HasField("state") else None,
    )
    owner.peer.link.signal(Signal(session_restore=order))
    state.woken.add(owner.peer)


def cut(lane: Lane) -> Error:
    """What a turn is told that does not end in time."""
    owner = lane.owner
    name = owner.agent.agent_id if owner is not None else ""
    text = f"session {shown(lane.key[3])} moves away from {name}, and the time for its running turn is over"
    return failure(codes.AGENT_LOST, text, may_have_executed=True, agent_id=name)


def say_again(state: State, lane: Lane) -> None:
    """The owner's link began anew, and what it was told may be lost."""
    move, owner = lane.move, lane.owner
    if move is not None and owner is not None:
        if move.step is Step.RELEASING:
            ask_for(state, lane, owner)
        elif move.step is Step.RESTORING:
            give(state, lane, move.content)
