"""A frame as bytes: protobuf by hand, so that an envelope is serialised once and a frame is a join of what there is.

Knows the field keys and the base-128 numbers of the contract; which frame carries what is the link's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item

# Field keys of Frame (number << 3 | wire type) and of Envelope.fresh.
SEQ: Final = b"\x08"
ACK: Final = b"\x10"
AGE: Final = b"\x18"
ENVELOPES: Final = b"\x22"
SIGNALS: Final = b"\x2a"
NOT_FRESH: Final = b"\x68\x00"  # fresh = false appended: the last value of a scalar field wins


def _long_varint(number: int) -> bytes:
    if 1 << 14 <= number < 1 << 21:  # timeouts above 16 s, large payloads
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_TABLED: Final = 1 << 14  # lengths of ordinary envelopes and timeouts of ordinary requests: one or two bytes
_TABLE: Final = [_long_varint(number) for number in range(_TABLED)]


def varint(number: int) -> bytes:
    """Protobuf's base-128 encoding of a number ≥ 0."""
    return _TABLE[number] if number < _TABLED else _long_varint(number)


def frame(seq: int, ack: int, items: Iterable[Item], signals: Iterable[bytes], now: float) -> bytes:
    """A serialised `Frame`; 0 leaves the number or the ack out. Its age is that of the oldest item that has data."""
    parts: list[bytes] = []
    if seq:
        parts += (SEQ, varint(seq))
    if ack:
        parts += (ACK, varint(ack))
    age_ms = 0
    for item in items:
        data = item.data
        if data is not None:
            parts += (ENVELOPES, varint(len(data)), data)
            age_ms = max(age_ms, int((now - item.stamped) * 1000))
    if age_ms > 0:
        parts += (AGE, varint(age_ms))
    for data in signals:
        parts += (SIGNALS, varint(len(data)), data)
    return b"".join(parts)
