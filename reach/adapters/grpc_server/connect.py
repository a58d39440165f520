"""MeshService.Connect: carries bytes between one gRPC stream and the node's end of it.

The handler coroutine is the only writer and nothing is ever cancelled inside a write (house.md, traps 1, 4); one child
task reads, without any limit around a read (trap 2). Why a stream ends is said in a frame; then the peer is given time
to half-close before the RPC ends with OK, because an RPC that ends while the peer still writes loses its status
(trap 3). Admission is told by initial metadata: a stream refused at the door ends with its status instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from reach.adapters.grpc_server.calls import Handler
from reach.adapters.grpc_server.outcome import Context, cancelled_from_outside, end_with, failure_of, write
from reach.core.ports import NodeStream

_log = logging.getLogger(__name__)

HALF_CLOSE_LIMIT_S = 2.0  # a live peer half-closes within a round trip of reading goodbye


def connect(method: str, opened: Callable[[Context], NodeStream]) -> Handler:
    """The handler of a stream of frames; `opened` gives the node's end of it."""

    async def serve(request_iterator: AsyncIterator[bytes], context: Context) -> None:
        try:
            await _carry(opened(context), request_iterator, context)
            return
        except Exception as error:
            failure = failure_of(error, method)
        await end_with(context, failure)

    return grpc.stream_stream_rpc_method_handler(serve)


async def _carry(stream: NodeStream, request_iterator: AsyncIterator[bytes], context: Context) -> None:
    """Write the stream's frames until the node is done with it, then wait for the peer to half-close."""
    reader: asyncio.Task[None] | None = None
    try:
        await context.send_initial_metadata(())
        reader = asyncio.create_task(_read(stream, request_iterator), name=f"connect-reader {context.peer()}")
        while (frame := await stream.next_frame()) is not None:
            if not await write(context, frame):
                return
        if not stream.severed:
            await asyncio.wait((reader,), timeout=HALF_CLOSE_LIMIT_S)
    except asyncio.CancelledError:
        if cancelled_from_outside():  # the peer left, or the server stops: there is nobody to tell
            raise
        _log.error("the node gave up a stream from inside", extra={"peer": context.peer()})
    finally:
        if reader is not None:
            reader.cancel()
        stream.ended()


async def _read(stream: NodeStream, request_iterator: AsyncIterator[bytes]) -> None:
    try:
        async for data in request_iterator:
            stream.received(data)
            await asyncio.sleep(0)  # what it has brought about is written before the next is asked for
    except Exception as error:  # the stream promises not to raise, the transport does not
        _log.error("reading a stream failed; it ends", exc_info=error)
    finally:
        stream.ended()
