"""Who sends a message, as the node sees it: its source, the call that it was made from, and whether it may.

What a sender says of itself counts for nothing; what a node has signed does. Refusing is `admit`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import actors, auditing
from reach.core.lineage import Forged, expired

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.peers import Peer
    from reach.core.ports import Identity
    from reach.core.state import State

ADDRESSED_CHARS = 200


def stamp_source(state: State, who: Identity, envelope: Envelope, peer: Peer | None, caller_id: str) -> str:
    """Write the source: the claimed one if the link may use it, else the caller's own id."""
    claimed = envelope.source
    if claimed and peer is not None and claimed in peer.names:
        return claimed
    if claimed and who.rights is not None and claimed != caller_id:
        auditing.restamped(state, who, peer, claimed, envelope.trace_id)
    envelope.source = caller_id
    return caller_id


def admitted(
    state: State, who: Identity, envelope: Envelope, target_data: bytes
) -> tuple[Lineage | None, Error | None]:
    """The call that a request was made from, and why it may not be sent."""
    parent, fault = None, None
    if envelope.lineage:
        parent, fault = called_from(state, envelope.lineage, envelope, who)
    return parent, fault or _access_fault(state, who, envelope, target_data, parent)


def called_from(state: State, lineage: bytes, envelope: Envelope, who: Identity) -> tuple[Lineage | None, Error | None]:
    """The call this one was made from, and what is wrong with a forged or expired lineage.

    One signed with an unknown key (another life of the mesh) makes a new root.
    """
    try:
        parent = state.lineage.verify(lineage, who.principal)
    except Forged as forged:
        return None, failure(codes.PERMISSION_DENIED, f"lineage: {forged}")
    if parent is None:
        state.log("info", "lineage of an unknown key: counted as a new root", envelope.trace_id)
        return None, None
    if expired(parent, int(state.unix * 1000)):
        text = "lineage: the call it belongs to ended more than 15 minutes ago; send it as a new one"
        return None, failure(codes.PERMISSION_DENIED, text)
    if parent.tenant != who.tenant:
        return None, failure(codes.PERMISSION_DENIED, "lineage: it was given to somebody else")
    envelope.trace_id = parent.trace_id
    envelope.parent_message_id = parent.message_id
    return parent, None


def _access_fault(
    state: State, who: Identity, envelope: Envelope, target_data: bytes, parent: Lineage | None
) -> Error | None:
    if who.rights is None:
        return None
    fault = actors.call_fault(state, who, envelope, target_data, parent)
    if fault is None and envelope.reply_topic:
        fault = actors.topic_fault(state, who, envelope.reply_topic, envelope.env, parent)
    return fault


def on_behalf_of(state: State, who: Identity, envelope: Envelope) -> str:
    """The actors of a message that is refused, oldest first; empty: its sender acts for itself, or says falsely."""
    try:
        parent = state.lineage.verify(envelope.lineage, who.principal) if envelope.lineage else None
    except Forged:
        return ""
    return ",".join(actors.behind(parent, who.principal))


def addressed(target: Target) -> str:
    """To whom, in short."""
    to = target.agent_id or target.agent_type or (f"topic {target.topic}" if target.topic else "")
    return (to or f"capabilities {','.join(target.capabilities)}")[:ADDRESSED_CHARS]
