"""How a call ends: every failure becomes one definite status with details, and nothing internal leaves the node.

Three things can go wrong in a handler. A `MeshFailure` is the caller's to read. Any other exception is our bug: the
caller gets INTERNAL with a reference that stands in the log beside the cause. And a cancellation either comes from
outside (the client left, the server stops: it passes on) or from inside the node, which must not leave a caller
without a deadline waiting for ever (house.md, trap 6): it becomes a status too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import CANCELLED, INTERNAL, INVALID_ENVELOPE
from agentreach.wire import errors
from agentreach.wire.redaction import Redaction
from agentreach.wire.salvage import WHY, framed
from reach.core.ports import MeshFailure

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic in its stubs only

_DETAILS_KEY = "grpc-status-details-bin"

ended_as: ContextVar[str] = ContextVar("ended_as", default="")
"""How the call that this task handles ended: the name of its ErrorCode."""

_SHAPES = Redaction(())  # what goes by a name that means a secret is withheld where the names are known: in the core
_CODES = {code.value[0]: code for code in grpc.StatusCode}


async def end_with(context: Context, failure: MeshFailure) -> NoReturn:
    """End the RPC with the failure's status: gRPC code, text from the code's name to the trace_id, and details."""
    failure.error.message = _SHAPES.text(failure.error.message)
    status = errors.to_status(failure.error, failure.trace_id, failure.items)
    ended_as.set(errors.code_name(failure.error.code))
    trailers = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_CODES[status.code], status.message, trailers)


async def write(context: Context, data: bytes) -> bool:
    """Write one stream message; False if the peer is gone, however the transport says so.

    Called by the handler coroutine itself only, and never cancelled by us (house.md, traps 1 and 4).
    """
    try:
        await context.write(data)
    except Exception as error:
        _log.debug("a stream's peer was gone before a write", exc_info=error)
        return False
    return True


def failure_of(error: BaseException, method: str, trace_id: str = "") -> MeshFailure:
    """What a caller shall read when a handler ended with `error`; bugs are logged here with their cause."""
    if isinstance(error, MeshFailure):
        if not error.trace_id:
            error.trace_id = trace_id
        return error
    if isinstance(error, asyncio.CancelledError):
        text = "the node gave up this call; whether it was carried out is not known"
        return MeshFailure(errors.failure(CANCELLED, text, may_have_executed=True), trace_id)
    reference = secrets.token_hex(6)
    _log.error(
        "a fault in this node ended a call",
        exc_info=error,
        extra={"trace_id": trace_id, "method": method, "reference": reference},
    )
    text = f"a fault in this node; its log tells more under the reference {reference}"
    details = {"reference": reference}
    return MeshFailure(errors.failure(INTERNAL, text, may_have_executed=True, details=details), trace_id)


def cancelled_from_outside() -> bool:
    """In a handler of `CancelledError`: True if this very task was cancelled, False if something it awaited was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def parse_envelope(data: bytes) -> Envelope:
    """The envelope that a call brings; `MeshFailure` INVALID_ENVELOPE if it is none that can be passed on."""
    try:
        return framed(data)
    except DecodeError as error:
        text = f"the request's {len(data)} bytes are not a valid {Envelope.DESCRIPTOR.full_name}: {WHY}"
        raise MeshFailure(errors.failure(INVALID_ENVELOPE, text)) from error


def parse(message_type: type[M], data: bytes) -> M:
    """Parse a request; `MeshFailure` INVALID_ENVELOPE if it is none."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        text = f"the request's {len(data)} bytes are not a valid {name}; send one as proto/agentreach/v1 defines it"
        raise MeshFailure(errors.failure(INVALID_ENVELOPE, text)) from error
