"""Plays: a node is lost, and its callers and agents come to the others, in any order."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import DEGRADED, HEALTHY, STARTING, UNREACHABLE, AgentRecord
from reach.core import drains, remote
from tests.support.core import record
from tests.support.cores import Cores


@pytest.mark.parametrize("place", [0, 1])
def test_what_a_caller_sends_again_waits_for_the_agent_that_is_on_its_way_to_any_node(place: int) -> None:
    cores = Cores(3)
    *others, lost = cores.nodes
    lost.agent("echo/1")
    cores.advance(60)
    cores.kill(lost)
    caller = others[0].caller()
    message = caller.request("hello", fresh=True, resent=True, timeout_ms=20_000)
    assert not caller.replies_to(message)
    cores.advance(3)
    agent = others[place].agent("echo/1")
    cores.advance(0.2)
    agent.answer(message, "here")
    assert caller.text_of(message) == "here"
    cores.assert_settled()


def test_a_new_request_does_not_wait_nor_does_one_that_comes_long_after() -> None:
    cores = Cores(2)
    entry, lost = cores.nodes
    cores.advance(60)
    cores.kill(lost)
    caller = entry.caller()
    assert caller.error_of(caller.request()).code == codes.NO_ROUTE
    cores.advance(60)
    assert caller.error_of(caller.request(fresh=True, resent=True)).code == codes.NO_ROUTE
    cores.assert_settled()


def test_a_home_that_leaves_gives_its_agents_work_for_as_long_as_they_may_go_elsewhere() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    cores.advance(60)
    home.state.peer_addresses = ("10.0.0.1:7070",)
    with home.step() as state:
        drains.node(state, 55.0)
        assert not drains.moved(state)
    cores.pump()
    message = caller.request()
    agent.answer(message, "still here")
    assert caller.text_of(message) == "still here"
    other = entry.agent("echo/2")
    cores.advance(1)
    for _ in range(5):
        other.answer(caller.request())  # whoever stays comes first
    other.leave()
    cores.advance(drains.MOVE_S)
    with home.step() as state:
        assert drains.moved(state)
    late = caller.request(timeout_ms=10_000)
    cores.advance(11)
    assert not agent.has(late)
    error = caller.error_of(late)
    assert error.code == codes.CONNECT_FAILED and error.retryable, "it was never started"


def test_a_node_without_others_does_not_wait_for_its_agents_to_go() -> None:
    cores = Cores(1)
    (home,) = cores.nodes
    home.agent("echo/1")
    with home.step() as state:
        drains.node(state, 55.0)
        assert drains.moved(state)


def test_an_agent_that_moves_is_as_well_at_the_next_node_until_that_says_otherwise() -> None:
    """Its registration is seen before its new home has said a word of it: nobody may be told that it is starting."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    cores.advance(60)
    (attachment,) = [each for node in entry.state.nodes.values() for each in node.agents.values()]
    seen = AgentRecord(
        agent_id="echo/1", agent_type="echo", tenant="default", env="production", node_id=other.state.rules.node_id,
        incarnation=attachment.agent.incarnation,
    )  # fmt: skip
    with entry.step() as state:
        remote.agent_seen(state, seen, attachment.agent.generation + 1)
    assert entry.status("echo/1") == HEALTHY
    with entry.step() as state:
        seen.incarnation = b"another process"
        remote.agent_seen(state, seen, attachment.agent.generation + 2)
    assert entry.status("echo/1") == STARTING
    assert agent.connected and caller.connected


def test_an_agent_that_comes_from_another_node_is_no_new_start() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    cores.advance(60)
    home.state.peer_addresses = ("10.0.0.1:7070",)
    with home.step() as state:
        drains.node(state, 55.0)
    cores.pump()
    assert entry.status("echo/1") == DEGRADED
    moved = entry.process("moved")
    moved.forget()
    moved.incarnation, moved.answers_probes = agent.incarnation, False
    moved.connect(record("echo/1"))
    assert entry.status("echo/1") == HEALTHY, "before it has answered anything there"
    assert moved.has(caller.request())
    moved.say(HEALTHY)
    assert entry.status("echo/1") == HEALTHY


def test_an_agent_whose_node_has_said_goodbye_is_as_well_at_the_next_one_as_it_was() -> None:
    """The end of its former home may be seen before its registration is written: it never was away."""
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    cores.advance(60)
    home.state.peer_addresses = ("10.0.0.1:7070",)
    with home.step() as state:
        drains.node(state, 55.0)
    cores.pump()
    cores.kill(home)
    assert entry.status("echo/1") == UNREACHABLE
    moved = entry.process("moved")
    moved.forget()
    moved.incarnation, moved.answers_probes = agent.incarnation, False
    moved.connect(record("echo/1"))
    assert entry.status("echo/1") == HEALTHY
    assert moved.has(caller.request())


def test_an_agent_that_nobody_knew_to_be_well_is_starting_when_its_node_has_left() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.process("starting")
    agent.answers_probes = False
    agent.connect(record("echo/1"))
    cores.advance(1)
    home.state.peer_addresses = ("10.0.0.1:7070",)
    with home.step() as state:
        drains.node(state, 55.0)
    cores.pump()
    cores.kill(home)
    moved = entry.process("moved")
    moved.forget()
    moved.incarnation, moved.answers_probes = agent.incarnation, False
    moved.connect(record("echo/1"))
    assert entry.status("echo/1") == STARTING
