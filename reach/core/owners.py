"""The owner of a session and its pin: chosen, recorded, kept, awaited, lost.

The first message chooses its owner by ring and asks for a pin (compare-and-set in the store). Later messages follow
the pin, not the ring. When the owner is gone the next message gets a new owner under a new epoch, and is told that the
state is `LOST`, or `MOVED` where a state was stored: that is for `moves` to see to. Which message is next is `lanes`';
how a pin is written is the node's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.wire.errors import failure
from agentreach.wire.names import shown
from reach.core import balance, fence, homes, lanes, losses, moves, route, settle, version_policy
from reach.core.effects import CreatePin, RefreshPin, VoidPin
from reach.core.requests import Attachment, Stage

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.moving import Holder
    from reach.core.pool import Pool
    from reach.core.state import State

REFRESH_S = 60.0  # a used pin is written again at most so often
PIN_RETRY_AFTER_MS = 1000
NEVER = float("-inf")


def ask(state: State, lane: lanes.Lane) -> None:
    """Choose an owner for the lane's head and ask for its pin; without a candidate the head fails."""
    request = lane.waiting[0]
    pool = _pool(state, lane)
    agent = _choose(state, lane, pool)
    if agent is None:
        lanes.take_head(state, lane)
        request.lane = None
        settle.fail(state, request, request.last_error or route.nobody(state, pool, request))
        return
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    pin(state, lane, attachment)


def pin(state: State, lane: lanes.Lane, attachment: Attachment) -> None:
    """Have this agent's name, and the state that is stored, written into the session's pin."""
    lane.pinning = True
    since = lane.since if lane.snapshot or lane.move is not None else 0
    state.effects.append(CreatePin(lane, attachment, lane.epoch, lane.turn, lane.snapshot, since, lane.forsaken))


def verify(state: State, lane: lanes.Lane) -> None:
    """Have the store say again whose the session is; what it says comes as `pinned_elsewhere`."""
    assert lane.owner is not None
    lane.pinning = True
    state.effects.append(CreatePin(lane, lane.owner, -1, lane.turn, lane.snapshot, lane.since, epoch=lane.epoch))


def candidate(state: State, lane: lanes.Lane, exclude: Collection[str]) -> Attachment | None:
    """Who of the others would own the session now."""
    agent = _choose(state, lane, _pool(state, lane, anybody=True), exclude)
    if agent is None:
        return None
    assert isinstance(agent.link, Attachment)
    return agent.link


def _choose(state: State, lane: lanes.Lane, pool: Pool, exclude: Collection[str] = frozenset()) -> Agent | None:
    """The owner by ring; of the version that the session's hash draws, where a version policy says so."""
    session_id = lane.key[3]
    if not state.version_policies:
        return balance.choose_owner(pool, session_id, exclude)
    point = version_policy.point_of(session_id)
    picked = version_policy.pick(
        state.version_policies,
        state.directory,
        pool,
        point,
        lambda one, _: balance.choose_owner(one, session_id, exclude),
    )
    if picked.fell_back and lane.waiting:
        route.fell_back(state, picked, lane.waiting[0])
    return picked.agent


def _pool(state: State, lane: lanes.Lane, *, anybody: bool = False) -> Pool:
    """Who could own the session, by its head's target; `anybody`: also those whom a target that names one does not."""
    tenant, env, agent_type, _ = lane.key
    target = Envelope.FromString(lane.waiting[0].data).target if lane.waiting else Target()
    if anybody and target.agent_id:
        target = Target(among=target.among)
    target.agent_type = "" if target.agent_id else agent_type
    return state.directory.pool_for(target, tenant, env)


def pinned(state: State, lane: lanes.Lane, attachment: Attachment, holder: Holder) -> None:
    """The pin for this agent is written, as `holder` says."""
    epoch = holder.epoch
    if lane.owner is attachment and lane.epoch == epoch:  # the store had forgotten it; its owner has the state
        lane.pinning = False
        lane.verified_at = lane.refreshed_at = state.now
        state.lanes_ready.append(lane)
        return
    lane.turn, lane.snapshot, lane.forsaken = holder.turn, holder.snapshot, False
    if holder.snapshot:
        lane.since = holder.since
    lane.pinning = False
    lane.refreshed_at = state.now
    if lane.snapshot or lane.move is not None:
        moves.pinned(state, lane, attachment, epoch, attached=_attached(state, attachment))
        return
    first = lane.epoch == 0 and not lane.broken
    lane.event = int(pb.STARTED if first else pb.LOST)
    lane.broken = False
    lane.since = epoch
    if _attached(state, attachment):
        own(state, lane, attachment, epoch)
    else:  # it went while the pin was written
        lane.epoch, lane.broken = epoch, not first
    state.lanes_ready.append(lane)


