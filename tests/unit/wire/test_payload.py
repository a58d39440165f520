from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Envelope, Payload
from agentreach.v1.frame_pb2 import Frame, Signal
from agentreach.wire.payload import Blob, Form, PayloadError, decode, encode, form_of

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


def travelled(payload: Payload) -> Payload:
    return Payload.FromString(payload.SerializeToString())


def same(one: object, other: object) -> bool:
    """Equal, with bool and number kept apart; 1.0 and 1 are the same number in JSON."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(values, st.sampled_from(Form))
def test_a_value_arrives_as_it_was_in_every_form(value: object, form: Form) -> None:
    assert same(decode(travelled(encode(value, form))), value)


@given(st.binary(max_size=100), st.sampled_from(Form))
def test_bytes_are_always_in_the_body(value: bytes, form: Form) -> None:
    for data in (value, bytearray(value), memoryview(value)):
        payload = encode(data, form)
        assert (payload.WhichOneof("content"), payload.content_type) == ("body", "application/octet-stream")
        assert decode(travelled(payload)) == value


@pytest.mark.parametrize(
    ("value", "form", "content", "content_type"),
    [
        ("hi", Form.BODY, "body", "text/plain"),
        ("hi", Form.TEXT, "text", "text/plain"),
        ("hi", Form.JSON, "json", "application/json"),
        ({"a": 1}, Form.BODY, "body", "application/json"),
        ({"a": 1}, Form.JSON, "json", "application/json"),
        ({"a": 1}, Form.TEXT, "json", "application/json"),
        (None, Form.BODY, "body", "application/json"),
        (None, Form.JSON, "json", "application/json"),
        ([], Form.JSON, "json", "application/json"),
        ({}, Form.JSON, "json", "application/json"),
    ],
)
def test_an_answer_takes_the_form_it_was_asked_in(value: object, form: Form, content: str, content_type: str) -> None:
    payload = travelled(encode(value, form))
    assert (payload.WhichOneof("content"), payload.content_type) == (content, content_type)
    assert decode(payload) == value


def test_the_form_of_a_payload_is_how_its_content_is_held() -> None:
    assert form_of(Payload()) is Form.BODY
    for form in Form:
        assert form_of(encode("hello", form)) is form
    assert form_of(encode(Blob("s3://bucket/key"))) is Form.BODY


def test_json_text_is_compact_and_readable() -> None:
    assert encode({"größe": [1, 2.5, None, True]}).body == '{"größe":[1,2.5,null,true]}'.encode()


def test_whole_numbers_in_a_value_arrive_as_int_up_to_two_to_the_53() -> None:
    payload = Payload()
    for number, kind in ((3.0, int), (-0.0, int), (2.0**53, int), (2.0**53 + 2, float), (0.5, float), (1e300, float)):
        payload.json.number_value = number
        value = decode(payload)
        assert type(value) is kind and value == number


def test_a_number_that_a_value_would_round_goes_into_the_body_instead() -> None:
    for form in (Form.JSON, Form.TEXT):
        payload = encode({"id": 2**53 + 1}, form)
        assert payload.WhichOneof("content") == "body" and decode(payload) == {"id": 2**53 + 1}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_both_ways(number: float) -> None:
    for form in Form:
        with pytest.raises(PayloadError, match="JSON"):
            encode({"x": [number]}, form)
    payload = Payload()
    payload.json.list_value.values.add().number_value = number
    with pytest.raises(PayloadError, match="not a JSON number"):
        decode(payload)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"NaN", "NaN"),
        (b'{"x":-Infinity}', "Infinity"),
        (b"1e999", "too large"),
        (b"[-1e999]", "too large"),
        (b"9" * 5000, "not JSON"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b"1 2", "not JSON"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\uDFFF":1}', "surrogate"),
        (b'"\xed\xa0\x80"', "UTF-8"),
        (b'"\xff"', "UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ('{"a":1}'.encode("utf-16"), "UTF-8"),
        (b"[" * 101 + b"]" * 101, "100 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "100 levels"),
        (b'{"a":' * 100_000, "100 levels"),
    ],
)
def test_bad_json_is_a_payload_error_that_names_the_problem(body: bytes, problem: str) -> None:
    with pytest.raises(PayloadError, match=problem):
        decode(Payload(content_type="application/json", body=body))


def test_paired_surrogates_and_escaped_backslashes_are_fine() -> None:
    assert decode(Payload(content_type="application/json", body=b'["\\ud83d\\ude00","\\\\ud800"]')) == ["😀", "\\ud800"]


def test_depth_counts_containers_not_brackets() -> None:
    deepest: object = 1
    for _ in range(100):
        deepest = [deepest]
    wide = {"text": "[" * 500, "rows": [[n] for n in range(500)]}
    for value in (deepest, wide):
        assert decode(encode(value)) == value


@pytest.mark.parametrize("levels", [101, 5000, 100_000])
def test_values_nested_too_deep_are_refused(levels: int) -> None:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    try:
        for form in Form:
            with pytest.raises(PayloadError, match="100 levels"):
                encode(value, form)
    finally:
        while isinstance(value, dict):  # taken apart by hand: freeing it recursively is another test's subject
            value = value.pop("a")


@pytest.mark.parametrize("container", ["list", "dict"])
def test_a_deep_answer_never_makes_a_frame_that_cannot_be_parsed(container: str) -> None:
    value: object = "x"
    for _ in range(100):
        value = [value] if container == "list" else {"a": value}
        payload = encode(value, Form.JSON)
        signal = Signal()
        signal.session_snapshot.handled.add().reply.CopyFrom(Envelope(payload=payload))
        frame = Frame.FromString(Frame(signals=[signal]).SerializeToString())
        assert decode(frame.signals[0].session_snapshot.handled[0].reply.payload) == value


@pytest.mark.parametrize("form", Form)
def test_lone_surrogates_are_refused(form: Form) -> None:
    for value in ("\ud800", {"a": "\ud800"}, ["\udfff"], {"\ud800": 1}):
        with pytest.raises(PayloadError, match="surrogate"):
            encode(value, form)


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize("form", Form)
def test_what_python_writes_as_json_arrives_as_json_means_it(form: Form) -> None:
    assert decode(encode({7: (1, 2), True: Color.RED, None: 1.5}, form)) == {"7": [1, 2], "true": 1, "null": 1.5}


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": b"bytes"}, {(1, 2): 3}, pytest.param(10**5000, id="huge")])
def test_what_json_cannot_say_is_refused_with_the_reason(value: object) -> None:
    with pytest.raises(PayloadError, match="cannot be said in JSON"):
        encode(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(PayloadError, match="Circular"):
        encode(loop)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", [1]),
        ("Application/JSON; charset=UTF-8", [1]),
        ("application/json;charset=latin-1", b"[1]"),
        ("text/plain", "[1]"),
        ('text/plain; charset="utf-8"; format=flowed', "[1]"),
        ("text/plain; charset=utf-16", b"[1]"),
        ("application/octet-stream", b"[1]"),
        ("image/png", b"[1]"),
        ("", b"[1]"),
        (";;;=", b"[1]"),
    ],
)
def test_a_body_is_read_by_its_content_type_and_unknown_ones_are_bytes(content_type: str, expected: object) -> None:
    assert decode(Payload(content_type=content_type, body=b"[1]")) == expected


def test_text_is_text_unless_it_is_declared_to_be_json() -> None:
    assert decode(Payload(text="[1]")) == "[1]"
    assert decode(Payload(text="[1]", content_type="application/json")) == [1]
    with pytest.raises(PayloadError, match="not JSON"):
        decode(Payload(text="hello", content_type="application/json"))


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(PayloadError, match="not UTF-8 at byte 2"):
        decode(Payload(content_type="text/plain", body=b"ab\xff"))


def test_no_content_is_none_and_empty_content_is_empty() -> None:
    assert decode(Payload()) is None
    assert decode(encode(b"")) == b"" and decode(encode("")) == ""


def test_a_value_of_no_kind_is_refused() -> None:
    payload = Payload()
    payload.json.list_value.values.add()
    with pytest.raises(PayloadError, match="neither null"):
        decode(payload)


def test_of_equal_keys_the_last_wins() -> None:
    assert decode(Payload(content_type="application/json", body=b'{"a":1,"a":2}')) == {"a": 2}


def test_a_blob_arrives_as_it_was() -> None:
    for blob in (Blob("s3://b/k", 7, b"\x01" * 32, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)), Blob("file:///x")):
        assert decode(travelled(encode(blob))) == blob


def test_a_blob_that_cannot_be_is_refused() -> None:
    with pytest.raises(PayloadError, match="blob"):
        encode(Blob("x", -1))
    payload = Payload()
    payload.blob.expires_at.seconds = 1 << 60
    with pytest.raises(PayloadError, match="expires_at"):
        decode(payload)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.sampled_from(["application/json", "text/plain", "x"]))
def test_any_body_is_a_value_or_a_payload_error(body: bytes, content_type: str) -> None:
    try:
        value = decode(Payload(content_type=content_type, body=body))
    except PayloadError:
        return
    if content_type == "application/json":
        assert value == json.loads(body)
