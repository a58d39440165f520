"""What the core tells the audit log: who came, went, was denied what, or claimed to be somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reach.core.access import Patterns, Rights
from reach.core.effects import AuditLine
from reach.core.ports import Identity
from tests.support.core import CoreMesh, record


def may(**patterns: Any) -> Rights:
    topics = {name: Patterns(patterns.pop(name, ()), topics=True) for name in ("publish", "subscribe")}
    chosen: dict[str, Any] = {name: Patterns(texts) for name, texts in patterns.items()} | topics
    return Rights(**chosen)


SERVES = Identity("acme", "serves", may(register=["echo", "relay"], call=["echo"]), "aaaaaaaa#1")
POOR = Identity("acme", "poor", may(call=["relay"]), "bbbbbbbb#1")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AuditLine]]:
    """Every line that any core of this test tells."""
    told: list[AuditLine] = []

    def carry_out(core: CoreMesh, effect: object) -> None:
        if isinstance(effect, AuditLine):
            told.append(effect)
        else:
            real(core, effect)

    real = CoreMesh._carry_out
    monkeypatch.setattr(CoreMesh, "_carry_out", carry_out)
    yield told


def only(lines: list[AuditLine], action: str) -> AuditLine:
    (line,) = [line for line in lines if line.action == action]
    return line


def test_an_agent_that_comes_changes_and_goes_is_told_each_time(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    process = core.agent("echo/1", who=SERVES, capabilities=["b", "a"], version="1.0")
    line = only(lines, "agent.attached")
    assert (line.tenant, line.principal, line.key_id, line.outcome) == ("acme", "serves", "aaaaaaaa", "OK")
    assert line.about == {"agent": "echo/1", "env": "production", "version": "1.0", "capabilities": "a,b"}
    process.forget()
    process.connect(record("echo/1", capabilities=["a", "c"]))
    assert only(lines, "agent.changed").about["capabilities"] == "a,c"
    process.leave()
    line = only(lines, "agent.detached")
    assert line.about == {"agent": "echo/1", "env": "production"} and "said goodbye" in line.why


def test_an_agent_that_may_not_be_registered_is_told_with_who_wanted_it(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    core.process("thief", record("planner/1"), who=SERVES)
    line = only(lines, "agent.denied")
    assert line.principal == "serves" and line.outcome == "PERMISSION_DENIED"
    assert line.about == {"agent": "planner/1", "env": "production"} and "may not register" in line.why


def test_somebody_elses_agent_id_is_told_too(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    core.agent("echo/1", who=SERVES)
    core.process("thief", record("echo/1"), who=Identity("acme", "thief", may(register=["*"]), "cccccccc#1"))
    line = only(lines, "agent.denied")
    assert line.principal == "thief" and "somebody else" in line.why


def test_a_message_and_a_subscription_without_the_right_are_told(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    caller = core.caller(who=POOR)
    message_id = caller.request(agent_type="echo", trace_id="t" * 32)
    line = only(lines, "message.denied")
    assert line.about == {"message": message_id, "to": "echo", "on_behalf_of": ""}
    assert (line.principal, line.key_id, line.trace_id) == ("poor", "bbbbbbbb", "t" * 32)
    caller.subscribe("orders/created")
    assert only(lines, "topic.denied").about == {"topic": "orders/created", "env": "production"}


def test_a_denial_says_on_whose_behalf_it_would_have_been(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    core.state.principals = {("acme", "poor"): may(call=["relay"]), ("acme", "serves"): SERVES.rights or Rights()}
    core.agent("echo/1", who=SERVES)
    relay, caller = core.agent("relay/1", who=SERVES), core.caller(who=POOR)
    caller.request(agent_type="relay")
    relay.call_from(relay.requests[-1], agent_type="echo")
    line = only(lines, "message.denied")
    assert line.principal == "serves" and "poor" in line.why
    assert line.about["on_behalf_of"] == "poor"


def test_who_claims_to_be_somebody_else_is_told_and_goes_on_as_itself(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    agent = core.agent("echo/1", who=SERVES)
    caller = core.caller(who=Identity("acme", "liar", may(call=["echo"]), "dddddddd#1"))
    caller.request(agent_type="echo", source="system/root")
    line = only(lines, "message.restamped")
    assert line.principal == "liar" and line.about == {"source": "system/root"}
    assert caller.peer is not None and agent.requests[-1].source == caller.peer.caller_id


def test_where_nobody_is_known_a_claim_is_worth_no_line(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    core.agent("echo/1")
    core.caller().request(agent_type="echo", source="system/root")
    assert [line.action for line in lines] == ["agent.attached"]


def test_a_request_that_only_others_than_it_may_call_would_match_is_told(lines: list[AuditLine]) -> None:
    core = CoreMesh()
    core.agent("echo/1", who=SERVES, capabilities=["ner"])
    caller = core.caller(who=POOR)
    message_id = caller.request(capabilities=["ner"], trace_id="t" * 32)
    line = only(lines, "message.denied")
    assert (line.principal, line.trace_id, line.about["message"]) == ("poor", "t" * 32, message_id)
    assert "none is among those that may be called" in line.why
