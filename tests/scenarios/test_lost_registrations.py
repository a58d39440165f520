"""Plays: the keys of a node's agents vanish from the store while the node lives: etcd was away longer than a lease."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from reach.core import remote
from tests.support.cores import Cores, NodeCore

ECHO = ("default", "production", "echo/1")


def lose_keys(cores: Cores, home: NodeCore, *names: str) -> None:
    """The lease of these agents has ended: every other node sees their keys go."""
    for core in cores.nodes:
        if core is not home:
            with core.step() as state:
                for name in names:
                    generation = home.attachment(name).agent.generation
                    remote.agent_gone(state, "default", "production", name, generation)
    cores.pump()


def write_again(cores: Cores, home: NodeCore, name: str) -> None:
    """Their home writes them under a new lease."""
    cores.revision += 1
    agent = home.attachment(name).agent
    agent.generation = cores.revision
    cores.registered.append((home, agent))
    cores.pump()


def test_agents_that_their_home_still_has_get_work_while_their_keys_are_gone() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    running = caller.request(timeout_ms=60_000)
    lose_keys(cores, home, "echo/1")
    message = caller.request()
    agent.answer(message)
    assert caller.reply_to(message).source == "echo/1"
    cores.advance(20.0)
    write_again(cores, home, "echo/1")
    assert [envelope.message_id for envelope in agent.requests].count(running) == 1  # it is not sent again
    agent.answer(running)
    assert caller.reply_to(running).source == "echo/1"
    lose_keys(cores, home, "echo/1")  # once more
    assert entry.state.directory.get(*ECHO) is not None
    cores.assert_settled()


def test_a_record_that_is_written_again_may_offer_something_else() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    home.attachment("echo/1").agent.version = "2.0.0"
    write_again(cores, home, "echo/1")
    message = caller.request(agent_type="echo", version="2.0.0")
    agent.answer(message)
    assert caller.reply_to(message).source == "echo/1"
    assert len(entry.state.nodes["n1"].agents) == entry.state.remote_agents == 1


def test_an_agent_that_leaves_while_its_key_is_gone_is_gone() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    lose_keys(cores, home, "echo/1")
    agent.leave()
    cores.pump()
    assert caller.error_of(caller.request()).code == codes.NO_ROUTE
    assert entry.state.remote_agents == 0 and not entry.state.nodes["n1"].unregistered


def test_a_node_whose_keys_and_link_are_both_gone_has_no_agents_whichever_goes_first() -> None:
    for keys_first in (True, False):
        cores = Cores(2)
        entry, home = cores.nodes
        agent, caller = home.agent("echo/1"), entry.caller()
        running = caller.request(timeout_ms=60_000)
        assert agent.has(running)
        if keys_first:
            lose_keys(cores, home, "echo/1")
            cores.cut(entry, home)
        else:
            cores.cut(entry, home)
            lose_keys(cores, home, "echo/1")
        assert entry.state.directory.get(*ECHO) is None and entry.state.remote_agents == 0
        assert caller.error_of(caller.request()).code == codes.NO_ROUTE
        cores.advance(15.0)
        assert caller.error_of(running).code == codes.AGENT_LOST
        assert not entry.state.unsettled


def test_while_only_the_link_is_gone_its_agents_are_known_but_get_nothing() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    caller = entry.caller()
    cores.cut(entry, home)
    assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE
    assert entry.state.directory.get(*ECHO) is not None


def test_a_link_that_begins_anew_forgets_what_no_store_knows() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    lose_keys(cores, home, "echo/1")
    cores.cut(entry, home)
    cores.link(entry, home)
    assert caller.error_of(caller.request()).code == codes.NO_ROUTE
    write_again(cores, home, "echo/1")
    message = caller.request()
    agent.answer(message)
    assert caller.reply_to(message).source == "echo/1"
    cores.assert_settled()


def test_an_agent_that_comes_here_while_its_key_at_another_node_is_gone_is_nobody_elses() -> None:
    cores = Cores(2)
    here, home = cores.nodes
    home.agent("echo/1")
    lose_keys(cores, home, "echo/1")
    here.agent("echo/1")
    cores.cut(here, home)
    cores.advance(20.0)
    assert here.attachment("echo/1").agent.node_id == "n0"
