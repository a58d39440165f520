from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.error_pb2 import Error, ErrorCode
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire.checks import event_fault, payload_size, record_fault, request_fault, target_fault

LIMIT = 1000


def request(**fields: object) -> Envelope:
    env = Envelope(timeout_ms=2000, target=Target(capabilities=["echo"]), payload=Payload(body=b"x"))
    env.MergeFrom(Envelope(**fields))  # type: ignore[arg-type]  # rows of tables below
    return env


def to(**fields: object) -> Envelope:
    return Envelope(timeout_ms=2000, target=Target(**fields))  # type: ignore[arg-type]  # likewise


def refused(fault: Error | None, field: str, why: str = "") -> None:
    assert fault is not None
    assert fault.code == ErrorCode.INVALID_ENVELOPE and not fault.retryable and not fault.may_have_executed
    assert fault.message.startswith(field) and why in fault.message, fault.message
    assert fault.details["field"] in field


GOOD = [
    request(),
    request(type=pb.REQUEST),
    Envelope(profile=pb.LLM, target=Target(agent_type="extractor")),
    to(agent_id="extractor/7f9c5d"),
    to(agent_id="caller/cli-1"),
    to(agent_type="extractor", capabilities=["Ner", "x_y-z"], labels={"zone": "eu west ü"}, version=">=2.1,<3"),
    to(version="build-2024 (blue)"),
    to(labels={"zone": ""}),
    to(capabilities=["echo"], policy=pb.CONSISTENT_HASH, hash_key="k" * 256),
    request(message_id="m" * 128, trace_id="ä" * 128, session_id="😀" * 64, dedup_key="step 1", env="staging"),
    request(protocol_version=1, priority=pb.LOW, idempotent=True, strict_session=True, epoch=7),
    request(headers={f"h{n}": "v" * 100 for n in range(64)}),
    request(headers={"tracestate": "a=1,b=2", "note": "grüße\u00a0an\u200dalle"}),
    request(span_id="b7ad6b7169203331", parent_span_id="0" * 16, parent_message_id="m" * 128),
    request(reply_topic="answers/mine"),
    request(payload=Payload(body=b"x" * LIMIT, content_type="application/octet-stream")),
    Envelope(timeout_ms=10, target=Target(agent_type="a")),
    Envelope(timeout_ms=600_000, target=Target(agent_type="a")),
]


@pytest.mark.parametrize("env", GOOD)
def test_a_good_request_has_no_fault(env: Envelope) -> None:
    assert request_fault(env, LIMIT) is None
    assert request_fault(env, LIMIT, nested=True) is None


BAD = [
    (Envelope(timeout_ms=2000), "target", "is empty"),
    (to(policy=pb.RANDOM, hash_key="k"), "target", "is empty"),
    (to(agent_id="a/1", agent_type="a"), "target", "agent_id, agent_type"),
    (to(agent_id="a/1", version="1", capabilities=["x"]), "target", "agent_id, capabilities, version"),
    (to(agent_id="a/1", topic="t"), "target", "agent_id, topic"),
    (to(topic="news"), "target.topic", "publish"),
    (to(agent_type="a", broadcast=True), "target.broadcast", "EVENT"),
    (to(agent_id="extractor"), "target.agent_id", "no '/'"),
    (to(agent_id="Extractor/1"), "target.agent_id", "lower case"),
    (to(agent_type="Extractor"), "target.agent_type", "lower case"),
    (to(agent_type="a b"), "target.agent_type", "not a name"),
    (to(capabilities=["ok", ""]), "target.capabilities", "'' is not a name"),
    (to(capabilities=["a\r\nb"]), "target.capabilities", "not a name"),
    (to(capabilities=[f"c{n}" for n in range(65)]), "target.capabilities", "65 entries; the limit is 64"),
    (to(labels={"a b": "c"}), "target.labels", "not a name"),
    (to(labels={"a": "x\n"}), "target.labels", "controls"),
    (to(labels={f"l{n}": "" for n in range(65)}), "target.labels", "65 entries"),
    (to(version=">=abc"), "target.version", "PEP 440"),
    (to(version="~~1"), "target.version", "PEP 440"),
    (to(version="1" * 129), "target.version", "129 characters"),
    (to(agent_type="a", policy=8), "target.policy", "unknown value 8"),
    (to(agent_type="a", policy=-1), "target.policy", "unknown value -1"),
    (to(agent_type="a", hash_key="ä" * 129), "target.hash_key", "258 bytes"),
    (Envelope(target=Target(agent_type="a")), "timeout_ms", "neither timeout_ms nor profile"),
    (Envelope(timeout_ms=9, target=Target(agent_type="a")), "timeout_ms", "10 ms to 600000 ms"),
    (Envelope(timeout_ms=600_001, target=Target(agent_type="a")), "timeout_ms", "10 ms to 600000 ms"),
    (request(profile=6), "profile", "unknown value 6"),
    (request(profile=-7), "profile", "unknown value -7"),
    (request(priority=4), "priority", "unknown value 4"),
    (request(type=pb.RESPONSE), "type", "not RESPONSE"),
    (request(type=pb.EVENT), "type", "not EVENT"),
    (request(type=17), "type", "unknown value 17"),
    (request(type=-1), "type", "unknown value -1"),
    (request(protocol_version=2), "protocol_version", "highest known is 1"),
    (request(message_id="m" * 129), "message_id", "129 characters"),
    (request(message_id="a\x00b"), "message_id", "control character"),
    (request(trace_id="t" * 129), "trace_id", "129 characters"),
    (request(trace_id="t\r\nx: y"), "trace_id", "control character"),
    (request(session_id="😀" * 65), "session_id", "260 bytes"),
    (request(session_id="s\x85"), "session_id", "control character"),
    (request(env="pro duction"), "env", "not a name"),
    (request(dedup_key="d" * 257), "dedup_key", "257 characters"),
    (request(dedup_key="d\n"), "dedup_key", "control character"),
    (request(reply_topic="/x"), "reply_topic", "not a topic"),
    (request(span_id="s" * 65), "span_id", "65 characters"),
    (request(parent_span_id="\x1b[0m"), "parent_span_id", "control character"),
    (request(parent_message_id="p" * 129), "parent_message_id", "129 characters"),
    (request(headers={f"h{n}": "" for n in range(65)}), "headers", "65 entries"),
    (request(headers={"h": "v" * 8192}), "headers", "8193 bytes"),
    (request(headers={"h": "é" * 4096}), "headers", "8193 bytes"),
    (request(headers={"": "v"}), "headers", "empty key"),
    (request(headers={"a\nb": "v"}), "headers", "control character"),
    (request(headers={"a": "v\r\nSet-Cookie: x"}), "headers", "control character"),
    (request(payload=Payload(content_type="text/plain\r\n")), "payload.content_type", "control character"),
    (request(payload=Payload(content_type="x" * 256)), "payload.content_type", "256 characters"),
]


