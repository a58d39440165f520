"""What grpc.aio does that our code is built around (docs/decisions, and the design's list of measured traps).

These tests say nothing about Agent-Reach. They fail when an upgrade of grpcio changes one of these behaviours: then
the code that works around it can be thought over. Each shows one trap in the smallest possible program.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from agentreach.aio.options import CLIENT_OPTIONS, SERVER_OPTIONS

METHOD = "/trap.T/Stream"
CALL = "/trap.T/Call"
LIMIT_S = 5.0
NOT_SHARED = [("grpc.so_reuseport", 0)]

Handler = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    stream: Handler | None = None, call: Callable[[bytes, Any], Awaitable[bytes]] | None = None
) -> AsyncIterator[tuple[grpc.aio.Server, grpc.aio.Channel]]:
    """A bare server with a raw method, and a channel to it."""
    handlers: dict[str, Any] = {}
    if stream is not None:
        handlers["Stream"] = grpc.stream_stream_rpc_method_handler(stream)
    if call is not None:
        handlers["Call"] = grpc.unary_unary_rpc_method_handler(call)
    server = grpc.aio.server(options=NOT_SHARED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("trap.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def echo(request_iterator: AsyncIterator[bytes], context: Any) -> None:
    async for data in request_iterator:
        await context.write(data)


async def test_trap_2_a_client_read_that_is_given_up_ends_the_whole_call() -> None:
    async with serving(echo) as (_, channel):
        call = channel.stream_stream(METHOD)()
        await call.write(b"1")
        assert await call.read() == b"1"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.05)
        assert call.done()
        assert call.cancelled()


async def test_trap_3_the_status_of_an_rpc_that_ends_while_the_peer_writes_is_not_reliable() -> None:
    # Not asserted to be lost: that is a race. What is relied on is the opposite, that a status given after the
    # client has half-closed arrives.
    async def refuse_after_half_close(request_iterator: AsyncIterator[bytes], context: Any) -> None:
        async for _ in request_iterator:
            pass
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the reason")

    async with serving(refuse_after_half_close) as (_, channel):
        for _ in range(10):
            call = channel.stream_stream(METHOD)()
            for _ in range(10):
                await call.write(b"x" * 1000)
            await call.done_writing()
            assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_trap_4_concurrent_writes_on_one_stream_fail() -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def reads_nothing(request_iterator: AsyncIterator[bytes], context: Any) -> None:
        entered.set()
        await may_end.wait()

    async with serving(reads_nothing) as (_, channel):
        call = channel.stream_stream(METHOD)()
        await call.write(b"first")
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        under_way: set[asyncio.Task[None]] = set()
        while not under_way:  # until the windows are full, and one waits for a reader
            _, under_way = await asyncio.wait((asyncio.create_task(call.write(bytes(4_000_000))),), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(call.write(b"x"), LIMIT_S)
        assert error.value.code() is grpc.StatusCode.INTERNAL  # and with it the whole call has failed
        may_end.set()
        await asyncio.wait(under_way, timeout=LIMIT_S)


async def test_trap_5_half_close_and_cancel_end_the_servers_read_loop_alike() -> None:
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def reading(request_iterator: AsyncIterator[bytes], context: Any) -> None:
        async def read() -> None:
            try:
                async for _ in request_iterator:
                    pass
            except BaseException as error:
                ends.put_nowait(type(error).__name__)
                raise
            ends.put_nowait("ended")

        # As the node does it: the reader is a child, and hears of the end by itself.
        await asyncio.wait((asyncio.create_task(read()),))

    async with serving(reading) as (_, channel):
        polite = channel.stream_stream(METHOD)()
        await polite.write(b"1")
        await polite.done_writing()
        assert await asyncio.wait_for(ends.get(), LIMIT_S) == "ended"
        rude = channel.stream_stream(METHOD)()
        await rude.write(b"1")
        rude.cancel()
        assert await asyncio.wait_for(ends.get(), LIMIT_S) == "ended"


async def test_trap_6_a_handler_cancelled_from_inside_leaves_its_caller_waiting() -> None:
    entered = asyncio.Event()

    async def cancelled(data: bytes, context: Any) -> bytes:
        entered.set()
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner
        return b""

    async with serving(call=cancelled) as (_, channel):
        call = channel.unary_unary(CALL)(b"")
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        done, _ = await asyncio.wait((asyncio.ensure_future(call.code()),), timeout=0.5)
        assert not done
        call.cancel()


async def test_trap_6_a_task_knows_whether_it_was_cancelled_itself() -> None:
    # What `cancelled_from_outside` stands on: the client's cancel goes through Task.cancel, an inner one does not.
    seen: asyncio.Queue[int] = asyncio.Queue()
    entered = asyncio.Event()

    async def waiting(data: bytes, context: Any) -> bytes:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            seen.put_nowait(task.cancelling() if task else -1)
            raise
        return b""

    async with serving(call=waiting) as (_, channel):
        call = channel.unary_unary(CALL)(b"")
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        call.cancel()
        assert await asyncio.wait_for(seen.get(), LIMIT_S) == 1


async def test_trap_7_ports_are_shared_unless_that_is_switched_off() -> None:
    first = grpc.aio.server()
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    second = grpc.aio.server()
    assert second.add_insecure_port(f"127.0.0.1:{port}") == port  # silently
    third = grpc.aio.server(options=SERVER_OPTIONS)
    with pytest.raises(RuntimeError):
        third.add_insecure_port(f"127.0.0.1:{port}")
    for server in (first, second, third):
        await server.stop(0)


async def test_trap_8_a_stalled_stream_takes_megabytes_before_a_write_waits() -> None:
    never = asyncio.Event()

    async def stalled(request_iterator: AsyncIterator[bytes], context: Any) -> None:
        await never.wait()

    async with serving(stalled) as (_, channel):
        call = channel.stream_stream(METHOD)()
        taken = 0
        chunk = b"x" * 65_536
        while taken < 64 << 20:
            writing = asyncio.ensure_future(call.write(chunk))
            done, _ = await asyncio.wait((writing,), timeout=0.3)
            if not done:
                break
            taken += len(chunk)
        call.cancel()
        await asyncio.wait((writing,))
        never.set()
        assert 64 << 10 < taken < 64 << 20


async def test_trap_10_an_idle_stream_takes_the_whole_grace_of_a_stop() -> None:
    async with serving(echo) as (server, channel):
        call = channel.stream_stream(METHOD)()
        await call.write(b"1")
        assert await call.read() == b"1"
        began = time.monotonic()
        await server.stop(0.5)
        assert time.monotonic() - began >= 0.45


async def test_trap_10_so_does_an_open_watch_of_the_librarys_health_service() -> None:
    server = grpc.aio.server(options=NOT_SHARED)
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await servicer.enter_graceful_shutdown()
        began = time.monotonic()
        await server.stop(0.5)
        assert time.monotonic() - began >= 0.45


def test_trap_11_the_reflection_library_knows_v1alpha_only() -> None:
    assert reflection.SERVICE_NAME == "grpc.reflection.v1alpha.ServerReflection"


async def test_trap_12_the_text_of_a_handlers_exception_reaches_the_client() -> None:
    async def failing(data: bytes, context: Any) -> bytes:
        raise ValueError("hunter2")

    async with serving(call=failing) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(CALL)(b"", timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert "hunter2" in (caught.value.details() or "")


async def test_trap_13_a_proxy_in_the_environment_takes_loopback_calls_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(data: bytes, context: Any) -> bytes:
        return b"ok"

    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server(options=NOT_SHARED)
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("trap.T", {"Call": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with grpc.aio.insecure_channel(address) as hijacked:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hijacked.unary_unary(CALL)(b"", timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as direct:
        assert await direct.unary_unary(CALL)(b"", timeout=LIMIT_S) == b"ok"
    await server.stop(0)
