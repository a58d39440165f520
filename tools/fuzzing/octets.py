"""Bytes that were something once: cut, flipped, doubled, spliced."""

from __future__ import annotations

from random import Random

_NUMBERS = (b"\x00", b"\x7f", b"\x80\x01", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 9)
BYTES_MAX = 1 << 20  # what grows by being doubled stops here


def damage(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """The bytes with one to four things done to them; `other` is what may be spliced in."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 2, 4, 16, 64))
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at : at + length]
            case 3:
                out[at:at] = rng.randbytes(length)
            case 4 if len(out) < BYTES_MAX:
                out[at:at] = out[at : at + length] * rng.randrange(1, 5)
            case 5:
                del out[at:]
            case 6:
                out[at : at + 1] = rng.choice(_NUMBERS)
            case _:
                start = rng.randrange(len(other) + 1)
                out[at:at] = other[start : start + length * 4]
    return bytes(out)
