"""What the simulator found with several nodes, played by hand: see tools/sim.py."""

from __future__ import annotations

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