def pinned_elsewhere(state: State, lane: lanes.Lane, holder: Holder) -> None:
    """The store has a pin already: of an agent that is here, or that may still come back after a restart."""
    lane.pinning = False
    moves.not_pinned(state, lane)
    agent_id, incarnation, epoch = holder.agent_id, holder.incarnation, holder.epoch
    lane.since, lane.turn, lane.snapshot = holder.since or epoch, holder.turn, holder.snapshot
    tenant, env, _, _ = lane.key
    attachment = route.incarnation(state, (tenant, "", env, ""), agent_id, incarnation)
    if attachment is not None and homes.is_there(attachment):
        knew = lane.epoch == epoch and lane.owner is attachment
        lane.broken = False
        own(state, lane, attachment, epoch)
        if not knew and not attachment.remote:
            homes.adopt(state, lane, attachment)
    elif not incarnation:  # its home says that the owner is dead
        disown(state, lane)
        lane.awaited_until = 0.0
        lane.epoch, lane.broken = epoch, True
    else:
        disown(state, lane)
        if (agent_id, incarnation) != lane.owner_id or not lane.awaited_until:
            _await(state, lane)
        lane.epoch, lane.home = epoch, holder.home
        lane.owner_id = (agent_id, incarnation)
    state.lanes_ready.append(lane)


def taken(state: State, lane: lanes.Lane, epoch: int, holder: Holder) -> None:
    """The store gave a session of this node, owned under `epoch`, to somebody else: a pin was lost, and made anew.

    A running turn is cancelled, and the next message follows the pin. Its caller is told what became of the state.
    """
    owner = lane.owner
    if owner is None or lane.epoch != epoch or lane.pinning:
        return  # old news, or the store is being asked
    name = owner.agent.agent_id
    state.log("error", "another owner has a session of this node", agent=name, session=shown(lane.key[3]), epoch=epoch)
    state.stats.duplicates["fenced"] += 1
    for request in list(lane.running):
        if request.stage is not Stage.SETTLED:
            request.fenced = True
            text = f"another owner has session {shown(lane.key[3])}: its pin was lost in the registry"
            settle.give_up(state, request, failure(codes.AGENT_LOST, text, may_have_executed=True, agent_id=name))
    moves.not_pinned(state, lane)
    disown(state, lane)
    lane.broken = False
    lane.event = int(pb.MOVED if holder.since <= epoch < holder.epoch else pb.LOST)
    pinned_elsewhere(state, lane, holder)


def _await(state: State, lane: lanes.Lane) -> None:
    """The owner is not to be seen: it may be on its way to a node."""
    lane.awaited_from = state.now
    lane.awaited_until = state.now + state.rules.resume_window_s
    lanes.watch(state, lane)


def void(state: State, lane: lanes.Lane) -> bool:
    """Whether an owner that is not seen may be given up by now. One that is registered is its home's to judge."""
    tenant, env, _, _ = lane.key
    if route.incarnation(state, (tenant, "", env, ""), *lane.owner_id) is not None:
        _await(state, lane)
        return False
    if lane.awaited_until > state.now or not fence.may_void(state, lane.home, state.now - lane.awaited_from):
        return False
    lane.awaited_until, lane.broken = 0.0, True
    return True


def _attached(state: State, attachment: Attachment) -> bool:
    agent = attachment.agent
    return state.directory.get(agent.tenant, agent.env, agent.agent_id) is agent


def awaited_is_back(state: State, lane: lanes.Lane) -> bool:
    """True if the process that the pin names has attached meanwhile: then the lane is its again."""
    tenant, env, _, _ = lane.key
    attachment = route.incarnation(state, (tenant, "", env, ""), *lane.owner_id)
    if attachment is None or not homes.is_there(attachment):
        return False
    if not attachment.remote and lane.home != state.rules.node_id:  # its former home may have stored newer states
        homes.look(state, lane)
        return lane.pinning
    own(state, lane, attachment, lane.epoch)
    if not attachment.remote:
        homes.adopt(state, lane, attachment)
    return True


def not_pinned(state: State, lane: lanes.Lane, why: str) -> None:
    """The store could not write the pin: no new session starts while it is away."""
    lane.pinning = False
    moves.not_pinned(state, lane)
    text = f"session {lane.key[3]} has no owner and the registry cannot record one now ({why}); try again"
    while lane.waiting:
        request = lanes.take_head(state, lane)
        request.lane = None
        # Each gets an error of its own: what its earlier attempts add to it is nobody else's.
        error = request.last_error or failure(codes.REGISTRY_UNAVAILABLE, text, retry_after_ms=PIN_RETRY_AFTER_MS)
        settle.fail(state, request, error)
    lanes.forget_if_unknown(state, lane)


