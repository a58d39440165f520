"""What is checked of a message and of an agent's record at the place where they enter the mesh (contract.md).

A fault names the field, says why, and costs that one message only. Checks here need nothing but the message: who may
send it, who is there, and how much time is left are decided elsewhere. A common valid request costs about 3 µs; it is
paid once, at the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from agentreach.v1.envelope_pb2 import CallProfile, Envelope, MessageType, Payload, Priority, RoutingPolicy, Target
from agentreach.v1.error_pb2 import Error, ErrorCode
from agentreach.v1.registry_pb2 import AgentRecord, AgentStatus
from agentreach.wire import limits
from agentreach.wire.errors import failure
from agentreach.wire.names import CALLER_TYPE, NAME_RULE, agent_id_fault, agent_type_fault, is_name, shown, topic_fault

VERSION_CHARS_MAX: Final = 128
LABEL_VALUE_CHARS_MAX: Final = 255
CONTENT_TYPE_CHARS_MAX: Final = 255
ENDPOINTS_MAX: Final = 16
ENDPOINT_CHARS_MAX: Final = 512
WEIGHT_MAX: Final = 1_000_000
CONCURRENCY_MAX: Final = 1_000_000
SPAN_ID_CHARS_MAX: Final = 64

# Enum values are looked up once: each look-up on a generated enum costs as much as several checks.
_REQUEST: Final = int(MessageType.REQUEST)
_EVENT: Final = int(MessageType.EVENT)
_PRIORITIES: Final = len(Priority.keys())
_PROFILES: Final = len(CallProfile.keys())
_POLICIES: Final = len(RoutingPolicy.keys())
_STATUSES: Final = len(AgentStatus.keys())
_CONTROLS: Final = frozenset(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
_TEXT_CONTROLS: Final = _CONTROLS - {"\n", "\t"}

_TARGET_BYTES_CACHED: Final = 512  # larger targets are checked each time
_TARGETS_CACHED: Final = 4096

_Fault = tuple[str, str]  # field, why


def request_fault(
    env: Envelope, payload_bytes_max: int, *, nested: bool = False, target_data: bytes | None = None
) -> Error | None:
    """Why a REQUEST cannot enter, or None. `target_data` is its serialised target, if the caller has it already.

    `nested`: it is sent from a handler's context or sent again; the least time is then not checked here, because
    less than 10 ms left is TIMEOUT there.
    """
    kind = env.type
    if kind and kind != _REQUEST:
        return _invalid("type", f"a REQUEST was expected, not {_enum_name(kind, MessageType.keys())}")
    data = env.target.SerializeToString() if target_data is None else target_data
    fault = (
        _request_target_fault(data) if len(data) <= _TARGET_BYTES_CACHED else _target_fault(env.target, False)
    ) or _common_fault(env)
    if fault is not None:
        return _invalid(*fault)
    timeout_ms = env.timeout_ms
    if timeout_ms == 0:
        profile = env.profile
        if profile == 0:
            return _invalid("timeout_ms", "neither timeout_ms nor profile is set; a request needs one of them")
    else:
        if timeout_ms > limits.TIMEOUT_MS_MAX or (timeout_ms < limits.TIMEOUT_MS_MIN and not nested):
            return _timeout_fault(timeout_ms)
        profile = env.profile
    if not 0 <= profile < _PROFILES:
        return _invalid("profile", f"unknown value {profile}")
    reply_topic = env.reply_topic
    if reply_topic and (wrong := topic_fault(reply_topic)):
        return _invalid("reply_topic", wrong)
    return _payload_fault(env.payload, payload_bytes_max)


def event_fault(env: Envelope, payload_bytes_max: int, *, nested: bool = False) -> Error | None:
    """Why an EVENT cannot enter, or None. Its type may be unspecified, and so may its timeout."""
    kind = env.type
    if kind and kind != _EVENT:
        return _invalid("type", f"an EVENT was expected, not {_enum_name(kind, MessageType.keys())}")
    target = env.target
    data = target.SerializeToString()
    fault = (
        _event_target_fault(data) if len(data) <= _TARGET_BYTES_CACHED else _target_fault(target, True)
    ) or _common_fault(env)
    if fault is not None:
        return _invalid(*fault)
    timeout_ms = env.timeout_ms
    if timeout_ms and (timeout_ms > limits.TIMEOUT_MS_MAX or (timeout_ms < limits.TIMEOUT_MS_MIN and not nested)):
        return _timeout_fault(timeout_ms)
    if not 0 <= env.profile < _PROFILES:
        return _invalid("profile", f"unknown value {env.profile}")
    if env.reply_topic:
        return _invalid("reply_topic", "an EVENT has no reply")
    return _payload_fault(env.payload, payload_bytes_max)


def target_fault(target: Target, env: str = "") -> Error | None:
    """Why a target (of Resolve, say, where any kind may be empty but not contradictory) is illegal, or None."""
    fault = _selector_fault(target)
    if fault is None and env and not is_name(env):
        fault = ("env", f"{shown(env)} is not a name: {NAME_RULE}")
    return _invalid(*fault) if fault is not None else None


def payload_size(payload: Payload) -> int:
    """Bytes of a payload's content that travel inline: what the limit is about."""
    kind = payload.WhichOneof("content")
    if kind == "body":
        return len(payload.body)
    if kind == "text":
        text = payload.text
        return len(text) if text.isascii() else len(text.encode())
    if kind == "json":
        return payload.json.ByteSize()
    return payload.blob.ByteSize() if kind == "blob" else 0


