"""Every call passes here first: who is calling is established before its body is read, whatever its shape.

A refused call gets the shape of a two-way stream, so that its status goes out at once even to a client that never
sends anything. Methods that do not exist are refused to strangers like those that do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from inspect import isasyncgen
from typing import Any

import grpc

from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.adapters.grpc_server.outcome import Context, end_with
from reach.core.ports import ANYBODY, Doorkeeper, Identity, MeshFailure

_CALLER: ContextVar[Identity] = ContextVar("caller", default=ANYBODY)
_DOORKEEPER: ContextVar[Doorkeeper | None] = ContextVar("doorkeeper", default=None)
_CALL: ContextVar[Context | None] = ContextVar("call", default=None)

Handler = Any  # grpc.RpcMethodHandler is generic in its stubs only


def identify() -> Identity:
    """Who makes the call that this task handles. Anybody, where no gate stands."""
    return _CALLER.get()


def admitted() -> Identity:
    """The same once the call's message is there, which can come long after its headers.

    Raises `MeshFailure` if what its caller got in by has ended meanwhile.
    """
    who, doorkeeper = _CALLER.get(), _DOORKEEPER.get()
    if doorkeeper is not None:
        doorkeeper.check(who)
    return who


def still_admitted() -> Callable[[], None]:
    """What raises `MeshFailure` once what this task's caller got in by has ended; to be asked by any task."""
    who, doorkeeper = _CALLER.get(), _DOORKEEPER.get()
    return lambda: doorkeeper.check(who) if doorkeeper is not None else None


def answering(context: Context) -> None:
    """This task answers that call."""
    _CALL.set(context)


def caller_address() -> str:
    """Where the call comes from that this task answers; empty if it answers none."""
    context = _CALL.get()
    return context.peer() if context is not None else ""


class Gate(grpc.aio.ServerInterceptor):
    """Lets in whom the doorkeeper lets in."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], call: grpc.HandlerCallDetails
    ) -> Handler:
        """The method's own handler, or one that refuses."""
        _DOORKEEPER.set(self._doorkeeper)
        method, metadata = str(call.method), tuple(call.invocation_metadata or ())
        try:
            who = await self._doorkeeper.admit(method, metadata)
        except MeshFailure as refused:
            return self._refusal(method, refused)
        if who is not None:
            _CALLER.set(who)
            return await continuation(call)
        return self._by_certificate(method, await continuation(call))

    def _by_certificate(self, method: str, handler: Handler) -> Handler:
        """Who is calling stands in its certificate, which only the call itself knows.

        It has the shape of a two-way stream until then: a stranger is refused before its message has come.
        """

        async def serve(requests: Any, context: Context) -> None:
            try:
                _CALLER.set(self._doorkeeper.certified(method, context.auth_context()))
            except MeshFailure as refused:
                self._doorkeeper.turned_away(method, refused, context.peer())
                await end_with(context, refused)
            if handler is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}")
            inner = handler.unary_unary or handler.unary_stream or handler.stream_stream or handler.stream_unary
            answers = inner(requests if handler.request_streaming else await _only_message(context), context)
            if isasyncgen(answers):
                async for each in answers:
                    await context.write(each)
            elif (reply := await answers) is not None:
                await context.write(reply)

        coding = (handler.request_deserializer, handler.response_serializer) if handler is not None else ()
        return grpc.stream_stream_rpc_method_handler(serve, *coding)

    def _refusal(self, method: str, refused: MeshFailure) -> Handler:
        async def refuse(_: Any, context: Context) -> None:
            self._doorkeeper.turned_away(method, refused, context.peer())
            await end_with(context, refused)

        return grpc.stream_stream_rpc_method_handler(refuse)


async def _only_message(context: Context) -> Any:
    message = await context.read()
    if message is grpc.aio.EOF:
        await end_with(context, MeshFailure(failure(codes.INVALID_ENVELOPE, "the call ended before its message came")))
    return message
