"""The fence against two owners of a session (cluster.md, "Leases, on two levels").

A home gives sessions' messages to its agents only while nobody else may give these sessions away: while its own lease
in the store holds by its own clock, or, where the store is away, while every other node says over its link that it
still honours this home's pins. When neither is so, running turns are cancelled and no other starts; once it is again,
each session's pin is read anew before its next message.

The other side of it is `may_void`: when a node may take a session from an owner that it cannot see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import PinsHonoured, Signal
from agentreach.wire.errors import failure
from reach.core import settle
from reach.core.requests import Stage

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.lanes import Lane
    from reach.core.nodes import NodePeer
    from reach.core.state import State

MARGIN_S = 1.0  # clocks of store and node do not run alike
HONOURED_S = 5.0  # a node's word holds for so long
TELL_S = 1.0
UNREGISTERED_S = 10.0  # cluster.md
LINK_DOWN_S = HONOURED_S + MARGIN_S  # after a cut the home may believe this node's last word for so long
RETRY_AFTER_MS = 2_000


class NodeLease(Protocol):
    """This node's lease in the store."""

    @property
    def valid_until(self) -> float:
        """By the boot clock: send time of the last acknowledged keepalive + TTL, of the shortest of its leases."""
        ...


class Fence:
    """Whether this home may serve sessions, and since when it has not been able to for a while."""

    __slots__ = ("broken_at", "holds_now", "lease", "timer")

    def __init__(self) -> None:
        self.lease: NodeLease | None = None
        """None: the store is this node's own, and nobody else has any session."""
        self.broken_at = 0.0
        """When it was seen last that the fence did not hold: what was known of pins before counts no more."""
        self.holds_now = True
        self.timer: Token | None = None


def use(state: State, lease: NodeLease) -> None:
    """The node's registrations stand under a lease: from now on the fence is looked after."""
    state.fence.lease = lease
    state.fence.timer = state.checks.schedule(state.fence, state.now + TELL_S)


def holds(state: State) -> bool:
    """Whether sessions' messages may be given to agents of this node now."""
    lease = state.fence.lease
    if lease is None or state.now < lease.valid_until - MARGIN_S:
        return True
    since = state.now - HONOURED_S
    if all(node.honoured_at >= since for node in state.nodes.values() if node.address):
        return True
    _broken(state)
    return False


def _broken(state: State) -> None:
    fence = state.fence
    fence.broken_at = state.now
    if not fence.holds_now:
        return
    fence.holds_now = False
    state.log("error", "the registry's lease is over and other nodes are silent: sessions wait", lanes=len(state.lanes))
    for lane in list(state.lanes.values()):
        if lane.owner is None or lane.owner.remote:
            continue
        for request in list(lane.running):
            if request.stage is not Stage.SETTLED:
                error = refusal(lane.key[3])
                error.may_have_executed = True
                settle.give_up(state, request, error)
        state.lanes_ready.append(lane)


def refusal(session_id: str) -> Error:
    """What a session's message is told while the fence does not hold."""
    return failure(
        codes.REGISTRY_UNAVAILABLE,
        f"session {session_id} cannot be served now: this node has lost its lease in the registry, and another node "
        "may have given the session away; try again",
        retry_after_ms=RETRY_AFTER_MS,
    )


def in_doubt(state: State, lane: Lane) -> bool:
    """Whether a session's pin must be read again before its next message: the fence has not held meanwhile."""
    return lane.verified_at < state.fence.broken_at


def on_timer(state: State, fence: Fence) -> None:
    """Tell the others whose pins are honoured, and look after the own."""
    fence.timer = state.checks.schedule(fence, state.now + TELL_S)
    for node in state.nodes.values():
        if node.connected:
            word = PinsHonoured(node_id=state.rules.node_id, view_revision=state.directory.revision)
            word.said_at_us = int(state.now * 1e6)
            word.heard_at_us = 0 if _unknown_to_some(state, node) else node.said_at_us
            node.link.signal(Signal(pins_honoured=word))
            state.woken.add(node)
    if holds(state) and not fence.holds_now:
        fence.holds_now = True
        state.log("info", "sessions are served again")
        state.lanes_ready.extend(lane for lane in state.lanes.values() if lane.waiting)


def _unknown_to_some(state: State, home: NodePeer) -> bool:
    """Whether a node came after this home's key had vanished: it never heard of the home, and may take its sessions."""
    return not home.address and any(node.address and node.seen_at >= home.gone_at for node in state.nodes.values())


def heard(state: State, node: NodePeer, message: PinsHonoured) -> None:
    """A node says that it honours this home's pins, after it had heard what this one said at a time of its own clock.

    It counts from that time on: what waited in a buffer while this process stood still is no news.
    """
    node.said_at_us = message.said_at_us
    node.honoured_at = max(node.honoured_at, min(message.heard_at_us / 1e6, state.now))


def may_void(state: State, home: str, unregistered_s: float) -> bool:
    """Whether a session may be given away whose owner has not been registered for so long; `home` had it last.

    A home that can be asked has let go of an agent that is not registered: it judged it. One that cannot be asked may
    still serve it, until its lease is over and this node's last word is too old for it.
    """
    if home == state.rules.node_id:
        return True
    node = state.nodes.get(home)
    if node is None:  # while others vouch for it, it knows that they do not for us
        return unregistered_s >= UNREGISTERED_S
    if node.dead:
        return True
    if node.connected:  # one that has lost its registrations serves on, by this node's own word (`pins_honoured`)
        return bool(node.address)
    return unregistered_s >= UNREGISTERED_S and state.now - node.cut_at >= LINK_DOWN_S