# ---- parts of an envelope ----


def _common_fault(env: Envelope) -> _Fault | None:
    """The first illegal field among those that requests and events share, without target, time and payload."""
    message_id, trace_id, session_id = env.message_id, env.trace_id, env.session_id
    if len(message_id) > limits.MESSAGE_ID_CHARS_MAX or not message_id.isprintable():
        fault = _line_fault("message_id", message_id, limits.MESSAGE_ID_CHARS_MAX)
        if fault is not None:
            return fault
    if len(trace_id) > limits.TRACE_ID_CHARS_MAX or not trace_id.isprintable():
        fault = _line_fault("trace_id", trace_id, limits.TRACE_ID_CHARS_MAX)
        if fault is not None:
            return fault
    if session_id:
        fault = _bytes_fault("session_id", session_id, limits.SESSION_ID_BYTES_MAX)
        if fault is not None:
            return fault
    version = env.protocol_version
    if version > limits.PROTOCOL_VERSION:
        return "protocol_version", f"{version} is not known here; the highest known is {limits.PROTOCOL_VERSION}"
    priority = env.priority
    if not 0 <= priority < _PRIORITIES:
        return "priority", f"unknown value {priority}"
    name = env.env
    if name and not is_name(name):
        return "env", f"{shown(name)} is not a name: {NAME_RULE}"
    dedup_key = env.dedup_key
    if dedup_key and (fault := _line_fault("dedup_key", dedup_key, limits.DEDUP_KEY_CHARS_MAX)) is not None:
        return fault
    headers = env.headers
    if headers and (fault := _headers_fault(headers)) is not None:
        return fault
    span_id, parent_span_id, parent = env.span_id, env.parent_span_id, env.parent_message_id
    if span_id or parent_span_id or parent:
        return (
            _line_fault("span_id", span_id, SPAN_ID_CHARS_MAX)
            or _line_fault("parent_span_id", parent_span_id, SPAN_ID_CHARS_MAX)
            or _line_fault("parent_message_id", parent, limits.MESSAGE_ID_CHARS_MAX)
        )
    return None


def _headers_fault(headers: Mapping[str, str]) -> _Fault | None:
    count = len(headers)
    if count > limits.HEADERS_MAX:  # before anything walks them
        return "headers", f"{count} entries; the limit is {limits.HEADERS_MAX}"
    size = 0
    for key, value in headers.items():
        size += len(key.encode()) + len(value.encode())
        if not key:
            return "headers", "an empty key"
        if not _is_line(key):
            return "headers", f"key {shown(key)} holds a control character"
        if not _is_line(value):
            return "headers", f"the value of {shown(key)} holds a control character"
    if size > limits.HEADERS_BYTES_MAX:
        return "headers", f"{size} bytes; the limit is {limits.HEADERS_BYTES_MAX}"
    return None


