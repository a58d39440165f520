"""What killing and freezing real nodes has found (tests/e2e/test_nodes_chaos.py), played by hand."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import AttemptState, Detach, Signal
from agentreach.wire.errors import failure
from reach.core import refusals, remote
from tests.scenarios.test_once_over_nodes import message_owned_by
from tests.support.cores import Cores


@pytest.mark.parametrize("owner", [0, 1])
def test_a_sessions_message_that_its_owner_has_joins_it_at_the_owners_new_home(owner: int) -> None:
    cores = Cores(3)
    entry, home, first = cores.nodes
    entry.pins = home.pins = first.pins
    agent, caller, talker = first.agent("chat/1"), first.caller(), home.caller("talker")
    name = message_owned_by(cores.nodes[owner], entry)
    session = {"agent_type": "chat", "session_id": "s", "timeout_ms": 9_000}
    caller.request("hi", message_id=name, **session)
    assert agent.has(name)
    cores.kill(first)
    again = home.process("chat-1")
    again.incarnation, again.requests, again.running = agent.incarnation, agent.requests, agent.running
    again.connect(*agent.agents.values())
    cores.advance(0.5)
    talker.request("next", **session)  # its new home knows the session now
    other = entry.caller("other")
    other.request("hi", message_id=name, fresh=False, **session)
    cores.advance(0.5)
    assert [each.message_id for each in again.requests].count(name) == 2
    again.answer(name, "hello")
    assert other.text_of(name) == "hello"


def test_what_a_home_refused_because_its_agent_was_still_arriving_is_sent_to_it_when_it_is_there() -> None:
    """The registry's watchers may see that an agent has moved before its new home has taken it in."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    name = caller.request(timeout_ms=20_000)
    assert agent.has(name)
    cores.kill(home)
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    seen = entry.attachment("echo/1").agent.to_record()
    seen.node_id = other.node_id
    with entry.step() as state:
        remote.agent_seen(state, seen, cores.revision + 1_000)
    cores.advance(0.5)
    again.connect(*agent.agents.values())
    cores.advance(0.5)
    again.answer(name, "by who had it")
    assert caller.text_of(name) == "by who had it"


def test_a_message_whose_owner_is_cut_off_twice_is_asked_for_twice_and_runs_once() -> None:
    cores = Cores(2)
    owner, entry = cores.nodes
    agent, caller = owner.agent("echo/1"), entry.caller()
    name = message_owned_by(owner, entry)
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    assert agent.has(name)
    idle = entry.agent("echo/2")
    for _ in range(2):
        cores.cut(owner, entry)
        cores.advance(0.5)
        cores.link(owner, entry)
        cores.advance(2.0)
        assert not idle.has(name)
    agent.answer(name, "once")
    assert caller.text_of(name) == "once"
    assert len(agent.requests) == 1


def test_who_waits_at_a_home_for_an_owner_that_is_lost_is_given_to_its_successor_by_name() -> None:
    """A process answers what is addressed to an agent that it does not serve with CONNECT_FAILED."""
    cores = Cores(2)
    entry, home = cores.nodes
    entry.pins = home.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    session: dict[str, object] = {"agent_type": "chat", "session_id": "s", "timeout_ms": 60_000}
    first = caller.request("first", **session)
    waiting = [caller.request(f"later {number}", **session) for number in range(3)]
    successor = home.agent("chat/2")
    assert agent.has(first)
    agent.leave()
    cores.advance(2.0)
    for message in waiting:
        assert successor.got(message).recipient == "chat/2"
        successor.answer(message, "hello")
        assert caller.text_of(message) == "hello"
    cores.assert_settled()


def test_a_node_that_has_lost_its_keys_is_waited_for_like_one_that_has_them() -> None:
    """It stood still while its leases ended: its processes have not even noticed."""
    cores = Cores(3)
    frozen, entry, other = cores.nodes
    agent = frozen.agent("echo/1")
    name = frozen.caller().request("same", timeout_ms=20_000)
    assert agent.has(name)
    idle = other.agent("echo/2")
    for core in (entry, other):
        cores.cut(frozen, core)
        with core.step() as state:
            known = core.attachment("echo/1").agent
            remote.agent_gone(state, known.tenant, known.env, known.agent_id, known.generation)
            remote.node_gone(state, frozen.node_id)
    again = entry.caller("again")
    again.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.advance(3.0)
    assert not idle.has(name)
    process = other.process("echo-1")
    process.incarnation, process.requests, process.running = agent.incarnation, agent.requests, agent.running
    process.connect(*agent.agents.values())
    cores.advance(3.0)
    process.answer(name, "once")
    assert again.text_of(name) == "once"
    assert not idle.has(name)


def test_what_ran_at_a_process_that_died_after_its_node_is_not_run_by_its_successor() -> None:
    cores = Cores(3)
    first, entry, other = cores.nodes
    agent = first.agent("echo/1")
    name = first.caller().request("same", timeout_ms=20_000)
    assert agent.has(name)
    cores.kill(first)
    for core in (entry, other):
        core.state.nodes[first.node_id].dead = True
    again = entry.caller("again")
    again.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.advance(1.0)
    successor = other.agent("echo/1")
    cores.advance(15.0)
    assert not successor.has(name)
    assert again.error_of(name).code == codes.AGENT_LOST and again.error_of(name).may_have_executed
    cores.advance(30.0)
    cores.assert_settled()


