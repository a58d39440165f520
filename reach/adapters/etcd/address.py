"""Where etcd is and how to trust it: what an operator writes, checked. Pure but for reading the key files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import grpc

DEFAULT_PORT = 2379  # IANA: etcd-client

_SCHEMES = {"etcd": False, "etcds": True}


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The members of one cluster as `host:port`, and whether they speak TLS."""

    endpoints: tuple[str, ...]
    tls: bool = False


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files: the authority that signed the servers (None: the system's), and our own certificate for mTLS.

    Read once, when the store connects: after a renewal the process restarts.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate needs both cert and key")


def parse_endpoints(url: str) -> EtcdAddress:
    """Read `etcd://host:port,host:port` (`etcds://` for TLS; port 2379 if left out). `ValueError` if it is not that."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"not an etcd address: {url!r} (write etcd://host:port,host:port or etcds://… for TLS)")
    names = rest.removesuffix("/").split(",")
    return EtcdAddress(tuple(_endpoint(name.strip()) for name in names), tls=_SCHEMES[scheme])


def _endpoint(name: str) -> str:
    try:
        parts = urlsplit(f"//{name}")
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ValueError(f"not an etcd endpoint: {name!r} ({error})") from None
    if not parts.hostname or _has_more(parts):
        raise ValueError(
            f"not an etcd endpoint: {name!r} (write host:port; user and password are settings of their own)"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def _has_more(parts: SplitResult) -> bool:
    return bool(parts.path or parts.query or parts.fragment or parts.username is not None)


def credentials(tls: EtcdTls) -> grpc.ChannelCredentials:
    """Read the files. `OSError` names the one that cannot be read."""
    ca, key, cert = (path.read_bytes() if path is not None else None for path in (tls.ca, tls.key, tls.cert))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
