"""How ids are made from random bits and a time that the caller brings: message, trace and span ids.

Pure on purpose: whoever has a clock and a source of randomness (the SDK, the node) draws once and passes both in.
"""

from __future__ import annotations

_UNIX_MS_MASK = (1 << 48) - 1
_RANDOM_A_MASK = 0xFFF << 64  # 12 bits beside the version, as they stand in the UUID
_RANDOM_B_MASK = (1 << 62) - 1  # 62 bits beside the variant
_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_HEX = "0123456789abcdefABCDEF"

RANDOM_BITS_OF_UUID7 = 74


def uuid7(unix_ms: int, random_bits: int) -> str:
    """A version 7 UUID (RFC 9562) of a wall-clock time in milliseconds and 74 random bits (more are cut off).

    Ids of a later millisecond compare greater as text.
    """
    number = (
        (unix_ms & _UNIX_MS_MASK) << 80
        | _VERSION_7
        | (random_bits << 2) & _RANDOM_A_MASK
        | _VARIANT
        | random_bits & _RANDOM_B_MASK
    )
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid7_unix_ms(message_id: str) -> int | None:
    """The wall-clock time in milliseconds at which a version 7 UUID was made, or None for any other id."""
    if len(message_id) != 36 or message_id[14] != "7" or message_id[19] not in "89abAB":
        return None
    digits = message_id.replace("-", "")
    if len(digits) != 32 or digits.strip(_HEX):
        return None
    if not message_id[8] == message_id[13] == message_id[18] == message_id[23] == "-":
        return None
    return int(digits[:12], 16)


def trace_id(random_bits: int) -> str:
    """A W3C trace id: 128 random bits as 32 hex digits. All zeros mean "none" there, so 0 becomes 1."""
    return (random_bits & (1 << 128) - 1 or 1).to_bytes(16, "big").hex()  # a third of what a format takes


def span_id(random_bits: int) -> str:
    """A W3C span id: 64 random bits as 16 hex digits, never all zeros."""
    return (random_bits & (1 << 64) - 1 or 1).to_bytes(8, "big").hex()
