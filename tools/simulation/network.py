"""The network: connections between processes that deliver bytes late, in order, and lose them as TCP and HTTP/2 do.

What a stream guarantees is kept (no gap, no reordering within one stream); what it does not guarantee is played out:
frames under way are lost from any point on, both ends learn of a break at different times, a connection may be silent
while both ends believe in it, and a reader may take so little that the writer has to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentreach.aio.transport import Refused, StreamBroken

if TYPE_CHECKING:
    from .process import Process
    from .world import World

WINDOW_BYTES = 64 << 10  # under way and unread, from which a writer waits: HTTP/2's flow control
KEEPALIVE_S = 8.0  # after which a silent peer is noticed: a ping every 6 s, 2 s for its answer


class End:
    """One end of a connection, seen by its process."""

    def __init__(self, connection: Connection, process: Process, to_node: bool) -> None:
        self.connection = connection
        self.process = process
        self.to_node = to_node
        """True: this end writes towards the node."""
        self.broken = ""
        self.finished = False
        """It will write no more."""
        self.incoming: Callable[[bytes | None], None] | None = None
        """Takes each message in the process's own loop, None when there will be no more."""
        self.unread_bytes = 0
        """Sent by this end and not yet read by the other."""
        self.under_way: deque[list[Any]] = deque()
        self.last_arrival = 0.0
        self.deaf_until = 0.0
        """Until then nothing of it arrives, while the other way is open."""
        self.bytes_per_s = 0.0
        """How fast the other end reads; 0: at once."""
        self._room: asyncio.Future[None] | None = None

    @property
    def other(self) -> End:
        """The peer's end."""
        ends = self.connection.ends
        return ends[1] if ends[0] is self else ends[0]

    async def write(self, data: bytes) -> None:
        """Put one message on its way; waits while too much is unread. Raises `StreamBroken`."""
        if self.broken or self.finished:
            raise StreamBroken(self.broken or "the stream has ended")
        self.connection.send(self, data)
        while self.unread_bytes > WINDOW_BYTES and not self.broken:
            self._room = self.process.loop.create_future()
            await self._room
            self._room = None
        if self.broken:
            raise StreamBroken(self.broken)

    def finish(self) -> None:
        """Half-close."""
        if not self.finished and not self.broken:
            self.finished = True
            self.connection.send(self, None)

    def read(self, size: int) -> None:
        """The other end has taken so many bytes."""
        self.unread_bytes -= size
        if self._room is not None and not self._room.done() and self.unread_bytes <= WINDOW_BYTES:
            self._room.set_result(None)

    def breaks(self, why: str) -> None:
        """This end learns, in its own loop, that the connection is gone."""
        if self.broken:
            return
        self.broken = why
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self.incoming is not None:
            self.incoming(None)


class Connection:
    """One HTTP/2 stream between a client process and a node process."""

    def __init__(self, world: World, client: Process, node: Process, between_nodes: bool = False) -> None:
        self.between_nodes = between_nodes
        self.world = world
        self.number = world.number()
        self.ends = (End(self, client, True), End(self, node, False))
        self.silent_until = 0.0
        """Until then nothing arrives at either end, and neither is told."""
        self.lossy = False
        """Cut: what is sent from now on is lost."""
        self.over = False
        world.connections[self] = None

    def __str__(self) -> str:
        client, node = self.ends
        return f"{client.process}~{node.process}#{self.number}"

    def send(self, end: End, data: bytes | None) -> None:
        """Put a message (None: the half-close) on its way to the other end."""
        size = len(data) if data is not None else 0
        end.unread_bytes += size
        if self.lossy:
            return
        world = self.world
        delay = world.latency_s()
        if end.bytes_per_s:
            delay += size / end.bytes_per_s
        arrival = max(end.last_arrival + 1e-6, world.now + delay, self.silent_until, end.deaf_until)
        end.last_arrival = arrival
        message = [data, size, False]
        end.under_way.append(message)
        world.scheduler.at(arrival, self._arrive, end, message)

    def _arrive(self, end: End, message: list[Any]) -> None:
        """Its time has come; one whose predecessor is held up arrives right after that."""
        waiting = end.under_way
        held_until = max(self.silent_until, end.deaf_until)
        if self.world.now < held_until:
            self.world.scheduler.at(held_until, self._arrive, end, message)
            return
        message[2] = True
        while waiting and waiting[0][2]:
            data, size, _ = waiting.popleft()
            end.other.process.loop.call_soon(self._taken, end, end.other, data, size)

    def _taken(self, end: End, other: End, data: bytes | None, size: int) -> None:
        """In the reader's loop."""
        if other.broken:
            return
        self.world.ledger.frame(self, end, data)
        if other.incoming is not None:
            other.incoming(data)
        if not end.process.loop.dead:
            end.process.loop.call_soon(end.read, size)

    # ---- faults ----

    def cut(self, notice_s: tuple[float, float]) -> None:
        """Break it: what is under way arrives up to a point drawn at random; each end learns of it at its own time."""
        if self.over:
            return
        self.over = self.lossy = True
        rng = self.world.network_rng
        for end, after_s in zip(self.ends, notice_s, strict=True):
            for _ in range(rng.randint(0, len(end.under_way))):
                end.under_way.pop()
            self.world.scheduler.after(after_s, self._notice, end, "the connection was reset")
        self._gone()

    def _gone(self) -> None:
        if self.world.connections.pop(self, self) is None:
            self.ends[0].process.was_cut()

    def _notice(self, end: End, why: str) -> None:
        if not end.process.loop.dead:
            end.process.loop.call_soon(end.breaks, why)

    def silence(self, seconds: float) -> None:
        """Nothing arrives for so long; beyond the keepalive's time both ends give it up."""
        if self.over:
            return
        self.silent_until = max(self.silent_until, self.world.now + seconds)
        self.ends[0].process.was_cut(seconds)
        if seconds > KEEPALIVE_S:
            self.world.scheduler.after(KEEPALIVE_S, self._unanswered_pings)

    def deafen(self, end: End, seconds: float) -> None:
        """What one end writes does not arrive for so long; the answers to the pings of the other do not either."""
        end.deaf_until = max(end.deaf_until, self.world.now + seconds)
        self.ends[0].process.was_cut(seconds)
        if seconds > KEEPALIVE_S:
            self.world.scheduler.after(KEEPALIVE_S, self._unanswered_pings)

    def _unanswered_pings(self) -> None:
        if self.world.now < max(self.silent_until, self.ends[0].deaf_until, self.ends[1].deaf_until):
            rng = self.world.network_rng
            self.cut((rng.uniform(0, 0.5), rng.uniform(0, 0.5)))

    def peer_stopped(self, stopped: Process) -> None:
        """One process does not run: the other end notices when its pings are not answered."""
        self.world.scheduler.after(KEEPALIVE_S, self._still_stopped, stopped, stopped.stops)

    def _still_stopped(self, stopped: Process, stops: int) -> None:
        if stopped.stops == stops and stopped.loop.frozen and not self.over:
            self.cut((0.01, 0.01))

    def drop(self, by: End) -> None:
        """One end gives it up (RST_STREAM): the other learns of it after what was sent before."""
        if self.over:
            return
        self.over = True
        arrival = max(by.last_arrival, self.world.now + self.world.latency_s(), self.silent_until)
        self.world.scheduler.at(arrival + 1e-6, self._dropped, by.other)

    def _dropped(self, end: End) -> None:
        self.lossy = True
        self._gone()
        self._notice(end, "the peer ended the stream")


