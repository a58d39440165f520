"""Sessions between nodes: what an entry does with an owner at another node, and what that node does with it.

The lane that orders a session's messages is at its owner's home. An entry gives each message to it at once, in order,
and keeps none; it knows the owner by the pin. A home that does not own the session as the entry believes refuses
(FENCED): the entry reads the pin again, waits until all it had given away is answered or refused, and sends to whom the
pin names now. A home takes a session that is new to it by reading its pin, and has the state restored that the pin
names, unless the process has it already: it, not its home, remembers across a restart of its home.

When an owner is dead is its home's to judge, which says so in the pin (`VoidPin`); when a home is, is `fence`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Handover, Signal
from agentreach.wire.errors import failure
from agentreach.wire.names import shown
from reach.core import deadlines, lanes, loops, moves, once, owners, settle, visiting, waiters
from reach.core.agents import UNREACHABLE
from reach.core.effects import ReadPin, RefreshPin
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from reach.core.lanes import Lane
    from reach.core.moving import Holder
    from reach.core.nodes import NodePeer
    from reach.core.state import State

READ_EVERY_S = 1.0  # the pin of a session that waits for its owner to be seen again
REFUSED_WAIT_S = 0.25  # until a home that is leaving, or has not the agent, is asked again
_FRESH = (int(pb.STARTED), int(pb.LOST))


# ---- at the entry ----


def advance(state: State, lane: Lane, owner: Attachment) -> bool:
    """Give the head of the lane to the owner's home. False: not now."""
    request = lane.waiting[0]
    if request.visitor is not None:  # this home's own agent had it: the entry shall go to the new one itself
        bounce(state, lane, lanes.take_head(state, lane))
        return True
    if lane.pinning or not owner.peer.connected or request.retry_at > state.now:
        return False
    if any(each.epoch != lane.epoch and not each.is_settled for each in lane.running):
        return False  # given to the former home and not answered yet: nothing may overtake it
    lanes.take_head(state, lane)
    lanes.start(state, lane, request, Envelope.FromString(request.data))
    return True


def bounce(state: State, lane: Lane, request: Request) -> None:
    """A message of another node's caller was for a former owner: its entry shall read the pin, and send it anew.

    Copies of callers of this node may have joined it: for them it goes on from here like any that was sent before, for
    its entry may have found its owner elsewhere meanwhile, and had it run there.
    """
    text = f"session {shown(lane.key[3])} is not at node {state.rules.node_id} as its entry believes"
    error = failure(codes.FENCED, text)
    visitors = [waiter for waiter in request.waiters if isinstance(waiter.port, visiting.NodePort)]
    if len(visitors) == len(request.waiters):
        request.lane = None
        settle.fail(state, request, error)
        return
    request.verdict = visiting.REFUSED
    for waiter in visitors:
        waiters.withdraw(state, request, waiter, error)
    envelope, parent = visiting.as_sent(state, request)
    request.lane, request.stage = None, Stage.ADMITTED
    request.verdict, request.visitor = 0, None
    request.retriable, request.node_made_id = True, False
    once.place(state, request, envelope, parent)


def refused(state: State, request: Request, why: Error) -> None:
    """The owner's home did not give a session's message to the owner: it goes back to its place in the lane."""
    lane = request.lane
    assert lane is not None
    sent_under = request.epoch
    settle.give_back(state, request)
    request.attempt -= 1
    request.attempt_until = 0.0
    request.last_error = None
    lane.running.discard(request)
    lanes.put_back(state, lane, request)
    if lane.epoch == sent_under and request.session_event in _FRESH and not lane.event:
        lane.event = request.session_event  # nobody was told
    if why.code == codes.OVERLOADED:
        lane.waiting.remove(request)
        state.queue.held_elsewhere -= len(request.data)
        request.lane = None
        settle.fail(state, request, failure(why.code, why.message, retry_after_ms=why.retry_after_ms))
    elif why.code == codes.FENCED:
        read_again(state, lane, sent_under)
    else:
        request.retry_at = state.now + REFUSED_WAIT_S
        if why.code == codes.NO_ROUTE:
            read_again(state, lane, sent_under)
    if request.lane is lane:
        deadlines.reschedule(state, request)
    state.lanes_ready.append(lane)


def read_again(state: State, lane: Lane, epoch: int) -> None:
    """What this node knew of the session under this epoch is not so any more."""
    owner = lane.owner
    if lane.epoch == epoch and owner is not None and owner.remote and lane.move is None and not lane.pinning:
        owners.disown(state, lane)
        read(state, lane)


def read(state: State, lane: Lane) -> None:
    """Have the pin read; `pin_read` follows."""
    lane.pinning = True
    lane.read_at = state.now
    state.effects.append(ReadPin(lane))


def look(state: State, lane: Lane) -> None:
    """A session waits for its owner to be seen: perhaps the pin says more by now."""
    if (state.nodes or lane.home != state.rules.node_id) and state.now - lane.read_at >= READ_EVERY_S:
        read(state, lane)