@pytest.mark.parametrize(("env", "field", "why"), BAD)
def test_a_bad_request_is_refused_by_field_and_reason(env: Envelope, field: str, why: str) -> None:
    refused(request_fault(env, LIMIT), field, why)
    refused(request_fault(env, LIMIT), field, why)  # a fault that is remembered is the same


def test_a_hundred_thousand_headers_are_counted_not_walked() -> None:
    env = request()
    for n in range(100_000):
        env.headers[str(n)] = "\n"
    refused(request_fault(env, LIMIT), "headers", "100000 entries")


def test_nested_requests_with_little_time_left_are_judged_elsewhere() -> None:
    env = Envelope(timeout_ms=3, target=Target(agent_type="a"))
    assert request_fault(env, LIMIT, nested=True) is None
    env.timeout_ms = 600_001
    refused(request_fault(env, LIMIT, nested=True), "timeout_ms")


@pytest.mark.parametrize(
    "payload",
    [
        Payload(body=b"x" * (LIMIT + 1)),
        Payload(text="ä" * 501),
        Payload(text="x" * (LIMIT + 1)),
        Payload(json=Value(string_value="x" * LIMIT)),
        Payload(blob=pb.BlobRef(uri="x" * LIMIT)),
    ],
)
def test_an_oversize_payload_names_size_limit_and_the_way_out(payload: Payload) -> None:
    for fault in (request_fault(request(payload=payload), LIMIT), event_fault(request(payload=payload), LIMIT)):
        assert fault is not None and fault.code == ErrorCode.PAYLOAD_TOO_LARGE and not fault.retryable
        assert str(payload_size(payload)) in fault.message and str(LIMIT) in fault.message
        assert "BlobRef" in fault.message
        assert fault.details["limit_bytes"] == str(LIMIT)


def test_the_size_of_a_payload_is_that_of_its_content() -> None:
    assert payload_size(Payload()) == 0
    assert payload_size(Payload(body=b"12345", content_type="application/octet-stream")) == 5
    assert payload_size(Payload(text="für")) == 4
    assert payload_size(Payload(json=Value(string_value="abc"))) == 5


GOOD_EVENTS = [
    Envelope(target=Target(topic="news/today")),
    Envelope(type=pb.EVENT, target=Target(capabilities=["log"], broadcast=True)),
    Envelope(type=pb.EVENT, timeout_ms=10, target=Target(agent_id="a/1")),
]
BAD_EVENTS = [
    (Envelope(), "target", "is empty"),
    (Envelope(type=pb.REQUEST, target=Target(topic="a")), "type", "not REQUEST"),
    (Envelope(target=Target(topic="a", agent_type="b")), "target", "topic, agent_type"),
    (Envelope(target=Target(topic="a b")), "target.topic", "not a topic"),
    (Envelope(target=Target(topic="t" * 256)), "target.topic", "not a topic"),
    (Envelope(timeout_ms=9, target=Target(topic="a")), "timeout_ms", "10 ms"),
    (Envelope(target=Target(topic="a"), profile=9), "profile", "unknown"),
    (Envelope(target=Target(topic="a"), reply_topic="b"), "reply_topic", "no reply"),
    (Envelope(target=Target(topic="a"), trace_id="\n"), "trace_id", "control"),
]


