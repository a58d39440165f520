"""A message that was sent before, over several nodes: whoever is asked, it runs once."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from reach.core import once
from tests.support.core import Process
from tests.support.cores import Cores, NodeCore


def owned_by(core: NodeCore, message_id: str, seen_from: NodeCore) -> bool:
    owner = once.owner(seen_from.state, ("default", "anonymous", "production", message_id))
    return (owner.node_id if owner is not None else seen_from.node_id) == core.node_id


def message_owned_by(core: NodeCore, seen_from: NodeCore) -> str:
    """A message_id of which a node is the owner."""
    return next(name for name in (f"m-{number}" for number in range(1000)) if owned_by(core, name, seen_from))


def runs(*agents: Process) -> int:
    return sum(len(agent.requests) for agent in agents)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_message_that_is_not_fresh_runs_wherever_it_enters(owner: int) -> None:
    cores = Cores(3)
    entry, home, _ = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    name = message_owned_by(cores.nodes[owner], entry)
    caller.request(message_id=name, fresh=False)
    assert runs(agent) == 1
    agent.answer(name, "once")
    assert caller.text_of(name) == "once" and caller.reply_to(name).source == "echo/1"
    cores.assert_settled()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_copies_that_enter_at_every_node_at_once_run_once(owner: int) -> None:
    cores = Cores(3)
    agents = [cores.nodes[0].agent("echo/1"), cores.nodes[2].agent("echo/2")]
    callers = [core.caller(f"c{number}") for number, core in enumerate(cores.nodes)]
    name = message_owned_by(cores.nodes[owner], cores.nodes[0])
    for caller in callers:
        caller.send(caller.core.envelope("same", message_id=name, fresh=False))
    cores.pump()
    assert runs(*agents) == 1
    for agent in agents:
        if agent.has(name):
            agent.answer(name, "once")
    assert [caller.text_of(name) for caller in callers] == ["once"] * 3
    cores.assert_settled()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_copy_of_a_running_fresh_message_joins_it_from_another_node(owner: int) -> None:
    cores = Cores(3)
    first, second, home = cores.nodes
    agent = home.agent("echo/1")
    one, two = first.caller("one"), second.caller("two")
    name = message_owned_by(cores.nodes[owner], first)
    one.request("same", message_id=name)
    two.request("same", message_id=name, fresh=False)
    assert len({envelope.message_id for envelope in agent.requests}) == 1
    agent.answer(name, "once")
    assert one.text_of(name) == two.text_of(name) == "once"
    cores.assert_settled()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_copy_after_the_answer_is_answered_from_a_nodes_table(owner: int) -> None:
    cores = Cores(3)
    first, second, home = cores.nodes
    agent = home.agent("echo/1")
    one, two = first.caller("one"), second.caller("two")
    name = message_owned_by(cores.nodes[owner], first)
    one.request("same", message_id=name, fresh=False)
    agent.answer(name, "once")
    two.request("same", message_id=name, fresh=False)
    assert two.text_of(name) == "once"
    assert runs(agent) == 1
    cores.assert_settled()


def test_a_callers_node_dies_and_the_running_handler_answers_by_another() -> None:
    cores = Cores(3)
    first, second, home = cores.nodes
    agent = home.agent("echo/1")
    caller = first.caller()
    name = caller.request("same", timeout_ms=20_000)
    cores.kill(first)
    again = second.caller("again")
    again.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.advance(0.2)
    assert {envelope.message_id for envelope in agent.requests} == {name}
    agent.answer(name, "once")
    cores.advance(11.0)
    assert again.text_of(name) == "once"
    cores.advance(30.0)
    cores.assert_settled()


def test_nobody_knows_it_and_a_silent_node_may_so_it_does_not_run() -> None:
    cores = Cores(3)
    entry, home, silent = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    cores.cut(entry, silent)
    cores.cut(home, silent)
    name = caller.request(fresh=False, timeout_ms=30_000)
    cores.advance(9.0)
    assert not caller.replies_to(name)
    cores.advance(2.0)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed and "n2" in error.message
    assert runs(agent) == 0
    cores.assert_settled()


def test_an_idempotent_one_runs_all_the_same() -> None:
    cores = Cores(3)
    entry, home, silent = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    cores.cut(entry, silent)
    cores.cut(home, silent)
    name = caller.request(fresh=False, idempotent=True, timeout_ms=30_000)
    cores.advance(11.0)
    agent.answer(name, "twice does no harm")
    assert caller.text_of(name) == "twice does no harm"
    cores.assert_settled()


def test_a_node_whose_process_is_gone_is_not_waited_for() -> None:
    cores = Cores(3)
    entry, home, dead = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    cores.kill(dead)
    for core in (entry, home):
        core.state.nodes["n2"].dead = True
    name = caller.request(fresh=False, timeout_ms=30_000)
    cores.advance(0.6)
    assert runs(agent) == 1
    agent.answer(name)
    assert not caller.reply_to(name).HasField("error")
    cores.assert_settled()


def test_an_owner_that_dies_is_followed_by_another() -> None:
    cores = Cores(3)
    entry, home, owner = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    name = message_owned_by(owner, entry)
    caller.request(message_id=name, fresh=False, timeout_ms=30_000)
    assert runs(agent) == 1
    cores.kill(owner)
    for core in (entry, home):
        core.state.nodes["n2"].dead = True
    cores.advance(1.0)
    agent.answer(name, "once")
    cores.advance(1.0)
    assert caller.text_of(name) == "once"
    assert {envelope.message_id for envelope in agent.requests} == {name}
    cores.advance(60.0)
    cores.assert_settled()


def test_a_conflict_is_seen_over_nodes() -> None:
    cores = Cores(2)
    first, second = cores.nodes
    agent = second.agent("echo/1")
    one, two = first.caller("one"), second.caller("two")
    name = one.request("this", message_id="m-1", fresh=False)
    two.request("that", message_id="m-1", fresh=False)
    assert two.error_of(name).code == codes.IDEMPOTENCY_CONFLICT
    agent.answer(name)
    cores.assert_settled()


def test_a_cancel_goes_through_the_owner_to_the_agent() -> None:
    cores = Cores(3)
    entry, home, owner = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    name = message_owned_by(owner, entry)
    caller.request(message_id=name, fresh=False)
    caller.cancel(name)
    assert agent.cancels and caller.error_of(name).code == codes.CANCELLED
    cores.assert_settled()


def test_what_is_sent_again_to_a_process_that_may_have_run_it_goes_to_nobody_else() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    name = caller.request(timeout_ms=20_000)
    assert agent.has(name)
    cores.kill(home)
    idle = entry.agent("echo/2")
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.answers_probes = False  # it is attached, and cannot be given new work yet
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(1.0)
    assert again.has(name) and not idle.has(name)
    again.answer(name, "by who had it")
    assert caller.text_of(name) == "by who had it"


def test_it_is_lost_and_not_run_elsewhere_if_that_process_leaves_before_it_gets_it_again() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    name = caller.request(timeout_ms=20_000)
    cores.kill(home)
    idle = entry.agent("echo/2")
    cores.cut(entry, other)
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(1.0)
    assert not again.has(name)
    again.leave()
    cores.link(entry, other)
    cores.advance(12.0)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert not idle.has(name)
