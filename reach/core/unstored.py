"""States that were handed over as checkpoints and could not be stored: the newest of a session is kept and tried again.

Otherwise whoever takes the session over later would be given an older state than its caller has been answered from. So
while one is kept here nobody takes the session over; if it cannot be stored in the end, the older one is forsaken, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reach.core import owners
from reach.core.effects import StoreSnapshot, VoidPin

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.lanes import Lane
    from reach.core.state import State

AGAIN_S = 1.0
AGAIN_AT_ONCE = 64
OWNERLESS_S = 30.0  # a session whose owner died waits so long for a store that refuses its state


class Unstored:
    """What is kept; each counts as one of its lane's `storing`, and in `snapshots_held`."""

    def __init__(self) -> None:
        self.kept: dict[Lane, StoreSnapshot] = {}
        self.timer: Token | None = None


def size_of(state: State, lane: Lane) -> int:
    """Bytes of a session's state that a newer one would replace."""
    kept = state.unstored.kept.get(lane)
    return 0 if kept is None else len(kept.data)


def keep(state: State, effect: StoreSnapshot, why: str) -> None:
    """A checkpoint could not be stored now."""
    lane, kept = effect.lane, state.unstored.kept.get(effect.lane)
    state.log("warning", "checkpoint not stored yet", agent=effect.attachment.agent.agent_id, why=why)
    if lane.epoch != effect.epoch or state.lanes.get(lane.key) is not lane:
        return
    if kept is not None and kept.turn > effect.turn:
        return
    if lane.owner is None and lane.broken and lane.move is None and not lane.pinning:
        effect = replace(effect, ownerless_since=effect.ownerless_since or state.now)
        if not state.registry_away and state.now - effect.ownerless_since >= OWNERLESS_S:
            _forsake(state, lane)
            return
        owners.not_pinned(state, lane, why)
    forget(state, lane)
    state.unstored.kept[lane] = effect
    lane.storing += 1
    state.snapshots_held += len(effect.data)
    if state.unstored.timer is None:
        state.unstored.timer = state.checks.schedule(state.unstored, state.now + AGAIN_S)


def forget(state: State, lane: Lane, turn: int | None = None) -> None:
    """What is kept of a session, if it is not of a later turn, is not needed any more."""
    kept = state.unstored.kept.get(lane)
    if kept is not None and (turn is None or kept.turn <= turn):
        del state.unstored.kept[lane]
        lane.storing -= 1
        state.snapshots_held -= len(kept.data)
        state.lanes_ready.append(lane)


def _forsake(state: State, lane: Lane) -> None:
    """The newest state is gone, and an older one shall not pass for it: the session is lost."""
    forget(state, lane)
    lane.turn, lane.snapshot, lane.forsaken = 0, "", True
    state.stats.moves["lost"] += 1
    state.log("error", "session lost its state", agent=lane.owner_id[0], why="its last checkpoint cannot be stored")
    _tell_others(state, lane)


def _tell_others(state: State, lane: Lane) -> None:
    if state.nodes and lane.owner is None and lane.broken and lane.home in ("", state.rules.node_id):
        state.effects.append(VoidPin(lane, lane.epoch))


def stored(state: State, lane: Lane, turn: int) -> None:
    """The store has taken a state: it may take more, and older ones of the session are not needed."""
    if not state.unstored.kept:
        return
    forget(state, lane, turn)
    _again(state, 1)


def was_stored(state: State, effect: StoreSnapshot) -> None:
    """A checkpoint stands; an owner that died before that may be replaced now."""
    if effect.epoch == effect.lane.epoch:
        _tell_others(state, effect.lane)


def on_timer(state: State, unstored: Unstored) -> None:
    """Try again."""
    unstored.timer = None
    _again(state, AGAIN_AT_ONCE)
    if unstored.kept:
        unstored.timer = state.checks.schedule(unstored, state.now + AGAIN_S)


def _again(state: State, count: int) -> None:
    for lane, effect in list(state.unstored.kept.items())[:count]:
        del state.unstored.kept[lane]  # it is being stored, as it was counted
        if lane.epoch == effect.epoch and state.lanes.get(lane.key) is lane:
            state.effects.append(effect)
        else:
            lane.storing -= 1
            state.snapshots_held -= len(effect.data)
            state.lanes_ready.append(lane)