@pytest.mark.parametrize("env", GOOD_EVENTS)
def test_a_good_event_has_no_fault(env: Envelope) -> None:
    assert event_fault(env, LIMIT) is None


@pytest.mark.parametrize(("env", "field", "why"), BAD_EVENTS)
def test_a_bad_event_is_refused_by_field_and_reason(env: Envelope, field: str, why: str) -> None:
    refused(event_fault(env, LIMIT), field, why)


def test_the_same_target_is_judged_apart_for_events_and_requests() -> None:
    env = Envelope(timeout_ms=100, target=Target(topic="a"))
    assert event_fault(env, LIMIT) is None
    refused(request_fault(env, LIMIT), "target.topic")
    assert event_fault(env, LIMIT) is None


def test_a_target_to_resolve_may_be_empty_but_not_contradictory() -> None:
    assert target_fault(Target()) is None
    assert target_fault(Target(topic="t"), "staging") is None
    refused(target_fault(Target(topic="t", agent_type="a")), "target")
    refused(target_fault(Target(), "no env"), "env")


@given(st.binary(max_size=200))
def test_any_envelope_that_parses_is_judged_without_an_exception(data: bytes) -> None:
    try:
        env = Envelope.FromString(data)
    except Exception:
        return
    for fault in (request_fault(env, LIMIT), event_fault(env, LIMIT)):
        assert fault is None or fault.message


# ---- records ----


def record(**fields: object) -> AgentRecord:
    return AgentRecord(agent_id="ner/1", **fields)  # type: ignore[arg-type]  # rows of tables below


GOOD_RECORDS = [
    AgentRecord(agent_type="ner"),
    AgentRecord(agent_id="ner/1"),
    record(agent_type="ner", version="2.1.0", capabilities=["ner"], labels={"zone": "eu"}, env="staging"),
    record(weight=1, max_concurrency=4, session_concurrency=2, priority=-5, description="Finds\nnames\tand places"),
    record(weight=1_000_000, description="d" * 4096),
]
BAD_RECORDS = [
    (AgentRecord(), "agent_id", "neither"),
    (AgentRecord(agent_id="ner"), "agent_id", "no '/'"),
    (AgentRecord(agent_id="Ner/1"), "agent_id", "lower case"),
    (AgentRecord(agent_type="Ner"), "agent_type", "lower case"),
    (AgentRecord(agent_type="a/b"), "agent_type", "not a name"),
    (AgentRecord(agent_type="caller"), "agent_type", "cannot be registered"),
    (AgentRecord(agent_id="caller/1"), "agent_type", "cannot be registered"),
    (record(agent_type="other"), "agent_type", "not the type in agent_id"),
    (record(capabilities=["a b"]), "capabilities", "not a name"),
    (record(capabilities=[f"c{n}" for n in range(65)]), "capabilities", "65 entries"),
    (record(labels={"a": "x" * 256}), "labels", "255 characters"),
    (record(labels={"": "x"}), "labels", "not a name"),
    (record(env="a b"), "env", "not a name"),
    (record(version="v" * 129), "version", "129 characters"),
    (record(version="1\n2"), "version", "control character"),
    (record(weight=0), "weight", "drain"),
    (record(weight=1_000_001), "weight", "limit"),
    (record(max_concurrency=1_000_001), "max_concurrency", "unlimited"),
    (record(session_concurrency=1_000_001), "session_concurrency", "limit"),
    (record(status=6), "status", "unknown value 6"),
    (record(description="d" * 4097), "description", "4097 characters"),
    (record(description="\x1b[31m"), "description", "control character"),
    (record(endpoints=["http://x"] * 17), "endpoints", "17 entries"),
    (record(endpoints=["x" * 513]), "endpoints", "513 characters"),
]


@pytest.mark.parametrize("good", GOOD_RECORDS)
def test_a_good_record_has_no_fault(good: AgentRecord) -> None:
    assert record_fault(good) is None


@pytest.mark.parametrize(("bad", "field", "why"), BAD_RECORDS)
def test_a_bad_record_is_refused_by_field_and_reason(bad: AgentRecord, field: str, why: str) -> None:
    refused(record_fault(bad), field, why)


@pytest.mark.parametrize("check", [request_fault, event_fault])
def test_a_fault_of_any_size_of_input_stays_short(check: Callable[[Envelope, int], Error | None]) -> None:
    fault = check(to(agent_type="x" * 500_000), 1 << 20)
    assert fault is not None and len(fault.message) < 400
