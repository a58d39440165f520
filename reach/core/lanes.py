"""The lane of a session: its messages in their order, and when the next one may start.

A message starts when its owner is there and able, the lane has a place, and the owner a slot; lanes of one owner take
turns for its slots. A lane is forgotten when the session was idle for its time to live, or never got an owner. How an
owner is found and kept is `owners`'.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.errors import failure
from reach.core import again, breakers, deadlines, fence, homes, leaving, loops, moves, owners, route, settle
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, Agent
from reach.core.effects import DropSnapshot
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.homes import Expected
    from reach.core.moving import Move
    from reach.core.state import State

LaneKey = tuple[str, str, str, str]  # tenant, env, agent_type, session_id
AWAITED_LOOK_S = 0.25  # an owner that is to come back after a restart of the node is looked for so often


class Lane:
    """One session's messages and its owner."""

    __slots__ = (
        "awaited_from",
        "awaited_until",
        "broken",
        "entered",
        "epoch",
        "event",
        "expected",
        "forsaken",
        "home",
        "in_turn",
        "key",
        "move",
        "owner",
        "owner_id",
        "pinning",
        "read_at",
        "refreshed_at",
        "running",
        "since",
        "snapshot",
        "storing",
        "timer",
        "turn",
        "used_at",
        "verified_at",
        "waiting",
    )

    def __init__(self, key: LaneKey, now: float) -> None:
        self.key = key
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()
        self.entered = 0
        """How many messages it has had."""
        self.owner: Attachment | None = None
        self.owner_id: tuple[str, bytes] = ("", b"")
        """(agent_id, incarnation) of the pin."""
        self.epoch = 0
        self.since = 0
        """The epoch with which its present state began: who knows this one or a later one has lost nothing."""
        self.pinning = False
        """A pin is being written."""
        self.move: Move | None = None
        """It is on its way to another owner."""
        self.turn = 0
        self.snapshot = ""
        """The state that the pin names: of which turn, and where it is; empty: none."""
        self.forsaken = False
        """What the pin names cannot be restored: the next one shall not name it."""
        self.storing = 0
        """States of it that are being stored."""
        self.in_turn = False
        """It stands in its owner's queue for a slot."""
        self.event = 0
        """The SessionEvent that the next reply tells."""
        self.broken = False
        """Its former owner's state is gone."""
        self.home = ""
        """The node_id of the owner's home."""
        self.read_at = 0.0
        """When the pin was asked for last."""
        self.expected: Expected | None = None
        """Messages that its former home hands on."""
        self.awaited_from = 0.0
        self.awaited_until = 0.0
        """The pin names a process that is not attached (a restart): until when it may come back."""
        self.used_at = now
        self.verified_at = now
        """When the store last said whose it is."""
        self.refreshed_at = now
        self.timer: Token | None = None


def lane_of(state: State, key: LaneKey) -> Lane | None:
    """The lane of a session, made if it is the first that is heard of it. None: the node holds as many as it may."""
    lane = state.lanes.get(key)
    if lane is None and len(state.lanes) < state.rules.sessions_max:
        lane = state.lanes[key] = Lane(key, state.now)
        watch(state, lane)
    return lane


def watch(state: State, lane: Lane) -> None:
    """Set the lane's one timer: the awaited owner's time, else the end of the session's time to live."""
    when = max(lane.used_at + state.rules.session_ttl_s, state.now)
    move = lane.move
    if move is not None:
        when = max(when, state.now + owners.REFRESH_S) if move.until is None else max(move.until, state.now)
    elif lane.awaited_until > state.now or (lane.awaited_until and lane.waiting):
        when = min(when, state.now + AWAITED_LOOK_S)
    elif lane.expected is not None:
        when = min(when, max(lane.expected.until, state.now))
    elif lane.waiting or lane.running or lane.pinning:
        when = max(when, state.now + owners.REFRESH_S)
    if lane.timer is not None:
        state.checks.cancel(lane.timer, lane)
    lane.timer = state.checks.schedule(lane, when)


def _forget(state: State, lane: Lane) -> None:
    if lane.owner is not None and lane.snapshot:
        state.effects.append(DropSnapshot(lane.snapshot))
    owners.disown(state, lane)
    if lane.timer is not None:
        state.checks.cancel(lane.timer, lane)
        lane.timer = None
    del state.lanes[lane.key]
    if state.quotas is not None:
        state.quotas.session_over(lane.key)


