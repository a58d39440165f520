"""The HTTP side: /metrics for Prometheus, /healthz and /readyz for supervisors. Everything else comes later.

Liveness is narrow on purpose: it says that this process's loop turns and nothing more, so that a supervisor never
restarts a node because etcd is away. Readiness says whether new work should be sent here, and why not.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from agentreach.v1.error_pb2 import UNAUTHENTICATED
from reach.adapters.binding import join_address, require_free, split_address, taken
from reach.adapters.http_guard import HEAD_S, LINGER_S, Guard
from reach.core.ports import MeshFailure

KEEPALIVE_S = 75.0  # between two requests of one connection: a scrape comes every 15 to 60 s
_PAGES = "what there is: /metrics /healthz /readyz\n"


class HttpServer:
    """Serves three pages on one address. `start` once, `stop` once."""

    def __init__(
        self,
        *,
        listen: str,
        metrics: Callable[[], tuple[bytes, str]],
        unready_reason: Callable[[], str],
        tls: ssl.SSLContext | None = None,
        head_s: float = HEAD_S,
    ) -> None:
        """`metrics` gives the exposition and its content type; `unready_reason` is empty while the node is ready.

        With `tls` None it serves in the clear. `head_s` is how long a client may take to send a request's head.
        """
        self._head_s = head_s
        self.may_scrape: Callable[[Sequence[str], bytes], Awaitable[None]] | None = None
        """Raises `MeshFailure` for who may not read /metrics, by its Authorization headers and its certificate (PEM,
        empty if it shows none); None: anybody may."""
        self._listen = listen
        self._address = listen
        self._metrics = metrics
        self._unready_reason = unready_reason
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._guard: Guard | None = None

    @property
    def address(self) -> str:
        """HOST:PORT where it listens, with the real port once started."""
        return self._address

    async def start(self) -> None:
        """Bind and serve; `PortTaken` if the address cannot be had for this process alone."""
        require_free(self._listen, "HTTP", "http")
        guard = self._guard = Guard(lambda: runner.server(), head_s=self._head_s)  # type: ignore[misc]  # setup() has made it
        app = web.Application(middlewares=[guard.middleware])
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_healthz)
        app.router.add_get("/readyz", self._serve_readyz)
        app.router.add_route("*", "/{path:.*}", self._serve_nothing)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            handle_signals=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        await runner.setup()
        host, port = split_address(self._listen)
        limit_s = HEAD_S if self._tls is not None else None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                guard, host, port, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except OSError as error:
            await runner.cleanup()
            raise taken(self._listen, "HTTP", "http", error) from error
        self._runner = runner
        bound = self._server.sockets[0].getsockname()[1]
        self._address = join_address(host, int(bound))

    async def stop(self) -> None:
        """Close the address and what is open, within a second."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._guard is not None:
            await self._guard.close()
            self._guard = None

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        if self.may_scrape is not None:
            try:
                await self.may_scrape(request.headers.getall("Authorization", ()), _certificate(request))
            except MeshFailure as refused:
                return _refusal(refused)
        body, content_type = self._metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _serve_healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        reason = self._unready_reason()
        return web.Response(status=503, text=reason + "\n") if reason else web.Response(text="ready\n")

    async def _serve_nothing(self, request: web.Request) -> web.Response:
        return web.Response(status=404, text=_PAGES)


def _certificate(request: web.Request) -> bytes:
    """What the client has shown, and the handshake has verified."""
    connection = request.get_extra_info("ssl_object")
    shown: bytes | None = connection.getpeercert(binary_form=True) if connection is not None else None
    return ssl.DER_cert_to_PEM_cert(shown).encode() if shown else b""


def _refusal(refused: MeshFailure) -> web.Response:
    text = f"{refused}\n"
    if refused.error.code == UNAUTHENTICATED:
        return web.Response(status=401, text=text, headers={"WWW-Authenticate": 'Bearer realm="agent-reach"'})
    return web.Response(status=403, text=text)
