"""An agent leaves: which of its sessions move next, how many at once, and when it may go.

Decides order and number only; how one session moves is `moves`'. A process that goes to another node and keeps its
sessions says so; then none of them moves. Also: a single session that an operator wants elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import failure
from agentreach.wire.names import shown
from reach.core import departures, handing, moves, owners
from reach.core.agents import DRAINING
from reach.core.moving import KEEPS

if TYPE_CHECKING:
    from reach.core.lanes import Lane
    from reach.core.requests import Attachment
    from reach.core.state import State

AT_ONCE_SHARE = 10  # one in so many of an agent's sessions moves at a time, one at least


def leaves(attachment: Attachment) -> bool:
    """True if the agent goes and its sessions do not go with it."""
    return attachment.agent.status == DRAINING and not attachment.keeps_sessions and not attachment.remote


def at_once(attachment: Attachment) -> int:
    """How many of its sessions may move now."""
    away = sum(lane.owner is not attachment for lane in attachment.moving)
    return max(1, (len(attachment.pinned) + away) // AT_ONCE_SHARE)


def begin(state: State, attachment: Attachment) -> None:
    """Have the sessions of an agent that leaves move, those first for which somebody waits."""
    if leaves(attachment):
        attachment.to_move.clear()
        for lane in sorted(attachment.pinned, key=lambda lane: (not lane.waiting, lane.key)):
            attachment.to_move[lane] = None
        go_on(state, attachment)


def go_on(state: State, attachment: Attachment) -> None:
    """Begin as many moves as may go on at once; let an agent go that has asked for it when there are none left."""
    queue = attachment.to_move
    if attachment.going_on:  # one that ends at once asks for the next
        return
    attachment.going_on = True
    while queue and attachment.hooks != KEEPS and len(attachment.moving) < at_once(attachment):
        lane, _ = queue.popitem(last=False)
        if lane.owner is attachment and lane.move is None and (attachment.departs or _anybody(state, lane)):
            moves.begin(state, lane, _limit_s(state, attachment))
    attachment.going_on = False
    if attachment.departs and not attachment.moving and (not queue or attachment.hooks == KEEPS):
        _dismiss(state, attachment)


def _anybody(state: State, lane: Lane) -> bool:
    """Whether somebody else could have it now. Else it stays while its owner does: a successor may come."""
    assert lane.owner is not None
    return owners.candidate(state, lane, {lane.owner.agent.agent_id}) is not None


def _limit_s(state: State, attachment: Attachment) -> float:
    if attachment.drain is not None:
        return max(0.0, attachment.drain.until - state.now)
    return state.rules.drain_timeout_s


def wanted(state: State, lane: Lane) -> bool:
    """A message waits for a session whose owner leaves and works on nothing of it. True if it can have another now."""
    owner = lane.owner
    assert owner is not None
    if not leaves(owner) or not _anybody(state, lane):
        return False  # as long as the owner is here, waiting costs less than failing
    if owner.hooks == KEEPS:
        owners.give_up(state, lane)
        return True
    owner.to_move[lane] = None
    owner.to_move.move_to_end(lane, last=False)
    go_on(state, owner)
    return lane.move is None and lane.owner is not owner


def depart(state: State, attachment: Attachment, reason: str) -> bool:
    """The agent wants to go when its sessions have. True if that takes a while; they are stored if nobody has them."""
    if attachment.hooks == KEEPS or not (attachment.pinned or attachment.moving):
        return False
    attachment.departs = reason or "no reason given"
    begin(state, attachment)
    return True


def is_busy(state: State, attachment: Attachment) -> bool:
    """True while sessions of an agent that was ordered to leave are on their way; it is left without one for nobody."""
    if attachment.attempts or attachment.held:
        return True
    if not attachment.departs and attachment.pinned and attachment.hooks != KEEPS:
        attachment.departs = "drained"
        begin(state, attachment)
    return bool(attachment.moving)


def _dismiss(state: State, attachment: Attachment) -> None:
    agent, peer = attachment.agent, attachment.peer
    if attachment.drain is not None or peer.attachments.get((agent.env, agent.agent_id)) is not attachment:
        return  # `drains` lets it go; or it is gone
    # What it was given since it asked to go its words do not cover.
    departures.dismiss(state, attachment, f"detached ({attachment.departs[:100]})")
    peer.link.signal(Signal(detached=pb.Detached(agent_id=agent.agent_id, code=pb.Goodbye.NORMAL)))
    state.woken.add(peer)


def again(state: State, attachment: Attachment) -> None:
    """Its link began anew, and what was said on the former one may be lost: say it again."""
    for lane in list(attachment.pinned):
        if lane.move is not None:
            handing.say_again(state, lane)


def release(state: State, lane: Lane) -> Error | None:
    """An operator wants the session elsewhere. Returns why it cannot go."""
    owner, name = lane.owner, shown(lane.key[3])
    if lane.move is not None or lane.pinning or owner is None:
        return failure(codes.OVERLOADED, f"session {name} is moving, or has no owner now", retry_after_ms=1000)
    if owner.hooks == KEEPS:
        text = f"{owner.agent.agent_id} has no hook by which it could hand session {name} over; it would lose its state"
        return failure(codes.REJECTED, text, agent_id=owner.agent.agent_id)
    if owners.candidate(state, lane, {owner.agent.agent_id}) is None:
        text = f"no other agent could take session {name} over from {owner.agent.agent_id}"
        return failure(codes.NO_AGENT_AVAILABLE, text, agent_id=owner.agent.agent_id)
    if len(owner.moving) >= at_once(owner):
        text = f"{len(owner.moving)} sessions of {owner.agent.agent_id} are moving, as many as may at once"
        return failure(codes.OVERLOADED, text, retry_after_ms=1000)
    moves.begin(state, lane, state.rules.drain_timeout_s)
    return None
