"""Conversations: one owner each, one message at a time, in order.

The first message of a session chooses its owner by ring and asks for a pin (compare-and-set in the store); until the
answer comes, and while the owner cannot take it, messages wait in the session's lane. Later messages follow the pin,
not the ring. When the owner is gone the next message gets a new owner under a new epoch, and is told that the state
is `LOST`. (Moves with the state are for the version with several nodes; their seat is `owner_gone`.)
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import balance, deadlines, loops, losses, route, settle
from reach.core.agents import DEGRADED, HEALTHY
from reach.core.effects import CreatePin, RefreshPin
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.pool import Pool
    from reach.core.state import State
LaneKey = tuple[str, str, str, str]  # tenant, env, agent_type, session_id

REFRESH_S = 60.0  # a used pin is written again at most so often
AWAITED_LOOK_S = 0.25  # an owner that is to come back after a restart of the node is looked for so often
PIN_RETRY_AFTER_MS = 1000


class Lane:
    """One session's messages and its owner."""

    __slots__ = (
        "awaited_until",
        "broken",
        "epoch",
        "event",
        "in_turn",
        "key",
        "owner",
        "owner_id",
        "pinning",
        "refreshed_at",
        "running",
        "timer",
        "used_at",
        "waiting",
    )

    def __init__(self, key: LaneKey, now: float) -> None:
        self.key = key
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()
        self.owner: Attachment | None = None
        self.owner_id: tuple[str, bytes] = ("", b"")
        """(agent_id, incarnation) of the pin."""
        self.epoch = 0
        self.pinning = False
        """A pin is being written."""
        self.in_turn = False
        """It stands in its owner's queue for a slot."""
        self.event = 0
        """The SessionEvent that the next reply tells."""
        self.broken = False
        """Its former owner's state is gone."""
        self.awaited_until = 0.0
        """The pin names a process that is not attached (a restart): until when it may come back."""
        self.used_at = now
        self.refreshed_at = now
        self.timer: Token | None = None


def enter(state: State, request: Request, envelope: Envelope, parent: Lineage | None) -> None:
    """A session's message was admitted: put it into its lane and let the lane go on."""
    target, session_id = envelope.target, envelope.session_id
    tenant, _, env, _ = request.key
    pool = state.directory.pool_for(target, tenant, env)
    agent_type = target.agent_type.lower() or _type_of(state, pool, session_id, target.agent_id)
    if not agent_type:
        settle.fail(state, request, route.nobody(state, pool, request, parent))
        return
    lane = lane_of(state, (tenant, env, agent_type, session_id))
    if lane is None:
        settle.fail(state, request, _too_many(state))
        return
    request.agent_type = agent_type
    request.parent = parent
    request.strict_session = envelope.strict_session
    request.epoch = envelope.epoch
    fault = _refusal(state, lane, pool, request, parent)
    if fault is not None:
        settle.fail(state, request, fault)
        return
    lane.used_at = state.now
    if request.reentrant and lane.owner is not None:
        _start(state, lane, request, envelope)
        return
    request.lane = lane
    request.stage = Stage.QUEUED
    request.data = envelope.SerializeToString()
    lane.waiting.append(request)
    request.note("queued", state.now, f"session lane, {len(lane.waiting)} waiting")
    advance(state, lane)


def lane_of(state: State, key: LaneKey) -> Lane | None:
    """The lane of a session, made if it is the first that is heard of it. None: the node holds as many as it may."""
    lane = state.lanes.get(key)
    if lane is None and len(state.lanes) < state.rules.sessions_max:
        lane = state.lanes[key] = Lane(key, state.now)
        _watch(state, lane)
    return lane


def _watch(state: State, lane: Lane) -> None:
    """Set the lane's one timer: the awaited owner's time, else the end of the session's time to live."""
    when = max(lane.used_at + state.rules.session_ttl_s, state.now)
    if lane.awaited_until > state.now:
        when = min(when, lane.awaited_until, state.now + AWAITED_LOOK_S)
    elif lane.waiting or lane.running or lane.pinning:
        when = max(when, state.now + REFRESH_S)
    if lane.timer is not None:
        state.checks.cancel(lane.timer, lane)
    lane.timer = state.checks.schedule(lane, when)


