"""What ends with a key: the links that were opened with it, their agents, and the streams that wait for more.

A key that is revoked, or expires, or is gone from where keys are kept, ends whatever it opened at once; what its
callers had under way is cancelled down to the handlers, as when their process says goodbye.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.frame_pb2 import Goodbye
from reach.core import links

if TYPE_CHECKING:
    from reach.core.state import State

WHY = "its key was revoked or has expired"


def revoked(state: State, key_ids: frozenset[str]) -> None:
    """End what these keys opened on this node; a stream that has not said hello yet is refused when it does."""
    state.ended_keys |= key_ids
    for peer in list(state.peers.values()):
        if peer.who.key_id in key_ids:
            links.farewell(state, peer, Goodbye.UNAUTHENTICATED, WHY)