def _payload_fault(payload: Payload, bytes_max: int) -> Error | None:
    content_type = payload.content_type
    if content_type and not (content_type.isprintable() and len(content_type) <= CONTENT_TYPE_CHARS_MAX):
        fault = _line_fault("payload.content_type", content_type, CONTENT_TYPE_CHARS_MAX)
        if fault is not None:
            return _invalid(*fault)
    size = len(payload.body) or payload_size(payload)  # the common kind first: asking which one it is costs more
    if size <= bytes_max:
        return None
    return failure(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"payload is {size} bytes; the limit for inline payloads is {bytes_max} bytes. Put the content somewhere both "
        "sides can reach and send a BlobRef (payload.blob) instead",
        details={"field": "payload", "size_bytes": str(size), "limit_bytes": str(bytes_max)},
    )


# ---- targets ----


@lru_cache(maxsize=_TARGETS_CACHED)
def _request_target_fault(data: bytes) -> _Fault | None:
    # Callers use few targets, many times: one look-up replaces the reading of nine fields.
    return _target_fault(Target.FromString(data), False)


@lru_cache(maxsize=_TARGETS_CACHED)
def _event_target_fault(data: bytes) -> _Fault | None:
    return _target_fault(Target.FromString(data), True)


def _target_fault(target: Target, event: bool) -> _Fault | None:
    if not (target.agent_id or target.topic or _selector_fields(target)):
        return "target", "is empty: name an agent_id, a topic, or any of agent_type, capabilities, labels, version"
    fault = _selector_fault(target)
    if fault is None and not event:
        if target.topic:
            return "target.topic", "a REQUEST cannot go to a topic; publish an EVENT, or name an agent or a selector"
        if target.broadcast:
            return "target.broadcast", "only an EVENT can go to every match"
    return fault


def _selector_fields(target: Target) -> list[str]:
    names = []
    if target.agent_type:
        names.append("agent_type")
    if target.capabilities:
        names.append("capabilities")
    if target.labels:
        names.append("labels")
    if target.version:
        names.append("version")
    return names


def _selector_fault(target: Target) -> _Fault | None:
    agent_id, topic, agent_type, version = target.agent_id, target.topic, target.agent_type, target.version
    kinds = [name for name, text in (("agent_id", agent_id), ("topic", topic)) if text]
    selector = _selector_fields(target)
    if len(kinds) + bool(selector) > 1:
        fields = ", ".join(kinds + selector)
        return "target", f"{fields} are set together; it is one of agent_id, topic, or a selector"
    if not 0 <= target.policy < _POLICIES:
        return "target.policy", f"unknown value {target.policy}"
    if agent_id and (why := agent_id_fault(agent_id)) is not None:
        return "target.agent_id", why
    if topic and (fault := topic_fault(topic)):
        return "target.topic", fault
    if agent_type and (why := agent_type_fault(agent_type)) is not None:
        return "target.agent_type", why
    return (
        _capabilities_fault("target.capabilities", list(target.capabilities))
        or _labels_fault("target.labels", target.labels)
        or _range_fault(version)
        or _bytes_fault("target.hash_key", target.hash_key, limits.HASH_KEY_BYTES_MAX)
    )


def _range_fault(version: str) -> _Fault | None:
    fault = _line_fault("target.version", version, VERSION_CHARS_MAX)
    if fault is None and version != version.strip():
        return "target.version", f"{shown(version)} has blanks around it"
    if fault is None and version[:1] in ("<", ">", "=", "!", "~"):
        try:
            SpecifierSet(version)
        except InvalidSpecifier:
            return "target.version", f"{shown(version)} is not a range such as >=2.1,<3 (PEP 440)"
    return fault


# ---- records ----


def record_fault(record: AgentRecord) -> Error | None:
    """Why an agent cannot be registered with this record, or None.

    `agent_id` or `agent_type` may be missing: an id without its instance is assigned, a type is taken from the id.
    """
    fault = (
        _identity_fault(record)
        or _capabilities_fault("capabilities", list(record.capabilities))
        or _labels_fault("labels", record.labels)
        or _line_fault("version", record.version, VERSION_CHARS_MAX)
        or _numbers_fault(record)
        or _endpoints_fault(list(record.endpoints))
    )
    if fault is None and record.env and not is_name(record.env):
        fault = ("env", f"{shown(record.env)} is not a name: {NAME_RULE}")
    if fault is None:
        description = record.description
        if len(description) > limits.DESCRIPTION_CHARS_MAX:
            fault = ("description", f"{len(description)} characters; the limit is {limits.DESCRIPTION_CHARS_MAX}")
        elif not _TEXT_CONTROLS.isdisjoint(description):
            fault = ("description", "holds a control character other than line break and tab")
    return _invalid(*fault) if fault is not None else None


