"""Which door a call knocks at, what opens it, and what the caller shows: decided before a byte of the body is read.

What no table names needs an admin. A caller shows an API key (`authorization: Bearer …`), or that it is a node of this
mesh (`authorization: Node …`), in exactly one header.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from enum import Enum

BEARER, NODE = "bearer", "node"
AUTHORIZATION = "authorization"
KEY_CHARS_MAX = 512

_HEALTH = "grpc.health.v1.Health"
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_MESH, _REGISTRY = "agentreach.v1.MeshService", "agentreach.v1.RegistryService"
_ADMIN, _PEER = "agentreach.v1.AdminService", "agentreach.v1.PeerService"


class Needs(Enum):
    """What opens a door."""

    HEALTH = "open unless health_access closes it"
    REFLECTION = "open on loopback unless reflection_access says otherwise"
    PRINCIPAL = "anybody who is known"
    ADMIN = "an admin, for what belongs to its tenant"
    OWNER = "an admin of those who run the mesh"
    NODE = "another node"


_OWNERS = frozenset(
    {
        f"{_ADMIN}/GetNode",
        f"{_ADMIN}/ListNodes",
        f"{_ADMIN}/DrainNode",
        f"{_ADMIN}/SetConfig",
        f"{_REGISTRY}/SetVersionPolicy",
    }
)
"""What concerns all tenants of a mesh."""

_CHANGES = frozenset({f"{_REGISTRY}/{name}" for name in ("Register", "Heartbeat", "Deregister")})


def needs(method: str) -> Needs:
    """What a method (`/package.Service/Method`) needs."""
    name = method.removeprefix("/")
    service = name.partition("/")[0]
    if service == _HEALTH:
        return Needs.HEALTH
    if service in _REFLECTION:
        return Needs.REFLECTION
    if name in _OWNERS:
        return Needs.OWNER
    if service == _PEER:
        return Needs.NODE
    if service == _MESH or (service == _REGISTRY and name not in _CHANGES):
        return Needs.PRINCIPAL
    return Needs.ADMIN


def brings_messages(method: str) -> bool:
    """Whether what it brings is counted message by message, against the limits of who sends them."""
    return method.removeprefix("/").partition("/")[0] == _MESH


class Unshown(Exception):
    """The caller shows nothing that could be looked at; the text says what is wrong, and never what was shown."""


def shown(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, str]:
    """(BEARER or NODE, what follows it) of the call's one authorization header. Raises `Unshown`."""
    found = [value for name, value in metadata if name.lower() == AUTHORIZATION]
    if not found:
        raise Unshown("no API key: send it as `authorization: Bearer KEY`")
    if len(found) > 1:
        raise Unshown("more than one authorization header")
    value = found[0]
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()) or len(value) > KEY_CHARS_MAX:
        raise Unshown(f"the authorization header is not printable ASCII text of at most {KEY_CHARS_MAX} characters")
    scheme, _, rest = value.strip(" ").partition(" ")
    scheme, rest = scheme.lower(), rest.strip(" ")
    if scheme not in (BEARER, NODE) or not rest:
        raise Unshown("the authorization header is not of the form `Bearer KEY`")
    return scheme, rest


def node_proof(secret: bytes, dialler: str, address: str) -> str:
    """What a node shows another at this address: that it knows the mesh's secret. No other node takes it.

    The value of the authorization header. Clocks of nodes need not agree, so it holds as long as the secret does.
    """
    return f"Node {dialler} {hmac.digest(secret, f'{dialler} {address}'.encode(), 'sha256').hex()}"


def proves(text: str, secret: bytes, address: str) -> str:
    """The node_id of the node that shows this text to the node at `address`; empty if it is none of the mesh."""
    dialler, _, _ = text.partition(" ")
    expected = node_proof(secret, dialler, address).partition(" ")[2]
    return dialler if hmac.compare_digest(expected.encode(), text.encode()) else ""
