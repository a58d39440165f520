"""What a caller uses: a `Mesh` sends requests, opens streams, subscribes and publishes.

    import asyncio
    from agent_sdk import connect

    async def main():
        async with connect() as mesh:
            reply = await mesh.request({"text": "Ada met Alan"}, capabilities=["ner"], timeout=5)
            print(reply.data, "from", reply.source)

    asyncio.run(main())

Inside a handler the same calls belong to the request being handled: they carry its trace and its lineage, and take no
more time than it has left.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from agent_sdk.calls import GRACE_S, Call, Calls, Joiner, StreamReader
from agent_sdk.current import current_work
from agent_sdk.errors import InvalidEnvelope, PayloadTooLarge, Timeout
from agent_sdk.identity import new_message_id, new_trace_id
from agent_sdk.messages import PublishCounts, Reply
from agent_sdk.outgoing import FRESH, MESSAGE_ID, PAYLOAD, TIMEOUT_MS, TRACE_ID, Route, Routes, octets_payload
from agent_sdk.shapes import to_plain
from agent_sdk.streams import ReplyStream
from agent_sdk.topics import Subscription
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import payload as payloads
from agentreach.wire.framing import varint
from agentreach.wire.outbox import HIGH, LOW, NORMAL

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink
    from agent_sdk.work import Work

PUBLISH_TIMEOUT_S = 2.0
_ROOM_TIMEOUT_S = 60.0  # for room in the outbox, where the request itself names no time
_TIMEOUT_S_MAX = 4_000_000.0  # what the field can hold; the node's own bounds are narrower, and it names them
_PROFILE_WHOLE_S = {"CACHE": 1.1, "RPC": 16.0, "LLM": 245.0, "EXTERNAL": 62.0, "TASK": 320.0}
"""Whole time of a profile (behaviour.md §4, rounded up): for the SDK's own guard only; the node keeps the real one."""
_PRIORITIES = {"HIGH": (pb.HIGH, HIGH), "NORMAL": (pb.NORMAL, NORMAL), "LOW": (pb.LOW, LOW)}


