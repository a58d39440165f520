"""One bidirectional stream to etcd. A reader task feeds a bounded queue; limits go around the queue.

Cancelling a read or write of grpc.aio ends the whole RPC (house.md, trap 2): hence no timeout ever touches one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Generic

import grpc

from reach.adapters.etcd.calls import Method, Req, Res, metadata
from reach.adapters.etcd.channels import Endpoint
from reach.adapters.etcd.status import Verdict, judge

_QUEUE = 64  # responses read ahead; then the stream's own flow control holds etcd back


class Stream(Generic[Req, Res]):
    """An open stream on one endpoint. One task sends, one receives."""

    def __init__(self, endpoint: Endpoint, method: Method[Req, Res], token: str | None) -> None:
        self.endpoint = endpoint
        rpc = endpoint.channel.stream_stream(
            method.path,
            request_serializer=method.serialize,
            response_deserializer=method.response.FromString,
        )
        self._call = rpc(metadata=metadata(token))
        self._queue: asyncio.Queue[Res | None] = asyncio.Queue(_QUEUE)
        self._ended = False
        self._reader = asyncio.create_task(self._read(), name=f"etcd {method.name} of {endpoint.name}")
        endpoint.streams.add(self)

    async def _read(self) -> None:
        try:
            while True:
                response: Any = await self._call.read()  # EOF has a type of its own that the stubs do not name
                if response is grpc.aio.EOF:
                    return
                await self._queue.put(response)
        except grpc.aio.AioRpcError:
            return  # the status tells
        finally:
            self._ended = True
            if not self._queue.full():
                self._queue.put_nowait(None)

    async def send(self, request: Req) -> bool:
        """Write one request; False if the stream has ended. Cancelling it ends the stream.

        In a task of its own, because a stream that is abandoned meanwhile raises `CancelledError` from its write, and
        the sender would take that for its own cancellation; or, if it was abandoned before it was connected, the write
        never ends at all: then the end of the reader tells.
        """
        writing = asyncio.ensure_future(self._call.write(request))
        try:
            await asyncio.wait([writing, self._reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = not writing.done()
            writing.cancel()
        if over or writing.cancelled():
            return False
        failure = writing.exception()
        if failure is not None and not isinstance(failure, (grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            raise failure
        return failure is None

    async def receive(self) -> Res | None:
        """The next response, None when the stream has ended. Cancelling it loses nothing."""
        if self._ended and self._queue.empty():
            return None
        return await self._queue.get()

    async def failure(self) -> tuple[Verdict, str]:
        """Why it ended. Call it after `receive` gave None."""
        code, details = await self._call.code(), await self._call.details() or ""
        return judge(code, details), f"{self.endpoint.name}: {details or code.name}"

    def abandon(self) -> None:
        """End it from outside: `receive` gives None after what was read already."""
        self._call.cancel()

    async def close(self) -> None:
        """End it and wait for the reader."""
        self.endpoint.streams.discard(self)
        self._call.cancel()
        self._reader.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):  # it ends in a turn of the loop; a bound for what we do not know
                await asyncio.wait([self._reader])