def refresh_every_s(session_ttl_s: float) -> float:
    """How often the pin of a session in use is written again."""
    return min(REFRESH_S, session_ttl_s / 4)


def keep_pin(state: State, lane: lanes.Lane) -> None:
    """The session is in use: have its pin written again if that was not done for a while."""
    lane.used_at = state.now
    if state.now - lane.refreshed_at >= refresh_every_s(state.rules.session_ttl_s):
        lane.refreshed_at = state.now
        state.effects.append(RefreshPin(lane))


def pin_key(lane: lanes.LaneKey) -> str:
    """Where a session's pin stands. The session_id is hashed: it may hold anything."""
    tenant, env, agent_type, session_id = lane
    digest = hashlib.blake2b(session_id.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
    return f"pins/{tenant}/{env}/{agent_type}/{digest}"


def own(state: State, lane: lanes.Lane, attachment: Attachment, epoch: int) -> None:
    """The lane belongs to this agent under this epoch."""
    disown(state, lane)
    lane.owner = attachment
    lane.owner_id = (attachment.agent.agent_id, attachment.agent.incarnation)
    lane.home = attachment.agent.node_id
    lane.epoch = epoch
    lane.verified_at = state.now
    lane.since = lane.since or epoch
    if lane.awaited_until:
        lane.awaited_until = 0.0
        homes.doubt(lane)
    attachment.pinned[lane] = None
    state.directory.pin(attachment.agent)
    if not attachment.remote:
        state.pins[pin_key(lane.key)] = lane


def disown(state: State, lane: lanes.Lane) -> None:
    """The lane has no owner any more."""
    owner = lane.owner
    if owner is None:
        return
    lanes.leave_queue(lane)
    lane.owner = None
    owner.pinned.pop(lane, None)
    state.directory.unpin(owner.agent)
    if not owner.remote:
        del state.pins[pin_key(lane.key)]


def gone(state: State, attachment: Attachment) -> None:
    """An agent is judged dead or has left: its sessions need new owners; their state is lost if none is stored."""
    attachment.to_move.clear()
    if attachment.keeps_sessions:  # it goes to another node, and they go with it
        home_left(state, attachment)
    for lane in attachment.moving:
        if lane.move is not None and lane.owner is not attachment:
            lane.move.origin = None
    for lane in list(attachment.pinned):
        gone_from(state, lane, attachment, "it is judged dead and its session goes on without it")


def gone_from(state: State, lane: lanes.Lane, attachment: Attachment, why: str) -> None:
    """A session's owner has it no longer."""
    for request in [each for each in lane.running if each.attachment is attachment]:
        request.fenced = True
        if request.stage is not Stage.SETTLED:
            losses.lost(state, request, why)
        if request in lane.running:
            lane.running.discard(request)
            request.lane = None
    if lane.move is not None:
        moves.owner_gone(state, lane, attachment)
    else:
        give_up(state, lane)
    state.lanes_ready.append(lane)


def give_up(state: State, lane: lanes.Lane) -> None:
    """The session has no owner any more; other nodes, which cannot judge that, read it in the pin."""
    at_home = lane.home in ("", state.rules.node_id)
    disown(state, lane)
    lane.broken = True
    if state.nodes and at_home and not lane.storing:  # else once its newest state is stored
        state.effects.append(VoidPin(lane, lane.epoch))


def home_left(state: State, attachment: Attachment) -> None:
    """An owner is not where it was: its sessions wait for it to be attached elsewhere."""
    attachment.to_move.clear()
    for lane in list(attachment.pinned):
        disown(state, lane)
        moves.not_pinned(state, lane)
        lane.broken = False
        _await(state, lane)
        lane.read_at = 0.0
        state.lanes_ready.append(lane)


def changed(state: State, attachment: Attachment) -> None:
    """The agent's status or slots changed: its sessions may be able to go on."""
    state.lanes_ready.extend(lane for lane in attachment.pinned if lane.waiting)


def came_back(state: State, attachment: Attachment, session_id: str, epoch: int) -> None:
    """A re-attaching process still holds this session under this epoch."""
    agent = attachment.agent
    lane = lanes.lane_of(state, (agent.tenant, agent.env, agent.agent_type, session_id))
    if lane is None or lane.owner is not None or lane.pinning or lane.epoch > epoch:
        return  # somebody else has it under a newer epoch: what this one says of it will be fenced
    moves.not_pinned(state, lane)
    news = lane.epoch == 0
    own(state, lane, attachment, epoch)
    if news and state.nodes:  # another node may have given the session away: the store is asked before its next message
        lane.verified_at = NEVER
    lane.event, lane.broken = 0, False
    state.lanes_ready.append(lane)
