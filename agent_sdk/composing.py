"""From a caller's arguments to a call that is under way: time, payload, rarer fields, the bytes of the envelope."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from agent_sdk.current import current_work
from agent_sdk.errors import InvalidEnvelope, PayloadTooLarge, Timeout
from agent_sdk.identity import new_message_id, new_trace_id
from agent_sdk.outgoing import FRESH, MESSAGE_ID, PAYLOAD, TIMEOUT_MS, TRACE_ID, Route, octets_payload
from agent_sdk.pending import Call, Joiner, StreamReader
from agent_sdk.shapes import to_plain
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import payload as payloads
from agentreach.wire.framing import varint
from agentreach.wire.outbox import HIGH, LOW, NORMAL

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink
    from agent_sdk.work import Work

_TIMEOUT_S_MAX: Final = 4_000_000.0  # what the field can hold; the node's own bounds are narrower, and it names them
_PROFILE_WHOLE_S: Final = {"CACHE": 1.1, "RPC": 16.0, "LLM": 245.0, "EXTERNAL": 62.0, "TASK": 320.0}
"""Whole time of a profile (behaviour.md §4, rounded up): for the SDK's own guard only; the node keeps the real one."""
_PRIORITIES: Final = {"HIGH": (pb.HIGH, HIGH), "NORMAL": (pb.NORMAL, NORMAL), "LOW": (pb.LOW, LOW)}

Extras = tuple[Any, ...]
"""session, strict_session, idempotent, priority, dedup_key, headers; as the user gave them."""


def timeout_s(timeout: Any, profile: Any, work: Work | None, now: float) -> float:
    """The time of the whole request in seconds, never more than the request being handled has left."""
    if timeout is not None:
        try:
            fits = 0 < timeout <= _TIMEOUT_S_MAX
        except TypeError:
            fits = False
        if not fits:
            raise InvalidEnvelope(f"timeout {timeout!r} is not a time in seconds above 0 and at most 600")
        wanted = float(timeout)
    elif profile is not None:
        wanted = _PROFILE_WHOLE_S[_profile_name(profile)]
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


def _profile_name(profile: Any) -> str:
    name = str(profile).upper()
    if name not in _PROFILE_WHOLE_S:
        raise InvalidEnvelope(f"profile {profile!r} is none of {', '.join(_PROFILE_WHOLE_S)}")
    return name


def payload(data: Any) -> bytes:
    """The serialised Payload of a value. Raises `InvalidEnvelope` for what no payload can carry."""
    if type(data) is bytes:
        return octets_payload(data)
    try:
        return payloads.encode(to_plain(data)).SerializeToString()
    except payloads.PayloadError as error:
        raise InvalidEnvelope(f"payload: {error}") from error


def check_size(content: bytes, bytes_max: int) -> None:
    """Raises `PayloadTooLarge` for a serialised Payload whose content is over the limit."""
    size = len(pb.Payload.FromString(content).body)
    if size > bytes_max:
        raise PayloadTooLarge(
            f"payload of {size} bytes; the limit for inline payloads is {bytes_max} (BlobRef for more)"
        )


def checked_id(message_id: Any) -> str:
    """The message_id, if it can be one. Raises `InvalidEnvelope`."""
    if not isinstance(message_id, str) or not message_id or len(message_id) > 128 or not message_id.isprintable():
        raise InvalidEnvelope("message_id must have 1 to 128 characters, none of them a control character")
    return message_id


def _check_kinds(session: object, strict: object, idempotent: object, dedup_key: object) -> None:
    """Raises `InvalidEnvelope` that names the first argument of a wrong type."""
    for name, value, kind, text in (
        ("strict_session", strict, bool, "True or False"),
        ("idempotent", idempotent, bool, "True or False"),
        ("session", session, str, "text"),
        ("dedup_key", dedup_key, str, "text"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidEnvelope(f"{name} must be {text}, got {value!r:.80}")


def rest(
    owner: MeshLink, route: Route, content: bytes, profile: Any, extras: Extras | None, work: Work | None
) -> tuple[bytes, int, tuple[bytes, str] | None]:
    """The rarer fields, serialised; the outbox lane; the key under which the session's epoch is kept."""
    envelope = pb.Envelope()
    lane, key = NORMAL, None
    if profile is not None:
        envelope.profile = pb.CallProfile.Value(_profile_name(profile))
    dedup_key: Any = None
    if extras is not None:
        session, strict, idempotent, priority, dedup_key, headers = extras
        _check_kinds(session, strict, idempotent, dedup_key)
        envelope.strict_session, envelope.idempotent = bool(strict), bool(idempotent)
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


def begin(
    owner: MeshLink,
    pid: int,
    route: Route,
    data: Any,
    timeout: Any,
    profile: Any,
    message_id: Any,
    extras: Extras | None,
    reader: StreamReader | None,
) -> tuple[Call, Joiner | None]:
    """Send a request, or join the call of its `message_id` that is under way.

    `pid` is the process that made the client; `timeout`, `profile` and `message_id` are as the user gave them.
    Raises `ReachError` for what cannot be sent, `RuntimeError` after a fork.
    """
    if os.getpid() != pid:
        raise RuntimeError("this mesh client was made before the process forked; call connect() in the child")
    if owner.failure is not None:
        raise owner.failure
    work = current_work.get()
    now = boot_time()
    alone = bool(route.reply_topic)  # it may outlive the request being handled
    time_s = timeout_s(timeout, profile, None if alone else work, now)
    content = payload(data)
    if len(content) > owner.limits.payload_bytes_max:
        check_size(content, owner.limits.payload_bytes_max)
    deadline = now + time_s
    if message_id is None:
        named, mark = new_message_id(), FRESH
    else:
        named, mark = checked_id(message_id), b""
        found = owner.calls.find(named)
        if found is not None:
            return found, owner.calls.join(found, (route.target + route.reply_topic, content), deadline)
    trace_id = new_trace_id() if work is None else work.trace_id
    wire_id, wire_trace = named.encode(), trace_id.encode()
    more, lane, session = b"", NORMAL, None
    if profile is not None or extras is not None or work is not None:
        more, lane, session = rest(owner, route, content, profile, extras, work)
    if timeout is not None or profile is None or (work is not None and not alone):
        more += TIMEOUT_MS + varint(int(time_s * 1000) or 1)
    envelope = b"".join(
        (
            route.head, mark, MESSAGE_ID, varint(len(wire_id)), wire_id, TRACE_ID, varint(len(wire_trace)), wire_trace,
            PAYLOAD, varint(len(content)), content, more,
        )
    )  # fmt: skip
    call = Call(named, trace_id, envelope, deadline, route.text, owner.loop.create_future())
    call.priority, call.session, call.reader = lane, session, reader
    if not mark:
        call.content = (route.target + route.reply_topic, content)
    owner.calls.begin(call, now, owner.leaving and work is None and not route.event)
    return call, None
