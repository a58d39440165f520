"""A session moves with its state: from a live owner to a new one, or from what is stored to a new one.

    ENDING → RELEASING → STORING → PINNING → (LOADING) → RESTORING → owned

While it moves nothing of it is started: its messages wait in the lane. Its state is stored before the pin moves, and
the pin moves by compare-and-set before the new owner is given the state, so that at no moment two processes own it:
what the former one still says is fenced by the epoch. A step that fails leads back to the former owner where that
stays, then to two other candidates, then to LOST. A session whose owner died enters at PINNING, if the pin names a
snapshot.

Who could own it is `owners`', what waits is `lanes`', where a state is kept is the node's (`pins`, a snapshot store).
Which sessions of an agent that leaves go next is `leaving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire.errors import clean
from agentreach.wire.limits import SNAPSHOT_BYTES_MAX
from reach.core import handing, homes, lanes, leaving, owners, settle, unstored
from reach.core.effects import LoadSnapshot, StoreSnapshot
from reach.core.moving import CANDIDATES_MAX, HANDS_OVER, KEEPS, UNKNOWN, Move, Step
from reach.core.requests import Attachment, Stage

if TYPE_CHECKING:
    from reach.core.lanes import Lane
    from reach.core.peers import Peer
    from reach.core.state import State

STORE_AGAIN_S = 1.0  # a state that could not be stored: the registry or the disk is away
HELD_BYTES_MAX = 64 << 20  # states that are being stored; beyond, a checkpoint is dropped and a move waits


# ---- from the owner ----


def begin(state: State, lane: Lane, limit_s: float) -> None:
    """Move an owned session. Its running turn may take `limit_s`."""
    owner = lane.owner
    assert owner is not None and lane.move is None
    move = lane.move = Move(owner)
    owner.moving[lane] = None
    lanes.leave_queue(lane)
    if lane.running:
        _go(state, lane, Step.ENDING, limit_s)
    else:
        _release(state, lane, move)


def advance(state: State, lane: Lane) -> None:
    """Something about the lane changed: perhaps its last turn is over."""
    move = lane.move
    if move is not None and move.step is Step.ENDING and not lane.running:
        _release(state, lane, move)


def _go(state: State, lane: Lane, step: Step, limit_s: float | None = None) -> None:
    move = lane.move
    assert move is not None
    move.to(step)
    move.until = None if limit_s is None else state.now + limit_s
    lanes.watch(state, lane)


def _release(state: State, lane: Lane, move: Move) -> None:
    """Nothing of the session runs: ask its owner for the state."""
    owner = move.origin
    assert owner is not None
    if owner.hooks == KEEPS:
        _not_released(state, lane, f"{owner.agent.agent_id} cannot hand sessions over")
        return
    _go(state, lane, Step.RELEASING, state.rules.session_hook_s)
    handing.ask_for(state, lane, owner)


def snapshot(state: State, peer: Peer, message: frames.SessionSnapshot) -> None:
    """A process hands a session's state over: as it was asked to, or as a checkpoint."""
    found = handing.lane_of(state, peer, message.agent_id, message.session_id, message.epoch)
    if found is None:
        return
    lane, attachment = found
    move = lane.move
    asked = message.released and move is not None and move.step is Step.RELEASING
    if message.released and not asked:
        state.stats.duplicates["fenced"] += 1  # its time was over, or the move has ended otherwise
        return
    size = message.ByteSize()
    if message.HasField("error") or size > SNAPSHOT_BYTES_MAX:
        why = clean(message.error.message, 200) or f"its state has {size} bytes; the limit is {SNAPSHOT_BYTES_MAX}"
        if message.error.code == codes.REJECTED:
            attachment.hooks = KEEPS
        if asked:
            _not_released(state, lane, why)
        else:
            state.log("warning", "checkpoint refused", agent=attachment.agent.agent_id, why=why)
        return
    attachment.hooks = HANDS_OVER
    if message.turn < lane.turn or (message.turn == lane.turn and not asked):
        state.stats.duplicates["fenced"] += 1
        return
    data = message.SerializeToString()
    if asked:
        assert move is not None
        move.content, move.turn = data, message.turn
        _store_moved(state, lane, move)
    elif state.snapshots_held - unstored.size_of(state, lane) + size > HELD_BYTES_MAX:
        state.stats.moves["dropped"] += 1
        state.log("warning", "checkpoint dropped: too many are to be stored", agent=attachment.agent.agent_id)
    else:
        unstored.forget(state, lane, message.turn)
        _store(state, lane, attachment, message.turn, data)


# ---- into the store ----


def _store(state: State, lane: Lane, attachment: Attachment, turn: int, data: bytes) -> None:
    lane.storing += 1
    state.snapshots_held += len(data)
    state.effects.append(StoreSnapshot(lane, attachment, lane.epoch, turn, data))


def _store_moved(state: State, lane: Lane, move: Move) -> None:
    """Store the state of a moving session, soon if there is no room for it now."""
    assert move.origin is not None
    if state.snapshots_held + len(move.content) > HELD_BYTES_MAX:
        _go(state, lane, Step.STORING, STORE_AGAIN_S)
        return
    _go(state, lane, Step.STORING)
    _store(state, lane, move.origin, move.turn, move.content)


