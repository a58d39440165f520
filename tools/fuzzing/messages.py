"""Messages of the contract with anything in them: every field, nested, at its extremes, drawn from a random source.

The source is a `random.Random`, or one that hypothesis steers. Strings are always UTF-8 (protobuf knows no others);
control characters, unknown enum values, NaN and infinity are not spared. `Words` is what a well informed attacker
knows: names, ids and tokens of the mesh at hand, so that not everything fails at the first check.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_DEPTH_MAX = 5
_REPEATED_MAX = 4
WORDS_MAX = 256  # learned ones of each kind; beyond, they replace one another

_TYPES = FieldDescriptor
_BITS = {
    _TYPES.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    _TYPES.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    _TYPES.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    _TYPES.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_INTEGERS = (0, 1, 2, 3, 7, 10, 64, 100, 200, 256, 1000, 5000, 30_000, 600_000)
_FLOATS = (0.0, 0.5, 1.0, -1.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), 2.0**53, 2.0**63)
_TEXTS = (
    "", "a", "A", "a/b", "a/b/c", "/", "caller/x", "caller", "production", "staging", " ", "a b", "\x00", "a\x00b",
    "\x1b[2J", "\x7f", "\x85", "\n", "é", "ﬁ", "\U0010ffff", "\u202e", "{}", "{", "null", "NaN", "%s", "../..",
    "x" * 63, "x" * 64, "x" * 129, "x" * 257, "é" * 200, "1.0", ">=1,<2", "==1.*", "===x", "~=1",
    "1!2.3rc1.post4.dev5+local", "<", ">=", "application/json", "text/plain", "application/octet-stream",
)  # fmt: skip
_BLOBS = (b"", b"\x00", b"\xff" * 16, b"{}", b"{", b"NaN", b"\xff\xfe", b"x" * 33, b"\x01" + b"\x00" * 40, b"0" * 300)


class Words:
    """Texts and bytes that mean something where the messages go."""

    def __init__(self, texts: Sequence[str] = (), blobs: Sequence[bytes] = ()) -> None:
        self.texts = list(texts)
        self.blobs = list(blobs)
        self.delivered: list[Message] = []
        """Envelopes that were given to one who knows these words: what can be answered."""
        self._learned = 0

    def learn(self, texts: Sequence[str] = (), blobs: Sequence[bytes] = ()) -> None:
        """Know these as well; the oldest learned ones are forgotten."""
        for known, new in ((self.texts, texts), (self.blobs, blobs)):
            for each in new:
                self._learned += 1
                if not each or each in known:
                    continue
                if len(known) < WORDS_MAX:
                    known.append(each)  # type: ignore[attr-defined]
                else:
                    known[self._learned % WORDS_MAX] = each  # type: ignore[index]


def text(rng: Random, words: Words) -> str:
    """A string for any field."""
    roll = rng.randrange(8)
    if roll < 5 and words.texts:
        return rng.choice(words.texts)
    if roll < 7:
        return rng.choice(_TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(rng.randrange(12)))


def blob(rng: Random, words: Words) -> bytes:
    """Bytes for any field."""
    roll = rng.randrange(8)
    if roll < 4 and words.blobs:
        return rng.choice(words.blobs)
    if roll < 6:
        return rng.choice(_BLOBS)
    return rng.randbytes(rng.choice((1, 8, 16, 16, 40)))


def _number(rng: Random, low: int, high: int) -> int:
    roll = rng.randrange(4)
    if roll == 0:
        return rng.choice((low, high, high - 1, high // 2 + 1))
    if roll == 1:
        return rng.randrange(low, high + 1)
    return rng.choice(_INTEGERS)


def scalar(rng: Random, field: FieldDescriptor, words: Words) -> Any:
    """A value for a field that is not a message."""
    kind = field.cpp_type
    if kind == _TYPES.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return rng.choice(known) if rng.randrange(8) else rng.choice((-1, len(known), 77, (1 << 31) - 1, -(1 << 31)))
    if kind == _TYPES.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (_TYPES.CPPTYPE_DOUBLE, _TYPES.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if kind == _TYPES.CPPTYPE_STRING:
        return blob(rng, words) if field.type == _TYPES.TYPE_BYTES else text(rng, words)
    return _number(rng, *_BITS[kind])


def fill(rng: Random, message: Message, words: Words, *, density: float = 0.4, depth: int = 0) -> None:
    """Set some of a message's fields, on average `density` of them, to anything."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is None and rng.random() < density:
            set_field(rng, message, field, words, density, depth)
    for oneof in message.DESCRIPTOR.oneofs:
        if rng.random() < max(density, 0.8):
            set_field(rng, message, rng.choice(list(oneof.fields)), words, density, depth)


def set_field(rng: Random, message: Message, field: FieldDescriptor, words: Words, density: float, depth: int) -> None:
    """Give one field a value, or another one."""
    nested = field.cpp_type == _TYPES.CPPTYPE_MESSAGE
    if nested and depth >= _DEPTH_MAX:
        return
    if nested and field.message_type.GetOptions().map_entry:
        _fill_map(rng, message, field, words, density, depth)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(rng.randrange(1, _REPEATED_MAX)):
            if nested:
                fill(rng, values.add(), words, density=density, depth=depth + 1)
            else:
                values.append(scalar(rng, field, words))
    elif nested:
        inner = getattr(message, field.name)
        inner.SetInParent()
        fill(rng, inner, words, density=density, depth=depth + 1)
    else:
        setattr(message, field.name, scalar(rng, field, words))


def _fill_map(rng: Random, message: Message, field: FieldDescriptor, words: Words, density: float, depth: int) -> None:
    entry = field.message_type.fields_by_name
    values = getattr(message, field.name)
    for _ in range(rng.randrange(1, _REPEATED_MAX)):
        key = scalar(rng, entry["key"], words)
        if entry["value"].cpp_type == _TYPES.CPPTYPE_MESSAGE:
            fill(rng, values[key], words, density=density, depth=depth + 1)
        else:
            values[key] = scalar(rng, entry["value"], words)


def disturb(rng: Random, message: Message, words: Words) -> None:
    """Change one thing about a message, somewhere inside it."""
    present = [field for field, _ in message.ListFields()]
    if present and rng.random() < 0.7:
        field = rng.choice(present)
        value = getattr(message, field.name)
        plain_map = field.cpp_type == _TYPES.CPPTYPE_MESSAGE and field.message_type.GetOptions().map_entry
        if field.cpp_type == _TYPES.CPPTYPE_MESSAGE and not plain_map and rng.random() < 0.8:
            disturb(rng, rng.choice(list(value)) if field.is_repeated else value, words)
            return
        if rng.random() < 0.3:
            message.ClearField(field.name)
            return
    else:
        field = rng.choice(list(message.DESCRIPTOR.fields)) if message.DESCRIPTOR.fields else None
    if field is not None:
        set_field(rng, message, field, words, 0.3, 2)
