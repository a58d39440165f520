"""What storms of random faults on real nodes found, played by hand: see tests/e2e/test_nodes_storm.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Detach, Goodbye, Signal
from reach.core import breakers, homes, lanes, links, moves, once, remote
from reach.core.agents import DRAINING, HEALTHY
from reach.core.breaker import IN_A_ROW_MAX, OPEN_S, Breaker
from tests.scenarios.test_once_over_nodes import dials, message_owned_by, owned_by, runs
from tests.scenarios.test_returning import AGAIN, comes_back, holding
from tests.support.core import CoreMesh
from tests.support.cores import Cores, NodeCore
from tests.support.keepers import Keeper


def opened(core: NodeCore, agent_id: str) -> None:
    """As a node sees it, an agent has failed too often."""
    with core.step() as state:
        agent = core.attachment(agent_id).agent
        agent.breaker = Breaker()
        for _ in range(IN_A_ROW_MAX):
            agent.breaker.outcome(False, state.now, state.now)
        breakers.look(state, agent)
    assert agent.shut


# ---- once means once ----


def stands_still(cores: Cores, core: NodeCore) -> None:
    """A node's process is stopped, and the others have noticed that it says nothing more."""
    core.alive = False
    for other in cores.nodes:
        if other is not core:
            cores.cut(other, core)


@pytest.mark.parametrize("end", [stands_still, Cores.kill])
@pytest.mark.parametrize("later_s", [0.0, 12.0])
@pytest.mark.parametrize("owner", [1, 2])
def test_a_home_keeps_an_outcome_that_its_entry_has_not_acknowledged(
    owner: int, later_s: float, end: Callable[[Cores, NodeCore], None]
) -> None:
    """Entry and home were linked when the agent answered; but the entry stood still, and the agent was replaced."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], other)
    entry.caller("first").request("same", message_id=name, timeout_ms=20_000)
    entry.alive = False
    agent.answer(name, "once")
    agent.leave()
    successor = other.agent("echo/2")
    end(cores, entry)
    cores.advance(later_s)  # in 12 s the entry is given up
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not successor.has(name) and caller.text_of(name) == "once"
    again = home.caller()
    again.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    assert again.text_of(name) == "once"
    cores.advance(30.0)
    home.assert_settled()
    other.assert_settled()


def test_a_home_keeps_an_outcome_that_one_of_several_has_heard() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = entry.caller("first").request("same", timeout_ms=20_000)
    home.caller("near").request("same", message_id=name, fresh=False, timeout_ms=20_000)
    entry.alive = False
    agent.answer(name, "once")
    agent.leave()
    successor = other.agent("echo/2")
    stands_still(cores, entry)
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not successor.has(name) and caller.text_of(name) == "once"


def test_a_home_keeps_an_outcome_that_a_later_life_of_its_entry_takes_and_knows_nothing_of() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = entry.caller("first").request("same", timeout_ms=20_000)
    entry.alive = False
    agent.answer(name, "once")
    agent.leave()
    successor = other.agent("echo/2")
    cores.kill(entry)
    cores.start_again(entry)
    cores.advance(1.0)
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not successor.has(name) and caller.text_of(name) == "once"
    cores.assert_settled()


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("owner", [1, 2])
def test_what_an_entry_had_acknowledged_and_took_with_it_is_not_run_again(owner: int, stays: bool) -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, idle = home.agent("echo/1"), other.agent("echo/2")
    name = message_owned_by(cores.nodes[owner], other)
    idle.say(DRAINING)
    entry.caller("first").request("same", message_id=name, timeout_ms=20_000)
    agent.answer(name, "once")
    cores.kill(entry)
    idle.say(HEALTHY)
    if not stays:
        agent.leave()
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    if stays:
        agent.answer(agent.requests[-1], "replayed")
        assert agent.requests[-1].resent and caller.text_of(name) == "replayed"
    else:
        error = caller.error_of(name)
        assert error.code == codes.AGENT_LOST and error.may_have_executed and not error.retryable
    assert not idle.has(name)
    cores.advance(30.0)
    cores.assert_settled()


def test_a_message_that_only_a_silent_node_may_have_is_not_run_when_that_one_s_key_has_vanished() -> None:
    """A frozen node was forgotten once its key and its link were gone; it had the message, and ran it on."""
    cores = Cores(3)
    frozen, other, third = cores.nodes
    agent = third.agent("echo/1")
    stands_still(cores, frozen)
    cores.advance(4.0)
    caller = other.caller()
    name = caller.request("same", fresh=False, timeout_ms=30_000)
    for core in (other, third):
        with core.step() as state:
            remote.node_gone(state, frozen.node_id)
    cores.advance(8.0)
    assert not agent.has(name) and not caller.replies_to(name)
    cores.advance(3.0)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    late = caller.request("one that came later", fresh=False, timeout_ms=30_000)
    cores.advance(12.0)
    assert caller.error_of(late).code == codes.AGENT_LOST
    cores.advance(10.0)
    assert frozen.node_id not in other.state.nodes, "nothing is remembered for ever"
    agent.answer(caller.request("after that", fresh=False))
    other.assert_settled()


@pytest.mark.parametrize("owner", [1, 2])
def test_an_agent_that_ended_with_its_home_is_missing_also_when_its_key_goes_under_the_home_s_next_life(
    owner: int,
) -> None:
    """A storm killed a node, then its agent, and deleted the agent's key when the node was back: it ran again."""
    cores = Cores(3)
    home, other, third = cores.nodes
    agent = home.agent("echo/1")
    name, later, *_ = (f"m-{n}" for n in range(100) if owned_by(cores.nodes[owner], f"m-{n}", other))
    home.caller().request("same", message_id=name, timeout_ms=30_000)
    home.caller().request("another", message_id=later, timeout_ms=30_000)
    assert agent.has(name) and agent.has(later)
    idle = third.agent("echo/2")
    ended = home.attachment("echo/1").agent
    cores.kill(home)
    again = cores.start_again(home)
    for node in again.state.nodes.values():
        node.seen_at -= 1.0  # before it read what its former life had left in the store: they remember by themselves
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    cores.gone.append((again, ended, ended.generation))
    cores.advance(0.1)
    caller.request("another", message_id=later, fresh=False, timeout_ms=30_000)
    cores.advance(8.0)
    assert not runs(idle) and not caller.replies_to(name)
    cores.advance(3.0)
    for each in (name, later):
        error = caller.error_of(each)
        assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(5.0)
    idle.answer(caller.request("an id of its application, later", fresh=False))
    cores.assert_settled()


