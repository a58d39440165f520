"""The digest by which two messages of one id are told to be the same or in conflict (behaviour.md §5).

It covers what the sender asked for: target, content type, schema version and payload. What the mesh or the SDK
writes on the way (recipient, entry, attempt, times, traces) is no part of it. Serialised protobuf has no canonical
form (maps come in any order, versions differ), so the fields are walked one by one in an order fixed here.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import pack

from google.protobuf.struct_pb2 import Value

from agentreach.v1.envelope_pb2 import Envelope, Payload, Target

DIGEST_BYTES = 16

_TARGET_BYTES_CACHED = 512  # larger targets are walked each time
_TARGETS_CACHED = 4096


def content_digest(env: Envelope) -> bytes:
    """16 bytes, equal for equal content whatever the order of maps and the program that serialised it.

    The form counts: the same value in `body` and in `json` is different content. Capabilities count in their order.
    """
    payload = env.payload
    kind = payload.WhichOneof("content")
    content_type = payload.content_type
    data = env.target.SerializeToString()
    target = _known_target(data) if len(data) <= _TARGET_BYTES_CACHED else _target(env.target)
    digest = blake2b(
        f"{target}{payload.schema_version};{len(content_type)}:{content_type}{kind or ''};".encode(),
        digest_size=DIGEST_BYTES,
    )
    digest.update(payload.body if kind == "body" else _content(payload, kind))  # last, so it needs no length
    return digest.digest()


# Each part says its own length first, so that no two different contents give the same bytes.


def _text(text: str) -> str:
    return f"{len(text)}:{text}"


@lru_cache(maxsize=_TARGETS_CACHED)
def _known_target(data: bytes) -> str:
    # Several serialised forms may stand for one target; what they are read into and written as is one.
    return _target(Target.FromString(data))


def _target(target: Target) -> str:
    agent_id, topic, agent_type = target.agent_id, target.topic, target.agent_type
    version, hash_key = target.version, target.hash_key
    flat = (
        f"{len(agent_id)}:{agent_id}{len(topic)}:{topic}{len(agent_type)}:{agent_type}{len(version)}:{version}"
        f"{len(hash_key)}:{hash_key}{target.policy};{target.broadcast:d};"
    )
    capabilities = "".join([f"{len(name)}:{name}" for name in target.capabilities])
    labels = target.labels
    if not labels:
        return f"{flat}{capabilities};;"
    pairs = "".join([_text(key) + _text(labels[key]) for key in sorted(labels)])
    return f"{flat}{capabilities};{pairs};"


def _content(payload: Payload, kind: str | None) -> bytes:
    if kind == "text":
        return payload.text.encode()
    if kind == "json":
        out = bytearray()
        walk(payload.json, out)
        return bytes(out)
    if kind == "blob":
        blob = payload.blob
        until = blob.expires_at
        return (
            f"{_text(blob.uri)}{blob.size_bytes};{until.seconds};{until.nanos};".encode() + blob.sha256  # last as well
        )
    return b""


def walk(value: Value, out: bytearray) -> None:
    """Add the one form of a JSON value: a letter for its kind, lengths and counts in four bytes, names in order."""
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        _sized(b"s", value.string_value, out)
    elif kind == "number_value":
        out += b"n" + pack(">d", value.number_value)
    elif kind == "bool_value":
        out += b"t" if value.bool_value else b"f"
    elif kind == "null_value":
        out += b"0"
    elif kind == "struct_value":
        fields = value.struct_value.fields
        out += b"{" + pack(">I", len(fields))
        for key in sorted(fields):
            _sized(b"k", key, out)
            walk(fields[key], out)
    elif kind == "list_value":
        values = value.list_value.values
        out += b"[" + pack(">I", len(values))
        for item in values:
            walk(item, out)
    else:
        out += b"-"


def _sized(tag: bytes, text: str, out: bytearray) -> None:
    data = text.encode()
    out += tag + pack(">I", len(data)) + data
