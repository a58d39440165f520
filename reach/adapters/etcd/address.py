"""Where etcd is: what an operator writes, checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

DEFAULT_PORT = 2379  # IANA: etcd-client

_SCHEMES = {"etcd": False, "etcds": True}


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The members of one cluster as `host:port`, and whether they speak TLS."""

    endpoints: tuple[str, ...]
    tls: bool = False


def parse_endpoints(url: str) -> EtcdAddress:
    """Read `etcd://host:port,host:port` (`etcds://` for TLS; port 2379 if left out). `ValueError` if it is not that.

    An address that holds a password is not repeated in the error.
    """
    if "@" in url:
        raise ValueError("the address of etcd holds no user and no password: they are settings of their own")
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
        raise ValueError(f"not an etcd endpoint: {name!r} (write host:port)")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def _has_more(parts: SplitResult) -> bool:
    return bool(parts.path or parts.query or parts.fragment)