def _forget(state: State, lane: Lane) -> None:
    disown(state, lane)
    if lane.timer is not None:
        state.checks.cancel(lane.timer, lane)
        lane.timer = None
    del state.lanes[lane.key]


def _forget_if_unknown(state: State, lane: Lane) -> None:
    """Keep no lane of a session that never got an owner: callers can invent as many as they like."""
    known = lane.owner is not None or lane.epoch or lane.pinning or lane.waiting or lane.running
    if not known and state.lanes.get(lane.key) is lane:
        _forget(state, lane)


def _too_many(state: State) -> Error:
    return failure(
        codes.OVERLOADED,
        f"node {state.rules.node_id} holds {len(state.lanes)} sessions, its limit; try again later",
        retry_after_ms=PIN_RETRY_AFTER_MS,
    )


def _type_of(state: State, pool: Pool, session_id: str, agent_id: str) -> str:
    """One type for a target that names none: the one that holds the session, else by rendezvous hash."""
    if agent_id:
        return agent_id.partition("/")[0].lower()
    selector = pool.selector
    types = {agent.agent_type for agent in pool}
    for agent_type in types:
        if (selector.tenant, selector.env, agent_type, session_id) in state.lanes:
            return agent_type
    salt = session_id.encode("utf-8", "surrogateescape")
    return max(types, key=lambda name: blake2b(salt + b"\0" + name.encode(), digest_size=8).digest(), default="")


def _refusal(state: State, lane: Lane, pool: Pool, request: Request, parent: Lineage | None) -> Error | None:
    """Why this message cannot wait in the lane; also settles whether it uses its own call tree's place."""
    if len(lane.waiting) >= state.rules.lane_max:
        return failure(
            codes.OVERLOADED,
            f"session {lane.key[3]} has {len(lane.waiting)} messages waiting, its limit; wait for answers",
            retry_after_ms=PIN_RETRY_AFTER_MS,
        )
    owner = lane.owner
    if owner is not None and owner.agent.agent_id not in pool.members:
        return failure(
            codes.NO_AGENT_AVAILABLE,
            f"session {lane.key[3]} is held by {owner.agent.agent_id}, which does not match {pool.selector}",
            agent_id=owner.agent.agent_id,
        )
    if not request.ancestors or parent is None:
        return None
    holders = [held.message_id for held in lane.running]
    queue = [lane]
    what = f"session {lane.key[3]}"
    if owner is not None and len(holders) < owner.agent.session_concurrency:
        if owner.agent.has_slot:
            return None
        holders, what = [held.message_id for held in owner.attempts.values()], f"every slot of {owner.agent.agent_id}"
        queue += owner.lanes_waiting
    if not loops.would_deadlock(request.ancestors, holders, [held.ancestors for one in queue for held in one.waiting]):
        return None
    if owner is not None and owner.agent.reentrant and _able(owner):
        request.reentrant = True
        return None
    state.stats.loops["would_deadlock"] += 1
    return loops.deadlock(parent.path, str(pool.selector), what)


def _able(owner: Attachment) -> bool:
    return owner.peer.connected and owner.agent.status in (HEALTHY, DEGRADED)


def advance(state: State, lane: Lane) -> None:
    """Start what can be started of a lane, from its head."""
    while lane.waiting:
        owner = lane.owner
        if owner is None:
            if lane.pinning:
                return
            if lane.awaited_until:
                if _awaited_is_back(state, lane):
                    continue
                if lane.awaited_until > state.now:
                    return
            _ask_for_owner(state, lane)
            continue
        agent = owner.agent
        if len(lane.running) >= agent.session_concurrency or not _able(owner):
            return
        if agent.saturated or not agent.has_slot:
            if lane.waiting[0].ancestors and not agent.saturated and _waits_for_itself(state, lane, owner):
                continue
            if not lane.in_turn:
                lane.in_turn = True
                owner.lanes_waiting.append(lane)
            return
        request = lane.waiting.popleft()
        _start(state, lane, request, Envelope.FromString(request.data))
    _forget_if_unknown(state, lane)


