"""The Connect stream over grpc.aio, as raw bytes: frames are written and parsed by the link.

One channel a stream: a channel that failed keeps its own back-off, which would stand beside ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.aio.tls import Credentials, Tls, TlsFileError, explained
from agentreach.aio.transport import Refused, StreamBroken

CONNECT_PATH = "/agentreach.v1.MeshService/Connect"
LINK_PATH = "/agentreach.v1.PeerService/Link"

_FATAL = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class GrpcTransport:
    """Dials nodes by gRPC; with `tls` None in the clear."""

    def __init__(self, tls: Callable[[], Tls] | None = None, *, path: str = CONNECT_PATH) -> None:
        """`tls` is asked at each dial and may raise `TlsFileError`; `path` is the method that opens a stream."""
        self._path = path
        self._credentials = Credentials(tls) if tls is not None else None

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> GrpcStream:
        """Open a stream; the node's initial metadata says that it is admitted."""
        options = list(CLIENT_OPTIONS)
        tls: Tls | None = None
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            try:
                credentials, tls = self._credentials.current()
            except TlsFileError as wrong:
                raise Refused("TLS", str(wrong), False) from wrong
            channel = grpc.aio.secure_channel(address, credentials, options=options)
        admitted = False
        try:
            call: Any = channel.stream_stream(self._path)(metadata=tuple(metadata))
            await _admission(call)
            admitted = True
            return GrpcStream(channel, call)
        except (ValueError, TypeError) as wrong:  # header values that gRPC does not take
            raise Refused("INVALID_ARGUMENT", str(wrong), True) from wrong
        except Refused as refused:
            if refused.code == grpc.StatusCode.UNAVAILABLE.name:
                refused = Refused(refused.code, await explained(address, refused.details, tls), refused.fatal)
            raise refused from None
        finally:
            if not admitted:
                await channel.close()


async def _admission(call: Any) -> None:
    """Wait for the initial metadata; raise `Refused` with the status if the call ended instead."""
    failure: grpc.aio.AioRpcError | None = None
    try:
        await call.initial_metadata()
    except grpc.aio.AioRpcError as error:
        failure = error
    if failure is None and not call.done():
        return
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return  # admitted and ended at once; the reader will see what was said
    details = await call.details()
    raise Refused(code.name, details or "", code in _FATAL) from failure


class _Over:
    """Stands for the call of a stream that was closed."""

    def cancel(self) -> None:
        """There is nothing to end."""

    def done(self) -> bool:
        """It is over."""
        return True

    async def read(self) -> object:
        """Nothing comes any more."""
        return grpc.aio.EOF

    async def write(self, _: bytes) -> None:
        """Nothing goes any more."""
        raise asyncio.InvalidStateError("the stream was closed")

    async def done_writing(self) -> None:
        """It is done."""


class GrpcStream:
    """One Connect call."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel: grpc.aio.Channel | None = channel
        self._call = call
        self._why = ""

    @property
    def why_ended(self) -> str:
        """The gRPC status, when it is not OK."""
        return self._why

    async def write(self, data: bytes) -> None:
        """Write one message; what is accepted here has not arrived (trap 8)."""
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise StreamBroken(str(error)) from error
        except asyncio.CancelledError:
            if self._ended_without_us():
                raise StreamBroken("the stream was ended") from None
            raise

    async def read(self) -> bytes | None:
        """Read one message."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._why = f"{error.code().name}: {error.details() or ''}"
            return None
        except asyncio.CancelledError:
            if self._ended_without_us():
                return None
            raise
        if data is grpc.aio.EOF:
            return None
        return bytes(data) if not isinstance(data, bytes) else data

    def _ended_without_us(self) -> bool:
        """True when a CancelledError tells of the call's end and not of a wish to cancel the task that waits."""
        task = asyncio.current_task()
        return bool(self._call.done()) and (task is None or not task.cancelling())

    async def half_close(self) -> None:
        """Say that nothing more will be written."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return
        except asyncio.CancelledError:
            if self._ended_without_us():
                return
            raise

    def cancel(self) -> None:
        """Reset the call."""
        self._call.cancel()

    async def close(self) -> None:
        """End the call if it runs, and the channel with it.

        gRPC closes a channel's socket when nobody refers to the channel, not when it is told to; so nobody here does.
        """
        self._call.cancel()
        channel, self._channel, self._call = self._channel, None, _Over()
        if channel is not None:
            await channel.close()
