"""Addresses, the environment, and errors over the wire."""

from __future__ import annotations

import os

import pytest

import agent_sdk
from agent_sdk import ErrorCode, ReachError, errors, settings
from agent_sdk.identity import new_message_id, new_trace_id
from agentreach.v1 import error_pb2
from agentreach.wire import ids


def test_a_list_of_addresses_is_split_in_its_order() -> None:
    assert settings.addresses("b:1, a:2,b:1,[::1]:3") == ("b:1", "a:2", "[::1]:3")


@pytest.mark.parametrize(
    "url", ["", "host", "host:", "host:0", "host:70000", "http://host:1", "a:1,,b:2", "::1:5", "a b:1"]
)
def test_an_address_that_cannot_be_read_says_how_one_looks(url: str) -> None:
    with pytest.raises(agent_sdk.ConnectFailed, match="HOST:PORT"):
        settings.addresses(url)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REACH_URL", "e:1")
    monkeypatch.setenv("REACH_API_KEY", "secret")
    monkeypatch.setenv("REACH_CLIENT_TLS_CA", "/ca.pem")
    found = settings.access()
    assert found.addresses == ("e:1",)
    assert found.metadata == (("authorization", "Bearer secret"),)
    assert found.tls == settings.Tls(ca="/ca.pem")
    assert settings.access("a:1", "other").metadata == (("authorization", "Bearer other"),)


def test_every_code_of_the_contract_has_its_class_in_camel_case() -> None:
    codes = {name for name in error_pb2.ErrorCode.keys() if name != "ERROR_CODE_UNSPECIFIED"}  # noqa: SIM118
    assert {code.value for code in ErrorCode} == codes
    for code in ErrorCode:
        kind = getattr(agent_sdk, "".join(part.title() for part in code.value.split("_")))
        assert issubclass(kind, ReachError) and kind.code is code
        assert code == code.value


def test_an_error_survives_the_way_there_and_back() -> None:
    error = errors.AgentError(
        "broken",
        retryable=True,
        retry_after=1.5,
        may_have_executed=True,
        agent_id="a/b",
        attempts=2,
        details={"k": "v"},
    )
    back = errors.from_proto(errors.to_proto(error), "trace")
    assert type(back) is errors.AgentError and back.trace_id == "trace"
    for name in ("message", "retryable", "retry_after", "may_have_executed", "agent_id", "attempts", "details"):
        assert getattr(back, name) == getattr(error, name)
    assert "trace" in str(back)


def test_an_unknown_code_is_told_as_such() -> None:
    unknown = errors.from_proto(error_pb2.Error(code=99, message="new"))  # type: ignore[arg-type]
    assert isinstance(unknown, errors.Internal) and unknown.details["code"] == "99"


def test_ids_are_version_7_uuids_that_never_repeat() -> None:
    made = [new_message_id() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(ids.uuid7_unix_ms(made_id) is not None for made_id in made)
    assert made == sorted(made)
    assert len(new_trace_id()) == 32


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_does_not_make_its_parent_s_ids() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, f"{new_message_id()} {new_trace_id()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs, their_trace = os.read(reading, 200).decode().split()
    os.close(reading)
    os.close(writing)
    ours = new_message_id()
    assert theirs[13:28] != ours[13:28] and their_trace != new_trace_id()