async def knock(world: World, process: Process, address: str) -> None:
    """See whether somebody listens there. Raises `ConnectionRefusedError` if the machine says that nobody does."""
    answer: asyncio.Future[None] = process.loop.create_future()
    at = max(world.now + world.latency_s(), process.isolated_until, world.walled_until(process, address))
    world.scheduler.at(at, _knocked, world, process, address, answer)
    await answer


def _knocked(world: World, process: Process, address: str, answer: asyncio.Future[None]) -> None:
    node = world.nodes.get(address)
    if process.loop.dead or (node is not None and not node.alive and node.things.get("power lost")):
        return  # a machine without power says nothing
    listens = node is not None and not node.loop.dead and node.accept is not None
    refusal = None if listens else ConnectionRefusedError(f"nobody listens at {address}")
    world.scheduler.after(world.latency_s(), process.loop.call_soon, _told, answer, refusal)


def _told(answer: asyncio.Future[None], refusal: ConnectionRefusedError | None) -> None:
    if answer.done():
        return
    if refusal is not None:
        answer.set_exception(refusal)
    else:
        answer.set_result(None)


class SimStream:
    """The client's `agentreach.aio.transport.Stream`."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._buffer: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        end.incoming = self._arrived

    def _arrived(self, data: bytes | None) -> None:
        self._buffer.append(data)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        await self._end.write(data)

    async def read(self) -> bytes | None:
        """See `Stream.read`."""
        while not self._buffer:
            self._waiter = self._end.process.loop.create_future()
            await self._waiter
            self._waiter = None
        return self._buffer.popleft()

    async def half_close(self) -> None:
        """See `Stream.half_close`."""
        self._end.finish()

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        if not self._end.broken:
            self._end.breaks("cancelled here")
            self._end.connection.drop(self._end)

    async def close(self) -> None:
        """See `Stream.close`."""
        self.cancel()

    @property
    def why_ended(self) -> str:
        """See `Stream.why_ended`."""
        return self._end.broken


class SimTransport:
    """A process's way to the nodes."""

    def __init__(self, world: World, process: Process, *, between_nodes: bool = False) -> None:
        self._world = world
        self._process = process
        self._between_nodes = between_nodes

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> SimStream:
        """See `Transport.open`: a round trip; no answer at all while the way there is silent or the node frozen."""
        world, process = self._world, self._process
        answer: asyncio.Future[SimStream] = process.loop.create_future()
        at = max(world.now + world.latency_s(), process.isolated_until, world.walled_until(process, address))
        world.scheduler.at(at, self._at_node, address, answer)
        return await answer

    def _at_node(self, address: str, answer: asyncio.Future[SimStream]) -> None:
        node = self._world.nodes.get(address)
        if self._process.loop.dead:
            return
        if node is None or node.loop.dead or node.accept is None:
            self._answer(answer, Refused("UNAVAILABLE", "nobody listens there", False))
        else:
            node.loop.call_soon(self._accept, node, answer)

    def _accept(self, node: Process, answer: asyncio.Future[SimStream]) -> None:
        """In the node's loop."""
        if answer.done() or self._process.loop.dead or node.accept is None:
            return
        connection = Connection(self._world, self._process, node, self._between_nodes)
        stream = SimStream(connection.ends[0])
        try:
            node.accept(connection.ends[1])
        except Refused as refused:
            connection.drop(connection.ends[1])
            self._answer(answer, refused)
            return
        self._process.has_linked()
        self._answer(answer, stream)

    def _answer(self, answer: asyncio.Future[SimStream], outcome: SimStream | Refused) -> None:
        world = self._world
        world.scheduler.after(world.latency_s(), self._process.loop.call_soon, _settle, answer, outcome)


def _settle(answer: asyncio.Future[SimStream], outcome: SimStream | Refused) -> None:
    if answer.done():  # the dialler has given up; what came about is given back
        if isinstance(outcome, SimStream):
            outcome.cancel()
    elif isinstance(outcome, Refused):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