class Mesh:
    """The sending face of a link; what `connect()` gives, and `agent.mesh`."""

    def __init__(self, owner: Callable[[], MeshLink], env: str = "", source: str = "") -> None:
        self._owner = owner
        self._routes = Routes(env, source)
        self._pid = os.getpid()

    async def request(
        self,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        timeout: float | None = None,
        profile: str | None = None,
        session: str | None = None,
        strict_session: bool = False,
        policy: str | None = None,
        hash_key: str | None = None,
        idempotent: bool = False,
        priority: str | None = None,
        message_id: str | None = None,
        dedup_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Ask whoever matches the target, and wait for the answer.

        The target is an `agent_id`, or any of `agent_type`, `capabilities` (all must match), `labels` (all must match)
        and `version` (exact, or a range such as `">=2.1,<3"`). `timeout` in seconds bounds the whole request; a
        `profile` (`"RPC"`, `"LLM"`, …) chooses timeout and retries by name; one of them must be given, except inside
        a handler, where the time left is the default.

        `session` keeps a conversation on one instance; `strict_session` prefers `SessionLost` to a new owner without
        the state. `idempotent` says that running twice does no harm. `message_id` makes repeated calls one: the
        handler runs once. `priority` is `"HIGH"`, `"NORMAL"` or `"LOW"`.

        Raises `ReachError`. Cancelling the call cancels the request down to the handler.
        """
        owner = self._owner()
        if owner.link.full:
            timeout = await self._wait_for_room(owner, timeout)
        call, joiner = self._begin(
            owner,
            self._routes.selector(pb.REQUEST, agent_id, agent_type, capabilities, labels, version, policy, hash_key),
            data,
            timeout,
            profile,
            message_id,
            None
            if session is None
            and not idempotent
            and priority is None
            and dedup_key is None
            and headers is None
            and not strict_session
            else (session, strict_session, idempotent, priority, dedup_key, headers),
            None,
        )
        try:
            if joiner is None:
                return await call.future
            return await self._joined(call, joiner)
        except asyncio.CancelledError:
            owner.calls.leave(call, joiner)
            raise

    def stream(
        self,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        timeout: float | None = None,
        profile: str | None = None,
        session: str | None = None,
        strict_session: bool = False,
        policy: str | None = None,
        hash_key: str | None = None,
        idempotent: bool = False,
        priority: str | None = None,
        message_id: str | None = None,
        dedup_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ReplyStream:
        """The same request, its reply item by item: see `ReplyStream`. A plain handler's answer is one item."""
        route = self._routes.selector(pb.REQUEST, agent_id, agent_type, capabilities, labels, version, policy, hash_key)
        extras = (session, strict_session, idempotent, priority, dedup_key, headers)

        async def start(reader: StreamReader) -> Call:
            owner, left = self._owner(), timeout
            if owner.link.full:
                left = await self._wait_for_room(owner, timeout)
            call, _ = self._begin(owner, route, data, left, profile, message_id, extras, reader)
            return call

        return ReplyStream(self._calls, start)

    def subscribe(self, topic: str) -> Subscription:
        """The events of a topic: see `Subscription`."""
        return Subscription(self._owner, topic, self._routes.env)

    async def publish(
        self,
        topic: str | None,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        broadcast: bool = False,
        timeout: float = PUBLISH_TIMEOUT_S,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PublishCounts:
        """Send an event to a topic's subscribers, or with `topic=None` to one match of a target (all: `broadcast`).

        Returns how many there were and how many have acknowledged it within `timeout` seconds.
        """
        if topic is not None:
            if agent_id or agent_type or capabilities or labels or version:
                raise InvalidEnvelope("target: a topic or a selector, not both")
            route = self._routes.topic(topic)
        else:
            route = self._routes.selector(pb.EVENT, agent_id, agent_type, capabilities, labels, version, None, None)
        if broadcast:
            route = self._routes.broadcast(route)
        extras = (None, False, False, None, None, headers) if headers else None
        owner = self._owner()
        left: float | None = timeout
        if owner.link.full:
            left = await self._wait_for_room(owner, timeout)
        call, joiner = self._begin(owner, route, data, left, None, message_id, extras, None)
        try:
            reply = await (call.future if joiner is None else self._joined(call, joiner))
        except asyncio.CancelledError:
            self._calls().leave(call, joiner)
            raise
        counts = reply.data
        if isinstance(counts, bytes):
            counts = json.loads(counts)
        return PublishCounts(*(int(counts.get(name, 0)) for name in ("matched", "accepted", "dropped", "unknown")))

    # ---- making a call ----

    def _calls(self) -> Calls:
        return self._owner().calls

    async def _joined(self, call: Call, joiner: Joiner) -> Reply:
        try:
            async with asyncio.timeout(joiner.deadline + GRACE_S - boot_time()):
                return await joiner.future
        except TimeoutError:
            if joiner.future.done() and not joiner.future.cancelled():
                raise
            self._calls().leave(call, joiner)
            raise Timeout(
                f"no answer from {call.target} in time",
                may_have_executed=call.may_have_executed,
                trace_id=call.trace_id,
            ) from None

    def _begin(
        self,
        owner: MeshLink,
        route: Route,
        data: Any,
        timeout: float | None,
        profile: str | None,
        message_id: str | None,
        extras: Extras | None,
        reader: StreamReader | None,
    ) -> tuple[Call, Joiner | None]:
        if os.getpid() != self._pid:
            raise RuntimeError("this mesh client was made before the process forked; call connect() in the child")
        if owner.failure is not None:
            raise owner.failure
        work = current_work.get()
        now = boot_time()
        timeout_s = _timeout(timeout, profile, work, now)
        content = _payload(data)
        if len(content) > owner.limits.payload_bytes_max:
            _check_size(content, owner.limits.payload_bytes_max)
        deadline = now + timeout_s
        if message_id is not None:
            found = owner.calls.find(message_id)
            if found is not None:
                return found, owner.calls.join(found, (route.target, content), deadline)
        message_id, mark = (new_message_id(), FRESH) if message_id is None else (_checked(message_id), b"")
        trace_id = new_trace_id() if work is None else work.trace_id
        wire_id, wire_trace = message_id.encode(), trace_id.encode()
        rest, lane, session = b"", NORMAL, None
        if profile is not None or extras is not None or work is not None:
            rest, lane, session = _rest(owner, route, content, profile, extras, work)
        if timeout is not None or profile is None or work is not None:
            rest += TIMEOUT_MS + varint(int(timeout_s * 1000) or 1)
        envelope = b"".join(
            (
                *(route.head, mark, MESSAGE_ID, varint(len(wire_id)), wire_id, TRACE_ID, varint(len(wire_trace))),
                *(wire_trace, PAYLOAD, varint(len(content)), content, rest),
            )
        )
        call = Call(message_id, trace_id, envelope, deadline, route.text, owner.loop.create_future())
        call.priority, call.session, call.reader = lane, session, reader
        if not mark:
            call.content = (route.target, content)
        owner.calls.begin(call)
        return call, None

    async def _wait_for_room(self, owner: MeshLink, timeout: float | None) -> float | None:
        """Wait until the outbox takes more; returns what is left of `timeout`."""
        began = boot_time()
        try:
            async with asyncio.timeout(timeout if timeout is not None else _ROOM_TIMEOUT_S):
                await owner.room()
        except (TimeoutError, ValueError):  # ValueError: a timeout that is no number, which is told further on
            if timeout is not None and not timeout > 0:
                return timeout
            raise Timeout("not sent in time: the link's outbox is full") from None
        return timeout if timeout is None else max(timeout - (boot_time() - began), 0.001)


Extras = tuple[str | None, bool, bool, str | None, str | None, Mapping[str, str] | None]
"""session, strict_session, idempotent, priority, dedup_key, headers."""


def _timeout(timeout: float | None, profile: str | None, work: Work | None, now: float) -> float:
    """The time of the whole request in seconds, never more than the request being handled has left."""
    if timeout is not None:
        try:
            fits = 0 < timeout <= _TIMEOUT_S_MAX
        except TypeError:
            fits = False
        if not fits:
            raise InvalidEnvelope(f"timeout {timeout!r} is not a time in seconds above 0 and at most 600")
        wanted = timeout
    elif profile is not None:
        name = profile.upper()
        if name not in _PROFILE_WHOLE_S:
            raise InvalidEnvelope(f"profile {profile!r} is none of {', '.join(_PROFILE_WHOLE_S)}")
        wanted = _PROFILE_WHOLE_S[name]
    elif work is None:
        raise InvalidEnvelope("say how long to wait: timeout=seconds, or a profile such as 'RPC' or 'LLM'")
    else:
        wanted = _TIMEOUT_S_MAX
    if work is not None:
        left = work.deadline - now
        if left < 0.01:
            raise Timeout("the request being handled has no time left for this call", trace_id=work.trace_id)
        return min(wanted, left)
    return wanted


def _payload(data: Any) -> bytes:
    """The serialised Payload of a value. Raises `InvalidEnvelope` for what no payload can carry."""
    if type(data) is bytes:
        return octets_payload(data)
    try:
        return payloads.encode(to_plain(data)).SerializeToString()
    except payloads.PayloadError as error:
        raise InvalidEnvelope(f"payload: {error}") from error


def _check_size(content: bytes, bytes_max: int) -> None:
    payload = pb.Payload.FromString(content)
    size = len(payload.body)
    if size > bytes_max:
        raise PayloadTooLarge(
            f"payload of {size} bytes; the limit for inline payloads is {bytes_max} (BlobRef for more)"
        )


def _checked(message_id: str) -> str:
    if not message_id or len(message_id) > 128 or not message_id.isprintable():
        raise InvalidEnvelope("message_id must have 1 to 128 characters, none of them a control character")
    return message_id


def _rest(
    owner: MeshLink, route: Route, content: bytes, profile: str | None, extras: Extras | None, work: Work | None
) -> tuple[bytes, int, tuple[bytes, str] | None]:
    """The rarer fields, serialised; the outbox lane; the key under which the session's epoch is kept."""
    envelope = pb.Envelope()
    lane, key = NORMAL, None
    if profile is not None:
        envelope.profile = pb.CallProfile.Value(profile.upper())
    dedup_key: str | None = None
    if extras is not None:
        session, strict, idempotent, priority, dedup_key, headers = extras
        envelope.strict_session, envelope.idempotent = strict, idempotent
        if session is not None:
            envelope.session_id = session
            key = (route.target, session)
            envelope.epoch = owner.calls.epochs.get(key, 0)
        if priority is not None:
            named = _PRIORITIES.get(str(priority).upper())
            if named is None:
                raise InvalidEnvelope(f"priority {priority!r} is none of {', '.join(_PRIORITIES)}")
            envelope.priority, lane = named
        if headers is not None:
            try:
                for name, value in headers.items():
                    envelope.headers[name] = value
            except (AttributeError, TypeError, ValueError) as error:
                raise InvalidEnvelope("headers must be a mapping of text to text") from error
    if dedup_key is not None:
        envelope.dedup_key = dedup_key
    elif work is not None:
        envelope.dedup_key = blake2b(route.target + content, digest_size=16).hexdigest()
    if work is not None:
        envelope.parent_message_id = work.message_id
        envelope.lineage = work.lineage
    return envelope.SerializeToString(), lane, key
