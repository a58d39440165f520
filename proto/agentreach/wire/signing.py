"""Signatures of messages: HMAC-SHA256 over a canonical form, with for whom, when, and a nonce.

The form is specified in docs/reference/signatures.md. A sender signs each sending anew. Serialised protobuf has no
canonical form, so what is signed is walked field by field in the order fixed here, each with its length first: no two
different messages give the same bytes. What the SDK or a node writes anew on the way is left out; the reference says of
each field why.

Nothing here knows clocks, or what was seen before: that is the node's.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack

from agentreach.v1.envelope_pb2 import REQUEST, Envelope, Payload, Target
from agentreach.wire.content import walk

VERSION = 1
NONCE_BYTES = 16
MAC_BYTES = 32
NAME_BYTES_MAX = 255  # of a key_id and of an audience: their lengths have one byte
SECRET_BYTES = 32
SECRET_PREFIX = "reach_sign_"

_DOMAIN = b"agentreach-signature\x00"
_TAIL_BYTES = 8 + NONCE_BYTES + MAC_BYTES


@dataclass(frozen=True, slots=True)
class Signature:
    """What `Envelope.signature` says."""

    key_id: str
    """The API key whose signing secret made it."""
    audience: str
    """Who may take the message: a link_id, or a node_id. Empty: whoever gets it, and it never counts as fresh."""
    unix_ms: int
    nonce: bytes
    mac: bytes


def secret_of(text: str) -> bytes:
    """The 32 bytes of a signing secret as `reach keys create --signs` prints it. Raises `ValueError`."""
    try:
        secret = urlsafe_b64decode(text.removeprefix(SECRET_PREFIX) + "=")
    except (ValueError, NotBase64):
        secret = b""
    if not text.startswith(SECRET_PREFIX) or len(secret) != SECRET_BYTES:
        raise ValueError(f"not a signing secret: it begins with {SECRET_PREFIX} and 43 characters follow")
    return secret


def text_of(secret: bytes) -> str:
    """The reverse."""
    return SECRET_PREFIX + urlsafe_b64encode(secret).rstrip(b"=").decode()


def sign(envelope: Envelope, secret: bytes, key_id: str, audience: str, unix_ms: int, nonce: bytes) -> bytes:
    """The bytes for `envelope.signature`, of the envelope as it is sent. Raises `ValueError` for names too long."""
    head = bytes((VERSION,)) + _short(key_id) + _short(audience) + pack(">Q", unix_ms) + nonce
    return head + _mac(envelope, secret, key_id, audience, unix_ms, nonce)


def read(data: bytes) -> Signature | None:
    """What these bytes say; None if they are no signature of this version. Never raises."""
    if len(data) < 3 or data[0] != VERSION:
        return None
    names: list[str] = []
    at = 1
    for _ in range(2):
        if at >= len(data):
            return None
        end = at + 1 + data[at]
        try:
            names.append(data[at + 1 : end].decode())
        except UnicodeDecodeError:
            return None
        at = end
    if len(data) - at != _TAIL_BYTES:
        return None
    nonce = data[at + 8 : at + 8 + NONCE_BYTES]
    return Signature(names[0], names[1], int.from_bytes(data[at : at + 8], "big"), nonce, data[-MAC_BYTES:])


def fits(envelope: Envelope, signature: Signature, secret: bytes) -> bool:
    """Whether the holder of this secret has signed this envelope so. Takes the same time wherever it differs."""
    signed = (signature.key_id, signature.audience, signature.unix_ms, signature.nonce)
    return hmac.compare_digest(_mac(envelope, secret, *signed), signature.mac)


def canonical(envelope: Envelope, key_id: str, audience: str, unix_ms: int, nonce: bytes) -> bytes:
    """The bytes that are signed. An unspecified type counts as REQUEST; on Publish its EVENT must be set before."""
    parts = (
        key_id.encode(),
        audience.encode(),
        _number(unix_ms),
        nonce,
        _number(envelope.protocol_version or 1),
        _number(envelope.type or REQUEST),
        envelope.message_id.encode(),
        _number(envelope.fresh),
        envelope.source.encode(),
        envelope.env.encode(),
        _target(envelope.target),
        _payload(envelope.payload),
        envelope.correlation_id.encode(),
        envelope.trace_id.encode(),
        envelope.lineage,
        envelope.session_id.encode(),
        _number(envelope.strict_session),
        _number(envelope.epoch),
        envelope.dedup_key.encode(),
        envelope.reply_topic.encode(),
        _number(envelope.priority),
        _number(envelope.idempotent),
        _pairs(envelope.headers.items()),
    )
    return _DOMAIN + bytes((VERSION,)) + _joined(parts)


def _mac(envelope: Envelope, secret: bytes, key_id: str, audience: str, unix_ms: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, canonical(envelope, key_id, audience, unix_ms, nonce), "sha256")


def _target(target: Target) -> bytes:
    return _joined(
        (
            target.agent_id.encode(),
            target.topic.encode(),
            target.agent_type.encode(),
            _joined(sorted(name.encode() for name in target.capabilities)),
            _pairs(target.labels.items()),
            target.version.encode(),
            _number(target.policy),
            target.hash_key.encode(),
            _number(target.broadcast),
        )
    )


def _payload(payload: Payload) -> bytes:
    kind = payload.WhichOneof("content") or ""
    content = b""
    if kind == "body":
        content = payload.body
    elif kind == "text":
        content = payload.text.encode()
    elif kind == "json":
        out = bytearray()
        walk(payload.json, out)
        content = bytes(out)
    elif kind == "blob":
        blob = payload.blob
        until = blob.expires_at
        content = _joined(
            (blob.uri.encode(), _number(blob.size_bytes), blob.sha256, pack(">qi", until.seconds, until.nanos))
        )
    return _joined((_number(payload.schema_version), payload.content_type.encode(), kind.encode(), content))


def _pairs(pairs: Iterable[tuple[str, str]]) -> bytes:
    """The entries of a map in the order of their names' bytes, each a name and a value."""
    encoded = sorted((name.encode(), value.encode()) for name, value in pairs)
    return _joined(each for pair in encoded for each in pair)


def _joined(parts: Iterable[bytes]) -> bytes:
    """Each with its length in four bytes first."""
    return b"".join(pack(">I", len(part)) + part for part in parts)


def _number(value: int) -> bytes:
    return pack(">Q", value)


def _short(name: str) -> bytes:
    data = name.encode()
    if len(data) > NAME_BYTES_MAX:
        raise ValueError(f"{name[:40]!r}… has more than {NAME_BYTES_MAX} bytes")
    return bytes((len(data),)) + data