def stored(state: State, effect: StoreSnapshot, reference: str, why: str) -> None:
    """The store has answered; `reference` is where the state is, empty if it is not: `why`."""
    lane, move = effect.lane, effect.lane.move
    lane.storing -= 1
    state.snapshots_held -= len(effect.data)
    if reference and effect.epoch == lane.epoch and effect.turn >= lane.turn:
        lane.turn, lane.snapshot = effect.turn, reference
        unstored.stored(state, lane, effect.turn)
    if move is not None and move.step is Step.STORING and effect.data is move.content:
        if reference:
            _let_go(state, lane, move)
        else:
            _not_stored(state, lane, move, why)
        return
    if not reference:
        unstored.keep(state, effect, why)
    else:
        unstored.was_stored(state, effect)
    state.lanes_ready.append(lane)


def fenced(state: State, effect: StoreSnapshot) -> None:
    """The pin in the store is somebody else's: this node's owner has lost the session, and nothing of it counts."""
    lane = effect.lane
    lane.storing -= 1
    state.snapshots_held -= len(effect.data)
    state.stats.duplicates["fenced"] += 1
    if lane.epoch == effect.epoch and lane.owner is not None:
        _end(state, lane)
        owners.gone_from(state, lane, lane.owner, "another owner has its session")
        lane.turn, lane.snapshot = 0, ""


def _not_stored(state: State, lane: Lane, move: Move, why: str) -> None:
    """The state is nowhere but here: try again while its owner is there, else keep the session where it is."""
    origin = move.origin
    if origin is None:
        _lost(state, lane, f"its state could not be stored: {why}")
    elif leaving.leaves(origin):  # for as long as it stays; it would have to hand it over again at once
        _go(state, lane, Step.STORING, STORE_AGAIN_S)
    else:
        state.log("warning", "session not moved", agent=origin.agent.agent_id, why=why)
        state.stats.moves["kept"] += 1
        _give_back(state, lane, move)


def _give_back(state: State, lane: Lane, move: Move) -> None:
    """The pin has not moved: let the owner that gave the state away have it again, under the same epoch."""
    assert lane.owner is not None
    _send_restore(state, lane, move)


# ---- to the next owner ----


def _let_go(state: State, lane: Lane, move: Move) -> None:
    """The state is stored: the session has no owner until the pin names the next one."""
    owners.disown(state, lane)
    _to_next(state, lane, move)


def _to_next(state: State, lane: Lane, move: Move) -> None:
    """Give the session to the next candidate; without any, leave it to whoever asks for it, with what is stored."""
    attachment = _candidate(state, lane, move)
    if attachment is not None:
        move.tries += attachment is not move.origin
        _go(state, lane, Step.PINNING)
        owners.pin(state, lane, attachment)
    elif move.failed or not lane.snapshot:
        _lost(state, lane, move.why or "nobody can take it over")
    else:
        owners.give_up(state, lane)
        state.stats.moves["parked"] += 1
        _end(state, lane)


def _candidate(state: State, lane: Lane, move: Move) -> Attachment | None:
    origin = move.origin
    if move.failed and origin is not None and not leaving.leaves(origin) and origin.agent.agent_id not in move.failed:
        return origin if lanes.able(origin) else None
    if move.tries >= CANDIDATES_MAX:
        return None
    exclude = set(move.failed)
    if origin is not None:
        exclude.add(origin.agent.agent_id)
    return owners.candidate(state, lane, exclude)


def pinned(state: State, lane: Lane, attachment: Attachment, epoch: int, *, attached: bool) -> None:
    """The pin names this agent, under this epoch, and a snapshot: have it restored."""
    move = lane.move
    if move is None:
        move = lane.move = Move(None)
        move.tries = 1
        move.to(Step.PINNING)
    if not attached:  # it went while the pin was written
        lane.epoch = epoch
        _to_next(state, lane, move)
        return
    owners.own(state, lane, attachment, epoch)
    if attachment.remote:  # its home has the state restored, and says MOVED
        lane.broken = False
        state.stats.moves["handed on"] += 1
        homes.hand_on(state, lane, attachment)
        _end(state, lane)
    elif move.content:
        _send_restore(state, lane, move)
    else:
        _load(state, lane)


def _load(state: State, lane: Lane) -> None:
    _go(state, lane, Step.LOADING)
    state.effects.append(LoadSnapshot(lane, lane.snapshot, lane.epoch))


def adopt(state: State, lane: Lane, attachment: Attachment) -> None:
    """The pin names this agent, and a state that it may not have yet."""
    move = lane.move = Move(None)
    move.tries = 1
    move.to(Step.PINNING)
    _load(state, lane)


def not_pinned(state: State, lane: Lane) -> None:
    """The store cannot move the pin now: what is stored stays, and the next message asks again."""
    if lane.move is not None:
        lane.broken = True
        _end(state, lane)