def forget_if_unknown(state: State, lane: Lane) -> None:
    """Keep no lane of a session that never got an owner: callers can invent as many as they like."""
    known = lane.owner is not None or lane.epoch or lane.pinning or lane.move or lane.waiting or lane.running
    if not known and state.lanes.get(lane.key) is lane:
        _forget(state, lane)


def put(state: State, lane: Lane, request: Request) -> None:
    """Let a request, whose `data` is its envelope, wait in the lane."""
    if not request.lane_place:
        lane.entered += 1
        request.lane_place = lane.entered
    state.queue.held_elsewhere += len(request.data)
    request.lane = lane
    request.stage = Stage.QUEUED
    lane.waiting.append(request)


def put_back(state: State, lane: Lane, request: Request) -> None:
    """Let a request wait in the lane again, before all that came after it."""
    state.queue.held_elsewhere += len(request.data)
    request.lane = lane
    request.stage = Stage.QUEUED
    place = 0
    while place < len(lane.waiting) and lane.waiting[place].lane_place < request.lane_place:
        place += 1
    lane.waiting.insert(place, request)


def take_head(state: State, lane: Lane) -> Request:
    """The head of the lane waits no longer."""
    request = lane.waiting.popleft()
    state.queue.held_elsewhere -= len(request.data)
    return request


def able(owner: Attachment) -> bool:
    """True if the owner may be given work: its link is up and it is well enough."""
    return owner.peer.connected and owner.agent.status in (HEALTHY, DEGRADED)


def advance(state: State, lane: Lane) -> None:
    """Start what can be started of a lane, from its head."""
    if lane.move is not None:
        moves.advance(state, lane)
    while lane.waiting:
        if lane.move is not None:
            return
        owner = lane.owner
        if owner is None:
            if lane.pinning or lane.storing:
                return
            if lane.awaited_until:
                if owners.awaited_is_back(state, lane):
                    continue
                if not owners.void(state, lane):
                    homes.look(state, lane)
                    return
            owners.ask(state, lane)
            continue
        agent = owner.agent
        if owner.remote:
            if agent.shut:
                _breaker_open(state, lane, agent)
            elif not homes.advance(state, lane, owner):
                return
            continue
        if not _fenced(state, lane):
            continue
        if lane.expected is not None and homes.must_wait(state, lane):
            return
        if lane.pinning:
            return
        if agent.shut:
            _breaker_open(state, lane, agent)
            continue
        if lane.waiting[0].retry_at > state.now:
            return
        if len(lane.running) >= agent.session_concurrency or not able(owner):
            if agent.status == DRAINING and not lane.running and leaving.wanted(state, lane):
                continue
            return
        if agent.saturated or not agent.has_slot:
            if lane.waiting[0].ancestors and not agent.saturated and _waits_for_itself(state, lane, owner):
                continue
            if not lane.in_turn:
                lane.in_turn = True
                owner.lanes_waiting.append(lane)
            return
        request = take_head(state, lane)
        envelope = Envelope.FromString(request.data)
        if request.visitor is not None and (envelope.recipient != agent.agent_id or request.epoch < lane.epoch):
            homes.bounce(state, lane, request)
        else:
            start(state, lane, request, envelope)
    leave_queue(lane)
    forget_if_unknown(state, lane)


def held_by_its_callers(lane: Lane, request: Request) -> str:
    """What a call would wait for, if its own call tree or those that wait as it would hold that; empty: they do not."""
    owner = lane.owner
    holders, queue, what = [held.message_id for held in lane.running], [lane], f"session {lane.key[3]}"
    if owner is not None and len(holders) < owner.agent.session_concurrency:
        if owner.agent.has_slot:
            return ""
        holders, what = [held.message_id for held in owner.attempts.values()], f"every slot of {owner.agent.agent_id}"
        queue += owner.lanes_waiting
    waiting = [held.ancestors for one in queue for held in one.waiting]
    return what if loops.would_deadlock(request.ancestors, holders, waiting) else ""


def _waits_for_itself(state: State, lane: Lane, owner: Attachment) -> bool:
    """The head needs a slot, and its own call tree holds them all: it fails, or uses the tree's slot again."""
    request = lane.waiting[0]
    holders = [held.message_id for held in owner.attempts.values()]
    queue = {lane, *owner.lanes_waiting}
    if not loops.would_deadlock(request.ancestors, holders, [held.ancestors for one in queue for held in one.waiting]):
        return False
    take_head(state, lane)
    if owner.agent.reentrant:
        request.reentrant = True
        start(state, lane, request, Envelope.FromString(request.data))
        return True
    path = request.parent.path if request.parent is not None else Envelope.FromString(request.data).path
    request.lane = None
    state.stats.loops["would_deadlock"] += 1
    name = owner.agent.agent_id
    settle.fail(state, request, loops.deadlock(path, name, f"every slot of {name}"))
    return True


