"""A TCP relay that misbehaves on purpose: what networks, middleboxes and frozen machines do to a connection.

    async with FaultProxy("127.0.0.1:7070") as proxy:            # as a library: dial proxy.address instead
        proxy.blackhole(UP)                                      # nothing more arrives at the node, nobody is told
        proxy.heal()

    python -m tools.faultproxy --listen 127.0.0.1:9000 --to 127.0.0.1:7070 --delay 0.05

The command reads further faults from its standard input, one a line (`help` lists them). UP is from the client that
dialled the relay to the server behind it, DOWN the way back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from enum import Flag
from types import TracebackType

_CHUNK_BYTES = 64 << 10
_TURNS = 10
_CHUNKS_UNDER_WAY_MAX = 64  # of one connection and way; beyond, the sender feels it
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST


class Way(Flag):
    """The ways through a relay."""

    UP = 1
    DOWN = 2


UP, DOWN = Way.UP, Way.DOWN
BOTH = UP | DOWN


class FaultProxy:
    """A relay to one address. Faults apply to all its connections, also to those still to come, until `heal`.

    `connections` counts those ever accepted.
    """

    def __init__(self, to: str, *, listen: str = "127.0.0.1:0", delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self._to, self._listen = to, listen
        self.delay_s = delay_s
        """Every byte arrives so much later; order and throughput stay."""
        self.bytes_per_s = bytes_per_s
        """How fast each way of each connection is; 0: as fast as it goes."""
        self.connections = 0
        self._swallowed = Way(0)
        self._passing = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        self._relays: dict[asyncio.Task[None], _Relay] = {}
        self._server: asyncio.Server | None = None
        self._closed = False
        for passing in self._passing.values():
            passing.set()

    @property
    def address(self) -> str:
        """HOST:PORT to dial."""
        assert self._server is not None, "the relay is not open"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    # ---- faults ----

    def blackhole(self, ways: Way = BOTH) -> None:
        """Swallow what comes these ways. A connection that lost bytes so never passes any again, that way."""
        self._swallowed |= ways
        for relay in self._relays.values():
            relay.deaf |= ways

    def hold(self, ways: Way = BOTH) -> None:
        """Let nothing pass these ways, and lose nothing: a frozen peer, full buffers. `heal` lets it flow."""
        for way in ways:
            self._passing[way].clear()

    def heal(self) -> None:
        """Let new connections, and those that lost nothing, pass again at full speed."""
        self._swallowed = Way(0)
        self.delay_s = self.bytes_per_s = 0.0
        for passing in self._passing.values():
            passing.set()

    def reset(self) -> None:
        """End every connection by RST on both sides."""
        for relay in self._relays.values():
            relay.reset()

    def half_close(self, ways: Way = UP) -> None:
        """Tell the far end of these ways, on every connection, that nothing more will come."""
        for relay in self._relays.values():
            relay.half_close(ways)

    # ---- life ----

    async def open(self) -> None:
        """Listen. `OSError` if the address cannot be had."""
        self._closed = False
        host, _, port = self._listen.rpartition(":")
        self._server = await asyncio.start_server(self.relay, host, int(port))

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        self.reset()
        relays = list(self._relays)
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        for _ in range(_TURNS):  # of the loop, in which sockets are closed, also of who was just being accepted
            await asyncio.sleep(0)

    async def __aenter__(self) -> FaultProxy:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take on a connection: one that was dialled here, or that somebody else has accepted."""
        self.connections += 1
        if self._closed:
            writer.transport.abort()
            return
        relay = _Relay(reader, writer)
        relay.deaf = self._swallowed
        task = asyncio.get_running_loop().create_task(self._carry(relay), name=f"relay {self.connections}")
        self._relays[task] = relay
        task.add_done_callback(self._over)

    # ---- inside ----

    def _over(self, task: asyncio.Task[None]) -> None:
        self._relays.pop(task).reset()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _carry(self, relay: _Relay) -> None:
        host, _, port = self._to.rpartition(":")
        up_reader, relay.up = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as ways:
            ways.create_task(self._pump(relay, UP, relay.reader, relay.up))
            ways.create_task(self._pump(relay, DOWN, up_reader, relay.down))

    async def _pump(self, relay: _Relay, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_UNDER_WAY_MAX)
        deliver = asyncio.create_task(self._deliver(relay, way, under_way, writer))
        loop = asyncio.get_running_loop()
        try:
            while not deliver.done():
                await self._passing[way].wait()
                data = await _read(reader)
                if not relay.deaf & way:
                    await under_way.put((loop.time() + self.delay_s, data))
                if not data:
                    break
            await deliver
        finally:
            deliver.cancel()

    async def _deliver(
        self, relay: _Relay, way: Way, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(due - loop.time(), 0))
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            await self._passing[way].wait()
            if (relay.deaf | relay.ended) & way:
                continue
            if not data:
                relay.half_close(way)
                return
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                relay.reset()
                return


