from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.wire import ids

times = st.integers(0, (1 << 48) - 1)
bits = st.integers(0, (1 << 128) - 1)


@given(times, bits)
def test_a_message_id_is_a_version_7_uuid_of_its_time(unix_ms: int, random_bits: int) -> None:
    text = ids.uuid7(unix_ms, random_bits)
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert parsed.version == 7 and parsed.variant == uuid.RFC_4122
    assert ids.uuid7_unix_ms(text) == unix_ms
    assert ids.uuid7_unix_ms(text.upper()) == unix_ms


@given(times, bits, bits)
def test_ids_differ_exactly_when_their_74_random_bits_differ(unix_ms: int, one: int, other: int) -> None:
    mask = (1 << ids.RANDOM_BITS_OF_UUID7) - 1
    assert (ids.uuid7(unix_ms, one) == ids.uuid7(unix_ms, other)) == (one & mask == other & mask)


@given(times, times, bits, bits)
def test_ids_sort_by_time(earlier: int, later: int, one: int, other: int) -> None:
    if earlier < later:
        assert ids.uuid7(earlier, one) < ids.uuid7(later, other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order-17",
        str(uuid.UUID(int=0)),
        "0190f3f0-0000-4000-8000-000000000000",  # version 4
        "0190f3f0-0000-7000-c000-000000000000",  # another variant
        "0190f3f0-0000-7000-8000-00000000000g",
        "0190f3f0-0000-7000-8000-00000000000_",
        "0190f3f00-000-7000-8000-000000000000",
        "+190f3f0-0000-7000-8000-000000000000",
        " 190f3f0-0000-7000-8000-000000000000",
        "0190f3f0-0000-7000-8000-0000000000000",
        "0190f3f0000070008000000000000000",
        "{190f3f0-0000-7000-8000-00000000000}",
        "٠190f3f0-0000-7000-8000-000000000000",
    ],
)
def test_other_ids_have_no_time(text: str) -> None:
    assert ids.uuid7_unix_ms(text) is None


@given(st.text(alphabet="0123456789abcdef-7", min_size=36, max_size=36))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    found = ids.uuid7_unix_ms(text)
    if found is not None:
        assert uuid.UUID(text).int >> 80 == found


@given(bits)
def test_trace_and_span_ids_are_hex_of_their_length_and_never_all_zeros(random_bits: int) -> None:
    for text, length in ((ids.trace_id(random_bits), 32), (ids.span_id(random_bits), 16)):
        assert len(text) == length and int(text, 16) > 0 and text == text.lower()
    assert int(ids.trace_id(random_bits), 16) == (random_bits or 1)


def test_no_random_bits_still_make_an_id() -> None:
    assert ids.trace_id(0).endswith("1") and ids.span_id(1 << 64).endswith("1")