def _waits_for_itself(state: State, lane: Lane, owner: Attachment) -> bool:
    """The head needs a slot, and its own call tree holds them all: it fails, or uses the tree's slot again."""
    request = lane.waiting[0]
    holders = [held.message_id for held in owner.attempts.values()]
    queue = {lane, *owner.lanes_waiting}
    if not loops.would_deadlock(request.ancestors, holders, [held.ancestors for one in queue for held in one.waiting]):
        return False
    lane.waiting.popleft()
    if owner.agent.reentrant:
        request.reentrant = True
        _start(state, lane, request, Envelope.FromString(request.data))
        return True
    assert request.parent is not None
    request.lane = None
    state.stats.loops["would_deadlock"] += 1
    name = owner.agent.agent_id
    settle.fail(state, request, loops.deadlock(request.parent.path, name, f"every slot of {name}"))
    return True


def _start(state: State, lane: Lane, request: Request, envelope: Envelope) -> None:
    """Hand the head of the lane to the owner, unless the caller would rather know that the state is gone."""
    owner = lane.owner
    assert owner is not None
    if request.deadline <= state.now:  # its timer is a tick late, or this node's loop stood still
        settle.fail(state, request, deadlines.timed_out(request))
        return
    event = lane.event
    if request.epoch and request.epoch != lane.epoch:  # it knew another owner: never STARTED
        event = int(pb.LOST)
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
    request.session_event = event
    request.routed = f"session pin, epoch {lane.epoch}"
    lane.event = 0
    request.epoch = lane.epoch
    if request.lane is lane:
        lane.running.add(request)
    _keep_pin(state, lane)
    route.hand_over(state, request, envelope, owner, request.parent)


def refresh_every_s(session_ttl_s: float) -> float:
    """How often the pin of a session in use is written again."""
    return min(REFRESH_S, session_ttl_s / 4)


def _keep_pin(state: State, lane: Lane) -> None:
    lane.used_at = state.now
    if state.now - lane.refreshed_at >= refresh_every_s(state.rules.session_ttl_s):
        lane.refreshed_at = state.now
        state.effects.append(RefreshPin(lane))


def _ask_for_owner(state: State, lane: Lane) -> None:
    """Choose an owner for the lane's head and ask for its pin; without a candidate the head fails."""
    request = lane.waiting[0]
    envelope = Envelope.FromString(request.data)
    tenant, env, agent_type, session_id = lane.key
    envelope.target.agent_type = "" if envelope.target.agent_id else agent_type
    pool = state.directory.pool_for(envelope.target, tenant, env)
    agent = balance.choose_owner(pool, session_id)
    if agent is None:
        lane.waiting.popleft()
        request.lane = None
        settle.fail(state, request, route.nobody(state, pool, request, request.parent))
        return
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    lane.pinning = True
    state.effects.append(CreatePin(lane, attachment, lane.epoch))


def pinned(state: State, lane: Lane, attachment: Attachment, epoch: int) -> None:
    """The pin for this agent is written; `epoch` is its number."""
    lane.pinning = False
    first = lane.epoch == 0 and not lane.broken
    lane.event = int(pb.STARTED if first else pb.LOST)
    lane.broken = False
    lane.refreshed_at = state.now
    if _attached(state, attachment):
        own(state, lane, attachment, epoch)
    else:  # it went while the pin was written
        lane.epoch, lane.broken = epoch, not first
    state.lanes_ready.append(lane)


def pinned_elsewhere(state: State, lane: Lane, agent_id: str, incarnation: bytes, epoch: int) -> None:
    """The store has a pin already: of an agent that is here, or that may still come back after a restart."""
    lane.pinning = False
    tenant, env, _, _ = lane.key
    attachment = route.incarnation(state, (tenant, "", env, ""), agent_id, incarnation)
    if attachment is not None:
        own(state, lane, attachment, epoch)
    elif epoch == lane.epoch or lane.awaited_until:
        lane.awaited_until = 0.0
        lane.epoch, lane.broken = epoch, True
    else:
        lane.epoch = epoch
        lane.owner_id = (agent_id, incarnation)
        lane.awaited_until = state.now + state.rules.resume_window_s
        _watch(state, lane)
    state.lanes_ready.append(lane)


def _awaited_is_back(state: State, lane: Lane) -> bool:
    """True if the process that the pin names has attached meanwhile: then the lane is its again."""
    tenant, env, _, _ = lane.key
    attachment = route.incarnation(state, (tenant, "", env, ""), *lane.owner_id)
    if attachment is None:
        return False
    own(state, lane, attachment, lane.epoch)
    return True


