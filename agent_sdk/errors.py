"""What a request can end with instead of a result: one class for each code of the contract.

Catch `ReachError` for all of them, or the one you can do something about:

    try:
        reply = await mesh.request(data, capabilities=["ner"], timeout=5)
    except NoRoute:
        ...                                  # nobody registered can do it
    except Timeout as error:
        if error.may_have_executed: ...      # it may have run: do not just repeat what has side effects

Handlers raise three of them to answer: `Rejected`, `Overloaded`, `AgentError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from agentreach.v1 import error_pb2


class ErrorCode(StrEnum):
    """Why a request has no result."""

    INVALID_ENVELOPE = "INVALID_ENVELOPE"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    NO_ROUTE = "NO_ROUTE"
    NO_AGENT_AVAILABLE = "NO_AGENT_AVAILABLE"
    BREAKER_OPEN = "BREAKER_OPEN"
    CONNECT_FAILED = "CONNECT_FAILED"
    AGENT_LOST = "AGENT_LOST"
    TIMEOUT = "TIMEOUT"
    OVERLOADED = "OVERLOADED"
    REJECTED = "REJECTED"
    AGENT_ERROR = "AGENT_ERROR"
    HOP_LIMIT = "HOP_LIMIT"
    LOOP_DETECTED = "LOOP_DETECTED"
    WOULD_DEADLOCK = "WOULD_DEADLOCK"
    IDEMPOTENCY_CONFLICT = "IDEMPOTENCY_CONFLICT"
    SESSION_LOST = "SESSION_LOST"
    FENCED = "FENCED"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    REGISTRY_UNAVAILABLE = "REGISTRY_UNAVAILABLE"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    INTERNAL = "INTERNAL"


class ReachError(Exception):
    """A request that ended without a result.

    `code`; `retryable`: sending it again may help, after `retry_after` seconds; `may_have_executed`: the handler may
    have run; `trace_id`: ask the mesh about it with `reach trace`; `agent_id`: who it was sent to, if it came so far;
    `attempts`; `details`: facts by name.
    """

    code: ErrorCode = ErrorCode.INTERNAL
    _by_code: ClassVar[dict[ErrorCode, type[ReachError]]] = {}

    def __init__(
        self,
        message: str = "",
        *,
        retryable: bool = False,
        retry_after: float = 0.0,
        may_have_executed: bool = False,
        trace_id: str = "",
        agent_id: str = "",
        attempts: int = 0,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = retryable
        self.retry_after = retry_after
        self.may_have_executed = may_have_executed
        self.trace_id = trace_id
        self.agent_id = agent_id
        self.attempts = attempts
        self.details: dict[str, str] = dict(details or {})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__:
            ReachError._by_code.setdefault(cls.code, cls)

    def __str__(self) -> str:
        trace = f" [trace {self.trace_id}]" if self.trace_id else ""
        return f"{self.message or self.code.value}{trace}"


class InvalidEnvelope(ReachError):
    """A field of the request is wrong; the message names it."""

    code = ErrorCode.INVALID_ENVELOPE


class PayloadTooLarge(ReachError):
    """The data is over the limit for inline payloads."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class NoRoute(ReachError):
    """Nothing registered matches; the message says what would be near."""

    code = ErrorCode.NO_ROUTE


class NoAgentAvailable(ReachError):
    """Agents match, and none of them is usable now."""

    code = ErrorCode.NO_AGENT_AVAILABLE


class BreakerOpen(ReachError):
    """Every usable instance is tripped."""

    code = ErrorCode.BREAKER_OPEN


class ConnectFailed(ReachError):
    """Never handed to an agent; from `connect()`: no node was reached."""

    code = ErrorCode.CONNECT_FAILED


class AgentLost(ReachError):
    """Handed over, then the agent vanished: it may have executed."""

    code = ErrorCode.AGENT_LOST


class Timeout(ReachError, TimeoutError):
    """The deadline passed; the message says where the request was by then."""

    code = ErrorCode.TIMEOUT


