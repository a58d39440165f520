"""Payloads and the Python values they stand for (contract.md, "Envelope and Payload"). The mesh itself never looks.

| value                               | content type             | as JSON `Value`, when asked in that form  |
|-------------------------------------|--------------------------|-------------------------------------------|
| dict, list, number, bool, None      | application/json         | yes                                       |
| str                                 | text/plain               | yes; or `text`, when asked in that        |
| bytes                               | application/octet-stream | no: always in `body`                      |

What JSON cannot say is refused, never bent: NaN and infinity, lone surrogates, more than 100 levels. Two habits of
Python's json are kept: keys that are numbers, bools or None become strings, and the last of equal keys wins.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final, NoReturn

from google.protobuf.struct_pb2 import Value

from agentreach.v1.envelope_pb2 import Payload

JSON: Final = "application/json"
TEXT: Final = "text/plain"
OCTETS: Final = "application/octet-stream"

DEPTH_MAX: Final = 100
WHOLE_NUMBER_MAX: Final = 1 << 53  # a double holds every whole number up to here

# Parsers stop at 100 nested messages (measured: a Value in an Envelope holds 32 objects or 49 arrays), and a reply
# that does not parse would end the link. An object takes three of them, an array two; ten are left for what is around.
_VALUE_NESTING_MAX: Final = 90


class PayloadError(ValueError):
    """A payload that is no legal value, or a value that no payload can carry. The message says what is wrong."""


class Form(Enum):
    """How a payload holds its content, which is also how its sender wants to be answered."""

    BODY = "body"
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Blob:
    """Content that lies elsewhere: where, how large, its SHA-256 (empty if unknown), and until when (UTC)."""

    uri: str
    size_bytes: int = 0
    sha256: bytes = b""
    expires_at: datetime | None = None


def form_of(payload: Payload) -> Form:
    """The form in which the sender of this payload is to be answered."""
    kind = payload.WhichOneof("content")
    if kind == "json":
        return Form.JSON
    return Form.TEXT if kind == "text" else Form.BODY


def encode(value: object, form: Form = Form.BODY) -> Payload:
    """The payload of a value, in the form asked for as far as it can say the value exactly.

    Bytes are always in the body. TEXT holds only str; anything else is answered as JSON, which a person can read as
    well. Numbers and depths beyond what a `Value` can hold go into the body as JSON text. Raises `PayloadError`.
    """
    if type(value) is bytes:
        payload = Payload()
        payload.body = value
        payload.content_type = OCTETS
        return payload
    if isinstance(value, str):
        return _encode_text(value, form)
    if isinstance(value, bytes | bytearray | memoryview):
        return Payload(content_type=OCTETS, body=bytes(value))
    if isinstance(value, Blob):
        return _encode_blob(value)
    text = _dumps(value)
    if form is not Form.BODY:
        payload = Payload(content_type=JSON)
        if _fill(payload.json, json.loads(text), _VALUE_NESTING_MAX):
            return payload
    return Payload(content_type=JSON, body=text)


def decode(payload: Payload) -> object:
    """The value of a payload: None if it has no content, bytes if its content type is none of the three.

    `text` of type application/json is read as JSON. Raises `PayloadError`.
    """
    kind = payload.WhichOneof("content")
    if kind == "body":
        content_type = payload.content_type
        if content_type == OCTETS:
            return payload.body
        return _READERS.get(content_type if content_type in _READERS else _plain(content_type), bytes)(payload.body)
    if kind == "json":
        return _value(payload.json, DEPTH_MAX)
    if kind == "text":
        return _loads(payload.text) if _plain(payload.content_type) == JSON else payload.text
    if kind == "blob":
        return _decode_blob(payload)
    return None


# ---- text and JSON text ----


def _refuse_constant(name: str) -> NoReturn:
    raise PayloadError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:  # 1e999 reads as infinity
        raise PayloadError(f"number {text[:40]} is too large")
    return number


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def _encode_text(value: str, form: Form) -> Payload:
    try:
        if form is Form.BODY:
            return Payload(content_type=TEXT, body=value.encode())
        if form is Form.TEXT:
            return Payload(content_type=TEXT, text=value)
        payload = Payload(content_type=JSON)
        payload.json.string_value = value
        return payload
    except UnicodeEncodeError:
        raise PayloadError("text holds a lone surrogate") from None


def _dumps(value: object) -> bytes:
    try:
        data = _ENCODER.encode(value).encode()
    except RecursionError:
        raise PayloadError(f"value is nested more than {DEPTH_MAX} levels deep") from None
    except UnicodeEncodeError:
        raise PayloadError("value holds text with a lone surrogate") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadError(f"value cannot be said in JSON: {error}") from None
    _check_depth(value, data.count(b"[") + data.count(b"{"))
    return data


def _loads(text: str) -> object:
    try:
        value: object = _DECODER.decode(text)
    except RecursionError:
        raise PayloadError(f"JSON is nested more than {DEPTH_MAX} levels deep") from None
    except PayloadError:
        raise
    except ValueError as error:
        raise PayloadError(f"not JSON: {error}") from None
    _check_depth(value, text.count("[") + text.count("{"))
    if "\\ud" in text or "\\uD" in text:
        try:
            _ENCODER.encode(value).encode()
        except UnicodeEncodeError:
            raise PayloadError("JSON holds a lone surrogate") from None
    return value


def _check_depth(value: object, brackets: int) -> None:
    if brackets <= DEPTH_MAX:  # cannot be deeper than it has brackets
        return
    level: list[object] = [value]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for container in level:
            if isinstance(container, dict):
                below.extend(container.values())
            elif isinstance(container, list | tuple):
                below.extend(container)
        level = [item for item in below if isinstance(item, dict | list | tuple)]
        if not level:
            return
    raise PayloadError(f"value is nested more than {DEPTH_MAX} levels deep")


def _read_json(body: bytes) -> object:
    return _loads(_read_text(body))


def _read_text(body: bytes) -> str:
    try:
        return str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise PayloadError(f"body is not UTF-8 at byte {error.start}") from None


_READERS: dict[str, Callable[[bytes], object]] = {JSON: _read_json, TEXT: _read_text}


def _plain(content_type: str) -> str:
    """A content type without its parameters, in lower case; empty if it is in a charset other than UTF-8."""
    head, *parameters = content_type.lower().split(";")
    for parameter in parameters:
        name, _, charset = parameter.strip().partition("=")
        if name == "charset" and charset.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            return ""
    return head.strip()


# ---- google.protobuf.Value ----


def _fill(target: Value, value: object, room: int) -> bool:
    """Write a value as json.loads gives it. False if a number would lose digits or the nesting is too deep."""
    if value is None:
        target.null_value = 0  # type: ignore[assignment]  # NULL_VALUE, its only one
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, str):
        target.string_value = value
    elif isinstance(value, int):
        target.number_value = value if abs(value) <= WHOLE_NUMBER_MAX else 0
        return abs(value) <= WHOLE_NUMBER_MAX
    elif isinstance(value, float):
        target.number_value = value
    elif isinstance(value, dict):
        fields = target.struct_value.fields
        target.struct_value.SetInParent()
        return room >= 3 and all(_fill(fields[key], item, room - 3) for key, item in value.items())
    elif isinstance(value, list):
        values = target.list_value.values
        target.list_value.SetInParent()
        return room >= 2 and all(_fill(values.add(), item, room - 2) for item in value)
    return True


def _value(value: Value, room: int) -> object:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "number_value":
        number = value.number_value
        if number - number != 0:
            raise PayloadError(f"json holds {number}, which is not a JSON number")
        return int(number) if abs(number) <= WHOLE_NUMBER_MAX and number == int(number) else number
    if kind == "bool_value":
        return value.bool_value
    if kind == "null_value":
        return None
    if kind is None:
        raise PayloadError("json holds a Value that is neither null nor anything else")
    if room == 0:
        raise PayloadError(f"json is nested more than {DEPTH_MAX} levels deep")
    if kind == "struct_value":
        return {key: _value(item, room - 1) for key, item in value.struct_value.fields.items()}
    return [_value(item, room - 1) for item in value.list_value.values]


# ---- blobs ----


def _encode_blob(blob: Blob) -> Payload:
    payload = Payload()
    try:
        payload.blob.uri = blob.uri
        payload.blob.size_bytes = blob.size_bytes
        payload.blob.sha256 = blob.sha256
        if blob.expires_at is not None:
            payload.blob.expires_at.FromDatetime(blob.expires_at)
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadError(f"blob: {error}") from None
    return payload


def _decode_blob(payload: Payload) -> Blob:
    blob = payload.blob
    expires_at: datetime | None = None
    if blob.HasField("expires_at"):
        try:
            expires_at = blob.expires_at.ToDatetime(tzinfo=UTC)
        except (ValueError, OverflowError) as error:
            raise PayloadError(f"blob.expires_at: {error}") from None
    return Blob(blob.uri, blob.size_bytes, blob.sha256, expires_at)
