"""Runs one handler call to its definite end: the only place where the user's code is called."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from agent_sdk import shapes
from agent_sdk.current import current_work
from agent_sdk.errors import AgentError, ErrorCode, Overloaded, ReachError, Rejected, to_proto
from agent_sdk.outgoing import MORE, PAYLOAD, SEQUENCE, field, octets_field
from agent_sdk.responses import error_core
from agent_sdk.threads import in_pool, items_of
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2
from agentreach.wire import errors as wire_errors
from agentreach.wire import payload as payloads
from agentreach.wire.framing import varint
from agentreach.wire.limits import STREAM_CREDIT_INITIAL

if TYPE_CHECKING:
    from agent_sdk.work import Work

log = logging.getLogger("agent_sdk")

IDLE_TIMEOUT_S = 30.0  # a consumer that grants nothing for so long loses its stream
_ITEMS_KEPT_BYTES_MAX = 1 << 20  # of one running streamed reply, for waiters that join late


async def run(work: Work) -> None:
    """Call the handler and answer. Whatever it does, every waiter gets exactly one final answer."""
    host, handler = work.host, work.handler
    current_work.set(work)
    work.started = boot_time()
    if work.tell:
        host.tell_started(work)
    interrupted: BaseException | None = None
    try:
        if work.cancelled:  # in the same moment in which it was to start
            raise asyncio.CancelledError
        if handler.streams:
            core, keep = await _stream(work), True
        else:
            data = _data(work)
            if handler.sync:
                result = await in_pool(work, data)
            elif handler.wants_context:
                from agent_sdk.context import Context

                result = await handler.fn(data, Context(work))
            else:
                result = await handler.fn(data)
            core, keep = encoded(work, result), True
    except BaseException as error:  # a rim: SystemExit and the like are an answer too, not the end of the agent
        core, keep = _failure(work, error)
        work.checkpoint = None  # of a turn that did not come to its end
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() and not work.cancelled:
            interrupted = error  # somebody ends the loop: answer, then let it
    work.task = None  # its context holds the work: a cycle, which each message would leave to the collector
    host.finish(work, core, keep)
    if interrupted is not None:
        raise interrupted


def _data(work: Work) -> Any:
    """The decoded data. Raises `Rejected` naming what does not fit."""
    payload = work.envelope.payload
    decode = work.handler.decode
    if not work.replies and work.envelope.HasField("error"):
        return None  # the outcome of a submitted request that has no result: `ctx.error` says why
    body = payload.body
    if body:
        work.body = body
        if payload.content_type == payloads.OCTETS and decode is None:
            return body
    try:
        data = payloads.decode(payload)
        return data if decode is None else decode(data)
    except (payloads.PayloadError, shapes.ShapeError) as error:
        raise Rejected(f"payload: {error}") from None


def encoded(work: Work, result: Any) -> bytes:
    """The payload field of a result, in the form it was asked in."""
    limit = work.host.owner.limits.payload_bytes_max
    if type(result) is bytes:
        if len(result) > limit:
            raise _TooLarge(len(result), limit)
        return octets_field(result)
    payload = shapes.encode(result, payloads.form_of(work.envelope.payload)).SerializeToString()
    if len(payload) > limit and pb.Payload.FromString(payload).body[limit:]:
        raise _TooLarge(len(payload), limit)
    return field(PAYLOAD, payload)


class _TooLarge(Exception):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the handler's result has {size} bytes; the limit for inline payloads is {limit}")


# ---- streamed replies ----


async def _stream(work: Work) -> bytes:
    """Send what the generator yields, as the consumer takes it; returns the end of the reply."""
    work.items = []
    work.credit = max(work.credit, STREAM_CREDIT_INITIAL)
    sequence = 0
    generator = items_of(work, _data(work))
    try:
        async for item in generator:
            core = encoded(work, item) + SEQUENCE + varint(sequence) + MORE
            if sequence >= work.credit:
                await _credit(work, sequence)
            _keep(work, core)
            work.host.answer(work, core)
            sequence += 1
    finally:
        await generator.aclose()  # type: ignore[attr-defined]  # both are generators
    return SEQUENCE + varint(sequence)


def _keep(work: Work, core: bytes) -> None:
    if work.items is not None:
        work.items_bytes += len(core)
        if work.items_bytes > _ITEMS_KEPT_BYTES_MAX:
            work.items = None
        else:
            work.items.append(core)


async def _credit(work: Work, sequence: int) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            while sequence >= work.credit:
                work.credit_waiter = loop.create_future()
                await work.credit_waiter
                if work.cancelled:
                    raise asyncio.CancelledError
    except TimeoutError:
        raise Overloaded(f"the consumer took no item for {IDLE_TIMEOUT_S:g} s", retryable=False) from None
    finally:
        work.credit_waiter = None


# ---- failures ----


def _failure(work: Work, error: BaseException) -> tuple[bytes, bool]:
    """What the caller is told, and whether a copy of the message shall be told the same instead of running."""
    agent_id = work.host.agent_id
    try:
        found = _told(work, error)
    except Exception:  # an exception whose own text cannot be had must not cost the answer
        log.exception("an error of handler %s cannot be told", work.handler.name)
        found = wire_errors.failure(
            error_pb2.AGENT_ERROR, type(error).__name__, may_have_executed=True, agent_id=agent_id
        )
    if not found.agent_id:
        found.agent_id = agent_id
    keep = found.may_have_executed and not found.retryable and found.code != error_pb2.CANCELLED
    return error_core(found), keep


def _told(work: Work, error: BaseException) -> error_pb2.Error:
    agent_id = work.host.agent_id
    if isinstance(error, asyncio.CancelledError) and work.cancelled:
        if work.host.expired:
            text = f"{agent_id} is shutting down, and the time for what it worked on is over"
            again = work.envelope.idempotent
            return wire_errors.failure(
                error_pb2.AGENT_LOST, text, retryable=again, may_have_executed=True, agent_id=agent_id
            )
        return wire_errors.failure(error_pb2.CANCELLED, "cancelled", may_have_executed=True, agent_id=agent_id)
    if isinstance(error, _TooLarge):
        return wire_errors.failure(error_pb2.PAYLOAD_TOO_LARGE, str(error), may_have_executed=True, agent_id=agent_id)
    if isinstance(error, ReachError):
        if isinstance(error, Rejected | Overloaded | AgentError) and not error.trace_id:
            told = to_proto(error)
            told.may_have_executed = error.code is ErrorCode.AGENT_ERROR or error.may_have_executed
            return told
        return _passed_on(work, error)
    log.error(
        "handler %s of %s failed: %s",
        work.handler.name,
        agent_id,
        type(error).__name__,
        exc_info=error,
        extra={"trace_id": work.trace_id},
    )
    return wire_errors.failure(error_pb2.AGENT_ERROR, type(error).__name__, may_have_executed=True, agent_id=agent_id)


def _passed_on(work: Work, error: ReachError) -> error_pb2.Error:
    """The error of a nested call on its way up (behaviour.md §4): its own code and agent, and whom it passed."""
    told = to_proto(error)
    via = told.details["via"]
    told.details["via"] = f"{via},{work.host.agent_id}" if via else work.host.agent_id
    told.may_have_executed = True
    told.retryable = error.retryable and work.envelope.idempotent
    return told