def _fenced(state: State, lane: Lane) -> bool:
    """Whether this home may serve the session; if not its head fails. A pin that is in doubt is read again first."""
    if not fence.holds(state):
        request = take_head(state, lane)
        request.lane = None
        settle.fail(state, request, request.last_error or fence.refusal(lane.key[3]))
        return False
    if fence.in_doubt(state, lane) and not lane.pinning:
        owners.verify(state, lane)
    return True


def _breaker_open(state: State, lane: Lane, owner: Agent) -> None:
    """The head has no other agent to go to, and this one gets nothing now."""
    request = take_head(state, lane)
    request.lane = None
    error = request.last_error or breakers.all_open(owner.agent_id, [owner], {}, state.now)
    settle.fail(state, request, error)


def start(state: State, lane: Lane, request: Request, envelope: Envelope) -> None:
    """Hand the head of the lane to the owner, unless the caller would rather know that the state is gone."""
    owner = lane.owner
    assert owner is not None
    if request.deadline <= state.now:  # its timer is a tick late, or this node's loop stood still
        settle.fail(state, request, deadlines.timed_out(request))
        return
    event = lane.event
    if request.epoch not in (0, lane.epoch) and event != pb.LOST:  # it knew another owner: never STARTED
        event = int(pb.MOVED if lane.since <= request.epoch < lane.epoch else pb.LOST)
    if event == pb.LOST and request.strict_session:
        request.lane = None
        settle.fail(
            state,
            request,
            failure(
                codes.SESSION_LOST,
                f"session {lane.key[3]} lost its state (its agent is gone) and strict_session is set; start a new one",
                agent_id=owner.agent.agent_id,
            ),
        )
        return
    if request.attempt and not state.budget.has_room(owner):
        request.lane = None
        settle.fail(state, request, again.suppressed(state, request, owner.agent.agent_id))
        return
    request.session_event = event
    request.routed = f"session pin, epoch {lane.epoch}"
    request.epoch = lane.epoch
    if request.lane is lane:
        lane.running.add(request)
    if owner.remote:  # its home orders the messages
        request.reentrant, lane.event, lane.used_at = True, 0, state.now
    else:
        owners.keep_pin(state, lane)
    route.hand_over(state, request, envelope, owner, request.parent)


def leave_queue(lane: Lane) -> None:
    """Nothing of the lane waits for its owner's slot any more."""
    if lane.in_turn and lane.owner is not None:
        lane.in_turn = False
        lane.owner.lanes_waiting.remove(lane)


def leave(state: State, request: Request) -> None:
    """A released request gives back its lane's place."""
    lane = request.lane
    if lane is None:
        return
    request.lane = None
    if request in lane.running:
        lane.running.discard(request)
    elif request in lane.waiting:
        lane.waiting.remove(request)
        state.queue.held_elsewhere -= len(request.data)
        if not lane.waiting:
            leave_queue(lane)
    state.lanes_ready.append(lane)


def next_in_turn(state: State, attachment: Attachment) -> None:
    """A slot of the agent is free: the lane that waits longest gets it."""
    if attachment.lanes_waiting:
        lane = attachment.lanes_waiting.popleft()
        lane.in_turn = False
        state.lanes_ready.append(lane)


def drain_ready(state: State) -> None:
    """Let every lane go on whose place, slot or owner changed in this step."""
    ready = state.lanes_ready
    while ready:
        lane = ready.popleft()
        advance(state, lane)
        owner = lane.owner
        if owner is not None and owner.lanes_waiting and owner.agent.has_slot and not owner.agent.saturated:
            next_in_turn(state, owner)  # this lane had no use for the slot


def on_timer(state: State, lane: Lane) -> None:
    """The lane's time has come: stop awaiting its owner, or forget it when it was idle for its time to live."""
    if state.lanes.get(lane.key) is not lane:
        return
    lane.timer = None
    if lane.move is not None:
        if lane.move.until is not None and lane.move.until <= state.now:
            moves.overdue(state, lane)
        watch(state, lane)  # for the same time, if that has set it already
        return
    if lane.awaited_until or lane.expected is not None:
        advance(state, lane)
        if state.lanes.get(lane.key) is not lane:
            return
    idle_until = lane.used_at + state.rules.session_ttl_s
    if idle_until <= state.now and not (lane.waiting or lane.running or lane.pinning):
        _forget(state, lane)
    else:
        watch(state, lane)
