"""What the node writes into envelopes, as protobuf bytes appended to them.

Of a scalar field that occurs twice a parser takes the last, so appending replaces what a peer claimed, without taking
the message apart: measured, a delivery costs half as much as by setting a dozen fields and building a `Lineage`
object. Repeated fields add up instead; the callers clear those first. A test checks each function against the objects
built in the ordinary way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Hop
from agentreach.v1.peer_pb2 import Lineage
from agentreach.wire.link import varint
from reach.core.lineage import LINGER_MS

if TYPE_CHECKING:
    from reach.core.requests import MessageKey, Request
    from reach.core.state import State

_LENGTH_DELIMITED = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE}


def _key(message: Descriptor, name: str) -> bytes:
    field = message.fields_by_name[name]
    wire_type = 2 if field.type in _LENGTH_DELIMITED else 1 if field.type == FieldDescriptor.TYPE_FIXED64 else 0
    return varint(field.number << 3 | wire_type)


def _keys(message: Descriptor, names: str) -> tuple[bytes, ...]:
    return tuple(_key(message, name) for name in names.split())


_TYPE, _SOURCE, _RECIPIENT, _ENTRY, _TRACE, _LINEAGE, _TIMEOUT, _ATTEMPT, _FRESH, _HOPS, _PATH = _keys(
    Envelope.DESCRIPTOR, "type source recipient entry trace_id lineage timeout_ms attempt fresh hop_count path"
)
_EPOCH, _TENANT, _PRINCIPAL, _CORRELATION, _SESSION_EVENT, _SEQUENCE = _keys(
    Envelope.DESCRIPTOR, "epoch tenant principal correlation_id session_event sequence"
)
_HOP_AGENT, _HOP_MESSAGE, _HOP_SESSION, _HOP_DEDUP = _keys(Hop.DESCRIPTOR, "agent_id message_id session_id dedup_key")
_L_MESSAGE, _L_TRACE, _L_PATH, _L_HOPS, _L_DEADLINE, _L_VALID, _L_TENANT, _L_PRINCIPAL, _L_ENV = _keys(
    Lineage.DESCRIPTOR, "message_id trace_id path hop_count deadline_unix_ms valid_until_unix_ms tenant principal env"
)

_ENTRY_16 = _ENTRY + b"\x10"  # an entry of ours is 16 bytes
_REQUEST = _TYPE + varint(pb.REQUEST)
_ONE_HOP = _HOPS + b"\x01"
_L_ONE_HOP = _L_HOPS + b"\x01"
_YES, _NO = b"\x01", b"\x00"
_NOTHING_CLAIMED = b"".join(
    (_TYPE, varint(pb.RESPONSE), *(key + _NO for key in (_RECIPIENT, _LINEAGE, _TENANT, _PRINCIPAL, _HOPS)))
)
"""A RESPONSE, and the scalar fields that no agent may write."""


def text(key: bytes, value: str) -> bytes:
    """A string field."""
    data = value.encode()
    return key + varint(len(data)) + data


def recipient_fields(agent_id: str) -> tuple[bytes, bytes]:
    """(the envelope's recipient, a hop's agent_id): the same for every delivery to an agent."""
    return text(_RECIPIENT, agent_id), text(_HOP_AGENT, agent_id)


def origin_fields(key: MessageKey) -> tuple[bytes, bytes]:
    """(the envelope's tenant and principal, those and the env for a lineage): the same for all of a principal."""
    tenant, principal, env, _ = key
    return (
        text(_TENANT, tenant) + text(_PRINCIPAL, principal),
        text(_L_TENANT, tenant) + text(_L_PRINCIPAL, principal) + text(_L_ENV, env),
    )


def delivered(
    state: State, request: Request, envelope: Envelope, recipient: tuple[bytes, bytes], parent: Lineage | None
) -> bytes:
    """The REQUEST for one attempt: the sender's envelope with all that the node writes, its lineage signed."""
    message_id = request.message_id.encode()
    trace_id = request.trace_id.encode()
    hop = b"".join((recipient[1], _HOP_MESSAGE, varint(len(message_id)), message_id, _hop_rest(envelope)))
    hop_field = b"".join((varint(len(hop)), hop))
    origin = state.origins.get(request.key[:3])
    if origin is None:
        origin = state.origin(request.key)
    if parent is None:
        path, lineage_path, hops, lineage_hops = _PATH + hop_field, _L_PATH + hop_field, _ONE_HOP, _L_ONE_HOP
    else:
        earlier = [_sized(each.SerializeToString()) for each in parent.path]
        path = b"".join([_PATH + each for each in earlier] + [_PATH + hop_field])
        lineage_path = b"".join([_L_PATH + each for each in earlier] + [_L_PATH + hop_field])
        count = varint(parent.hop_count + 1)
        hops, lineage_hops = _HOPS + count, _L_HOPS + count
    deadline_ms = int((request.deadline + state.unix_offset) * 1000)
    lineage = state.lineage.sign_bytes(
        b"".join(
            (
                _L_MESSAGE, varint(len(message_id)), message_id, _L_TRACE, varint(len(trace_id)), trace_id,
                lineage_path, lineage_hops, _L_DEADLINE, deadline_ms.to_bytes(8, "little"),
                _L_VALID, (deadline_ms + LINGER_MS).to_bytes(8, "little"),
                origin[1],
            )
        )
    )  # fmt: skip
    left_ms = max(1, int((request.deadline - state.now) * 1000))
    envelope.ClearField("path")
    envelope.ClearField("actors")
    return b"".join(
        (
            envelope.SerializeToString(), _REQUEST, recipient[0], _ENTRY_16, request.entry, _TRACE,
            varint(len(trace_id)), trace_id, _LINEAGE, varint(len(lineage)), lineage, _TIMEOUT, varint(left_ms),
            _ATTEMPT, varint(request.attempt), _FRESH, _YES if request.fresh else _NO, hops, path,
            _EPOCH, varint(request.epoch), origin[0],
        )
    )  # fmt: skip


def _hop_rest(envelope: Envelope) -> bytes:
    session_id, dedup_key = envelope.session_id, envelope.dedup_key
    if not session_id and not dedup_key:
        return b""
    return text(_HOP_SESSION, session_id) + text(_HOP_DEDUP, dedup_key)


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def answered(request: Request, envelope: Envelope, agent_id: str) -> bytes:
    """An agent's RESPONSE as the caller gets it: it says only what the node vouches for."""
    envelope.ClearField("target")
    envelope.ClearField("path")
    envelope.ClearField("actors")
    message_id, trace_id, source = request.message_id.encode(), request.trace_id.encode(), agent_id.encode()
    return b"".join(
        (
            envelope.SerializeToString(), _NOTHING_CLAIMED, _SOURCE, varint(len(source)), source,
            _CORRELATION, varint(len(message_id)), message_id, _TRACE, varint(len(trace_id)), trace_id,
            _ENTRY_16, request.entry, _EPOCH, varint(request.epoch),
            _SESSION_EVENT, varint(request.session_event), _SEQUENCE, varint(request.items),
        )
    )  # fmt: skip
