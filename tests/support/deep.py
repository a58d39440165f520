"""JSON data nested deeper than anybody's protobuf library would write it."""

from __future__ import annotations

from google.protobuf.struct_pb2 import ListValue, Value

from agentreach.v1.envelope_pb2 import Envelope, Payload
from agentreach.wire.framing import varint

_LIST = Value.DESCRIPTOR.fields_by_name["list_value"].number
_ITEM = ListValue.DESCRIPTOR.fields_by_name["values"].number
_JSON = Payload.DESCRIPTOR.fields_by_name["json"].number
_PAYLOAD = Envelope.DESCRIPTOR.fields_by_name["payload"].number


def deep(envelope: Envelope, levels: int) -> bytes:
    """An envelope, serialised, whose payload is so many lists in one another. A parser takes about 48."""
    value = Value(bool_value=True).SerializeToString()
    for _ in range(levels):
        value = _field(_LIST, _field(_ITEM, value))
    without = Envelope()
    without.CopyFrom(envelope)
    without.ClearField("payload")
    return without.SerializeToString() + _field(_PAYLOAD, _field(_JSON, value))


def _field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content
