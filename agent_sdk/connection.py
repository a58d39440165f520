"""Links of this process, shared: one per event loop, addresses, credentials and name."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from agent_sdk.errors import ConnectFailed
from agent_sdk.link import MeshLink
from agent_sdk.settings import Access
from agentreach.aio.transport import Transport

_Key = tuple[Any, ...]
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, Lease]]


class Lease:
    """A link and how many use it; it closes with the last one."""

    def __init__(self, link: MeshLink, key: _Key | None) -> None:
        self.link = link
        self.key = key
        self.users = 0


_shared = weakref.WeakKeyDictionary()


def import_grpc() -> None:
    """Import it now: it takes a while, for which a running event loop would stand still."""
    from agentreach.aio import grpc_runtime

    grpc_runtime.prepare()
    from agentreach.aio import grpc_transport  # noqa: F401


def transport_for(access: Access) -> Transport:
    """The gRPC transport for these credentials. Raises `ConnectFailed` for TLS files that cannot be read now.

    They are read again at each dial, so that renewed certificates are used; one that is not readable then counts as a
    failed dial.
    """
    from agentreach.aio import grpc_transport, tls  # after `settings.access`, see there

    given = access.tls
    if given is None:
        return grpc_transport.GrpcTransport()
    files = tls.TlsFiles(given.ca or "", given.cert or "", given.key or "")
    try:
        files.read()
    except tls.TlsFileError as error:
        raise ConnectFailed(str(error)) from error
    return grpc_transport.GrpcTransport(files.read)


def take(
    access: Access, *, name: str = "", env: str = "", own_link: bool = False, transport: Transport | None = None
) -> Lease:
    """Use a link; the process's existing one unless `own_link`. Give it back with `release`."""
    links = _shared.setdefault(asyncio.get_running_loop(), {})
    key = (access, name, env, id(transport) if transport is not None else 0)
    lease = None if own_link else links.get(key)
    if lease is None or lease.link.failure is not None:
        link = MeshLink(
            access.addresses,
            transport or transport_for(access),
            access.metadata,
            name=name,
            env=env,
            signer=access.signer,
        )
        lease = Lease(link, None if own_link else key)
        if not own_link:
            links[key] = lease
        link.start()
    lease.users += 1
    return lease


async def release(lease: Lease) -> None:
    """Give a link back; with its last user it says goodbye."""
    lease.users -= 1
    if lease.users == 0:
        links = _shared.get(lease.link.loop, {})
        if lease.key is not None and links.get(lease.key) is lease:
            del links[lease.key]
        await lease.link.close()