def test_a_stream_loses_no_item_when_its_agent_is_registered_again_at_the_node_where_it_was() -> None:
    """Its key was deleted while the link to its home was cut; its home goes on with the reply where it is."""
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=20_000)
    for number in range(2):
        agent.answer(message, f"item {number}", more=True)
    known = entry.attachment("echo/1").agent
    record = known.to_record()
    cores.cut(entry, home)
    with entry.step() as state:
        remote.agent_gone(state, known.tenant, known.env, known.agent_id, known.generation)
    cores.advance(1.0)
    cores.link(entry, home)
    with entry.step() as state:
        remote.agent_seen(state, record, cores.revision + 1_000)
    cores.advance(1.0)
    for number in range(2, 5):
        agent.answer(message, f"item {number}", more=True)
    agent.answer(message, "end")
    texts = [reply.payload.text for reply in caller.replies_to(message)]
    assert texts == [*(f"item {number}" for number in range(5)), "end"]


def test_an_agent_whose_home_does_not_say_yet_that_it_is_there_cannot_be_asked_yet() -> None:
    """Its key names a node that has not taken it in so far, or was started anew: that one answers for nobody."""
    cores = Cores(3)
    first, entry, other = cores.nodes
    agent = first.agent("echo/1")
    name = message_owned_by(entry, entry)
    first.caller().request("same", message_id=name, timeout_ms=20_000)
    assert agent.has(name)
    idle = entry.agent("echo/2")
    seen = entry.attachment("echo/1").agent.to_record()
    cores.kill(first)
    for core in (entry, other):
        core.state.nodes[first.node_id].dead = True
    seen.node_id = other.node_id
    with entry.step() as state:
        remote.agent_seen(state, seen, cores.revision + 1_000)
    again = entry.caller("again")
    again.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.advance(2.0)
    assert not idle.has(name)
    process = other.process("echo-1")
    process.incarnation, process.requests, process.running = agent.incarnation, agent.requests, agent.running
    process.connect(*agent.agents.values())
    cores.advance(2.0)
    process.answer(name, "once")
    assert again.text_of(name) == "once"
    assert not idle.has(name)


@pytest.mark.parametrize("session_id", ["", "s"])
def test_what_a_home_may_have_taken_before_it_was_started_anew_is_not_given_to_another_when_it_refuses_it(
    session_id: str,
) -> None:
    """It was sent and not acknowledged: the link sends it again to the home's next life, which knows no such agent."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    entry.pins = home.pins = other.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    message = caller.request(agent_type="chat", session_id=session_id, timeout_ms=20_000)
    assert agent.has(message)
    idle = other.agent("chat/2")
    (request,) = entry.attachment("chat/1").attempts.values()
    assert request.item is not None
    request.item.doubtful = True
    with entry.step() as state:
        refused = failure(codes.NO_ROUTE, "chat/1 is not attached")
        word = AttemptState(entry=request.entry, attempt=request.attempt, state=AttemptState.REFUSED, why=refused)
        refusals.told(state, state.nodes[home.node_id], word)
    cores.advance(3.0)
    assert not idle.has(message)
    agent.answer(message, "once")
    assert caller.text_of(message) == "once"


def test_what_waits_at_a_former_home_is_not_given_to_a_successor_of_the_same_name() -> None:
    """Its owner went to the entry's node, which gave it the message there: nobody has told the former home."""
    cores = Cores(2)
    home, entry = cores.nodes
    entry.pins = home.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    session: dict[str, object] = {"agent_type": "chat", "session_id": "s", "timeout_ms": 60_000}
    agent.answer(caller.request("first", **session))
    agent.cut()
    name = caller.request("second", **session)
    cores.views_stand = True
    cores.cut(home, entry)
    home.processes.remove(agent)
    entry.processes.append(agent)
    agent.forget()
    agent.core = entry
    agent.connect()
    assert agent.has(name)
    agent.signal(Signal(detach=Detach(agent_id="chat/1", reason="drained")))
    cores.pump()
    assert caller.error_of(name).code == codes.AGENT_LOST
    cores.views_stand = False
    cores.link(home, entry)
    successor = home.agent("chat/1")
    cores.advance(20.0)
    assert not successor.has(name)
    third = caller.request("third", **session)
    cores.advance(2.0)
    successor.answer(third)
    assert caller.text_of(third) == "ok"
    cores.assert_settled()


@pytest.mark.parametrize("seen", [False, True])
def test_what_waited_for_an_owner_that_was_elsewhere_meanwhile_is_not_given_to_it_as_a_new_message(seen: bool) -> None:
    """It may have had it there, and its process looks a new message up in no table."""
    cores = Cores(2)
    home, entry = cores.nodes
    entry.pins = home.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    record = agent.agents["chat/1"]
    session: dict[str, object] = {"agent_type": "chat", "session_id": "s", "timeout_ms": 60_000}
    agent.answer(caller.request("first", **session))
    agent.cut()
    name = caller.request("second", **session)
    cores.views_stand = True
    cores.cut(home, entry)
    there = entry.process("chat-1")
    there.incarnation = agent.incarnation
    there.connect(record)
    there.answer(name, "once")
    assert caller.text_of(name) == "once"
    if seen:
        there.signal(Signal(detach=Detach(agent_id="chat/1", reason="gone")))
        cores.pump()
        cores.views_stand = False
        cores.pump()
    agent.forget()
    agent.connect(record)
    cores.advance(2.0)
    assert agent.has(name) and not agent.got(name).fresh
    agent.answer(name, "once")
    cores.views_stand = False
    cores.link(home, entry)
    cores.advance(20.0)
    cores.assert_settled()
