"""The mesh's errors: what each code means to gRPC, and how an `Error` becomes a gRPC status and back.

Text that a peer influenced is made safe here, at the one place where errors are made: no control characters (a log
line stays one line, a header stays legal) and a bound on its length.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from agentreach.v1.error_pb2 import Error, ErrorCode

DOMAIN = "agentreach"

MESSAGE_CHARS_MAX = 1000
DETAILS_MAX = 32
DETAIL_KEY_CHARS_MAX = 64
ID_CHARS_MAX = 128

# A status travels in HTTP/2 trailers, twice (percent-encoded text and base64 details), and gRPC's soft limit for
# them is 8 KiB: these keep the largest one below it.
_STATUS_TEXT_BYTES_MAX = 2500  # percent-encoded
_STATUS_DETAILS_BYTES_MAX = 1000

_UINT32_MAX = (1 << 32) - 1

# gRPC's status codes, by number: pure code does not import grpc.
_CANCELLED, _UNKNOWN, _INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _NOT_FOUND = 1, 2, 3, 4, 5
_ALREADY_EXISTS, _PERMISSION_DENIED, _RESOURCE_EXHAUSTED, _FAILED_PRECONDITION = 6, 7, 8, 9
_ABORTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 10, 13, 14, 16

TABLE: Mapping[int, tuple[int, bool]] = {
    ErrorCode.INVALID_ENVELOPE: (_INVALID_ARGUMENT, False),
    ErrorCode.PAYLOAD_TOO_LARGE: (_INVALID_ARGUMENT, False),
    ErrorCode.NO_ROUTE: (_NOT_FOUND, False),
    ErrorCode.NO_AGENT_AVAILABLE: (_UNAVAILABLE, True),
    ErrorCode.BREAKER_OPEN: (_UNAVAILABLE, True),
    ErrorCode.CONNECT_FAILED: (_UNAVAILABLE, True),
    ErrorCode.AGENT_LOST: (_UNAVAILABLE, False),  # retryable only where the request was idempotent
    ErrorCode.TIMEOUT: (_DEADLINE_EXCEEDED, False),  # likewise
    ErrorCode.OVERLOADED: (_RESOURCE_EXHAUSTED, True),
    ErrorCode.REJECTED: (_FAILED_PRECONDITION, False),
    ErrorCode.AGENT_ERROR: (_UNKNOWN, False),  # retryable only where the handler said so
    ErrorCode.HOP_LIMIT: (_FAILED_PRECONDITION, False),
    ErrorCode.LOOP_DETECTED: (_FAILED_PRECONDITION, False),
    ErrorCode.WOULD_DEADLOCK: (_FAILED_PRECONDITION, False),
    ErrorCode.IDEMPOTENCY_CONFLICT: (_ALREADY_EXISTS, False),
    ErrorCode.SESSION_LOST: (_ABORTED, False),
    ErrorCode.FENCED: (_ABORTED, False),
    ErrorCode.CANCELLED: (_CANCELLED, False),
    ErrorCode.UNAUTHENTICATED: (_UNAUTHENTICATED, False),
    ErrorCode.PERMISSION_DENIED: (_PERMISSION_DENIED, False),
    ErrorCode.REGISTRY_UNAVAILABLE: (_UNAVAILABLE, True),
    ErrorCode.SHUTTING_DOWN: (_UNAVAILABLE, True),
    ErrorCode.INTERNAL: (_INTERNAL, False),
}
"""ErrorCode → (number of the gRPC status code, retryable unless said otherwise)."""

_AGENT_LOST = ErrorCode.AGENT_LOST

# Line breaks of every kind, other controls, and the marks that reorder text on a screen.
_UNSAFE = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], " "
)


def clean(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """`text` without control characters and lone surrogates, at most `chars_max` characters ('…' marks a cut)."""
    if len(text) > chars_max:
        text = text[: chars_max - 1] + "…"
    if text.isprintable():
        return text
    return text.translate(_UNSAFE).encode("utf-8", "replace").decode()


def grpc_code(code: int) -> int:
    """The number of the gRPC status code for an ErrorCode; UNKNOWN for a code this version does not know."""
    entry = TABLE.get(code)
    return entry[0] if entry is not None else _UNKNOWN


def code_name(code: int) -> str:
    """The ErrorCode's name, or `ERROR_<number>` for a code this version does not know."""
    return ErrorCode.Name(code) if code in TABLE else f"ERROR_{code}"  # type: ignore[arg-type]  # known by then


