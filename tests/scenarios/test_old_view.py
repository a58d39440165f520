"""Plays: the view of the registry is old. Who is in it gets work; of who is not, the store is asked."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from reach.core import lookups
from reach.core.lookups import LOOKUPS_MAX, PARKED_MAX
from tests.support.core import CoreMesh

ECHO = ("default", "production", "echo/1")


def mesh_with_a_view_of(age_s: float) -> CoreMesh:
    core = CoreMesh(resume_window_s=0.0)
    core.state.view_complete_at = core.state.now - age_s
    return core


def answer(core: CoreMesh, *, known: bool) -> None:
    """The store has answered for every agent that it was asked for, or not."""
    with core.step() as state:
        for key in list(state.lookups):
            lookups.answered(state, key, known)
    core.pump()


@pytest.mark.parametrize("session", ["", "s"])
def test_while_the_view_is_fresh_nobody_is_asked(session: str) -> None:
    core = mesh_with_a_view_of(10.0)
    caller = core.caller()
    message = caller.request(agent_id="echo/1", session_id=session)
    error = caller.error_of(message)
    assert error.code == codes.NO_ROUTE and "ago" not in error.message and not core.state.lookups


@pytest.mark.parametrize("session", ["", "s"])
def test_an_agent_that_an_old_view_does_not_know_is_asked_for_once_and_found(session: str) -> None:
    core = mesh_with_a_view_of(10.1)
    caller = core.caller()
    messages = [caller.request(agent_id="echo/1", session_id=session, text=text) for text in "ab"]
    assert list(core.state.lookups) == [ECHO] and not caller.replies
    agent = core.agent("echo/1", session_concurrency=2)
    answer(core, known=True)
    for message in messages:
        agent.answer(message)
        assert caller.reply_to(message).source == "echo/1"
    assert not core.state.lookups and not core.state.unsettled


@pytest.mark.parametrize("session", ["", "s"])
def test_an_agent_that_the_store_does_not_know_either_is_not_there_however_old_the_view(session: str) -> None:
    core = mesh_with_a_view_of(1000.0)
    caller = core.caller()
    message = caller.request(agent_id="echo/1", session_id=session)
    answer(core, known=True)
    error = caller.error_of(message)
    assert error.code == codes.NO_ROUTE and "ago" not in error.message
    assert not core.state.lookups and not core.state.unsettled


@pytest.mark.parametrize("session", ["", "s"])
@pytest.mark.parametrize("named", [True, False])
def test_where_the_store_does_not_answer_the_view_is_believed_for_the_grace_and_then_nobody_knows(
    named: bool, session: str
) -> None:
    target = {"agent_id": "echo/1"} if named else {"agent_type": "echo"}
    core = mesh_with_a_view_of(59.0)
    caller = core.caller()
    message = caller.request(session_id=session, **target)
    answer(core, known=False)
    error = caller.error_of(message)
    assert error.code == codes.NO_ROUTE and "as of 59 s ago, and" in error.message
    core.state.view_complete_at -= 2.0
    message = caller.request(session_id=session, **target)
    answer(core, known=False)
    error = caller.error_of(message)
    assert error.code == codes.REGISTRY_UNAVAILABLE and "is 61 s old, and" in error.message
    assert error.retryable and error.retry_after_ms and not error.may_have_executed


def test_the_grace_is_as_configured() -> None:
    core = CoreMesh(resume_window_s=0.0, registry_grace_s=2.0)
    core.state.view_complete_at = core.state.now - 5.1
    caller = core.caller()
    assert caller.error_of(caller.request()).code == codes.REGISTRY_UNAVAILABLE


def test_between_two_looks_at_the_store_the_view_has_no_age_unless_the_last_one_failed() -> None:
    core = CoreMesh(resume_window_s=0.0, registry_grace_s=2.0)
    caller = core.caller()
    core.state.view_complete_at = core.state.now - 4.9
    assert caller.error_of(caller.request()).code == codes.NO_ROUTE
    core.state.registry_away = True
    assert caller.error_of(caller.request()).code == codes.REGISTRY_UNAVAILABLE


def test_agents_of_this_node_are_given_work_however_old_the_view() -> None:
    core = mesh_with_a_view_of(100_000.0)
    agent, caller = core.agent("echo/1"), core.caller()
    for target in ({"agent_id": "echo/1"}, {"agent_type": "echo"}):
        message = caller.request(**target)
        agent.answer(message)
        assert caller.reply_to(message).source == "echo/1"


def test_one_that_attaches_while_the_store_does_not_answer_is_found_all_the_same() -> None:
    core = mesh_with_a_view_of(30.0)
    caller = core.caller()
    message = caller.request(agent_id="echo/1")
    agent = core.agent("echo/1")
    answer(core, known=False)
    agent.answer(message)
    assert caller.reply_to(message).source == "echo/1"


def test_a_request_that_ends_while_the_store_is_asked_is_not_given_to_anybody() -> None:
    core = mesh_with_a_view_of(30.0)
    caller = core.caller()
    late, cancelled = caller.request(agent_id="echo/1", timeout_ms=1000), caller.request(agent_id="echo/1")
    caller.cancel(cancelled)
    core.advance(1.1)
    error = caller.error_of(late)
    assert error.code == codes.TIMEOUT and not error.may_have_executed
    assert caller.error_of(cancelled).code == codes.CANCELLED
    agent = core.agent("echo/1")
    answer(core, known=True)
    assert not agent.has(late) and not agent.has(cancelled) and not core.state.unsettled


def test_what_is_asked_of_the_store_is_bounded_and_the_rest_is_answered_by_the_view() -> None:
    core = mesh_with_a_view_of(30.0)
    caller = core.caller()
    waiting = [caller.request(agent_id="echo/1") for _ in range(PARKED_MAX)]
    assert caller.error_of(caller.request(agent_id="echo/1")).code == codes.NO_ROUTE
    for number in range(LOOKUPS_MAX - 1):
        caller.request(agent_id=f"other/{number}")
    assert len(core.state.lookups) == LOOKUPS_MAX
    assert caller.error_of(caller.request(agent_id="more/1")).code == codes.NO_ROUTE
    answer(core, known=True)
    assert {caller.error_of(message).code for message in waiting} == {codes.NO_ROUTE}
    assert not core.state.unsettled
