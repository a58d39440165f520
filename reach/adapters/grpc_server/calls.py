"""Method handlers for unary and server-streaming calls: parse, ask the switchboard, serialise, end definitely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from agentreach.v1.envelope_pb2 import EVENT, Envelope
from reach.adapters.grpc_server.gating import admitted, answering
from reach.adapters.grpc_server.outcome import (
    Context,
    M,
    cancelled_from_outside,
    end_with,
    failure_of,
    parse,
    parse_envelope,
    write,
)
from reach.core.ports import ASKED_ALONE, Identity, Switchboard

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


def query(method: str, request_type: type[M], ask: Callable[[M, Identity], Message | Awaitable[Message]]) -> Handler:
    """A unary method that is answered from what the node knows, or can read or write within seconds."""

    async def serve(data: bytes, context: Context) -> bytes:
        try:
            reply = ask(parse(request_type, data), admitted())
            return (reply if isinstance(reply, Message) else await reply).SerializeToString()
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            failure = failure_of(error, method)
        except Exception as error:
            failure = failure_of(error, method)
        return await end_with(context, failure)

    return grpc.unary_unary_rpc_method_handler(serve)


def everywhere(method: str, request_type: type[M], own: Callable[[M, Identity], Message], node: Switchboard) -> Handler:
    """A unary method that all nodes answer, or the one it is about; only this one if another node asks."""

    async def serve(data: bytes, context: Context) -> bytes:
        try:
            request, who = parse(request_type, data), admitted()
            if ASKED_ALONE in (context.invocation_metadata() or ()):
                return own(request, who).SerializeToString()
            return (await node.everywhere(method, request, lambda: own(request, who), who)).SerializeToString()
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            failure = failure_of(error, method)
        except Exception as error:
            failure = failure_of(error, method)
        return await end_with(context, failure)

    return grpc.unary_unary_rpc_method_handler(serve)


def watch(
    method: str, request_type: type[M], follow: Callable[[M, Identity], AsyncGenerator[Message, None]]
) -> Handler:
    """A method that answers again and again until the client has enough, or the node ends it with an error."""

    async def serve(data: bytes, context: Context) -> None:
        try:
            async with aclosing(follow(parse(request_type, data), admitted())) as replies:
                async for reply in replies:
                    if not await write(context, reply.SerializeToString()):
                        return
            return
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            failure = failure_of(error, method)
        except Exception as error:
            failure = failure_of(error, method)
        await end_with(context, failure)

    return grpc.unary_stream_rpc_method_handler(serve)


def message_call(
    method: str, call: Callable[[Envelope, Identity, float | None], Awaitable[Message]], *, event: bool = False
) -> Handler:
    """Invoke or Publish: one envelope in, one message out. The client's cancelling cancels the switchboard's call."""

    async def serve(data: bytes, context: Context) -> bytes:
        trace_id = ""
        try:
            answering(context)
            envelope = parse_envelope(data)
            trace_id = envelope.trace_id
            if event and not envelope.type:
                envelope.type = EVENT
            reply = await call(envelope, admitted(), context.time_remaining())
            return reply.SerializeToString()
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            failure = failure_of(error, method, trace_id)
        except Exception as error:
            failure = failure_of(error, method, trace_id)
        return await end_with(context, failure)

    return grpc.unary_unary_rpc_method_handler(serve)


def stream_call(method: str, switchboard: Switchboard) -> Handler:
    """InvokeStream: one envelope in, every item of the reply out, then OK or the error that cut it short."""

    async def serve(data: bytes, context: Context) -> None:
        trace_id = ""
        sent = 0
        try:
            answering(context)
            envelope = parse_envelope(data)
            trace_id = envelope.trace_id
            replies = switchboard.invoke_stream(envelope, admitted(), context.time_remaining())
            async with aclosing(replies):  # left early, the request is cancelled down to the handler
                async for reply in replies:
                    if not await write(context, reply.SerializeToString()):
                        return
                    sent += 1
            return
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            failure = failure_of(error, method, trace_id)
        except Exception as error:
            failure = failure_of(error, method, trace_id)
        if failure.items is None:
            failure.items = sent
        await end_with(context, failure)

    return grpc.unary_stream_rpc_method_handler(serve)


def later(method: str, *, streams_in: bool, streams_out: bool) -> Handler:
    """A method of the contract that this version does not have yet."""

    async def refuse(_: Any, context: Context) -> bytes:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{method} is part of the contract and comes with a later version of Agent-Reach",
        )

    if streams_in:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if streams_out:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
