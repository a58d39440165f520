"""What can be read of a frame one of whose envelopes cannot: only that message fails, not all that share its link.

A protobuf parser refuses a whole frame for one envelope that it cannot read: one with text that is not UTF-8, or data
nested deeper than parsers go (100 messages). The frame's own fields are walked by hand then, one envelope is parsed at
a time, and of the unreadable ones those fields are kept by which they can be answered.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import RESPONSE, Envelope
from agentreach.v1.frame_pb2 import Frame
from agentreach.wire.errors import failure
from agentreach.wire.framing import ENVELOPES, varint

WHY = "a part of it cannot be read: data nested too deep for a protobuf parser, text that is not UTF-8, or no protobuf"

_ENVELOPES = Frame.DESCRIPTOR.fields_by_name["envelopes"].number
_TELLING = frozenset(
    Envelope.DESCRIPTOR.fields_by_name[name].number
    for name in ("message_id", "type", "source", "correlation_id", "entry", "trace_id", "attempt", "epoch", "env")
)
"""By which an envelope can be answered, or counts as an answer."""

_SIZES = {1: 8, 5: 4}
_BYTES, _VARINT = 2, 0
_VARINT_BYTES_MAX = 10


def salvaged(data: bytes) -> tuple[Frame, list[Envelope]] | None:
    """The frame with what can be read of it, and what is left of the messages that cannot; None: it is no frame.

    An unreadable RESPONSE stands in the frame as one with an error: whoever waits for it is told.
    """
    kept = bytearray()
    unread: list[Envelope] = []
    try:
        for number, start, content, end in _fields(data):
            if number != _ENVELOPES or _reads(data[start:end]):
                kept += data[start:end]
                continue
            rest = _telling(data[content:end])
            if rest.type == RESPONSE:
                rest.error.CopyFrom(failure(codes.AGENT_ERROR, f"the agent's answer was lost: {WHY}"))
                kept += Frame(envelopes=[rest]).SerializeToString()
            else:
                unread.append(rest)
        return Frame.FromString(bytes(kept)), unread
    except (DecodeError, ValueError):
        return None


def framed(data: bytes) -> Envelope:
    """Parse a serialised envelope as one of a frame, in which it will travel. Raises `DecodeError`.

    What can be read by itself and not one level deeper would break the link of whoever it is for.
    """
    return Frame.FromString(ENVELOPES + varint(len(data)) + data).envelopes[0]


def _reads(piece: bytes) -> bool:
    try:
        Frame.FromString(piece)
    except DecodeError:
        return False
    return True


def _telling(data: bytes) -> Envelope:
    pieces = [data[start:end] for number, start, _, end in _fields(data) if number in _TELLING]
    return Envelope.FromString(b"".join(pieces))


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Each field of a message: its number, where it starts, where its content starts, where it ends."""
    at, whole = 0, len(data)
    while at < whole:
        start = at
        tag, at = _varint(data, at)
        kind, content = tag & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, content = _varint(data, at)
            at = content + size
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise ValueError("a group, or no field")
        if at > whole:
            raise ValueError("it ends too early")
        yield tag >> 3, start, content, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts there, and where it ends."""
    value = 0
    for place in range(_VARINT_BYTES_MAX):
        if at + place >= len(data):
            break
        octet = data[at + place]
        value |= (octet & 127) << 7 * place
        if octet < 128:
            return value, at + place + 1
    raise ValueError("a number without an end")
