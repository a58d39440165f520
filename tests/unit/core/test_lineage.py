"""Lineages: what we signed is believed, everything else is not."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Hop
from agentreach.v1.peer_pb2 import Lineage
from reach.core.lineage import Forged, LineageKeys, expired, valid_until_unix_ms

NEW = (2, b"n" * 32)
OLD = (1, b"o" * 32)


def lineage(**fields: object) -> Lineage:
    made = Lineage(
        message_id="m-1",
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        hop_count=1,
        deadline_unix_ms=1_764_500_000_000,
        valid_until_unix_ms=valid_until_unix_ms(1_764_500_000_000),
        tenant="default",
        principal="anonymous",
        env="production",
    )
    made.path.append(Hop(agent_id="a/1", message_id="m-1", session_id="s", dedup_key="k"))
    made.MergeFrom(Lineage(**fields))  # type: ignore[arg-type]
    return made


def test_what_was_signed_is_read_back() -> None:
    keys = LineageKeys(NEW)
    assert keys.verify(keys.sign(lineage())) == lineage()


@given(secret=st.binary(min_size=32, max_size=100), content=st.text(max_size=300))
def test_the_signature_is_hmac_sha256_of_the_content(secret: bytes, content: str) -> None:
    signed = LineageKeys((7, secret)).sign(Lineage(message_id=content))
    assert signed[0] == 7
    assert signed[1:33] == hmac.digest(secret, signed[33:], "sha256")
    assert signed[33:] == Lineage(message_id=content).SerializeToString()


def test_the_previous_key_is_still_believed_and_no_longer_signs() -> None:
    before = LineageKeys(OLD).sign(lineage())
    keys = LineageKeys(NEW, OLD)
    assert keys.verify(before) == lineage()
    assert keys.sign(lineage())[0] == NEW[0]


def test_an_unknown_key_is_not_a_forgery() -> None:
    assert LineageKeys(NEW).verify(LineageKeys(OLD).sign(lineage())) is None
    assert LineageKeys(NEW).verify(b"") is None


@given(position=st.integers(min_value=1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_forgery(position: int, bit: int) -> None:
    keys = LineageKeys(NEW, OLD)
    signed = bytearray(keys.sign(lineage()))
    signed[1 + position % (len(signed) - 1)] ^= 1 << bit
    with pytest.raises(Forged):
        keys.verify(bytes(signed))


@given(length=st.integers(min_value=1))
def test_a_cut_lineage_is_a_forgery(length: int) -> None:
    keys = LineageKeys(NEW)
    signed = keys.sign(lineage())
    with pytest.raises(Forged):
        keys.verify(signed[: 1 + length % (len(signed) - 1)])


@given(garbage=st.binary(max_size=200))
def test_garbage_is_a_forgery_or_unknown_and_never_believed(garbage: bytes) -> None:
    keys = LineageKeys(NEW)
    assert keys.verify(b"\x63" + garbage) is None
    with pytest.raises(Forged):
        keys.verify(bytes((NEW[0],)) + garbage)


def test_a_signature_by_another_known_key_does_not_count_under_this_one() -> None:
    signed = LineageKeys(OLD).sign(lineage())
    with pytest.raises(Forged):
        LineageKeys(NEW, OLD).verify(bytes((NEW[0],)) + signed[1:])


def test_content_that_does_not_parse_is_a_forgery_even_when_signed() -> None:
    content = b"\xff\xff\xff"
    signed = bytes((NEW[0],)) + hmac.digest(NEW[1], content, "sha256") + content
    with pytest.raises(Forged):
        LineageKeys(NEW).verify(signed)


def test_a_lineage_outlives_its_deadline_by_a_quarter_of_an_hour() -> None:
    made = lineage()
    assert not expired(made, made.deadline_unix_ms + 900_000)
    assert expired(made, made.deadline_unix_ms + 900_001)
    assert expired(Lineage(), 1)


@pytest.mark.parametrize("key", [(-1, b"k" * 32), (256, b"k" * 32), (1, b"short")])
def test_a_key_that_cannot_be_used_is_refused(key: tuple[int, bytes]) -> None:
    with pytest.raises(ValueError, match="lineage key"):
        LineageKeys(key)


def test_two_keys_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="same id"):
        LineageKeys((1, b"a" * 32), (1, b"b" * 32))