@pytest.mark.parametrize("asked", ["while it is cut off", "when it is gone"])
def test_an_agent_that_lost_its_home_and_ends_at_the_next_one_is_missing_for_what_the_former_had(asked: str) -> None:
    """The simulator, seed 96: the next home knew what it had given itself, and had the message run again."""
    cores = Cores(2)
    home, other = cores.nodes
    agent, idle = home.agent("echo/1"), other.agent("echo/2")
    idle.say(DRAINING)
    first = home.caller("first")
    name, looked_for = (first.request("same", timeout_ms=30_000) for _ in range(2))
    agent.answer(name, "once")
    agent.answer(looked_for, "once")
    cores.kill(home)
    moved = dials(other, agent)
    idle.say(HEALTHY)
    caller = other.caller()
    caller.request("same", message_id=looked_for, fresh=False, timeout_ms=30_000)
    cores.advance(0.3)
    moved.answer(looked_for, "once")
    assert caller.text_of(looked_for) == "once"
    moved.cut()
    if asked == "when it is gone":
        cores.advance(other.state.rules.resume_window_s + 1.0)
    caller.request("same", message_id=name, fresh=False, timeout_ms=60_000)
    cores.advance(30.0)
    assert not runs(idle)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    idle.answer(caller.request("an id of its application, later", fresh=False))
    other.assert_settled()


# ---- a session's messages at a former home ----


@pytest.mark.parametrize("answers", [True, False])
def test_a_copy_that_joined_at_a_former_home_is_not_given_to_a_successor(answers: bool) -> None:
    """Its entry found the owner elsewhere, and had it run there; of the copy at the former home nobody was asked."""
    cores = Cores(2)
    home, entry = cores.nodes
    entry.pins = home.pins  # one store
    agent, far, near = home.agent("chat/1"), entry.caller("far"), home.caller("near")
    key = ("default", "anonymous", "production", "")
    named = next(f"s{n}" for n in range(100) if once.owner(home.state, key, f"s{n}") is not None)  # the entry owns it
    session: dict[str, object] = {"agent_type": "chat", "session_id": named, "timeout_ms": 60_000}
    first, name = (far.request(each, fresh=False, **session) for each in ("first", "second"))
    near.request("second", message_id=name, fresh=False, **session)
    assert runs(agent) == 1, "the second waits for the first"
    agent.cut()
    cores.views_stand = True
    cores.cut(home, entry)
    home.processes.remove(agent)
    entry.processes.append(agent)
    agent.forget()
    agent.core = entry
    agent.connect()
    agent.answer(first)
    assert agent.has(name)
    if answers:
        agent.answer(name, "once")
    agent.signal(Signal(detach=Detach(agent_id="chat/1", reason="drained")))
    cores.pump()
    cores.views_stand = False
    cores.link(home, entry)
    successor = home.agent("chat/1")
    cores.advance(20.0)
    assert not successor.has(name)
    if answers:
        assert near.text_of(name) == far.text_of(name) == "once"
    else:
        assert near.error_of(name).code == far.error_of(name).code == codes.AGENT_LOST
        assert near.error_of(name).may_have_executed
    third = far.request("third", **session)
    cores.advance(2.0)
    successor.answer(third)
    assert far.text_of(third) == "ok"
    cores.assert_settled()