def not_pinned(state: State, lane: Lane, why: str) -> None:
    """The store could not write the pin: no new session starts while it is away."""
    lane.pinning = False
    error = failure(
        codes.REGISTRY_UNAVAILABLE,
        f"session {lane.key[3]} has no owner and the registry cannot record one now ({why}); try again",
        retry_after_ms=PIN_RETRY_AFTER_MS,
    )
    while lane.waiting:
        request = lane.waiting.popleft()
        request.lane = None
        settle.fail(state, request, error)
    _forget_if_unknown(state, lane)


def own(state: State, lane: Lane, attachment: Attachment, epoch: int) -> None:
    """The lane belongs to this agent under this epoch."""
    disown(state, lane)
    lane.owner = attachment
    lane.owner_id = (attachment.agent.agent_id, attachment.agent.incarnation)
    lane.epoch = epoch
    lane.awaited_until = 0.0
    attachment.pinned.add(lane)
    state.directory.pin(attachment.agent)


def disown(state: State, lane: Lane) -> None:
    """The lane has no owner any more."""
    owner = lane.owner
    if owner is None:
        return
    lane.owner = None
    owner.pinned.discard(lane)
    state.directory.unpin(owner.agent)
    if lane.in_turn:
        lane.in_turn = False
        owner.lanes_waiting.remove(lane)


def owner_gone(state: State, attachment: Attachment) -> None:
    """An agent is judged dead or has left: its sessions need new owners, and their state is lost."""
    for lane in list(attachment.pinned):
        for request in [each for each in lane.running if each.attachment is attachment]:
            lane.running.discard(request)
            request.lane = None
            if request.stage is not Stage.SETTLED:
                losses.lost(state, request, "it is judged dead and its session goes on without it")
        disown(state, lane)
        lane.broken = True
        state.lanes_ready.append(lane)


def owner_changed(state: State, attachment: Attachment) -> None:
    """The agent's status or slots changed: its sessions may be able to go on."""
    state.lanes_ready.extend(lane for lane in attachment.pinned if lane.waiting)


def came_back(state: State, attachment: Attachment, session_id: str, epoch: int) -> None:
    """A re-attaching process still holds this session under this epoch."""
    agent = attachment.agent
    lane = lane_of(state, (agent.tenant, agent.env, agent.agent_type, session_id))
    if lane is None or lane.owner is not None or lane.pinning or lane.epoch > epoch:
        return  # somebody else has it under a newer epoch: what this one says of it will be fenced
    own(state, lane, attachment, epoch)
    lane.event, lane.broken = 0, False
    state.lanes_ready.append(lane)


def on_timer(state: State, lane: Lane) -> None:
    """The lane's time has come: stop awaiting its owner, or forget it when it was idle for its time to live."""
    if state.lanes.get(lane.key) is not lane:
        return
    lane.timer = None
    if lane.awaited_until:
        advance(state, lane)
        if state.lanes.get(lane.key) is not lane:
            return
    idle_until = lane.used_at + state.rules.session_ttl_s
    if idle_until <= state.now and not (lane.waiting or lane.running or lane.pinning):
        _forget(state, lane)
    else:
        _watch(state, lane)


def drain_ready(state: State) -> None:
    """Let every lane go on whose place, slot or owner changed in this step."""
    ready = state.lanes_ready
    while ready:
        lane = ready.popleft()
        advance(state, lane)
        owner = lane.owner
        if owner is not None and owner.lanes_waiting and owner.agent.has_slot and not owner.agent.saturated:
            next_in_turn(state, owner)  # this lane had no use for the slot


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
    state.lanes_ready.append(lane)


def next_in_turn(state: State, attachment: Attachment) -> None:
    """A slot of the agent is free: the lane that waits longest gets it."""
    if attachment.lanes_waiting:
        lane = attachment.lanes_waiting.popleft()
        lane.in_turn = False
        state.lanes_ready.append(lane)


def _attached(state: State, attachment: Attachment) -> bool:
    agent = attachment.agent
    return state.directory.get(agent.tenant, agent.env, agent.agent_id) is agent
