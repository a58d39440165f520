from __future__ import annotations

import unicodedata

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.error_pb2 import Error, ErrorCode
from agentreach.wire import errors

CODES = [code for code in ErrorCode.values() if code]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

# contract.md, "Errors"
CONTRACT = {
    "INVALID_ENVELOPE": "INVALID_ARGUMENT",
    "PAYLOAD_TOO_LARGE": "INVALID_ARGUMENT",
    "NO_ROUTE": "NOT_FOUND",
    "NO_AGENT_AVAILABLE": "UNAVAILABLE",
    "BREAKER_OPEN": "UNAVAILABLE",
    "CONNECT_FAILED": "UNAVAILABLE",
    "AGENT_LOST": "UNAVAILABLE",
    "TIMEOUT": "DEADLINE_EXCEEDED",
    "OVERLOADED": "RESOURCE_EXHAUSTED",
    "REJECTED": "FAILED_PRECONDITION",
    "AGENT_ERROR": "UNKNOWN",
    "HOP_LIMIT": "FAILED_PRECONDITION",
    "LOOP_DETECTED": "FAILED_PRECONDITION",
    "WOULD_DEADLOCK": "FAILED_PRECONDITION",
    "IDEMPOTENCY_CONFLICT": "ALREADY_EXISTS",
    "SESSION_LOST": "ABORTED",
    "FENCED": "ABORTED",
    "CANCELLED": "CANCELLED",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "PERMISSION_DENIED": "PERMISSION_DENIED",
    "REGISTRY_UNAVAILABLE": "UNAVAILABLE",
    "SHUTTING_DOWN": "UNAVAILABLE",
    "INTERNAL": "INTERNAL",
}


def test_every_code_has_the_grpc_code_of_the_contract() -> None:
    numbers = {status.name: status.value[0] for status in grpc.StatusCode}
    assert {ErrorCode.Name(code): errors.grpc_code(code) for code in CODES} == {
        name: numbers[status] for name, status in CONTRACT.items()
    }


def test_what_certainly_did_not_run_and_may_later_is_retryable() -> None:
    retryable = {ErrorCode.Name(code) for code in CODES if errors.failure(code, "").retryable}
    assert retryable == {
        "NO_AGENT_AVAILABLE",
        "BREAKER_OPEN",
        "CONNECT_FAILED",
        "OVERLOADED",
        "REGISTRY_UNAVAILABLE",
        "SHUTTING_DOWN",
    }
    assert errors.failure(ErrorCode.AGENT_ERROR, "busy", retryable=True).retryable
    assert not errors.failure(ErrorCode.OVERLOADED, "full", retryable=False).retryable


def test_a_lost_agent_may_always_have_executed() -> None:
    assert errors.failure(ErrorCode.AGENT_LOST, "gone").may_have_executed
    assert not errors.failure(ErrorCode.CONNECT_FAILED, "never handed over").may_have_executed


@given(st.text(alphabet=st.characters(), max_size=3000))
def test_text_of_peers_is_one_safe_line_of_bounded_length(text: str) -> None:
    error = errors.failure(ErrorCode.AGENT_ERROR, text, agent_id=text, details={text: text})
    assert len(error.message) <= 1000 and len(error.agent_id) <= 128
    for part in (error.message, error.agent_id, *error.details.keys(), *error.details.values()):
        assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in part)


def test_printable_text_of_any_language_is_left_alone() -> None:
    for text in ("größer 你好 שלום", "👩\u200d💻 works", "a\u00a0b"):
        assert errors.clean(text) == text
    assert errors.clean("a\r\nSet-Cookie: b\x7f\u202ec\u2028") == "a  Set-Cookie: b  c "


def test_numbers_out_of_range_are_clamped_and_details_counted() -> None:
    error = errors.failure(
        ErrorCode.OVERLOADED, "", retry_after_ms=1 << 40, attempts=-1, details={f"k{n}": "" for n in range(100)}
    )
    assert error.retry_after_ms == (1 << 32) - 1 and error.attempts == 0 and len(error.details) == 32


lines = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=80)


