"""The canonical form and what is made of it: the same as the vectors, and as a second, plainer implementation."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire import signing

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "signatures.md"
VECTORS: list[dict[str, Any]] = json.loads(PAGE.with_suffix(".json").read_text())
SECRET, KEY, NONCE = bytes(range(32)), "0a1b2c3d", bytes(range(16))
NAMES = st.text(max_size=12)


def envelope_of(vector: dict[str, Any]) -> Envelope:
    return json_format.ParseDict(vector["envelope"], Envelope())


def signed(envelope: Envelope, **changed: Any) -> bytes:
    chosen: dict[str, Any] = {"key_id": KEY, "audience": "node-1", "unix_ms": 1_700_000_000_000, "nonce": NONCE}
    return signing.sign(envelope, SECRET, **(chosen | changed))


def request(**fields: Any) -> Envelope:
    wanted: dict[str, Any] = {
        "message_id": "m",
        "target": pb.Target(agent_type="echo"),
        "payload": pb.Payload(text="hi"),
    } | fields
    return Envelope(**wanted)


def believed(envelope: Envelope, data: bytes, secret: bytes = SECRET) -> bool:
    read = signing.read(data)
    return read is not None and signing.fits(envelope, read, secret)


# ---- the vectors ----


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_a_vector_is_what_is_signed(vector: dict[str, Any]) -> None:
    envelope, nonce = envelope_of(vector), bytes.fromhex(vector["nonce"])
    said = (vector["key_id"], vector["audience"], vector["unix_ms"], nonce)
    assert signing.canonical(envelope, *said).hex() == vector["canonical"]
    secret = signing.secret_of(vector["signing_secret"])
    assert signing.sign(envelope, secret, *said).hex() == vector["signature"]
    assert believed(envelope, bytes.fromhex(vector["signature"]), secret)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_a_plain_implementation_of_the_reference_page_comes_to_the_same(vector: dict[str, Any]) -> None:
    canonical = plainly(vector)
    assert canonical.hex() == vector["canonical"]
    secret = signing.secret_of(vector["signing_secret"])
    assert bytes.fromhex(vector["signature"])[-32:] == hmac.new(secret, canonical, hashlib.sha256).digest()


def test_the_pages_example_is_the_first_vector_and_its_lines_are_the_form() -> None:
    message, form, signature = re.findall(r"(?ms)^```text\n(.*?)^```$", PAGE.read_text())
    vector = VECTORS[0]
    assert json.loads(message) == vector["envelope"]
    for lines, wanted in ((form, "canonical"), (signature, "signature")):
        assert "".join(line.partition("#")[0].strip() for line in lines.splitlines()) == vector[wanted]


def plainly(vector: dict[str, Any]) -> bytes:
    """The form written down once more, from the reference page, with nothing of `agentreach.wire`."""
    e = envelope_of(vector)
    t, p = e.target, e.payload

    def lp(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def n(value: int) -> bytes:
        return int(value).to_bytes(8, "big")

    def pairs(names: Any) -> bytes:
        out = b""
        for name in sorted(names, key=lambda each: each.encode()):
            out += lp(name.encode(), names[name].encode())
        return out

    target = lp(
        t.agent_id.encode(), t.topic.encode(), t.agent_type.encode(),
        lp(*sorted(c.encode() for c in t.capabilities)), pairs(t.labels), t.version.encode(), n(t.policy),
        t.hash_key.encode(), n(t.broadcast),
    )  # fmt: skip
    kind = p.WhichOneof("content") or ""
    content: dict[str, Callable[[], bytes]] = {"": lambda: b"", "body": lambda: p.body, "text": lambda: p.text.encode()}
    content["json"] = lambda: plain_json(json_format.MessageToDict(p.json))
    content["blob"] = lambda: lp(
        p.blob.uri.encode(), n(p.blob.size_bytes), p.blob.sha256,
        p.blob.expires_at.seconds.to_bytes(8, "big") + p.blob.expires_at.nanos.to_bytes(4, "big"),
    )  # fmt: skip
    payload = lp(n(p.schema_version), p.content_type.encode(), kind.encode(), content[kind]())
    return b"agentreach-signature\x00\x01" + lp(
        vector["key_id"].encode(), vector["audience"].encode(), n(vector["unix_ms"]), bytes.fromhex(vector["nonce"]),
        n(e.protocol_version or 1), n(e.type or 1), e.message_id.encode(), n(e.fresh), e.source.encode(),
        e.env.encode(), target, payload, e.correlation_id.encode(), e.trace_id.encode(), e.lineage,
        e.session_id.encode(), n(e.strict_session), n(e.epoch), e.dedup_key.encode(), e.reply_topic.encode(),
        n(e.priority), n(e.idempotent), pairs(e.headers),
    )  # fmt: skip


def plain_json(value: Any) -> bytes:
    def sized(kind: bytes, text: str) -> bytes:
        return kind + len(text.encode()).to_bytes(4, "big") + text.encode()

    if value is None:
        return b"0"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, float | int):
        return b"n" + struct.pack(">d", value)
    if isinstance(value, str):
        return sized(b"s", value)
    if isinstance(value, list):
        return b"[" + len(value).to_bytes(4, "big") + b"".join(map(plain_json, value))
    fields = b"".join(sized(b"k", name) + plain_json(value[name]) for name in sorted(value))
    return b"{" + len(value).to_bytes(4, "big") + fields


# ---- what is covered ----

CHANGES: dict[str, dict[str, Any]] = {
    "message_id": {"message_id": "n"},
    "type": {"type": pb.EVENT},
    "protocol_version": {"protocol_version": 2},
    "source": {"source": "planner/1"},
    "env": {"env": "staging"},
    "fresh": {"fresh": True},
    "trace_id": {"trace_id": "t"},
    "lineage": {"lineage": b"l"},
    "session_id": {"session_id": "s"},
    "strict_session": {"strict_session": True},
    "epoch": {"epoch": 1},
    "correlation_id": {"correlation_id": "c"},
    "dedup_key": {"dedup_key": "d"},
    "reply_topic": {"reply_topic": "t"},
    "priority": {"priority": pb.HIGH},
    "idempotent": {"idempotent": True},
    "headers": {"headers": {"a": "b"}},
    "target's type": {"target": pb.Target(agent_type="other")},
    "target's id": {"target": pb.Target(agent_id="echo/1")},
    "target's capabilities": {"target": pb.Target(agent_type="echo", capabilities=["x"])},
    "target's labels": {"target": pb.Target(agent_type="echo", labels={"a": "b"})},
    "target's version": {"target": pb.Target(agent_type="echo", version="1")},
    "target's policy": {"target": pb.Target(agent_type="echo", policy=pb.RANDOM)},
    "target's hash_key": {"target": pb.Target(agent_type="echo", hash_key="k")},
    "broadcast": {"target": pb.Target(agent_type="echo", broadcast=True)},
    "payload": {"payload": pb.Payload(text="ho")},
    "payload's kind": {"payload": pb.Payload(body=b"hi")},
    "content_type": {"payload": pb.Payload(text="hi", content_type="text/plain")},
    "schema_version": {"payload": pb.Payload(text="hi", schema_version=1)},
}
LEFT_OUT = {
    "recipient", "tenant", "principal", "actors", "entry", "attempt", "hop_count", "path", "session_event", "error",
    "timing", "sequence", "more", "timeout_ms", "profile", "created_at", "span_id", "parent_span_id",
    "parent_message_id", "resent", "signature",
}  # fmt: skip
"""Fields of Envelope that are not signed; the reference page says why of each."""


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_of_these_is_changed_the_signature_fits_no_more(change: str) -> None:
    data = signed(request())
    assert believed(request(), data)
    assert not believed(request(**CHANGES[change]), data)


def test_every_field_of_an_envelope_is_signed_or_left_out_on_purpose_and_the_page_says_which() -> None:
    every = {field.name for field in Envelope.DESCRIPTOR.fields}
    signed_ones = {name for name in CHANGES if name in every} | {"target", "payload"}
    assert signed_ones | LEFT_OUT == every and not signed_ones & LEFT_OUT
    page = PAGE.read_text()
    assert [name for name in every if f"`{name}`" not in page] == []


@pytest.mark.parametrize("changed", ["key_id", "audience", "unix_ms", "nonce"])
def test_who_for_whom_when_and_the_nonce_are_signed_too(changed: str) -> None:
    other = {"key_id": "ffffffff", "audience": "node-2", "unix_ms": 1, "nonce": bytes(16)}[changed]
    honest, forged = signed(request()), signed(request(), **{changed: other})
    assert believed(request(), forged)
    assert not believed(request(), forged[:-32] + honest[-32:])


def test_another_secret_signs_something_else() -> None:
    assert not believed(request(), signed(request()), secret=bytes(32))


@given(st.lists(st.tuples(NAMES, NAMES), max_size=4), st.lists(st.tuples(NAMES, NAMES), max_size=4))
def test_no_two_sets_of_headers_give_the_same_bytes(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    first, second = request(headers=dict(one)), request(headers=dict(other))
    same = signing.canonical(first, KEY, "", 0, NONCE) == signing.canonical(second, KEY, "", 0, NONCE)
    assert same == (dict(one) == dict(other))


@given(st.permutations(["ner", "echo", "sum"]), st.permutations([("a", "1"), ("b", "2"), ("c", "3")]))
def test_the_order_of_maps_and_capabilities_makes_no_difference(
    names: list[str], labels: list[tuple[str, str]]
) -> None:
    target = pb.Target(capabilities=names, labels=dict(labels))
    ordered = pb.Target(capabilities=["echo", "ner", "sum"], labels={"a": "1", "b": "2", "c": "3"})
    assert signed(request(target=target)) == signed(request(target=ordered))


# ---- the bytes of a signature ----


@given(st.binary(max_size=200))
def test_any_bytes_are_a_signature_or_none_and_never_a_fault(data: bytes) -> None:
    read = signing.read(data)
    if read is not None:
        assert not signing.fits(request(), read, SECRET)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_signature_that_was_changed_anywhere_is_not_believed(at: int, put: bytes) -> None:
    honest = signed(request())
    at %= len(honest)
    forged = honest[:at] + put + honest[at + len(put) :]
    assert forged == honest or not believed(request(), forged)


def test_a_signature_that_was_cut_or_made_longer_is_none() -> None:
    honest = signed(request())
    assert all(signing.read(honest[:size]) is None for size in range(len(honest)))
    assert signing.read(honest + b"\x00") is None
    assert signing.read(b"\x02" + honest[1:]) is None


def test_a_secret_is_read_as_it_is_printed_and_nothing_else_is_one() -> None:
    assert signing.secret_of(signing.text_of(SECRET)) == SECRET
    for text in ("", "reach_sign_", "reach_sign_short", signing.text_of(SECRET)[11:], signing.text_of(bytes(31)), "é"):
        with pytest.raises(ValueError, match="not a signing secret"):
            signing.secret_of(text)


def test_a_name_that_is_too_long_is_refused_by_who_signs() -> None:
    with pytest.raises(ValueError, match="more than 255 bytes"):
        signed(request(), audience="n" * 256)