def pin_read(state: State, lane: Lane, holder: Holder | None, why: str) -> None:
    """The pin as it is now; None: there is none, or the store does not say (`why`)."""
    if holder is not None:
        owners.pinned_elsewhere(state, lane, holder)
    elif not why:
        lane.pinning = False
        owners.disown(state, lane)
        lane.awaited_until, lane.broken = 0.0, lane.epoch > 0
        lane.turn, lane.snapshot = 0, ""
        state.lanes_ready.append(lane)
    elif lane.awaited_until:
        lane.pinning = False
        state.lanes_ready.append(lane)
    else:
        owners.not_pinned(state, lane, why)


def is_there(attachment: Attachment) -> bool:
    """False for a remote agent whose own home says that it is not there: what stands in the directory is old."""
    return not (attachment.remote and attachment.peer.connected and attachment.agent.status == UNREACHABLE)


# ---- at the home ----


def visit(state: State, request: Request, envelope: Envelope, attachment: Attachment) -> None:
    """Another node's caller has a message for a session of an agent of this node."""
    agent, epoch = attachment.agent, envelope.epoch
    lane = lanes.lane_of(state, (agent.tenant, agent.env, agent.agent_type, envelope.session_id))
    if lane is None or len(lane.waiting) >= state.rules.lane_max:
        text = f"node {state.rules.node_id} takes no more messages of session {shown(envelope.session_id)} now"
        settle.fail(state, request, failure(codes.OVERLOADED, text, retry_after_ms=owners.PIN_RETRY_AFTER_MS))
        return
    request.agent_type = agent.agent_type
    request.strict_session = envelope.strict_session
    request.epoch = epoch
    request.data = envelope.SerializeToString()
    if lane.epoch > epoch:
        bounce(state, lane, request)
        return
    if lane.epoch < epoch and not lane.pinning and lane.move is None:
        owners.disown(state, lane)
        read(state, lane)  # not what its entry believes: that may be of long ago
    lane.used_at = state.now
    request.ancestors = loops.ancestors(envelope.path) - {request.message_id}
    held = lanes.held_by_its_callers(lane, request) if request.ancestors else ""
    if held and agent.reentrant and lane.owner is attachment and lanes.able(attachment):
        request.reentrant = True
        lanes.start(state, lane, request, envelope)
        return
    if held:
        state.stats.loops["would_deadlock"] += 1
        *callers, _ = envelope.path
        settle.fail(state, request, loops.deadlock(callers, agent.agent_id, held))
        return
    _put(state, lane, request)
    lanes.advance(state, lane)


def _put(state: State, lane: Lane, request: Request) -> None:
    """Those that the former home hands on go before all others."""
    expected = lane.expected
    if expected is not None and request.visitor is not None and request.visitor.node is expected.node:
        lanes.put(state, lane, request)
        lane.waiting.pop()
        lane.waiting.insert(expected.came, request)
        expected.came += 1
        if expected.came >= expected.count:
            lane.expected = None
    else:
        lanes.put(state, lane, request)


def doubt(lane: Lane) -> None:
    """The owner was out of contact: an entry may have found it elsewhere, and had it run there what waits here."""
    for request in lane.waiting:
        if request.visitor is not None:
            request.fresh = False


def adopt(state: State, lane: Lane, attachment: Attachment) -> None:
    """The pin names an agent of this node, and this node did not know: have the state restored that it names."""
    state.effects.append(RefreshPin(lane))  # it says where the owner is
    if lane.snapshot:
        moves.adopt(state, lane, attachment)


# ---- from home to home ----


class Expected:
    """Messages that the former home of a session hands on: how many, and how many of them came."""

    __slots__ = ("came", "count", "node", "until")

    def __init__(self, node: NodePeer, count: int, until: float) -> None:
        self.node = node
        self.count = count
        self.came = 0
        self.until = until


def hand_on(state: State, lane: Lane, owner: Attachment) -> None:
    """The pin names an agent of another node now: tell its home, which takes the session from there."""
    agent = owner.agent
    word = Handover(
        session_id=lane.key[3],
        epoch=lane.epoch,
        count=sum(each.visitor is None for each in lane.waiting),
        tenant=agent.tenant,
        env=agent.env,
        agent_id=agent.agent_id,
    )
    owner.peer.link.signal(Signal(handover=word))
    state.woken.add(owner.peer)


def handed_on(state: State, node: NodePeer, word: Handover) -> None:
    """A former home hands a session on to an agent of this node."""
    agent = state.directory.get(word.tenant, word.env, word.agent_id)
    attachment = agent.link if agent is not None else None
    if agent is None or not isinstance(attachment, Attachment) or attachment.remote:
        return  # whoever sends to it will be told, and read the pin
    lane = lanes.lane_of(state, (agent.tenant, agent.env, agent.agent_type, word.session_id))
    if lane is None or lane.epoch >= word.epoch or lane.pinning or lane.move is not None:
        return
    if word.count:
        lane.expected = Expected(node, min(word.count, state.rules.lane_max), state.now + state.rules.session_hook_s)
    owners.disown(state, lane)
    read(state, lane)
    lanes.watch(state, lane)


def must_wait(state: State, lane: Lane) -> bool:
    """Whether messages of the former home are still to come."""
    if lane.expected is not None and state.now < lane.expected.until:
        return True
    lane.expected = None
    return False