class Overloaded(ReachError):
    """A queue, mailbox or limit is full. A handler raises `Overloaded(retry_after=seconds)` to say so."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str = "overloaded", **facts: object) -> None:
        facts.setdefault("retryable", True)
        super().__init__(message, **facts)  # type: ignore[arg-type]  # the base class checks the names


class Rejected(ReachError):
    """The agent said no. A handler raises `Rejected("why")`; nobody tries again."""

    code = ErrorCode.REJECTED


class AgentError(ReachError):
    """The handler failed. Raised by a handler, its text travels: `AgentError("no such account", retryable=False)`."""

    code = ErrorCode.AGENT_ERROR


class HopLimit(ReachError):
    """Passed through too many agents; `details["path"]` names them."""

    code = ErrorCode.HOP_LIMIT


class LoopDetected(ReachError):
    """The same step came round too often."""

    code = ErrorCode.LOOP_DETECTED


class WouldDeadlock(ReachError):
    """The call would wait for its own ancestors."""

    code = ErrorCode.WOULD_DEADLOCK


class IdempotencyConflict(ReachError):
    """This message_id was used with other content."""

    code = ErrorCode.IDEMPOTENCY_CONFLICT


class SessionLost(ReachError):
    """The session's state is gone, and the caller asked for strict sessions."""

    code = ErrorCode.SESSION_LOST


class Fenced(ReachError):
    """An answer from a former owner or attempt."""

    code = ErrorCode.FENCED


class Cancelled(ReachError):
    """The request was cancelled."""

    code = ErrorCode.CANCELLED


class Unauthenticated(ReachError):
    """The node does not accept the credentials."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(ReachError):
    """The credentials do not allow this."""

    code = ErrorCode.PERMISSION_DENIED


class RegistryUnavailable(ReachError):
    """The node cannot know who is there."""

    code = ErrorCode.REGISTRY_UNAVAILABLE


class ShuttingDown(ReachError):
    """The node is leaving."""

    code = ErrorCode.SHUTTING_DOWN


class Internal(ReachError):
    """A fault of the mesh; the message has a reference that is found in the node's log."""

    code = ErrorCode.INTERNAL


class AgentReplaced(Exception):
    """Another process has registered under this agent's id; `serve()` ends with it, `run()` with exit code 4."""

    def __init__(self, agent_id: str, reason: str) -> None:
        super().__init__(f"{agent_id} was replaced: {reason or 'another process registered under the same agent_id'}")
        self.agent_id = agent_id


def from_proto(error: error_pb2.Error, trace_id: str = "") -> ReachError:
    """The exception for an `Error` of the wire. An unknown code becomes `Internal`, its number in the details."""
    details = dict(error.details)
    try:
        code = ErrorCode(error_pb2.ErrorCode.Name(error.code))
    except ValueError:
        code = ErrorCode.INTERNAL
        details["code"] = str(error.code)
    return ReachError._by_code[code](
        error.message,
        retryable=error.retryable,
        retry_after=error.retry_after_ms / 1000,
        may_have_executed=error.may_have_executed,
        trace_id=trace_id,
        agent_id=error.agent_id,
        attempts=error.attempts,
        details=details,
    )


def to_proto(error: ReachError) -> error_pb2.Error:
    """The `Error` of the wire for an exception."""
    return error_pb2.Error(
        code=error_pb2.ErrorCode.Value(error.code.value),
        message=error.message[:_MESSAGE_CHARS_MAX],
        retryable=error.retryable,
        retry_after_ms=min(max(int(error.retry_after * 1000), 0), 2**31),
        may_have_executed=error.may_have_executed,
        agent_id=error.agent_id,
        attempts=error.attempts,
        details={str(k)[:128]: str(v)[:1024] for k, v in list(error.details.items())[:_DETAILS_MAX]},
    )


_MESSAGE_CHARS_MAX = 4096  # a handler's text is for people; longer ones are cut
_DETAILS_MAX = 32
