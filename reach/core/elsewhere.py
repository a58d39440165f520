"""What a process is told of the other nodes, so that one configured address is enough to find the next one.

Who they are is the view's to say (`State.peer_addresses`), which of them are leaving they say themselves; which to try
first is the process's. It is told with the welcome and with every heartbeat. One that would not know where to go, since
it was told of nobody or of nobody who is still there, is told at once when somebody comes: the node that it is linked
with may be dead before the next heartbeat, and nobody else can tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.limits import PEERS_MAX

if TYPE_CHECKING:
    from reach.core.peers import Peer
    from reach.core.state import State


def addresses(state: State) -> tuple[str, ...]:
    """Addresses of other nodes; of a large mesh some that follow one another, from a random one on."""
    known = _present(state)
    if len(known) <= PEERS_MAX:
        return known
    first = state.rng.randrange(len(known))
    return (known[first:] + known[:first])[:PEERS_MAX]


def _present(state: State) -> tuple[str, ...]:
    leaving = {node.address for node in state.nodes.values() if node.draining}
    return tuple(address for address in state.peer_addresses if address not in leaving)


def welcomed(state: State, peer: Peer) -> tuple[str, ...]:
    """The addresses for a welcome: from now on the process knows of these and of no others."""
    peer.elsewhere = addresses(state)
    return peer.elsewhere


def told(state: State, peer: Peer) -> tuple[str, ...]:
    """The addresses for anything later: where there are none the process keeps those that it has."""
    known = addresses(state)
    peer.elsewhere = known or peer.elsewhere
    return known


def node_came(state: State) -> None:
    """Another node is there, or is linked: tell every link that knows of none of those that there are."""
    present = set(_present(state))
    for peer in state.peers.values() if present else ():
        linked = peer.welcomed and peer.connected and not peer.restarts  # others are told with their welcome
        if linked and present.isdisjoint(peer.elsewhere):
            peer.link.signal(Signal(peers=pb.Peers(addresses=told(state, peer))))
            state.woken.add(peer)
