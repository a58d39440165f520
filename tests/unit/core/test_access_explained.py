"""The answers of `reach authz explain`."""

from __future__ import annotations

from typing import Any

import pytest

from agentreach.v1.admin_pb2 import ExplainAccessReply, ExplainAccessRequest
from agentreach.v1.envelope_pb2 import Target
from reach.core import access_explained
from reach.core.access import Patterns, Rights

RIGHTS = {
    "shop": Rights(call=Patterns(["extractor"]), publish=Patterns(["orders/*"], topics=True)),
    "agent": Rights(call=Patterns(["*"]), register=Patterns(["extractor", "cap:ner"]), admin=True),
    "metrics": Rights(scrape=True),
    "staging": Rights(envs=frozenset({"staging"}), call=Patterns(["*"])),
}


def ask(principal: str, action: str, actors: tuple[str, ...] = (), env: str = "", **target: Any) -> ExplainAccessReply:
    request = ExplainAccessRequest(principal=principal, action=action, actors=actors, env=env, target=Target(**target))
    assert access_explained.fault(request) == ""
    return access_explained.explained(request, principal, RIGHTS.get(principal), RIGHTS.get)


@pytest.mark.parametrize(
    ("principal", "action", "target", "allowed", "rule"),
    [
        ("shop", "call", {"agent_type": "extractor"}, True, "extractor"),
        ("shop", "call", {"agent_type": "planner"}, False, "default"),
        ("shop", "publish", {"topic": "orders/new"}, True, "orders/*"),
        ("shop", "subscribe", {"topic": "orders/new"}, False, "default"),
        ("agent", "register", {"agent_type": "extractor", "capabilities": ["ner"]}, True, "extractor"),
        ("agent", "register", {"agent_type": "extractor", "capabilities": ["ocr"]}, False, "default"),
        ("agent", "admin", {}, True, "admin"),
        ("shop", "admin", {}, False, "default"),
        ("metrics", "scrape", {}, True, "scrape"),
        ("staging", "call", {"agent_type": "x"}, False, "envs"),
        ("nobody", "call", {"agent_type": "x"}, False, "unknown"),
    ],
)
def test_the_rule_that_decides_is_named(
    principal: str, action: str, target: dict[str, Any], allowed: bool, rule: str
) -> None:
    reply = ask(principal, action, **target)
    assert (reply.allowed, reply.rule) == (allowed, rule)
    assert principal in reply.why or reply.allowed


def test_on_behalf_of_somebody_who_may_not_it_is_denied_and_that_one_is_named() -> None:
    assert ask("agent", "call", agent_type="planner").allowed
    reply = ask("agent", "call", actors=("shop",), agent_type="planner")
    assert not reply.allowed and "principal shop, on whose behalf" in reply.why
    assert ask("agent", "call", actors=("shop",), agent_type="extractor").allowed
    assert not ask("agent", "call", actors=("shop", "gone"), agent_type="extractor").allowed


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (ExplainAccessRequest(principal="a", action="fly"), "action is 'fly'"),
        (ExplainAccessRequest(action="admin"), "principal"),
        (ExplainAccessRequest(principal="a", action="publish"), "topic"),
        (ExplainAccessRequest(principal="a", action="register"), "type"),
        (ExplainAccessRequest(principal="a", action="admin", actors=["x"] * 33), "actors"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(request_: ExplainAccessRequest, part: str) -> None:
    assert part in access_explained.fault(request_)