class _Relay:
    """One connection: the client's side and, once dialled, the server's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.down = reader, writer
        self.up: asyncio.StreamWriter | None = None
        self.deaf = Way(0)
        self.ended = Way(0)
        """Half-closed: nothing more can be written."""

    def reset(self) -> None:
        for writer in (self.down, self.up):
            if writer is not None and not writer.transport.is_closing():
                inner: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                writer.transport.abort()

    def half_close(self, ways: Way) -> None:
        self.ended |= ways
        for way, writer in ((UP, self.up), (DOWN, self.down)):
            if ways & way and writer is not None and not writer.transport.is_closing():
                with contextlib.suppress(OSError):
                    writer.write_eof()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What came, b"" at the end, also when the end was a reset."""
    try:
        return await reader.read(_CHUNK_BYTES)
    except OSError:
        return b""


# ---- the command ----

HELP = (
    "delay S · rate BYTES_PER_S · blackhole [up|down] · hold [up|down] · half-close [up|down] · "
    "reset · heal · status · help"
)

_WAYS = {"": BOTH, "up": UP, "down": DOWN, "both": BOTH}


def obey(proxy: FaultProxy, line: str) -> str:
    """Carry out one line of the standard input; what to print. Raises `ValueError` for a line that makes no sense."""
    name, _, argument = line.strip().partition(" ")
    faults: dict[str, Callable[[Way], None]] = {
        "blackhole": proxy.blackhole, "hold": proxy.hold, "half-close": proxy.half_close,
    }  # fmt: skip
    if name in faults:
        if argument not in _WAYS:
            raise ValueError(f"{argument!r} is no way: up, down or nothing")
        faults[name](_WAYS[argument])
    elif name == "delay":
        proxy.delay_s = float(argument)
    elif name == "rate":
        proxy.bytes_per_s = float(argument)
    elif name == "reset":
        proxy.reset()
    elif name == "heal":
        proxy.heal()
    elif name == "status":
        return f"{proxy.connections} connections so far, {len(proxy._relays)} open"
    elif name == "help":
        return HELP
    elif name:
        raise ValueError(f"{name!r} is not known: {HELP}")
    return ""


async def _serve(options: argparse.Namespace) -> None:
    proxy = FaultProxy(options.to, listen=options.listen, delay_s=options.delay, bytes_per_s=options.rate)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    async with proxy:
        print(f"{proxy.address} → {options.to}", flush=True)
        orders = asyncio.create_task(_orders(proxy))
        resets = asyncio.create_task(_resets(proxy, options.reset_every))
        await over.wait()
        orders.cancel()
        resets.cancel()


async def _orders(proxy: FaultProxy) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    with contextlib.suppress(ValueError):  # an input that cannot be waited for: a file
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := (await reader.readline()).decode(errors="replace"):
        try:
            told = obey(proxy, line)
        except ValueError as error:
            told = str(error)
        if told:
            print(told, flush=True)


async def _resets(proxy: FaultProxy, every_s: float) -> None:
    while every_s > 0:
        await asyncio.sleep(every_s)
        proxy.reset()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the relay until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser("faultproxy", description="A TCP relay that misbehaves on purpose.", epilog=HELP)
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free one")
    parser.add_argument("--to", required=True, help="HOST:PORT of the server behind it")
    parser.add_argument("--delay", type=float, default=0.0, metavar="S", help="every byte arrives so much later")
    parser.add_argument("--rate", type=float, default=0.0, metavar="BYTES_PER_S", help="of each way and connection")
    parser.add_argument("--reset-every", type=float, default=0.0, metavar="S", help="reset all connections so often")
    try:
        asyncio.run(_serve(parser.parse_args(arguments)))
    except OSError as error:
        print(f"faultproxy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
