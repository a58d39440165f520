"""An attacker's tools: gRPC and protobuf as they come, and HTTP/2 by hand where those are too well-behaved.

Nothing of the SDK is in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

from agentreach.aio.options import CLIENT_OPTIONS

LIMIT_S = 5.0
Metadata = Sequence[tuple[str, str | bytes]]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """What shows a key."""
    return (("authorization", f"Bearer {key}"),)


@contextlib.asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A plain channel."""
    async with grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS]) as channel:
        yield channel


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: str
    text: str
    after_s: float
    answered: bool = False
    """It was given initial metadata, or a message, before it ended."""


async def knock(
    channel: grpc.aio.Channel, method: str, metadata: Metadata = (), body: bytes | None = None, limit_s: float = LIMIT_S
) -> Ended:
    """Call a method, whatever its shape, in that of a two-way stream; without a body it never sends a byte of one.

    On the wire that is what a unary client looks like that sends its headers and then nothing.
    """
    began = time.monotonic()
    call: Any = channel.stream_stream(method)(metadata=tuple(metadata))
    answered = False
    try:
        async with asyncio.timeout(limit_s):
            if body is not None:
                with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
                    await call.write(body)
                    await call.done_writing()
            async for _ in call:
                answered = True
                break
            code = (await call.code()).name if not answered else "OK"
            text = (await call.details()) or "" if not answered else ""
    except TimeoutError:
        code, text = "SILENT", ""
    except grpc.aio.AioRpcError as error:
        code, text = error.code().name, error.details() or ""
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        code, text = "CANCELLED", ""
    call.cancel()
    return Ended(code, text, time.monotonic() - began, answered)


async def ask(
    channel: grpc.aio.Channel, method: str, message: Message | bytes, key: str = "", metadata: Metadata = ()
) -> bytes:
    """One unary call of `agentreach.v1`; raises `AioRpcError`."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    call: Any = channel.unary_unary(f"/agentreach.v1.{method}")
    async with asyncio.timeout(LIMIT_S):
        reply: bytes = await call(data, metadata=(*(bearer(key) if key else ()), *metadata))
    return reply


async def code_of(
    channel: grpc.aio.Channel, method: str, message: Message | bytes, key: str = "", metadata: Metadata = ()
) -> str:
    """How such a call ends."""
    try:
        await ask(channel, method, message, key, metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def reflected(channel: grpc.aio.Channel) -> dict[str, str]:
    """Every method that the node's reflection tells of, with its shape."""
    call: Any = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    request = reflection_pb2.ServerReflectionRequest
    found: dict[str, str] = {}
    async with asyncio.timeout(LIMIT_S):
        await call.write(request(list_services=""))
        names = [each.name for each in (await call.read()).list_services_response.service]
        for name in names:
            await call.write(request(file_containing_symbol=name))
            for data in (await call.read()).file_descriptor_response.file_descriptor_proto:
                found |= dict(_methods(FileDescriptorProto.FromString(data), name))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    return found


def _methods(file: FileDescriptorProto, service: str) -> Iterator[tuple[str, str]]:
    for each in file.service:
        if f"{file.package}.{each.name}" == service:
            for method in each.method:
                shape = ("stream" if method.client_streaming else "unary") + "_"
                yield f"/{service}/{method.name}", shape + ("stream" if method.server_streaming else "unary")


# ---- HTTP/2 by hand ----

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 7, 9
_END_STREAM, _END_HEADERS = 1, 4


def _frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + data


def _text(data: bytes) -> bytes:
    size, coded = len(data), bytearray()
    if size < 127:
        return bytes((size,)) + data
    coded.append(127)
    size -= 127
    while size >= 128:
        coded.append(size & 127 | 128)
        size >>= 7
    coded.append(size)
    return bytes(coded) + data


def _block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """HPACK without compression: each header as it is."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


@dataclass
class Seen:
    """What came of headers that were sent by hand."""

    ended: bool = False
    """The stream was ended, reset, or the connection closed."""
    data: bool = False
    """The node sent a message."""
    after_s: float = 0.0


async def by_hand(
    address: str, method: str, headers: Sequence[tuple[bytes, bytes]], body: bytes = b"", limit_s: float = 2.0
) -> Seen:
    """Send headers as these bytes stand, and a body only if there is one; look whether the stream is ended."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    first = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", address.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    block = _block([*first, *headers])
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    sent = _PREFACE + _frame(_SETTINGS, 0, 0)
    for number, piece in enumerate(pieces):
        kind, last = (_CONTINUATION if number else _HEADERS), number == len(pieces) - 1
        sent += _frame(kind, _END_HEADERS if last else 0, 1, piece)
    if body:
        sent += _frame(_DATA, _END_STREAM, 1, b"\0" + struct.pack(">I", len(body)) + body)
    seen, began = Seen(), time.monotonic()
    try:
        writer.write(sent)
        async with asyncio.timeout(limit_s):
            while not seen.ended:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:9], "big")
                await reader.readexactly(size)
                if stream == 1:
                    seen.data = seen.data or (kind == _DATA and size > 0)
                    seen.ended = kind == _RST or bool(flags & _END_STREAM and kind in (_HEADERS, _DATA))
                elif kind == _GOAWAY:
                    seen.ended = True
    except (asyncio.IncompleteReadError, ConnectionError):
        seen.ended = True
    except TimeoutError:
        pass
    finally:
        seen.after_s = time.monotonic() - began
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return seen
