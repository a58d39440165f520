"""Where the node is and how to get in: the one module of the SDK that reads the environment.

`REACH_URL` (`HOST:PORT[,HOST:PORT…]`), `REACH_API_KEY`, `REACH_SIGNING_SECRET`, `REACH_CLIENT_TLS_CA`,
`REACH_CLIENT_TLS_CERT`, `REACH_CLIENT_TLS_KEY` (paths of PEM files). Arguments win over the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from agent_sdk.errors import ConnectFailed
from agent_sdk.signer import Signer
from agentreach.aio import grpc_runtime
from agentreach.wire import addresses as wire
from agentreach.wire import signing

_API_KEY = re.compile(r"reach_[0-9a-f]{8}_.+")


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
    api_key: str = field(default="", repr=False)
    tls: Tls | None = None
    signing_secret: bytes = field(default=b"", repr=False)
    """What is sent is signed with it; empty: it is not signed."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that a stream is opened with."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @property
    def signer(self) -> Signer | None:
        """A new one, for a link of its own."""
        return Signer(self.api_key.split("_")[1], self.signing_secret) if self.signing_secret else None


def access(
    url: str | None = None, api_key: str | None = None, tls: Tls | None = None, signing_secret: str | None = None
) -> Access:
    """Put arguments and environment together. Raises `ConnectFailed` for what cannot be used."""
    grpc_runtime.prepare()  # it counts only before grpc is imported, which is why `connection` does that last
    key = (api_key if api_key is not None else os.environ.get("REACH_API_KEY", "")).strip()
    if not key.isascii() or not key.isprintable():
        raise ConnectFailed("the API key holds characters that cannot be sent")
    secret = (signing_secret if signing_secret is not None else os.environ.get("REACH_SIGNING_SECRET", "")).strip()
    return Access(
        addresses(url or os.environ.get("REACH_URL") or wire.DEFAULT_URL),
        key,
        tls or _tls_of_environment(),
        _signing_secret(secret, key) if secret else b"",
    )


def _signing_secret(text: str, api_key: str) -> bytes:
    try:
        secret = signing.secret_of(text)
    except ValueError as error:
        raise ConnectFailed(f"the signing secret cannot be used: {error}") from None
    if not _API_KEY.fullmatch(api_key):
        raise ConnectFailed("a signing secret goes with the API key that it was made for: give api_key too")
    return secret


def addresses(url: str) -> tuple[str, ...]:
    """Split `HOST:PORT[,HOST:PORT…]`. Raises `ConnectFailed` naming what is wrong."""
    try:
        return wire.addresses(url)
    except ValueError as error:
        raise ConnectFailed(str(error)) from error


def _tls_of_environment() -> Tls | None:
    ca, cert, key = (os.environ.get(f"REACH_CLIENT_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
    return Tls(ca, cert, key) if ca or cert or key else None
