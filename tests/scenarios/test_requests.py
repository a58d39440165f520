"""Plays: a request, its answer, its errors."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from tests.support.core import CoreMesh


def test_a_request_reaches_an_agent_and_its_answer_the_caller() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()

    message = caller.request("hello")
    delivered = agent.got(message)
    assert (delivered.recipient, delivered.attempt, delivered.hop_count) == ("echo/1", 1, 1)
    assert delivered.source == caller.welcome.caller_id  # type: ignore[union-attr]

    agent.answer(message, "HELLO")
    assert caller.text_of(message) == "HELLO"
    assert caller.reply_to(message).source == "echo/1"
    core.assert_settled()


def test_a_request_for_nobody_is_no_route_at_once() -> None:
    core = CoreMesh()
    caller = core.caller()
    assert caller.error_of(caller.request(agent_type="nobody")).code == codes.NO_ROUTE
    core.assert_settled()
