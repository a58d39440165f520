"""The fault proxy against a real server that echoes: each fault does what it says and no more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from tools.faultproxy import BOTH, DOWN, UP, FaultProxy, Way, obey

LIMIT_S = 10.0
A_WHILE_S = 0.2


class EchoServer:
    """Sends back what it gets; remembers what came and how each connection ended."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while data := await reader.read(4096):
                self.heard += data
                writer.write(data)
                await writer.drain()
            self.ends.put_nowait("end")
        except OSError:
            self.ends.put_nowait("reset")
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    echo = EchoServer()
    listening = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    echo.address = f"{host}:{port}"
    yield echo
    listening.close()


@pytest.fixture
async def proxy(server: EchoServer) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(server.address) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def dialled(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(LIMIT_S):
        return await reader.readexactly(len(data))


async def silent(reader: asyncio.StreamReader) -> bool:
    """True if nothing comes for a while."""
    try:
        async with asyncio.timeout(A_WHILE_S):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def test_without_a_fault_everything_passes_and_the_end_too(proxy: FaultProxy, server: EchoServer) -> None:
    data = bytes(range(256)) * 8_000
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, data) == data
        writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            assert await server.ends.get() == "end"
            assert await reader.read() == b""
    assert proxy.connections == 1


@pytest.mark.parametrize(("ways", "arrives"), [(UP, False), (DOWN, True), (BOTH, False)])
async def test_a_black_hole_swallows_its_ways_and_a_new_connection_heals(
    proxy: FaultProxy, server: EchoServer, ways: Way, arrives: bool
) -> None:
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"before") == b"before"
        proxy.blackhole(ways)
        writer.write(b"-gone")
        assert await silent(reader)
        assert (b"-gone" in server.heard) is arrives
        proxy.heal()
        writer.write(b"-later")
        assert await silent(reader), "a connection that lost bytes would pass rubbish"
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"after") == b"after"


async def test_a_connection_made_into_a_black_hole_is_accepted_and_mute(proxy: FaultProxy) -> None:
    proxy.blackhole()
    async with dialled(proxy.address) as (reader, writer):
        writer.write(b"hello")
        assert await silent(reader)


async def test_what_is_held_flows_when_healed_and_nothing_is_lost(proxy: FaultProxy) -> None:
    async with dialled(proxy.address) as (reader, writer):
        proxy.hold(DOWN)
        writer.write(b"abc")
        assert await silent(reader)
        proxy.heal()
        assert await echoed(reader, writer, b"def") == b"abc"
        assert await reader.readexactly(3) == b"def"


async def test_a_held_connection_stops_its_sender(proxy: FaultProxy) -> None:
    proxy.hold(UP)
    async with dialled(proxy.address) as (_, writer):
        writer.write(bytes(32 << 20))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()


async def test_a_reset_is_seen_as_such_on_both_sides(proxy: FaultProxy, server: EchoServer) -> None:
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"x") == b"x"
        proxy.reset()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            assert await server.ends.get() == "reset"


async def test_half_closed_up_is_the_end_for_the_server_and_the_way_back_stays_open(
    proxy: FaultProxy, server: EchoServer
) -> None:
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"x") == b"x"
        proxy.half_close(UP)
        async with asyncio.timeout(LIMIT_S):
            assert await server.ends.get() == "end"


async def test_half_closed_down_is_the_end_for_the_client_only(proxy: FaultProxy, server: EchoServer) -> None:
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"x") == b"x"
        proxy.half_close(DOWN)
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read(1) == b""
    assert server.ends.empty()


async def test_what_comes_after_a_half_close_goes_nowhere(proxy: FaultProxy, server: EchoServer) -> None:
    async with dialled(proxy.address) as (reader, writer):
        assert await echoed(reader, writer, b"x") == b"x"
        proxy.half_close(UP)
        writer.write(b"late")
        async with asyncio.timeout(LIMIT_S):
            assert await server.ends.get() == "end"
        assert await silent(reader) or reader.at_eof()
    assert server.heard == b"x"


async def test_a_delay_counts_both_ways_and_keeps_order(proxy: FaultProxy) -> None:
    proxy.delay_s = 0.1
    async with dialled(proxy.address) as (reader, writer):
        began = time.monotonic()
        for number in range(10):
            writer.write(b"%d" % number)
        assert await echoed(reader, writer, b"-") == b"0"
        assert time.monotonic() - began >= 0.2
        assert await reader.readexactly(10) == b"123456789-"
        assert time.monotonic() - began < 1.5, "delays of chunks must not add up"


async def test_a_slow_way_takes_its_time(server: EchoServer) -> None:
    async with (
        FaultProxy(server.address, bytes_per_s=100_000) as proxy,
        dialled(proxy.address) as (reader, writer),
    ):
        began = time.monotonic()
        await echoed(reader, writer, bytes(20_000))
        assert time.monotonic() - began >= 0.3


async def test_a_server_that_is_not_there_ends_the_connection() -> None:
    async with FaultProxy("127.0.0.1:1") as proxy, dialled(proxy.address) as (reader, _):
        async with asyncio.timeout(LIMIT_S):
            try:
                assert await reader.read(1) == b""
            except ConnectionResetError:
                pass


async def test_lines_of_the_input_are_obeyed_or_explained(proxy: FaultProxy) -> None:
    assert obey(proxy, "delay 0.25\n") == "" and proxy.delay_s == 0.25
    assert obey(proxy, "rate 1000") == "" and proxy.bytes_per_s == 1000
    assert obey(proxy, "heal") == "" and proxy.delay_s == 0
    assert "blackhole" in obey(proxy, "help")
    assert "0 open" in obey(proxy, "status")
    for wrong in ("explode", "blackhole sideways", "delay soon"):
        with pytest.raises(ValueError):
            obey(proxy, wrong)


async def test_the_command_relays_obeys_its_input_and_ends_on_a_signal(server: EchoServer) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.faultproxy", "--to", server.address),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            address = (await process.stdout.readline()).decode().split()[0]
            async with dialled(address) as (reader, writer):
                assert await echoed(reader, writer, b"x") == b"x"
                process.stdin.write(b"reset\n")
                with pytest.raises(ConnectionResetError):
                    await reader.read(1)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
