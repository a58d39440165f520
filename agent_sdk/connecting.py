"""`connect()`: a client of the mesh."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType

from agent_sdk import arguments, connection
from agent_sdk.client import Mesh
from agent_sdk.link import MeshLink
from agent_sdk.settings import Tls, access
from agentreach.aio.transport import Transport

CONNECT_TIMEOUT_S = 5.0


class ConnectedMesh(Mesh):
    """A `Mesh` that closes its own connection."""

    def __init__(self, lease: connection.Lease, env: str) -> None:
        super().__init__(self._link, env)
        self._lease: connection.Lease | None = lease

    def _link(self) -> MeshLink:
        if self._lease is None:
            raise RuntimeError("this mesh client is closed")
        return self._lease.link

    async def close(self) -> None:
        """Leave politely; what is still pending ends with `ShuttingDown`."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await connection.release(lease)

    async def __aenter__(self) -> ConnectedMesh:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Connecting:
    """What `connect()` returns: `async with connect() as mesh`, or `mesh = await connect()` and a `close()`."""

    def __init__(
        self,
        url: str | None,
        env: str,
        name: str,
        api_key: str | None,
        tls: Tls | None,
        timeout: float | None,
        own_link: bool,
        transport: Transport | None,
        signing_secret: str | None,
    ) -> None:
        self._access = access(url, api_key, tls, signing_secret)
        self._env, self._name = env, name
        self._timeout_s = timeout
        self._own_link = own_link
        self._transport = transport
        self._mesh: ConnectedMesh | None = None

    async def _connect(self) -> ConnectedMesh:
        lease = connection.take(
            self._access, name=self._name, env=self._env, own_link=self._own_link, transport=self._transport
        )
        try:
            await lease.link.connected(self._timeout_s)
        except BaseException:
            await connection.release(lease)
            raise
        return ConnectedMesh(lease, self._env)

    def __await__(self) -> Generator[object, None, ConnectedMesh]:
        return self._connect().__await__()

    async def __aenter__(self) -> ConnectedMesh:
        self._mesh = await self._connect()
        return self._mesh

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mesh is not None:
            await self._mesh.close()


def connect(
    url: str | None = None,
    *,
    env: str = "",
    name: str = "",
    api_key: str | None = None,
    tls: Tls | None = None,
    timeout: float | None = CONNECT_TIMEOUT_S,
    own_link: bool = False,
    transport: Transport | None = None,
    signing_secret: str | None = None,
) -> Connecting:
    """Connect to the mesh.

    `url` is `HOST:PORT[,HOST:PORT…]`, tried in that order; default `REACH_URL`, else 127.0.0.1:7070. Waits `timeout`
    seconds for a node, then raises `ConnectFailed`; a url that cannot be read and bad credentials end it at once.
    `env` is the environment to talk in (`production` if empty), `name` a wish for the caller's id (where keys or
    certificates are asked for, that has its principal's name). Clients of one process share a connection, unless
    `own_link`. `signing_secret` came with an API key whose messages must be signed (default `REACH_SIGNING_SECRET`).
    """
    if url is not None:
        arguments.check_text("url", url)
    for what, text in (("env", env), ("name", name)):
        arguments.check_text(what, text)
    if timeout is not None:
        arguments.check_seconds("timeout", timeout)
    return Connecting(url, env, name, api_key, tls, timeout, own_link, transport, signing_secret)
