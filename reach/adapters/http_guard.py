"""What stands between the HTTP side's sockets and its server: few connections, and heads that are short and come soon.

aiohttp bounds a head's lines, not how long a client may take to send it, nor how many connections there are. A head
that is late is answered 408, one that is too long 431, and a request with a body 413: no page here takes one, and it is
not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS_MAX = 500  # of the HTTP side at once; beyond, the eldest that waits for a head gives way
HEAD_BYTES_MAX = 32 << 10  # of a request's first line and headers
HEAD_S = 10.0  # for a request's head, from its first byte, or from the start of the connection
LINGER_S = 1.0  # a client that sends a body may take so long to notice that nobody wants it

_TURNS = 100  # of the loop, at most, for aborted connections to be gone

_END = b"\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Guard:
    """Of one server: makes what listens to each of its connections."""

    def __init__(self, make: Callable[[], RequestHandler], *, head_s: float = HEAD_S) -> None:
        self._make = make
        self._head_s = head_s
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}
        self._there: set[_Connection] = set()
        self._closed = False

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Connection(self, self._make(), self._open, self._head_s)

    def came(self, connection: _Connection) -> bool:
        """A connection is there from now on. False: it is not wanted any more."""
        self._there.add(connection)
        return not self._closed

    def went(self, connection: _Connection) -> None:
        """It is gone."""
        self._there.discard(connection)

    async def close(self) -> None:
        """End every connection that is left, and wait until their sockets are closed: a turn or two of the loop."""
        self._closed = True
        for connection in list(self._there):
            connection.abort()
        for _ in range(_TURNS):
            if not self._there:
                return
            await asyncio.sleep(0)

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turns away what has a body, and lets the connection know when its next request may come."""
        connection = self._open.get(request.protocol)
        if request.body_exists:
            reply: web.StreamResponse = web.Response(status=413, text="no page here takes a body\n")
            reply.force_close()
            return reply
        reply = await handler(request)
        if connection is not None:
            connection.next_head()
        return reply


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's own protocol, as long as the client keeps to the bounds."""

    def __init__(
        self, guard: Guard, inner: RequestHandler, others: dict[asyncio.BaseProtocol, _Connection], head_s: float
    ) -> None:
        self._guard = guard
        self._inner = inner
        self._open = others
        self._head_s = head_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray()
        """What has come of it; it ends with an empty line."""
        self._in_head = True
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it in, if there is room."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        wanted = self._guard.came(self)
        if not wanted or (len(self._open) >= CONNECTIONS_MAX and not self._makes_room()):
            self._over = True
            self._transport.abort()
            return
        self._open[self._inner] = self
        self._inner.connection_made(self._transport)
        self._wait()

    def _makes_room(self) -> bool:
        """Close the eldest connection on which nothing is asked: who only holds places keeps no supervisor out."""
        for each in self._open.values():
            if each._in_head and not each._over:
                each.abort()
                return True
        return False

    def data_received(self, data: bytes) -> None:
        """Watch for the end of the head."""
        if self._over:
            return
        if self._in_head:
            self._head += data
            end = self._head.find(_END)
            if end > HEAD_BYTES_MAX or (end < 0 and len(self._head) > HEAD_BYTES_MAX):
                self._refuse(_LONG)
                return
            if end < 0:
                self._wait()
            else:
                self._in_head = False
                self._head.clear()
                self._stop_waiting()
        self._inner.data_received(data)

    def abort(self) -> None:
        """Close its socket without further ado."""
        self._over = True
        self._stop_waiting()
        if self._transport is not None:
            self._transport.abort()

    def next_head(self) -> None:
        """A request was answered; what comes next is another one's head."""
        self._in_head = True

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def eof_received(self) -> bool | None:
        """Pass it on."""
        if not self._over:
            self._inner.eof_received()
        return None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Pass it on, and let go of it."""
        self._stop_waiting()
        self._over = True
        self._guard.went(self)
        if self._open.pop(self._inner, None) is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._head_s, self._refuse, _LATE)

    def _refuse(self, answer: bytes) -> None:
        self._over = True
        self._stop_waiting()
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(answer)
            self._transport.close()
