"""Where the node is and how to get in: the one module of the SDK that reads the environment.

`REACH_URL` (`HOST:PORT[,HOST:PORT…]`), `REACH_API_KEY`, `REACH_CLIENT_TLS_CA`, `REACH_CLIENT_TLS_CERT`,
`REACH_CLIENT_TLS_KEY` (paths of PEM files). Arguments win over the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from agent_sdk.errors import ConnectFailed
from agentreach.aio import grpc_runtime
from agentreach.wire import addresses as wire


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a TLS connection: `ca` verifies the node (None: the system's), `cert` and `key` show who we are.

    They are read again whenever a node is dialled: put renewed ones in their place, and nothing needs a restart.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Everything needed to dial: addresses in the order to try them, the key, the TLS files (None: in the clear)."""

    addresses: tuple[str, ...]
    api_key: str = ""
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that a stream is opened with."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def access(url: str | None = None, api_key: str | None = None, tls: Tls | None = None) -> Access:
    """Put arguments and environment together. Raises `ConnectFailed` for a url that cannot be read."""
    grpc_runtime.prepare()  # it counts only before grpc is imported, which is why `connection` does that last
    key = (api_key if api_key is not None else os.environ.get("REACH_API_KEY", "")).strip()
    if not key.isascii() or not key.isprintable():
        raise ConnectFailed("the API key holds characters that cannot be sent")
    return Access(addresses(url or os.environ.get("REACH_URL") or wire.DEFAULT_URL), key, tls or _tls_of_environment())


def addresses(url: str) -> tuple[str, ...]:
    """Split `HOST:PORT[,HOST:PORT…]`. Raises `ConnectFailed` naming what is wrong."""
    try:
        return wire.addresses(url)
    except ValueError as error:
        raise ConnectFailed(str(error)) from error


def _tls_of_environment() -> Tls | None:
    ca, cert, key = (os.environ.get(f"REACH_CLIENT_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
    return Tls(ca, cert, key) if ca or cert or key else None
