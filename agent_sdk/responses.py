"""The bytes of answers."""

from __future__ import annotations

from agent_sdk.outgoing import ATTEMPT, CORRELATION_ID, ENTRY, EPOCH, ERROR, TIMING, field
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2
from agentreach.wire import errors
from agentreach.wire.framing import varint

Waiter = tuple[bytes, int, int]
"""entry, attempt, epoch: echoed, so that the answer finds its way."""


def head(agent_id: str) -> bytes:
    """What every answer of an agent starts with."""
    return pb.Envelope(type=pb.RESPONSE, source=agent_id).SerializeToString()


def addressed(start: bytes, correlation: bytes, waiter: Waiter, core: bytes, tail: bytes = b"") -> bytes:
    """One answer to one waiter; `correlation` is the request's id as a whole field, `tail` more fields."""
    entry, attempt, epoch = waiter
    if epoch:
        tail = b"".join((tail, EPOCH, varint(epoch)))
    return b"".join((start, correlation, ENTRY, varint(len(entry)), entry, ATTEMPT, varint(attempt), core, tail))


def correlation_field(message_id: str) -> bytes:
    """The `correlation_id` of an answer to this request."""
    return field(CORRELATION_ID, message_id.encode())


def error_core(error: error_pb2.Error) -> bytes:
    """The part of an answer that says why there is no payload."""
    return field(ERROR, error.SerializeToString())


def timing(queue_us: int, handler_us: int) -> bytes:
    """How long the message waited in the agent, and how long the handler took."""
    queue, handler = varint(queue_us), varint(handler_us)
    return b"".join((TIMING, varint(2 + len(queue) + len(handler)), b"\x08", queue, b"\x10", handler))


def refusal(envelope: pb.Envelope, code: str, message: str) -> bytes:
    """The answer to a request that nothing here will run."""
    error = errors.failure(error_pb2.ErrorCode.Value(code), message, agent_id=envelope.recipient)
    waiter = (envelope.entry, envelope.attempt, envelope.epoch)
    return addressed(head(envelope.recipient), correlation_field(envelope.message_id), waiter, error_core(error))
