"""What the simulator found with several nodes, played by hand: see tools/sim.py."""

from __future__ import annotations

from agentreach.wire.outbox import Item
from reach.core import health
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
