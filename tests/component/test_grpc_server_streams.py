"""Connect, health and stopping, over real sockets with raw clients."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from agentreach.aio.options import CLIENT_OPTIONS
from reach.adapters.grpc_server import GrpcServer
from tests.support.switchboard import RuleSwitchboard

CONNECT = "/agentreach.v1.MeshService/Connect"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
LIMIT_S = 5.0
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


class Served:
    """A server with its switchboard and a raw channel to it."""

    def __init__(self, node: RuleSwitchboard, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.node, self.server, self.channel = node, server, channel


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    node = RuleSwitchboard()
    server = GrpcServer(node, listen="127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
        yield Served(node, server, channel)
    await server.stop(0)


def status_in(data: bytes) -> int:
    return health_pb2.HealthCheckResponse.FromString(data).status


def asking(service: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


async def test_admission_is_told_by_initial_metadata_before_any_frame(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    await asyncio.wait_for(call.initial_metadata(), LIMIT_S)
    assert len(served.node.streams) == 1
    call.cancel()


async def test_frames_pass_both_ways_in_order(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    for number in range(50):
        await call.write(b"%d" % number)
    got = [await asyncio.wait_for(call.read(), LIMIT_S) for _ in range(50)]
    assert got == [b"%d" % number for number in range(50)]
    await call.done_writing()
    assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.OK


async def test_a_stream_refused_at_the_door_ends_with_its_status(served: Served) -> None:
    served.node.closed = True
    call = served.channel.stream_stream(CONNECT)()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (caught.value.details() or "").startswith("SHUTTING_DOWN")


async def test_a_stream_the_node_ends_is_read_on_until_the_peer_half_closes_and_is_ok(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    await call.initial_metadata()
    served.node.streams[0].frames.append(b"goodbye")
    served.node.streams[0].finish()
    assert await asyncio.wait_for(call.read(), LIMIT_S) == b"goodbye"
    for _ in range(20):
        await call.write(b"late")
    await call.done_writing()
    assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.OK
    assert served.node.streams[0].read_after_finish == 20


async def test_a_peer_that_never_half_closes_is_not_waited_for_longer_than_the_limit(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    await call.initial_metadata()
    began = time.monotonic()
    served.node.streams[0].finish()
    assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.OK
    assert time.monotonic() - began < 3.5


async def test_a_bug_in_the_nodes_stream_is_internal_and_tells_nothing(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    await call.initial_metadata()
    stream = served.node.streams[0]
    stream.fault = RuntimeError("hunter2")
    stream.finish()
    assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.INTERNAL
    assert "hunter2" not in (await call.details() or "")
    assert stream.over.is_set()


_READER = """
import asyncio, sys, grpc
async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        call = channel.stream_stream("/agentreach.v1.MeshService/Connect")()
        for _ in range(100):
            await call.write(b"x" * 1000)
            await call.read()
        print("reading", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_peer_that_is_killed_while_frames_are_written_ends_the_stream_quietly(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _READER, served.server.address, stdout=asyncio.subprocess.PIPE
    )
    assert peer.stdout is not None
    assert await asyncio.wait_for(peer.stdout.readline(), 20) == b"reading\n"
    stream = served.node.streams[0]
    for _ in range(200):
        stream.received(b"y" * 65_536)
    peer.kill()
    await asyncio.wait_for(stream.over.wait(), LIMIT_S)
    await peer.wait()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_a_peer_that_cancels_ends_the_nodes_stream(served: Served) -> None:
    call = served.channel.stream_stream(CONNECT)()
    await call.initial_metadata()
    call.cancel()
    await asyncio.wait_for(served.node.streams[0].over.wait(), LIMIT_S)


async def test_check_follows_the_nodes_readiness_overall_and_per_service(served: Served) -> None:
    check = served.channel.unary_unary(CHECK)
    for service in ("", "agentreach.v1.MeshService", "agentreach.v1.AdminService"):
        assert status_in(await check(asking(service), timeout=LIMIT_S)) == SERVING
    served.server.set_serving(False)
    assert status_in(await check(asking(""), timeout=LIMIT_S)) == NOT_SERVING


async def test_who_asks_is_told_at_once_what_holds_now(served: Served) -> None:
    """Who saw 200 at /readyz may ask here next, and must not find another answer."""
    check = served.channel.unary_unary(CHECK)
    for _ in range(3):
        served.node.reason = "the registry is away"
        assert status_in(await check(asking(""), timeout=LIMIT_S)) == NOT_SERVING
        served.node.reason = ""
        call = served.channel.unary_stream(WATCH)(asking(""))
        assert status_in(await asyncio.wait_for(call.read(), LIMIT_S)) == SERVING
        call.cancel()


async def test_check_of_an_unknown_service_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(CHECK)(asking("nope"), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_tells_every_change_by_itself(served: Served) -> None:
    call = served.channel.unary_stream(WATCH)(asking(""))
    assert status_in(await asyncio.wait_for(call.read(), LIMIT_S)) == SERVING
    served.node.reason = "the registry is away"
    assert status_in(await asyncio.wait_for(call.read(), LIMIT_S)) == NOT_SERVING
    served.node.reason = ""
    assert status_in(await asyncio.wait_for(call.read(), LIMIT_S)) == SERVING
    call.cancel()


async def test_open_watches_even_of_unknown_services_do_not_hold_up_a_stop() -> None:
    server = GrpcServer(RuleSwitchboard(), listen="127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
        known = channel.unary_stream(WATCH)(asking(""))
        unknown = channel.unary_stream(WATCH)(asking("nope"))
        assert status_in(await asyncio.wait_for(known.read(), LIMIT_S)) == SERVING
        assert status_in(await asyncio.wait_for(unknown.read(), LIMIT_S)) == UNKNOWN
        began = time.monotonic()
        await server.stop(30)
        assert time.monotonic() - began < 2
        assert status_in(await asyncio.wait_for(known.read(), LIMIT_S)) == NOT_SERVING
        assert await asyncio.wait_for(known.code(), LIMIT_S) is grpc.StatusCode.OK
        assert await asyncio.wait_for(unknown.code(), LIMIT_S) is grpc.StatusCode.OK


async def test_garbage_to_health_and_reflection_is_an_invalid_argument(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(CHECK)(b"\xff\xff", timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = served.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
    await call.write(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
