"""Whether a message of a principal that must sign is signed: by its key, for this node, now, and for the first time.

A captured message is worth nothing to whoever replays it: it names the link, or the node, that it is for, is too old
after `WINDOW_S`, and its nonce is remembered as long. What is remembered is bounded: beyond it the oldest is forgotten,
and with it everything as old counts as seen. Nobody remembers what a node took before it started; what was signed for
the node before that is refused. (A link ends with its node, and what is signed for a link with it.)
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire import signing
from agentreach.wire.errors import failure
from agentreach.wire.names import shown
from reach.core.keyring import key_id_of

if TYPE_CHECKING:
    from reach.core.peers import Peer
    from reach.core.ports import Identity
    from reach.core.state import State

WINDOW_S = 300.0
NONCES_MAX = 20_000  # of one principal: about 4 MiB

_WINDOW_MS = int(WINDOW_S * 1000)


class Nonces:
    """What one principal has signed within the window."""

    __slots__ = ("_heap", "_seen", "floor_ms")

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._seen: set[bytes] = set()
        self.floor_ms = 0
        """What was signed up to then counts as seen."""

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, unix_ms: int, nonce: bytes, now_ms: int) -> bool:
        """Remember one. False: it was seen before, or may have been."""
        self.forget(now_ms)
        if unix_ms <= self.floor_ms or nonce in self._seen:
            return False
        heapq.heappush(self._heap, (unix_ms, nonce))
        self._seen.add(nonce)
        if len(self._heap) > NONCES_MAX:
            self.floor_ms = max(self.floor_ms, self._pop())
        return True

    def forget(self, now_ms: int) -> None:
        """Let go of what is too old to be believed."""
        while self._heap and self._heap[0][0] < now_ms - _WINDOW_MS:
            self._pop()

    def _pop(self) -> int:
        unix_ms, nonce = heapq.heappop(self._heap)
        self._seen.discard(nonce)
        return unix_ms


def fault(state: State, who: Identity, envelope: Envelope, peer: Peer | None) -> Error | None:
    """Why the message is not believed; None: it is signed. Call it on the message as it came, once.

    One without an audience does not count as fresh from here on.
    """
    why = _why_not(state, who, envelope, peer)
    if not why:
        return None
    state.stats.denied += 1
    return failure(codes.PERMISSION_DENIED, f"signature: {why}")


def _why_not(state: State, who: Identity, envelope: Envelope, peer: Peer | None) -> str:
    if not envelope.signature:
        return "there is none, and what this key sends must be signed (docs/reference/signatures.md)"
    signature = signing.read(envelope.signature)
    if signature is None:
        return "it is malformed, or of a version that is not known here"
    if signature.key_id != key_id_of(who):
        return f"it names key {shown(signature.key_id)}, and the message came by another"
    if not who.signing_key or not signing.fits(envelope, signature, who.signing_key):
        return "it does not fit the message and this key's signing secret"
    node_id = state.rules.node_id
    on_link = peer is not None and signature.audience == peer.link_id
    if not on_link and signature.audience not in ("", node_id):
        return f"it is for {shown(signature.audience)}, and this is node {node_id}"
    if not signature.audience:
        envelope.fresh = False
        if envelope.type == pb.EVENT or not envelope.message_id:
            return "without an audience it needs a message_id, and an event needs an audience"
    now_ms = int(state.unix * 1000)
    late_ms = now_ms - signature.unix_ms
    if abs(late_ms) > _WINDOW_MS:
        how = f"{late_ms // 1000} s old" if late_ms > 0 else f"{-late_ms // 1000} s ahead of this node's clock"
        return f"it is {how}, and the limit is {WINDOW_S:g} s: look at the clocks, and sign each sending anew"
    if not on_link and signature.unix_ms < state.began_unix_ms:
        return "it was made before this node started: sign each sending anew"
    if not _nonces(state, who, now_ms).take(signature.unix_ms, signature.nonce, now_ms):
        return "it was seen before: sign each sending anew"
    return ""


def _nonces(state: State, who: Identity, now_ms: int) -> Nonces:
    key = (who.tenant, who.principal)
    found = state.nonces.get(key)
    if found is None:
        for other, nonces in list(state.nonces.items()):  # a new principal is rare: that of those gone goes now
            nonces.forget(now_ms)
            if not nonces:
                del state.nonces[other]
        found = state.nonces[key] = Nonces()
    return found
