"""What ends with a key: the links that were opened with it, their agents, and the streams that wait for more.

A key that is revoked, or expires, or is gone from where keys are kept, ends whatever it opened at once; what its
callers had under way is cancelled down to the handlers, as when their process says goodbye. Requests with a
`reply_topic`, which wait on no link, end when their principal has nothing left to come in by.

Of a key or certificate that allows something else now the same ends, and its process may come again: with what it may
now, or it is refused at the door.

A certificate that ends has been renewed, as a rule, by whoever has it. So the streams end and the links do not: with
the new certificate a process goes on where it was, and without one it does not get in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Goodbye
from agentreach.wire.errors import failure
from reach.core import actors, callbacks, links, waiters
from reach.core.effects import CutStream
from reach.core.ports import End
from reach.core.requests import Stage

if TYPE_CHECKING:
    from reach.core.state import State


def revoked(state: State, ended: Mapping[str, End]) -> None:
    """End what was opened on this node by these key_ids. Streams that have not said hello are the engine's to end."""
    for peer in list(state.peers.values()):
        end = ended.get(peer.who.key_id)
        if end is None:
            continue
        if end is End.CERTIFICATE:
            links.cut(state, peer)
            state.effects.append(CutStream(peer))
        else:
            waiters.shut_out(state, peer, list(peer.requests.values()), end.value)
            links.farewell(state, peer, goodbye_of(end), end.value)
    if any(end is not End.CERTIFICATE for end in ended.values()):
        _end_detached(state)


def _end_detached(state: State) -> None:
    for request in list(state.requests.values()):
        tenant, principal, *_ = request.key
        if request.stage is not Stage.SETTLED and actors.rights_of(state, tenant, principal) is None:
            for waiter in callbacks.all_of(request):
                ended = failure(codes.CANCELLED, f"{principal}, who asked for it, has no key left", retryable=False)
                waiters.leave(state, request, waiter, ended)


def goodbye_of(end: End) -> Goodbye.Code.ValueType:
    """What a stream is told that ends so: a process whose key has ended need not come again."""
    return Goodbye.UNAUTHENTICATED if end is End.KEY else Goodbye.PROTOCOL_ERROR