@given(
    st.sampled_from(CODES),
    lines,
    st.booleans(),
    st.integers(0, (1 << 32) - 1),
    lines,
    st.integers(0, (1 << 32) - 1),
    st.dictionaries(st.sampled_from(["field", "path", "via", "near"]), lines, max_size=3),
    st.sampled_from([TRACE, "", "my trace"]),
)
def test_a_status_gives_back_the_error_it_was_made_of(
    code: ErrorCode.ValueType,
    message: str,
    flag: bool,
    retry_after_ms: int,
    agent_id: str,
    attempts: int,
    details: dict[str, str],
    trace_id: str,
) -> None:
    error = errors.failure(
        code,
        message,
        retryable=flag,
        may_have_executed=not flag,
        retry_after_ms=retry_after_ms,
        agent_id=agent_id,
        attempts=attempts,
        details=details,
    )
    status = errors.to_status(error, trace_id)
    assert status.message.startswith(ErrorCode.Name(code)) and status.message.endswith(trace_id)
    assert status.code == errors.grpc_code(code)
    assert errors.from_status(Status.FromString(status.SerializeToString())) == error


def test_a_status_without_a_trace_does_not_speak_of_one() -> None:
    status = errors.to_status(errors.failure(ErrorCode.NO_ROUTE, "no agent"), "")
    assert status.message == "NO_ROUTE: no agent"


def test_a_status_holds_all_metadata_of_the_contract() -> None:
    error = errors.failure(
        ErrorCode.OVERLOADED, "mailbox full", retry_after_ms=1500, agent_id="ner/1", attempts=2, details={"size": "9"}
    )
    status = errors.to_status(error, TRACE, items=3)
    assert status.message == f"OVERLOADED: mailbox full trace_id={TRACE}"
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("OVERLOADED", "agentreach")
    assert dict(info.metadata) == {
        "trace_id": TRACE,
        "agent_id": "ner/1",
        "attempts": "2",
        "retryable": "true",
        "may_have_executed": "false",
        "items": "3",
        "size": "9",
    }
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_there_is_no_retry_info_without_a_time() -> None:
    assert len(errors.to_status(errors.failure(ErrorCode.NO_ROUTE, "x"), TRACE).details) == 1


def test_details_cannot_pass_for_the_meshs_own_metadata() -> None:
    error = errors.failure(ErrorCode.AGENT_ERROR, "x", details={"retryable": "true", "trace_id": "forged"})
    back = errors.from_status(errors.to_status(error, TRACE))
    assert back is not None and not back.retryable and not back.details


@given(st.sampled_from(["x", "%", "é", "你", "😀"]))
def test_the_largest_status_fits_into_trailers(char: str) -> None:
    text = char * 2000
    error = errors.failure(ErrorCode.AGENT_ERROR, text, agent_id=text, details={f"{char}{n}": text for n in range(50)})
    status = errors.to_status(error, TRACE, items=1)
    percent_encoded = sum(1 if b" " <= bytes([b]) <= b"~" and b != 0x25 else 3 for b in status.message.encode())
    assert percent_encoded + len(status.SerializeToString()) * 4 / 3 < 8 << 10
    assert status.message.endswith(TRACE)


def test_a_status_of_somebody_else_is_not_ours() -> None:
    status = Status(code=5, message="NO_ROUTE: looks like one")
    assert errors.from_status(status) is None
    for detail in (BadRequest(), ErrorInfo(reason="NO_ROUTE", domain="googleapis.com")):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    assert errors.from_status(status) is None


def test_a_code_of_a_later_version_is_carried_as_unspecified() -> None:
    newer = Error(code=99, message="new")  # type: ignore[arg-type]  # open enum
    status = errors.to_status(newer, TRACE)
    assert status.code == grpc.StatusCode.UNKNOWN.value[0] and status.message.startswith("ERROR_99: ")
    back = errors.from_status(status)
    assert back is not None and back.code == ErrorCode.ERROR_CODE_UNSPECIFIED and back.message == "new"


@pytest.mark.parametrize("attempts", ["", "-1", "x", "1e3", "²", "9" * 50])
def test_malformed_metadata_counts_as_nothing(attempts: str) -> None:
    packed = AnyMessage()
    packed.Pack(ErrorInfo(reason="TIMEOUT", domain="agentreach", metadata={"attempts": attempts}))
    back = errors.from_status(Status(message="TIMEOUT: late", details=[packed]))
    assert back is not None and back.attempts == 0 and back.message == "late"
