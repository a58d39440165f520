"""A caller that lost its node sends its session's messages again by another: they stay in order, whoever owns them."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from tests.support.core import Process
from tests.support.cores import Cores, NodeCore

SESSION = {"agent_type": "chat", "session_id": "s", "timeout_ms": 30_000}
NAMES = [f"m-{number}" for number in range(12)]


def mesh() -> tuple[Cores, NodeCore, NodeCore, NodeCore]:
    cores = Cores(3)
    first, second, third = cores.nodes
    first.pins = second.pins = third.pins  # one store
    return cores, first, second, third


def answers_at_once(agent: Process) -> None:
    agent.handler = lambda process, envelope: process.answer(envelope, pump=False)


def begin(caller: Process, *names: str, fresh: bool) -> None:
    """Send them on one link, one after the other."""
    for name in names:
        caller.send(caller.core.envelope(name, message_id=name, fresh=fresh, resent=True, **SESSION))


def order_at(agent: Process) -> list[str]:
    return list(dict.fromkeys(envelope.message_id for envelope in agent.requests))


@pytest.mark.parametrize("entry", [0, 1, 2])
@pytest.mark.parametrize("home", [0, 1, 2])
def test_messages_sent_again_come_in_their_order_and_new_ones_after_them(entry: int, home: int) -> None:
    cores, *nodes = mesh()
    agent = nodes[home].agent("chat/1")
    answers_at_once(agent)
    caller = nodes[entry].caller()
    begin(caller, *NAMES, fresh=False)
    begin(caller, "new-1", "new-2", fresh=True)
    cores.advance(3.0)
    assert order_at(agent) == [*NAMES, "new-1", "new-2"]
    cores.assert_settled()


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_what_waits_for_a_silent_agent_is_not_overtaken(entry: int) -> None:
    """Others of the same type may have it: until they say that they do not, nothing of the session goes on."""
    cores, *nodes = mesh()
    home = nodes[2]
    agent = home.agent("chat/1")
    answers_at_once(agent)
    caller = nodes[entry].caller()
    agent.answers_lookups = False
    begin(caller, "m-1", fresh=False)
    cores.advance(0.7)
    begin(caller, "m-2", fresh=False)
    begin(caller, "m-3", fresh=True)
    cores.advance(0.7)
    assert agent.requests == []
    agent.answers_lookups = True
    cores.advance(2.0)
    assert order_at(agent) == ["m-1", "m-2", "m-3"]
    cores.assert_settled()


def test_what_is_running_is_joined_and_the_rest_follows_it() -> None:
    cores, home, lost, entry = mesh()
    agent = home.agent("chat/1")
    caller = lost.caller()
    begin(caller, "m-1", "m-2", fresh=True)
    cores.pump()
    assert order_at(agent) == ["m-1"]
    cores.kill(lost)
    again = entry.caller()
    begin(again, "m-1", "m-2", "m-3", fresh=False)
    begin(again, "m-4", fresh=True)
    cores.advance(2.0)
    for name in ("m-1", "m-2", "m-3", "m-4"):
        agent.answer(name, name)
        cores.advance(0.5)
    assert [again.text_of(name) for name in ("m-1", "m-2", "m-3", "m-4")] == ["m-1", "m-2", "m-3", "m-4"]
    assert order_at(agent) == ["m-1", "m-2", "m-3", "m-4"]
    cores.advance(30.0)
    cores.assert_settled()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_they_keep_their_order_when_their_owner_is_lost_too(owner: int) -> None:
    cores, *nodes = mesh()
    home = nodes[(owner + 1) % 3]
    agent = home.agent("chat/1")
    agent.answers_lookups = False
    entry = nodes[(owner + 2) % 3]
    caller = entry.caller()
    begin(caller, *NAMES, fresh=False)
    begin(caller, "new-1", fresh=True)
    cores.advance(0.7)
    cores.kill(nodes[owner])
    answers_at_once(agent)
    agent.answers_lookups = True
    cores.advance(13.0)
    assert order_at(agent) == [*NAMES, "new-1"]
    cores.advance(30.0)
    cores.assert_settled()


def test_one_that_ends_while_it_is_asked_about_lets_the_next_go_on() -> None:
    cores, first, _, entry = mesh()
    agent = first.agent("chat/1")
    agent.answers_lookups = False
    caller = entry.caller()
    begin(caller, "m-1", "m-2", fresh=False)
    begin(caller, "m-3", fresh=True)
    cores.advance(0.2)
    caller.cancel("m-1")
    caller.cancel("m-2")
    cores.advance(0.2)
    assert order_at(agent) == ["m-3"]
    agent.answer("m-3", "yes")
    assert caller.text_of("m-3") == "yes"
    assert caller.error_of("m-1").code == caller.error_of("m-2").code == codes.CANCELLED
    cores.advance(1.0)
    cores.assert_settled()


def test_other_sessions_and_other_callers_wait_for_nobody() -> None:
    cores, first, _, entry = mesh()
    agent = first.agent("chat/1")
    agent.answers_lookups = False
    answers_at_once(agent)
    caller = entry.caller()
    begin(caller, "m-1", fresh=False)
    caller.request("other", message_id="other", **{**SESSION, "session_id": "other"})
    assert order_at(agent) == ["other"]
    agent.answers_lookups = True
    cores.advance(1.0)
    cores.assert_settled()


def test_what_a_handler_sends_in_its_own_session_does_not_wait_for_that_handler() -> None:
    cores, home, second, entry = mesh()
    agent = home.agent("chat/1", reentrant=True)
    helper = second.agent("tool/1")
    caller = entry.caller()
    begin(caller, "m-1", fresh=False)
    cores.advance(1.0)
    [envelope] = agent.requests
    nested = agent.request(
        "nested", agent_type="tool", session_id="s", lineage=envelope.lineage, source="chat/1", fresh=False
    )
    cores.advance(1.0)
    helper.answer(nested, "help")
    assert agent.text_of(nested) == "help"
    agent.answer("m-1", "done")
    assert caller.text_of("m-1") == "done"
    cores.assert_settled()


def test_a_session_has_a_limit_of_what_stands_in_line() -> None:
    cores = Cores(2, lane_max=5)
    home, entry = cores.nodes
    home.pins = entry.pins
    agent = home.agent("chat/1")
    agent.answers_lookups = False
    caller = entry.caller()
    begin(caller, "m-1", fresh=False)
    names = [f"new-{number}" for number in range(6)]
    begin(caller, *names, fresh=True)
    cores.advance(0.2)
    refused = [name for name in names if caller.replies_to(name)]
    assert refused == names[4:]
    assert all(caller.error_of(name).code == codes.OVERLOADED for name in refused)
    agent.answers_lookups = True
    answers_at_once(agent)
    cores.advance(2.0)
    assert order_at(agent) == ["m-1", *names[:4]]
    cores.assert_settled()
