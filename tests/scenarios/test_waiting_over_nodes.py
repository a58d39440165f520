"""A slot that comes free at its home goes to the one that waits longest, at whichever node it waits."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from tests.support.cores import Cores


def test_a_freed_slot_wakes_a_request_that_waits_at_another_node_at_once() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    caller = entry.caller()
    first, second = caller.request(), caller.request()
    assert agent.has(first) and not agent.has(second)
    agent.answer(first)
    assert agent.has(second), "without waiting for the next loads"
    agent.answer(second)
    assert not caller.reply_to(second).HasField("error")
    cores.assert_settled()


def test_the_older_goes_first_though_it_waits_at_another_node() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=30_000)
    cores.advance(1.0)
    older = far.request(timeout_ms=30_000)
    cores.advance(0.2)
    younger = near.request(timeout_ms=30_000)
    agent.answer(held)
    assert agent.has(older) and not agent.has(younger)
    agent.answer(older)
    assert agent.has(younger)
    agent.answer(younger)
    cores.advance(1.0)
    cores.assert_settled()


def test_the_higher_goes_first_whoever_came_first() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=30_000)
    cores.advance(1.0)
    low = far.request(timeout_ms=30_000, priority=pb.LOW)
    cores.advance(0.2)
    high = near.request(timeout_ms=30_000, priority=pb.HIGH)
    agent.answer(held)
    assert agent.has(high) and not agent.has(low)
    agent.answer(high)
    assert agent.has(low)
    agent.answer(low)
    cores.advance(1.0)
    cores.assert_settled()


def test_a_grant_that_nobody_uses_gives_its_slot_back() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=30_000)
    cores.advance(1.0)
    gone = far.request(timeout_ms=30_000)
    far.cancel(gone)
    agent.answer(held)
    after = near.request(timeout_ms=30_000)
    cores.advance(2.5)
    assert agent.has(after) and not agent.has(gone)
    agent.answer(after)
    cores.advance(1.0)
    cores.assert_settled()


def test_many_waiters_at_three_nodes_all_get_their_turn_and_no_slot_is_given_twice() -> None:
    cores = Cores(3)
    home = cores.nodes[2]
    agent = home.agent("echo/1", max_concurrency=3)
    callers = [core.caller(f"c{number}") for number, core in enumerate(cores.nodes)]
    sent = [(caller, caller.request(timeout_ms=60_000)) for _ in range(10) for caller in callers]
    most = 0
    for _ in range(200):
        most = max(most, len(agent.running))
        for envelope in list(agent.running.values())[:1]:
            agent.answer(envelope)
        cores.advance(0.1)
        if all(caller.replies_to(name) for caller, name in sent):
            break
    assert most == 3
    assert all(not caller.reply_to(name).HasField("error") for caller, name in sent)
    assert {name for _, name in sent} == {envelope.message_id for envelope in agent.requests}
    assert len(agent.requests) == len(sent), "each was given to the agent once"
    cores.advance(3.0)
    cores.assert_settled()


def test_a_node_that_is_cut_off_holds_no_slot() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=30_000)
    cores.advance(1.0)
    waits = far.request(timeout_ms=30_000)
    cores.cut(entry, home)
    agent.answer(held)
    mine = near.request(timeout_ms=30_000)
    assert agent.has(mine)
    agent.answer(mine)
    cores.advance(31.0)
    assert far.error_of(waits).code in (codes.TIMEOUT, codes.NO_AGENT_AVAILABLE)
    cores.advance(1.0)
    cores.assert_settled()
