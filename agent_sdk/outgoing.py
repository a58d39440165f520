"""The bytes of what the SDK sends. Serialised protobuf concatenates, so what repeats is made once and joined.

A request costs a join of a cached head (type, env, source, target), its id, its payload and its time; anything rare
is set on an `Envelope` and appended. No decisions are made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agent_sdk.errors import InvalidEnvelope
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import names
from agentreach.wire.framing import varint

# Field keys of Envelope: number << 3 | wire type.
MESSAGE_ID: Final = b"\x0a"
PAYLOAD: Final = b"\x32"
CORRELATION_ID: Final = b"\x3a"
ENTRY: Final = b"\x42"
TRACE_ID: Final = b"\x4a"
TIMEOUT_MS: Final = b"\x58"
ATTEMPT: Final = b"\x60"
EPOCH: Final = b"\xa8\x01"
SEQUENCE: Final = b"\xe0\x01"
ERROR: Final = b"\xfa\x01"
TIMING: Final = b"\x82\x02"
SESSION_ID: Final = b"\x9a\x01"
REPLY_TOPIC: Final = b"\xf2\x01"
SIGNATURE: Final = b"\xa2\x02"
FRESH: Final = b"\x68\x01"
NOT_FRESH: Final = b"\x68\x00"
MORE: Final = b"\xe8\x01\x01"
RESENT: Final = b"\xc0\x02\x01"
# A Payload of bytes: content_type, then the key of its body.
_OCTETS: Final = b"\x12\x18application/octet-stream\x1a"

_ROUTES_MAX: Final = 1024  # cached heads of one client; beyond, the cache starts anew


def field(key: bytes, data: bytes) -> bytes:
    """One length-delimited field."""
    return key + varint(len(data)) + data


def octets_payload(data: bytes) -> bytes:
    """The serialised Payload of plain bytes."""
    return b"".join((_OCTETS, varint(len(data)), data))


def octets_field(data: bytes) -> bytes:
    """The payload field of plain bytes, made with one copy."""
    size = varint(len(data))
    return b"".join((PAYLOAD, varint(len(_OCTETS) + len(size) + len(data)), _OCTETS, size, data))


class Route:
    """A target as it goes on the wire. `head` starts the envelope, `target` is what content is compared by.

    `reply_topic` is the field that sends the outcome to a topic, serialised; empty: it comes back to the caller.
    """

    __slots__ = ("event", "head", "reply_topic", "target", "text")

    def __init__(self, head: bytes, target: bytes, text: str, event: bool, reply_topic: bytes = b"") -> None:
        self.event = event
        self.reply_topic = reply_topic
        self.head = head
        self.target = target
        self.text = text


class Routes:
    """Makes and caches the routes of one sender (`source` empty: the node fills in the link's caller)."""

    def __init__(self, env: str, source: str = "") -> None:
        self.env = env
        self.source = source
        self._cache: dict[object, Route] = {}

    def selector(
        self,
        type_: int,
        agent_id: str | None,
        agent_type: str | None,
        capabilities: Sequence[str] | None,
        labels: Mapping[str, str] | None,
        version: str | None,
        policy: str | None,
        hash_key: str | None,
    ) -> Route:
        """A route by name, type, capabilities or labels. Raises `InvalidEnvelope` for a target that is none."""
        key: object = (
            type_,
            agent_id,
            agent_type,
            capabilities if capabilities is None or type(capabilities) is str else tuple(capabilities),
            version,
            policy,
        )
        if labels is None and hash_key is None:
            route = self._cache.get(key)
            if route is not None:
                return route
        target = _target(agent_id, agent_type, capabilities, labels, version)
        if policy is not None:
            target.policy = _policy(policy)
        if hash_key is not None:
            target.hash_key = hash_key
        route = self._route(type_, target)
        if labels is None and hash_key is None:
            self._remember(key, route)
        return route

    def topic(self, topic: str) -> Route:
        """A route to the subscribers of a topic. Raises `InvalidEnvelope` for a topic that cannot be."""
        route = self._cache.get(topic)
        if route is None:
            if fault := names.topic_fault(topic):
                raise InvalidEnvelope(f"target.topic {fault}")
            route = self._route(pb.EVENT, pb.Target(topic=topic))
            self._remember(topic, route)
        return route

    def broadcast(self, route: Route) -> Route:
        """The same target as an EVENT to every match."""
        broadcast = field(b"\x2a", pb.Target(broadcast=True).SerializeToString())
        return Route(route.head + broadcast, route.target, route.text, True)

    def replying(self, route: Route, topic: str) -> Route:
        """The same target, the outcome sent to a topic. Raises `InvalidEnvelope` for a topic that cannot be."""
        if fault := names.topic_fault(topic):
            raise InvalidEnvelope(f"reply_topic {fault}")
        reply_topic = field(REPLY_TOPIC, topic.encode())
        return Route(route.head + reply_topic, route.target, route.text, False, reply_topic)

    def _route(self, type_: int, target: pb.Target) -> Route:
        head = pb.Envelope(type=type_, target=target, source=self.source)  # type: ignore[arg-type]  # an enum's number
        if self.env and self.env != names.DEFAULT_ENV:
            head.env = self.env
        return Route(
            head.SerializeToString(deterministic=True),
            target.SerializeToString(deterministic=True),
            _text(target),
            type_ == pb.EVENT,
        )

    def _remember(self, key: object, route: Route) -> None:
        if len(self._cache) >= _ROUTES_MAX:
            self._cache.clear()
        self._cache[key] = route


def _target(
    agent_id: str | None,
    agent_type: str | None,
    capabilities: Sequence[str] | None,
    labels: Mapping[str, str] | None,
    version: str | None,
) -> pb.Target:
    if isinstance(capabilities, str):
        raise InvalidEnvelope("target.capabilities is a list of names, not one text")
    if agent_id is not None:
        if agent_type or capabilities or labels or version:
            raise InvalidEnvelope(
                "target: agent_id names one instance; give it alone, without type, capabilities or labels"
            )
        if not agent_id:
            raise InvalidEnvelope("target.agent_id is empty")
        return pb.Target(agent_id=agent_id)
    if not (agent_type or capabilities or labels or version):
        raise InvalidEnvelope("target: say to whom, with agent_id, agent_type, capabilities or labels")
    return pb.Target(
        agent_type=agent_type or "", capabilities=capabilities or (), labels=labels or {}, version=version or ""
    )


def _policy(name: str) -> pb.RoutingPolicy.ValueType:
    try:
        return pb.RoutingPolicy.Value(name.upper())
    except ValueError:
        known = ", ".join(pb.RoutingPolicy.keys()[1:])
        raise InvalidEnvelope(f"target.policy {names.shown(name)} is none of {known}") from None


def _text(target: pb.Target) -> str:
    """The target as error messages show it."""
    if target.agent_id or target.topic:
        return target.agent_id or f"topic {target.topic}"
    parts = [target.agent_type] if target.agent_type else []
    if target.capabilities:
        parts.append("capabilities " + ",".join(target.capabilities))
    if target.labels:
        parts.append("labels " + ",".join(f"{k}={v}" for k, v in sorted(target.labels.items())))
    if target.version:
        parts.append(f"version {target.version}")
    return " ".join(parts)