def loaded(state: State, effect: LoadSnapshot, content: bytes | None, why: str) -> None:
    """The stored state, None if there is none any more; `why` says why the store does not answer."""
    lane, move = effect.lane, effect.lane.move
    if move is None or move.step is not Step.LOADING or lane.epoch != effect.epoch:
        return
    if content is not None:
        move.content = content
        _send_restore(state, lane, move)
    elif why:
        owners.disown(state, lane)
        lane.broken = True
        _end(state, lane)
        owners.not_pinned(state, lane, why)
    else:
        _lost(state, lane, "the stored state is gone")


def _send_restore(state: State, lane: Lane, move: Move) -> None:
    _go(state, lane, Step.RESTORING, state.rules.session_hook_s)
    handing.give(state, lane, move.content)


def ready(state: State, peer: Peer, message: frames.SessionReady) -> None:
    """A process has taken a session over, or could not."""
    found = handing.lane_of(state, peer, message.agent_id, message.session_id, message.epoch)
    move = found[0].move if found is not None else None
    if found is None or move is None or move.step is not Step.RESTORING:
        return
    lane, attachment = found
    if message.HasField("error"):
        _not_restored(state, lane, move, clean(message.error.message, 200))
        return
    lane.broken = False
    if attachment is not move.origin and not message.held:
        lane.event = int(pb.MOVED)
        state.stats.moves["moved"] += 1
        came_from = move.origin.agent.agent_id if move.origin is not None else "what was stored"
        state.log("info", "session moved", agent=attachment.agent.agent_id, was=came_from, epoch=lane.epoch)
    _end(state, lane)


# ---- failures ----


def overdue(state: State, lane: Lane) -> None:
    """The time of the present step is over."""
    move = lane.move
    assert move is not None
    if move.step is Step.ENDING:
        for request in list(lane.running):
            if request.stage is not Stage.SETTLED:
                request.fenced = True
                settle.give_up(state, request, handing.cut(lane))
        if lane.move is move and move.step is Step.ENDING:
            _go(state, lane, Step.ENDING, state.rules.cancel_grace_s)
    elif move.step is Step.RELEASING:
        if move.origin is not None and move.origin.hooks == UNKNOWN:
            move.origin.hooks = KEEPS  # it does not know the word: no other session of it needs to wait for that
        _not_released(state, lane, "its owner did not hand it over in time")
    elif move.step is Step.STORING:
        _store_moved(state, lane, move)
    elif move.step is Step.RESTORING:
        _not_restored(state, lane, move, "it was not restored in time")


def _not_released(state: State, lane: Lane, why: str) -> None:
    """The owner keeps its state: what was stored before counts, or the session stays where it is, or loses it."""
    move, owner, kept = lane.move, lane.owner, state.unstored.kept.get(lane)
    assert move is not None and owner is not None
    if not leaving.leaves(owner):
        state.log("warning", "session not moved", agent=owner.agent.agent_id, why=why)
        state.stats.moves["kept"] += 1
        _end(state, lane)
    elif kept is not None and move.step is Step.RELEASING:
        move.content, move.turn = kept.data, kept.turn
        _store_moved(state, lane, move)
    elif lane.snapshot:
        _let_go(state, lane, move)
    else:
        _lost(state, lane, why)


def _not_restored(state: State, lane: Lane, move: Move, why: str) -> None:
    owner = lane.owner
    assert owner is not None
    move.failed.add(owner.agent.agent_id)
    move.why = why
    state.log("warning", "session not restored", agent=owner.agent.agent_id, why=why)
    _let_go(state, lane, move)


def owner_gone(state: State, lane: Lane, attachment: Attachment) -> None:
    """The agent that owns the moving session is gone."""
    move = lane.move
    assert move is not None
    owners.disown(state, lane)
    if move.origin is attachment:
        move.origin = None
    if move.step in (Step.ENDING, Step.RELEASING):
        owners.give_up(state, lane)
        _end(state, lane)
    elif move.step is Step.STORING:
        if lane.storing <= (lane in state.unstored.kept):
            _lost(state, lane, "its state could not be stored before its owner left")
    else:
        move.failed.add(attachment.agent.agent_id)
        _to_next(state, lane, move)


def _lost(state: State, lane: Lane, why: str) -> None:
    """The state is gone: the next message gets a new owner, and is told so."""
    move, name = lane.move, lane.owner_id[0]
    assert move is not None
    unstored.forget(state, lane)
    owners.give_up(state, lane)
    lane.turn, lane.snapshot, lane.forsaken = 0, "", True
    state.stats.moves["lost"] += 1
    state.log("debug" if move.origin is not None and move.origin.hooks == KEEPS else "warning",
              "session lost its state", agent=name, why=why)  # fmt: skip
    _end(state, lane)


def _end(state: State, lane: Lane) -> None:
    """The session moves no longer; whatever became of it, its messages go on."""
    move, lane.move = lane.move, None
    state.lanes_ready.append(lane)
    lanes.watch(state, lane)
    if move is not None and move.left is not None:
        move.left.moving.pop(lane, None)
        leaving.go_on(state, move.left)
