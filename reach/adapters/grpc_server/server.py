"""The server as a whole: binds its address alone, serves, and stops within its grace."""

from __future__ import annotations

import asyncio
import logging

import grpc

from agentreach.aio.options import SERVER_OPTIONS
from reach.adapters.binding import join_address, require_free, split_address, taken
from reach.adapters.grpc_server import health, reflection, services
from reach.adapters.grpc_server.gating import Gate
from reach.core.ports import Doorkeeper, Switchboard

_log = logging.getLogger(__name__)

_READY_EVERY_S = 0.25  # how late an open health watch may notice that the node's readiness changed by itself


class GrpcServer:
    """Serves one `Switchboard` on one address. `start` once, `stop` once."""

    def __init__(
        self, switchboard: Switchboard, *, listen: str, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        """`listen` is HOST:PORT; port 0 takes a free one, see `address`. Without a `doorkeeper` anybody gets in.

        With `credentials` (`encrypting.server_credentials`) it speaks TLS, else it serves in the clear.
        """
        self._credentials = credentials
        self.doorkeeper: Doorkeeper | None = None
        self._switchboard = switchboard
        self._listen = listen
        self._address = listen
        self._server: grpc.aio.Server | None = None
        self._wanted = True
        self._following: asyncio.Task[None] | None = None
        served = (services.MESH, services.REGISTRY, services.ADMIN)
        self._health = health.Health(served)
        shown = (*served, health.SERVICE)
        reflected = reflection.handlers(shown)
        self._handlers = (
            services.mesh(switchboard),
            services.registry(switchboard),
            services.admin(switchboard),
            services.peer(switchboard),
            grpc.method_handlers_generic_handler(health.SERVICE, health.handlers(self._health, self._look)),
            *(grpc.method_handlers_generic_handler(name, reflected) for name in reflection.SERVICES),
        )

    @property
    def address(self) -> str:
        """HOST:PORT where it listens, with the real port once started."""
        return self._address

    async def start(self) -> None:
        """Bind and serve; `PortTaken` if the address cannot be had for this process alone."""
        require_free(self._listen, "gRPC", "listen")
        server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[Gate(self.doorkeeper)] if self.doorkeeper is not None else None
        )
        server.add_generic_rpc_handlers(self._handlers)
        try:
            if self._credentials is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as error:  # somebody was quicker
            await server.stop(None)
            raise taken(self._listen, "gRPC", "listen") from error
        self._address = join_address(split_address(self._listen)[0], port)
        await server.start()
        self._server = server
        self._follow_once()
        self._following = asyncio.create_task(self._follow(), name="grpc-health")

    def set_serving(self, serving: bool) -> None:
        """False: health says NOT_SERVING whatever the node's readiness. True: it follows the node's readiness."""
        self._wanted = serving
        self._follow_once()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, end health watches, give running calls `grace_s`, then cut them.

        End the Connect streams before (by goodbye): an open one takes the whole grace. Cancelling it cuts at once.
        """
        self._health.close()
        if self._following is not None:
            self._following.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)

    def _follow_once(self) -> None:
        self._health.set_serving(self._wanted and self._switchboard.ready)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_READY_EVERY_S)
            self._look()

    def _look(self) -> None:
        try:
            self._follow_once()
            self._health.look_at_watchers()
        except Exception:
            _log.exception("the node's readiness cannot be told: health says NOT_SERVING")
            self._health.set_serving(False)