@pytest.mark.parametrize("entry_ends", [False, True])
def test_a_call_from_a_handler_that_goes_back_from_a_former_home_keeps_its_way(entry_ends: bool) -> None:
    """Who it was called by is written by the node that takes it on: for loops, and for rights."""
    cores = Cores(2)
    home, entry = cores.nodes
    home.pins = entry.pins
    outer, owner = entry.agent("outer/1"), home.agent("inner/1")
    caller, near = entry.caller(), home.caller("near")
    session: dict[str, object] = {"agent_type": "inner", "session_id": "s", "timeout_ms": 60_000}
    handled = caller.request("outer", agent_type="outer", timeout_ms=60_000)
    running = near.request("running", **session)
    nested = outer.call_from(handled, "nested", **session)
    near.request("nested", message_id=nested, fresh=False, **session)
    if entry_ends:
        cores.kill(entry)
        cores.advance(12.0)
    with home.step() as state:
        lane = state.lanes["default", "production", "inner", "s"]
        homes.bounce(state, lane, lanes.take_head(state, lane))
    cores.pump()
    owner.answer(running)
    cores.advance(2.0)
    got = owner.got(nested)
    assert [hop.agent_id for hop in got.path] == ["outer/1", "inner/1"] and got.hop_count == 2
    owner.answer(nested, "once")
    assert near.text_of(nested) == "once"
    if entry_ends:
        owner.leave()
        again = home.caller("again")
        again.request("nested", message_id=nested, fresh=False, **session)
        assert again.text_of(nested) == "once"
        home.assert_settled()
    else:
        assert outer.text_of(nested) == "once"
        outer.answer(handled)
        cores.assert_settled()


def test_a_message_that_comes_from_its_entry_while_this_node_asks_for_a_copy_of_it_does_not_wait_for_itself() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, far, near = home.agent("echo/1"), entry.caller("far"), home.caller("near")
    name = message_owned_by(home, home)
    near.send(home.envelope("same", message_id=name, fresh=False, timeout_ms=20_000))
    home.pump_alone()
    assert home.state.inquiries, "it asks the entry"
    far.send(entry.envelope("same", message_id=name, timeout_ms=20_000))
    entry.pump_alone()
    cores._carry(entry, home)  # its question is still on its way
    cores.advance(2.0)
    agent.answer(name, "once")
    assert near.text_of(name) == far.text_of(name) == "once" and runs(agent) == 1
    cores.assert_settled()


@pytest.mark.parametrize("far", [True, False], ids=["to the former owner's agent", "to one of its own"])
def test_an_owner_that_was_cut_off_leaves_a_message_to_the_node_that_took_it_over(far: bool) -> None:
    """Both asked each other; the former owner took the other's answer for its own wait for it, and both had it run."""
    cores = Cores(3)
    entry, owner, silent = cores.nodes
    agents = [entry.agent("echo/1"), owner.agent("echo/2")]
    caller = entry.caller()
    name = next(f"m-{n}" for n in range(1000) if owned_by(owner, f"m-{n}", entry))
    stands_still(cores, silent)
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert owner.state.inquiries and not entry.state.inquiries
    cores.cut(entry, owner)
    cores.advance(1.0)
    assert owner.state.inquiries and entry.state.inquiries
    opened(entry, "echo/1" if far else "echo/2")
    opened(owner, "echo/1")
    cores.link(entry, owner)
    cores.kill(silent)
    cores.advance(2.0)
    assert agents[far].has(name)
    assert runs(*agents) == 1
    for agent in agents:
        if agent.has(name):
            agent.answer(name, "once")
    assert caller.text_of(name) == "once"
    cores.advance(2.0)
    assert runs(*agents) == 1
    entry.assert_settled()
    owner.assert_settled()


