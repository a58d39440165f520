"""What a process is told of the other nodes, so that one configured address is enough to find the next one.

Who they are is the view's to say (`State.peer_addresses`), which of them are leaving they say themselves; which to try
first is the process's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.wire.limits import PEERS_MAX

if TYPE_CHECKING:
    from reach.core.state import State


def addresses(state: State) -> tuple[str, ...]:
    """Addresses of other nodes; of a large mesh some that follow one another, from a random one on."""
    leaving = {node.address for node in state.nodes.values() if node.draining}
    known = tuple(address for address in state.peer_addresses if address not in leaving)
    if len(known) <= PEERS_MAX:
        return known
    first = state.rng.randrange(len(known))
    return (known[first:] + known[:first])[:PEERS_MAX]
