"""The node's end of one Connect stream: bytes to frames, frames to the core, and the core's answers back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

from agentreach.aio.outlet import Outlet
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Frame, Goodbye, Hello, Signal
from agentreach.wire import limits
from agentreach.wire.link import LinkError
from agentreach.wire.salvage import salvaged
from reach.core import links, mesh, revoking
from reach.node.silence import Silence

if TYPE_CHECKING:
    from reach.core.peers import Peer
    from reach.core.ports import End, Identity
    from reach.node.engine import Engine

log = structlog.get_logger("reach.link")


class Carrier:
    """What carries a link at present, as the engine sees it."""

    def __init__(self) -> None:
        self.outlet: Outlet | None = None
        """From the moment at which it carries the link."""
        self.over = False
        """What still comes on it counts for nothing."""
        self.severed = False
        """See `NodeStream.severed`."""

    def wake(self) -> None:
        """The link has something to say."""
        if self.outlet is not None:
            self.outlet.wake()

    def finish(self, *, flush: bool) -> None:
        """Say what is left to say, then end."""
        self.over = True
        if self.outlet is not None:
            self.outlet.close(flush=flush)

    def sever(self) -> None:
        """End at once, without a word; the link goes on with the next stream."""
        self.severed = True
        Carrier.supersede(self)

    def supersede(self) -> None:
        """A newer stream carries the link."""
        self.over = True
        if self.outlet is not None:
            self.outlet.abandon()


class Stream(Carrier):
    """A `NodeStream`. Before hello it has no link; after it was superseded, or has ended, it does nothing more."""

    def __init__(self, engine: Engine, who: Identity, address: str, hello_timeout_s: float) -> None:
        super().__init__()
        self._engine = engine
        self._who = who
        self._address = address
        self._silence = Silence(engine, who)
        self._peer: Peer | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_words: bytes | None = None
        self._hello_timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(
            hello_timeout_s, self._refuse, f"no hello within {hello_timeout_s:g} s"
        )

        self._let_go = engine.holders.call(who, self._key_ended)

    # ---- from the transport ----

    def received(self, data: bytes) -> None:
        """See `NodeStream.received`."""
        if self.over:
            return
        unread: list[Envelope] = []
        try:
            frame = Frame.FromString(data)
        except DecodeError:
            found = salvaged(data) if self._peer is not None else None
            if found is None:
                self._broken("bytes that are not a Frame")
                return
            frame, unread = found
        if self._peer is None:
            self._first(frame)
        else:
            self._next(self._peer, frame, len(data), unread)

    def ended(self) -> None:
        """See `NodeStream.ended`."""
        self._stop_waiting()
        peer = self._peer
        if not self.over:
            self.over = True
            if peer is not None and peer.stream is self:
                with self._engine.step() as state:
                    links.cut(state, peer)
        if self.outlet is not None:
            self.outlet.abandon()

    async def next_frame(self) -> bytes | None:
        """See `NodeStream.next_frame`."""
        if self.outlet is None:
            await asyncio.shield(self._opened)
        if self.outlet is not None:
            return await self.outlet.next_frame()
        words, self._last_words = self._last_words, None
        return words

    # ---- inside ----

    def _first(self, frame: Frame) -> None:
        hello = next((signal.hello for signal in frame.signals if signal.HasField("hello")), None)
        if hello is None:
            self._refuse("the first frame must hold hello")
        elif hello.protocol_version > limits.PROTOCOL_VERSION:
            self._refuse(f"protocol version {hello.protocol_version} is newer than this node's")
        else:
            self._open(hello)

    def _open(self, hello: Hello) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        with self._engine.step() as state:
            peer = links.hello(state, self._who, hello)
            if peer is None:
                self._refuse(links.no_room(state, self._who))
                return
            former = peer.stream
            if isinstance(former, Carrier):
                former.supersede()
            peer.stream = self
            peer.came_from = self._address
            self._peer = peer
            self.outlet = Outlet(peer.link, self._engine.standstill.before_writing)
        self._stop_waiting()

    def _next(self, peer: Peer, frame: Frame, size: int, unread: list[Envelope]) -> None:
        engine = self._engine
        try:
            with engine.step() as state:
                mesh.frame(state, peer, frame, engine.standstill.ms(state.now), size, unread)
        except LinkError as error:
            self._broken(str(error))
        except Exception:
            reference = engine.reference()
            log.exception("a frame could not be handled", link=peer.link_id, reference=reference)
            self._broken(f"internal error, reference {reference} in the node's log")
        else:
            if self.outlet is not None:
                self.outlet.received()

    def _broken(self, why: str) -> None:
        """The peer (or we) made a mistake that the link cannot go on from; it ends, and no other does."""
        if self._peer is None:
            self._refuse(why)
            return
        log.warning("link broken", link=self._peer.link_id, peer=self._address, why=why)
        with self._engine.step() as state:
            links.farewell(state, self._peer, Goodbye.PROTOCOL_ERROR, why)

    def _key_ended(self, end: End) -> None:
        """What it was opened with counts no more, and it has not said hello: a link is ended by the core."""
        self._refuse(end.value, revoking.goodbye_of(end))

    def _refuse(self, why: str, code: Goodbye.Code.ValueType = Goodbye.PROTOCOL_ERROR) -> None:
        """End a stream that never became a link."""
        self.over = True
        log.info("stream refused", peer=self._address, why=why)
        goodbye = Signal(goodbye=Goodbye(code=code, reason=why))
        self._last_words = Frame(signals=[goodbye]).SerializeToString()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._let_go()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        self._silence.over()
        if not self._opened.done():
            self._opened.set_result(None)