# ---- who leaves ----


@pytest.mark.parametrize("ends", ["link", "goodbye", "nothing sent"])
def test_a_copy_that_did_not_reach_the_agent_that_brought_its_message_along_may_have_run(ends: str) -> None:
    """It was told CONNECT_FAILED, nothing was started: of the copy that is true, of the message it is not known."""
    core = CoreMesh()
    agent, caller = comes_back(core, holding("a")), core.caller()
    other = core.agent("echo/2")
    agent.frozen = True
    if ends == "nothing sent":
        with core.step() as state:
            links.cut(state, core.attachment("echo/1").peer)
    caller.request(message_id="a", **AGAIN)
    if ends == "goodbye":
        with core.step() as state:
            links.goodbye(state, core.attachment("echo/1").peer, Goodbye())
    elif ends == "link":
        with core.step() as state:
            links.cut(state, core.attachment("echo/1").peer)
    agent.connected = False
    core.advance(30.0)
    error = caller.error_of("a")
    assert error.code == codes.AGENT_LOST and error.may_have_executed and not other.has("a")
    core.assert_settled()


def test_what_an_agent_was_given_after_it_had_asked_to_go_is_not_taken_for_not_given() -> None:
    """Its goodbye says what it had taken by then, not what it was given while its sessions moved."""
    core = CoreMesh()
    leaving, staying = Keeper(core, "a"), Keeper(core, "b")
    caller = core.caller()
    session: dict[str, object] = {"agent_id": "keeper/a", "session_id": "s"}
    leaving.handle(leaving.process.got(caller.request(**session)))
    lane = core.state.lanes["default", "production", "keeper", "s"]
    leaving.answers = False
    with core.step() as state:
        assert moves.begin(state, lane, 5.0) is None
    core.pump()
    leaving.process.signal(Signal(detach=Detach(agent_id="keeper/a", reason="hand-written", after_moves=True)))
    core.pump()
    leaving.process.frozen = True
    given = caller.request(agent_id="keeper/a", timeout_ms=60_000)
    assert leaving.process.peer is not None
    leaving.process.peer.link.next_frame(core.state.now)  # it is on its way when the agent is let go
    with core.step() as state:
        moves.overdue(state, lane)
    core.pump()
    assert core.state.directory.get("default", "production", "keeper/a") is None, "it was let go"
    error = caller.error_of(given)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert not staying.process.has(given)


# ---- breakers ----


def is_open(core: NodeCore, agent_id: str) -> bool:
    return core.attachment(agent_id).agent.shut


def test_an_agent_whose_breaker_is_open_gets_its_probe_also_at_the_node_to_which_it_went() -> None:
    """Nobody looked at the breaker again: until an operator closed it the agent got nothing from that entry."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    opened(entry, "echo/1")
    moved = dials(other, agent)
    assert entry.attachment("echo/1").agent.node_id == other.node_id and is_open(entry, "echo/1")
    refused = caller.request()
    assert caller.error_of(refused).code == codes.BREAKER_OPEN
    cores.advance(OPEN_S + 1.0)
    probe = caller.request()
    moved.answer(probe)
    assert not caller.reply_to(probe).HasField("error")
    cores.assert_settled()


def test_a_breaker_comes_along_with_an_agent_that_comes_to_this_node_and_is_no_other_later() -> None:
    """The breaker was put away for the agent after the agent had come; closed meanwhile, it was open when that left."""
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    opened(entry, "echo/1")
    here = dials(entry, agent)
    assert is_open(entry, "echo/1"), "it is the same process"
    with entry.step() as state:
        breakers.reset(state, entry.attachment("echo/1").agent)
    dials(home, here)
    assert entry.attachment("echo/1").agent.node_id == home.node_id
    assert not is_open(entry, "echo/1")
    cores.assert_settled()


# ---- streams ----


def test_an_item_that_comes_before_those_it_follows_is_not_given_in_their_place() -> None:
    """An agent that was joined sent the newest item first, then all from the start: the caller got 2, 1, 2, 3."""
    core = CoreMesh()
    agent, caller = core.agent("echo/1"), core.caller()
    core.attachment("echo/1").peer.numbers_items = True  # as every SDK does
    message = caller.request()
    agent.answer(message, "2", more=True, sequence=2)
    for number in range(3):
        agent.answer(message, str(number), more=True, sequence=number)
    agent.answer(message, "end", sequence=3)
    assert [reply.payload.text for reply in caller.replies_to(message)] == ["0", "1", "2", "end"]
    core.assert_settled()