def _identity_fault(record: AgentRecord) -> _Fault | None:
    agent_id, agent_type = record.agent_id, record.agent_type
    if not (agent_id or agent_type):
        return "agent_id", "neither agent_id nor agent_type is set"
    if agent_id and (why := agent_id_fault(agent_id)) is not None:
        return "agent_id", why
    if agent_type and (why := agent_type_fault(agent_type)) is not None:
        return "agent_type", why
    of_id = agent_id.partition("/")[0]
    if agent_id and agent_type and of_id != agent_type:
        return "agent_type", f"{shown(agent_type)} is not the type in agent_id {shown(agent_id)}"
    if (agent_type or of_id) == CALLER_TYPE:
        return "agent_type", f"{CALLER_TYPE!r} is kept for callers' ids and cannot be registered"
    return None


def _numbers_fault(record: AgentRecord) -> _Fault | None:
    if not 0 <= record.status < _STATUSES:
        return "status", f"unknown value {record.status}"
    if record.HasField("weight"):
        weight = record.weight
        if weight == 0:
            return "weight", "0 is no weight: leave it out for 100, or drain the agent to send it no new work"
        if weight > WEIGHT_MAX:
            return "weight", f"{weight} is above the limit of {WEIGHT_MAX}"
    if record.max_concurrency > CONCURRENCY_MAX:
        return "max_concurrency", f"{record.max_concurrency} is above {CONCURRENCY_MAX}; 0 means unlimited"
    if record.session_concurrency > CONCURRENCY_MAX:
        return "session_concurrency", f"{record.session_concurrency} is above the limit of {CONCURRENCY_MAX}"
    return None


def _endpoints_fault(endpoints: list[str]) -> _Fault | None:
    if len(endpoints) > ENDPOINTS_MAX:
        return "endpoints", f"{len(endpoints)} entries; the limit is {ENDPOINTS_MAX}"
    for endpoint in endpoints:
        fault = _line_fault("endpoints", endpoint, ENDPOINT_CHARS_MAX)
        if fault is not None:
            return fault
    return None


# ---- shared by envelopes, targets and records ----


def _capabilities_fault(field: str, names: list[str]) -> _Fault | None:
    if len(names) > limits.CAPABILITIES_MAX:
        return field, f"{len(names)} entries; the limit is {limits.CAPABILITIES_MAX}"
    for name in names:
        if not is_name(name):
            return field, f"{shown(name)} is not a name: {NAME_RULE}"
    return None


def _labels_fault(field: str, labels: Mapping[str, str]) -> _Fault | None:
    if not labels:
        return None
    if len(labels) > limits.LABELS_MAX:
        return field, f"{len(labels)} entries; the limit is {limits.LABELS_MAX}"
    for key, value in labels.items():
        if not is_name(key):
            return field, f"key {shown(key)} is not a name: {NAME_RULE}"
        if len(value) > LABEL_VALUE_CHARS_MAX or not _is_line(value):
            return field, f"the value of {shown(key)} is over {LABEL_VALUE_CHARS_MAX} characters or holds controls"
    return None


def _is_line(text: str) -> bool:
    """True if no control character is in it. Most text is printable, which is the cheaper question."""
    return text.isprintable() or _CONTROLS.isdisjoint(text)


def _line_fault(field: str, text: str, chars_max: int) -> _Fault | None:
    if len(text) > chars_max:
        return field, f"{len(text)} characters; the limit is {chars_max}"
    return None if _is_line(text) else (field, "holds a control character")


def _bytes_fault(field: str, text: str, bytes_max: int) -> _Fault | None:
    if len(text) * 4 > bytes_max and len(text.encode()) > bytes_max:
        return field, f"{len(text.encode())} bytes of UTF-8; the limit is {bytes_max}"
    return None if _is_line(text) else (field, "holds a control character")


def _timeout_fault(timeout_ms: int) -> Error:
    return _invalid(
        "timeout_ms",
        f"{timeout_ms} ms is out of bounds: {limits.TIMEOUT_MS_MIN} ms to {limits.TIMEOUT_MS_MAX} ms",
    )


def _enum_name(number: int, names: list[str]) -> str:
    return names[number] if 0 <= number < len(names) else f"unknown value {number}"


def _invalid(field: str, why: str) -> Error:
    return failure(ErrorCode.INVALID_ENVELOPE, f"{field}: {why}", details={"field": field})
