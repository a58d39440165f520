"""What the simulator found with several nodes, played by hand: see tools/sim.py."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Signal, StreamCredit
from agentreach.v1.registry_pb2 import DRAINING
from agentreach.wire.errors import failure
from agentreach.wire.link import Link
from agentreach.wire.outbox import Item
from reach.core import health, nodes
from tests.scenarios.test_once_over_nodes import message_owned_by
from tests.support.core import CoreMesh, Process, record
from tests.support.cores import Cores


def test_what_a_home_said_while_the_link_was_cut_is_heard_when_it_is_resumed() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    caller, listener = entry.caller(), home.caller()
    cores.cut(entry, home)
    agent = home.agent("echo/1")
    listener.subscribe("news")
    cores.advance(1.0)
    cores.link(entry, home)
    message = caller.request()
    assert agent.has(message)
    agent.answer(message, "here")
    assert caller.text_of(message) == "here"
    caller.publish("news")
    assert len(listener.events) == 1
    cores.assert_settled()


def test_an_agent_whose_home_acknowledged_nothing_gets_work_again_on_a_new_link() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    echo, unacknowledged = entry.attachment("echo/1"), Item(b"", 1, entry.state.now)
    with entry.step() as state:
        health.unacknowledged(state, echo, unacknowledged)
    cores.cut(entry, home)
    cores.advance(15.0)
    cores.link(entry, home)
    message = caller.request()
    assert agent.has(message)


def test_what_was_withdrawn_from_a_link_that_began_anew_is_not_overdue() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1"), core.caller()
    caller.request(timeout_ms=60_000)
    echo = core.attachment("echo/1")
    (request,) = echo.attempts.values()
    link = Link()
    item = request.item = link.put_bytes(request.data, core.state.now)
    assert link.next_frame(core.state.now)
    link.withdraw(item)
    link.restart()
    agent.beat()
    core.advance(8.0)
    with core.step() as state:
        health.look_for_overdue(state, echo)
    assert not echo.agent.saturated


def test_a_process_that_leaves_and_dials_again_does_not_take_its_agent_id_from_its_successor() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    successor = one.agent("echo/1")
    for core in (one, two):
        former = core.process(f"former at {core.node_id}", record("echo/1", status=DRAINING))
        assert [each.error.code for each in former.welcome.agents] == [codes.REJECTED]
    message = two.caller().request()
    assert successor.has(message)


def test_a_process_that_leaves_may_dial_again_while_nobody_else_has_its_agent_id() -> None:
    core = CoreMesh()
    former = core.process("former", record("echo/1", status=DRAINING))
    assert not former.welcome.agents[0].HasField("error")
    last = core.process("last", record("echo/1", status=DRAINING))
    assert not last.welcome.agents[0].HasField("error")


def test_items_of_a_streamed_reply_that_come_again_from_a_new_home_are_not_given_twice() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=20_000)
    for number in range(100):
        agent.answer(message, f"item {number}", more=True)
        take(caller, message, number + 65)
    cores.kill(home)
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(1.0)
    for number in range(130):  # all that it keeps, and more
        again.answer(message, f"item {number}", more=True)
    again.answer(message, "end")
    texts = [reply.payload.text for reply in caller.replies_to(message)]
    assert texts == [*(f"item {number}" for number in range(130)), "end"]
    assert [reply.sequence for reply in caller.replies_to(message)] == list(range(131))
    assert max(signal.stream_credit.up_to for signal in again.got_signals("stream_credit")) == 164
    cores.assert_settled()


def take(caller: Process, message: str, up_to: int) -> None:
    """The caller takes so many items."""
    entry = caller.replies_to(message)[0].entry
    caller.signal(Signal(stream_credit=StreamCredit(correlation_id=message, entry=entry, up_to=up_to)))
    caller.core.pump()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_message_whose_time_was_over_does_not_run_again_when_it_comes_by_any_node(owner: int) -> None:
    cores = Cores(3)
    first, second, home = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], first)
    one, two = first.caller("one"), second.caller("two")
    one.send(first.envelope("same", message_id=name, fresh=False, timeout_ms=300))
    cores.advance(1.0)
    assert one.error_of(name).code == codes.TIMEOUT and one.error_of(name).may_have_executed
    for cancel in agent.cancels:
        agent.refuse(cancel.correlation_id, codes.CANCELLED)
    two.send(second.envelope("same", message_id=name, fresh=False, timeout_ms=5_000))
    cores.pump()
    assert len(agent.requests) == 1
    assert two.error_of(name).code == codes.TIMEOUT
    cores.assert_settled()


def test_a_sessions_message_that_its_owner_has_goes_to_nobody_else() -> None:
    cores = Cores(3)
    entry, first, home = cores.nodes
    first.pins = home.pins = entry.pins
    agent = home.agent("chat/1")
    one, two = first.caller("one"), entry.caller("two")
    name = message_owned_by(entry, entry)
    fields = {"message_id": name, "agent_type": "chat", "session_id": "s", "idempotent": True, "timeout_ms": 9_000}
    one.request("hi", profile=pb.CACHE, **fields)
    assert agent.has(name)
    other = entry.agent("chat/2")
    cores.kill(first)
    two.request("hi", fresh=False, profile=pb.CACHE, **fields)
    cores.advance(3.0)
    assert not other.has(name)


def test_a_sessions_messages_keep_their_order_however_long_they_wait_at_its_owners_home() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.pins = entry.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    sent = [
        caller.request(
            str(number), agent_type="chat", session_id="s", idempotent=True, profile=pb.RPC, timeout_ms=9_000
        )
        for number in range(6)
    ]
    cores.advance(5.0)
    for message in sent:
        agent.answer(message)
    assert [envelope.message_id for envelope in agent.requests] == sent
    assert [envelope.attempt for envelope in agent.requests] == [1] * 6
    cores.assert_settled()


def test_who_waits_at_a_home_for_other_messages_of_its_session_trips_no_breaker() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.pins = entry.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    first = caller.request(agent_type="chat", session_id="s", timeout_ms=60_000)
    for _ in range(10):
        caller.request(agent_type="chat", session_id="s", timeout_ms=2_000)
    cores.advance(3.0)
    agent.answer(first)
    agent.answer(caller.request(agent_type="chat"))
    cores.assert_settled()


def test_a_session_whose_messages_all_failed_while_it_stood_in_its_owners_queue_stands_there_no_more() -> None:
    core = CoreMesh()
    agent, caller = core.agent("chat/1", max_concurrency=1), core.caller()
    first = caller.request(agent_type="chat", session_id="one")
    waits = caller.request(agent_type="chat", session_id="two")
    chat = core.attachment("chat/1")
    assert len(chat.lanes_waiting) == 1
    with core.step() as state:
        chat.agent.shut = True
        state.lanes_ready.extend(chat.lanes_waiting)
    core.pump()
    assert caller.error_of(waits).code == codes.BREAKER_OPEN
    assert not chat.lanes_waiting
    chat.agent.shut = False
    agent.answer(first)
    core.assert_settled()


def test_a_home_hears_that_nothing_is_wanted_any_more_also_after_a_cut() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1", max_concurrency=1), entry.caller()
    held = caller.request(timeout_ms=60_000)
    cores.advance(1.0)
    cores._cut.add(frozenset(("n0", "n1")))  # nothing arrives any more, and nobody notices
    waits = caller.request(timeout_ms=60_000)
    cores.advance(1.0)
    assert nodes.of(entry.state, "n1").link.next_frame(entry.state.now)
    cores.cut(entry, home)
    caller.cancel(waits)
    cores.advance(1.0)
    cores.link(entry, home)
    cores.advance(1.0)
    assert not home.state.wants.wishes
    agent.answer(held)
    cores.assert_settled()


def test_messages_of_a_session_that_are_tried_again_keep_their_order() -> None:
    core = CoreMesh()
    agent, caller = core.agent("chat/1", session_concurrency=3), core.caller()
    sent = [caller.request(str(number), agent_type="chat", session_id="s", idempotent=True) for number in range(3)]
    for message in sent:
        agent.answer(message, error=failure(codes.AGENT_ERROR, "not now", retryable=True))
    core.advance(0.5)
    again = [envelope.message_id for envelope in agent.requests[3:]]
    assert again == sent
    for message in sent:
        agent.answer(message)
    core.assert_settled()


def test_a_node_that_is_the_last_one_still_asks_its_agents_who_has_a_message() -> None:
    cores = Cores(2)
    owner, last = cores.nodes
    agents = [last.agent("echo/1"), last.agent("echo/2")]
    name = message_owned_by(owner, owner)
    one = owner.caller("one")
    one.request("same", message_id=name, fresh=False)
    (runs,) = [agent for agent in agents if agent.has(name)]
    runs.answer(name, "once")
    assert one.text_of(name) == "once"
    cores.kill(owner)
    nodes.of(last.state, owner.node_id).dead = True
    two = last.caller("two")
    two.request("so that the other one is preferred", agent_id=next(iter(runs.agents)))
    two.request("same", message_id=name, fresh=False)
    assert [agent for agent in agents if agent.has(name)] == [runs]


def test_an_answer_that_only_an_agent_keeps_is_nobody_elses_to_give() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(entry, entry)
    one, two = entry.caller("one"), entry.caller("two")
    one.request("same", message_id=name, fresh=False)
    agent.answer(name, "item", more=True)
    agent.answer(name, "end")
    other = entry.agent("echo/2")
    cores.views_stand = True
    agent.leave()
    two.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.views_stand = False
    cores.advance(15.0)
    assert not other.has(name)
    assert two.error_of(name).code == codes.AGENT_LOST and two.error_of(name).may_have_executed


def test_what_was_sent_to_its_process_again_may_have_been_executed_when_its_time_is_over() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=3_000)
    assert agent.has(message)
    cores._cut.add(frozenset(("n0", "n2")))  # nothing arrives there, and nobody notices
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(4.0)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and error.may_have_executed
