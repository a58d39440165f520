"""What ends with a key: the links that were opened with it, their agents, and the streams that wait for more.

A key that is revoked, or expires, or is gone from where keys are kept, ends whatever it opened at once; what its
callers had under way is cancelled down to the handlers, as when their process says goodbye. Requests with a
`reply_topic`, which wait on no link, end when their principal has no key left.

A certificate that ends has been renewed, as a rule, by whoever has it. So the streams end and the links do not: with
the new certificate a process goes on where it was, and without one it does not get in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Goodbye
from agentreach.wire.errors import failure
from reach.core import callbacks, links, waiters
from reach.core.certificates import is_certificate
from reach.core.effects import CutStream
from reach.core.requests import Stage

if TYPE_CHECKING:
    from reach.core.state import State

WHY = "its key was revoked or has expired"


def revoked(state: State, key_ids: frozenset[str]) -> None:
    """End what these keys opened on this node. Streams that have not said hello are the engine's to end."""
    for peer in list(state.peers.values()):
        if peer.who.key_id not in key_ids:
            continue
        if is_certificate(peer.who.key_id):
            links.cut(state, peer)
            state.effects.append(CutStream(peer))
        else:
            waiters.shut_out(state, peer, list(peer.requests.values()), WHY)
            links.farewell(state, peer, Goodbye.UNAUTHENTICATED, WHY)
    if not all(map(is_certificate, key_ids)):
        _end_detached(state)


def _end_detached(state: State) -> None:
    for request in list(state.requests.values()):
        if request.stage is not Stage.SETTLED and request.key[:2] not in state.principals:
            for waiter in callbacks.all_of(request):
                ended = failure(
                    codes.CANCELLED, f"{request.key[1]}, who asked for it, has no key left", retryable=False
                )
                waiters.leave(state, request, waiter, ended)


def goodbye_of(key_id: str) -> Goodbye.Code.ValueType:
    """What a stream is told whose key ended before it said hello: a process with a key need not come again."""
    return Goodbye.PROTOCOL_ERROR if is_certificate(key_id) else Goodbye.UNAUTHENTICATED
