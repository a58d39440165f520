from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import RANDOM, Envelope, Hop, Payload, Target
from agentreach.wire.content import DIGEST_BYTES, content_digest
from agentreach.wire.payload import Form, encode

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(alphabet="ab:;0", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="ab:;0", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
tricky = st.text(alphabet="ab0123:;", max_size=5)


def shuffled(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(json_values, st.dictionaries(tricky, tricky, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_maps_does_not_count(value: object, labels: dict[str, str], rng: random.Random) -> None:
    one = Envelope(target=Target(agent_type="t", labels=labels), payload=encode(value, Form.JSON))
    mixed = shuffled(labels, rng)
    assert isinstance(mixed, dict)
    other = Envelope(target=Target(agent_type="t", labels=mixed), payload=encode(shuffled(value, rng), Form.JSON))
    assert content_digest(one) == content_digest(other)
    assert content_digest(Envelope.FromString(other.SerializeToString())) == content_digest(one)
    assert len(content_digest(one)) == DIGEST_BYTES


@given(json_values, json_values)
def test_different_json_is_different_content(one: object, other: object) -> None:
    first, second = encode(one, Form.JSON), encode(other, Form.JSON)
    assert (content_digest(Envelope(payload=first)) == content_digest(Envelope(payload=second))) == (first == second)


targets = st.builds(
    Target,
    agent_id=tricky,
    topic=tricky,
    agent_type=tricky,
    capabilities=st.lists(tricky, max_size=3),
    labels=st.dictionaries(tricky, tricky, max_size=2),
    version=tricky,
    hash_key=tricky,
    broadcast=st.booleans(),
)
payloads = st.builds(
    Payload, content_type=tricky, body=st.binary(max_size=5), schema_version=st.integers(0, 12)
) | st.builds(Payload, content_type=tricky, text=tricky)


@given(targets, targets, payloads, payloads)
def test_equal_content_and_only_it_has_an_equal_digest(
    one: Target, other: Target, payload: Payload, other_payload: Payload
) -> None:
    first, second = Envelope(target=one, payload=payload), Envelope(target=other, payload=other_payload)
    equal = one == other and payload == other_payload
    assert (content_digest(first) == content_digest(second)) == equal


def base() -> Envelope:
    env = Envelope(message_id="m", timeout_ms=1000)
    env.target.capabilities.append("echo")
    env.target.labels["zone"] = "a"
    env.payload.content_type = "application/json"
    env.payload.body = b"{}"
    return env


CHANGES: dict[str, Callable[[Envelope], object]] = {
    "agent_id": lambda env: setattr(env.target, "agent_id", "x"),
    "topic": lambda env: setattr(env.target, "topic", "x"),
    "agent_type": lambda env: setattr(env.target, "agent_type", "x"),
    "capabilities": lambda env: env.target.capabilities.append("x"),
    "labels": lambda env: env.target.labels.update({"zone": "b"}),
    "version": lambda env: setattr(env.target, "version", "1"),
    "policy": lambda env: setattr(env.target, "policy", RANDOM),
    "hash_key": lambda env: setattr(env.target, "hash_key", "k"),
    "broadcast": lambda env: setattr(env.target, "broadcast", True),
    "content_type": lambda env: setattr(env.payload, "content_type", "text/plain"),
    "schema_version": lambda env: setattr(env.payload, "schema_version", 2),
    "body": lambda env: setattr(env.payload, "body", b"[]"),
    "text": lambda env: setattr(env.payload, "text", "{}"),
    "json": lambda env: env.payload.json.CopyFrom(Value(bool_value=False)),
    "blob": lambda env: setattr(env.payload.blob, "uri", "s3://x"),
    "blob size": lambda env: setattr(env.payload.blob, "size_bytes", 1),
    "blob time": lambda env: setattr(env.payload.blob.expires_at, "seconds", 1),
    "blob digest": lambda env: setattr(env.payload.blob, "sha256", b"\x00" * 32),
}


def test_each_part_of_the_content_counts() -> None:
    digests = {content_digest(base())}
    for change in CHANGES.values():
        env = base()
        change(env)
        digests.add(content_digest(env))
    assert len(digests) == len(CHANGES) + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"message_id": "n"},
        {"recipient": "a/1", "entry": b"e", "attempt": 3, "epoch": 4},
        {"trace_id": "t", "span_id": "s", "lineage": b"l", "hop_count": 2, "path": [Hop(agent_id="a/1")]},
        {"timeout_ms": 1, "fresh": True, "priority": 1, "headers": {"a": "b"}, "tenant": "x", "source": "caller/1"},
    ],
)
def test_what_is_written_on_the_way_does_not_count(fields: dict[str, object]) -> None:
    env = base()
    env.MergeFrom(Envelope(**fields))  # type: ignore[arg-type]  # the table's rows
    assert content_digest(env) == content_digest(base())


def test_a_target_too_large_for_the_cache_is_digested_alike() -> None:
    one, other = base(), base()
    for env, order in ((one, range(60)), (other, reversed(range(60)))):
        for n in order:
            env.target.labels[f"label-{n}"] = "value" * 5
    assert content_digest(one) == content_digest(other) != content_digest(base())


def test_the_digest_is_the_same_in_every_release() -> None:
    assert content_digest(base()).hex() == "3c0c4f3cdeb568e03aedf5b6b47325f1"
