"""Links that go to nodes which have less, so that a node which was started anew gets its part.

Processes choose a node when they connect, and then stay: after a rolling restart the node restarted last would have
none. So a node with clearly more agents than its part asks a few idle links at a time to go to those that have less
(`drain`), which loses nothing (decision 16). A link that is at work, waits for answers or has subscriptions is left
where it is, and nobody is asked while nodes come and go.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.limits import PEERS_MAX

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.nodes import NodePeer
    from reach.core.peers import Peer
    from reach.core.state import State

LOOK_S = 5.0
STEADY_S = 10.0  # so long all nodes must have been linked
PART = 1.25  # of its part, and one more, is what a node may have before it asks anybody to go
AT_ONCE = 0.2  # of the surplus
GO_WITHIN_S = 10.0
ASK_AGAIN_S = 60.0  # a link that did not go: it may not understand


class Balance:
    """When this node looks next, and whom it has asked to go."""

    __slots__ = ("asked", "timer")

    def __init__(self) -> None:
        self.timer: Token | None = None
        self.asked: dict[Peer, float] = {}
        """When, by link."""


def begin(state: State) -> None:
    """There are other nodes: look now and then."""
    if state.balance.timer is None:
        _later(state, state.balance)


def _later(state: State, balance: Balance) -> None:
    balance.timer = state.checks.schedule(balance, state.now + LOOK_S * (0.5 + state.rng.random()))


def on_timer(state: State, balance: Balance) -> None:
    """Ask links to go, if this node has more agents than its part."""
    _later(state, balance)
    for peer, at in list(balance.asked.items()):
        if at + ASK_AGAIN_S <= state.now or state.peers.get(peer.link_id) is not peer:
            del balance.asked[peer]
    others = [node for node in state.nodes.values() if node.address or node.connected]
    if state.draining or not others or not all(_is_steady(state, node) for node in others):
        return
    counts = [len(node.agents) for node in others]
    going = sum(len(peer.attachments) for peer, at in balance.asked.items() if state.now - at < GO_WITHIN_S)
    own = len(state.directory) - state.remote_agents - going
    part = (own + sum(counts)) / (len(others) + 1)
    surplus = own - ceil(part)
    if own <= PART * part + 1 or surplus < 1:
        return
    less = [node.address for node, count in zip(others, counts, strict=True) if count < part and node.address]
    _ask(state, balance, surplus, less[:PEERS_MAX])


def _is_steady(state: State, node: NodePeer) -> bool:
    return node.connected and not node.draining and bool(node.address) and state.now - node.since >= STEADY_S


def _ask(state: State, balance: Balance, surplus: int, addresses: list[str]) -> None:
    most = max(1, int(surplus * AT_ONCE))
    idle = [peer for peer in state.peers.values() if peer not in balance.asked and _may_go(peer)]
    while idle and most > 0 and addresses:
        peer = idle.pop(state.rng.randrange(len(idle)))
        if len(peer.attachments) > surplus:
            continue
        most -= len(peer.attachments)
        surplus -= len(peer.attachments)
        balance.asked[peer] = state.now
        reason = f"node {state.rules.node_id} has more agents than its part"
        order = pb.Drain(deadline_ms=int(GO_WITHIN_S * 1000), peers=addresses, reason=reason)
        peer.link.signal(Signal(drain=order))
        state.woken.add(peer)
        state.log("info", "link asked to go to another node", link=peer.link_id, agents=len(peer.attachments))


def _may_go(peer: Peer) -> bool:
    """Whether a link has agents, and neither they nor its callers have anything under way."""
    if not peer.attachments or not peer.connected or not peer.welcomed or peer.closing or peer.restarts:
        return False
    if peer.requests or peer.subscriptions or peer.arriving:
        return False
    return not any(
        each.attempts or each.held or each.drain is not None or each.lanes_waiting for each in peer.attachments.values()
    )