def failure(
    code: ErrorCode.ValueType,
    message: str,
    *,
    retryable: bool | None = None,
    may_have_executed: bool = False,
    retry_after_ms: int = 0,
    agent_id: str = "",
    attempts: int = 0,
    details: Mapping[str, str] | None = None,
) -> Error:
    """An `Error`; `message` says what happened, to whom, and what to do.

    `retryable` None takes the code's default. AGENT_LOST always says that it may have executed: that is what it
    means. At most 32 details are kept.
    """
    if retryable is None:
        entry = TABLE.get(code)
        retryable = entry is not None and entry[1]
    error = Error(
        code=code,
        message=clean(message),
        retryable=retryable,
        may_have_executed=may_have_executed or code == _AGENT_LOST,
    )
    if retry_after_ms > 0:
        error.retry_after_ms = min(retry_after_ms, _UINT32_MAX)
    if agent_id:
        error.agent_id = clean(agent_id, ID_CHARS_MAX)
    if attempts > 0:
        error.attempts = min(attempts, _UINT32_MAX)
    if details:
        for key, _ in zip(details, range(DETAILS_MAX), strict=False):
            error.details[clean(key, DETAIL_KEY_CHARS_MAX)] = clean(details[key])
    return error


def to_status(error: Error, trace_id: str, items: int | None = None) -> Status:
    """The gRPC status of an error on a unary call or, with the number of `items` sent before it, on a stream.

    The message starts with the code's name and ends with the trace_id, if there is one. `details` travel as further
    metadata of ErrorInfo as far as trailers have room for them.
    """
    name = code_name(error.code)
    trace = clean(trace_id, ID_CHARS_MAX)
    metadata = {
        "trace_id": trace,
        "agent_id": clean(error.agent_id, ID_CHARS_MAX),
        "attempts": str(error.attempts),
        "retryable": _truth(error.retryable),
        "may_have_executed": _truth(error.may_have_executed),
    }
    if items is not None:
        metadata["items"] = str(items)
    room = _STATUS_DETAILS_BYTES_MAX
    for key in sorted(error.details):
        value = error.details[key]
        room -= len(key.encode()) + len(value.encode())
        if room >= 0 and key not in _METADATA:
            metadata[clean(key)] = clean(value)
    text = _fitting(clean(error.message), _STATUS_TEXT_BYTES_MAX)
    told = f"{name}: {text} trace_id={trace}" if trace else f"{name}: {text}"
    status = Status(code=grpc_code(error.code), message=told)
    _attach(status, ErrorInfo(reason=name, domain=DOMAIN, metadata=metadata))
    if error.retry_after_ms:
        seconds, ms = divmod(error.retry_after_ms, 1000)
        retry = RetryInfo()
        retry.retry_delay.seconds = seconds
        retry.retry_delay.nanos = ms * 1_000_000
        _attach(status, retry)
    return status


_CODES = dict(ErrorCode.items())
_METADATA = frozenset({"trace_id", "agent_id", "attempts", "retryable", "may_have_executed", "items"})


def from_status(status: Status) -> Error | None:
    """The error that `to_status` put into a status, or None if there is none of ours in it.

    A code this version does not know becomes ERROR_CODE_UNSPECIFIED; details that are not well-formed count as 0.
    """
    info = ErrorInfo()
    retry = RetryInfo()
    found = False
    for detail in status.details:
        if detail.Is(ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
            found = found or info.domain == DOMAIN
        elif detail.Is(RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
    if not found:
        return None
    metadata = dict(info.metadata)
    text = status.message.removeprefix(f"{info.reason}: ").removesuffix(f" trace_id={metadata.get('trace_id', '')}")
    return Error(
        code=_CODES.get(info.reason, ErrorCode.ERROR_CODE_UNSPECIFIED),
        message=text,
        retryable=metadata.get("retryable") == "true",
        may_have_executed=metadata.get("may_have_executed") == "true",
        retry_after_ms=retry.retry_delay.seconds * 1000 + retry.retry_delay.nanos // 1_000_000,
        agent_id=metadata.get("agent_id", ""),
        attempts=_count(metadata.get("attempts", "")),
        details={key: value for key, value in metadata.items() if key not in _METADATA},
    )


def _attach(status: Status, detail: ErrorInfo | RetryInfo) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _count(text: str) -> int:
    return min(int(text), _UINT32_MAX) if text.isascii() and text.isdigit() and len(text) <= 10 else 0


def _fitting(text: str, bytes_max: int) -> str:
    """`text` cut so that it is at most `bytes_max` long when percent-encoded, as gRPC does."""
    if len(text) * 12 <= bytes_max or (text.isascii() and len(text) + 2 * text.count("%") <= bytes_max):
        return text
    used = 0
    for at, char in enumerate(text):
        used += 1 if char.isascii() and char != "%" else 3 * len(char.encode())
        if used > bytes_max:
            return text[: max(0, at - 3)] + "…"
    return text
