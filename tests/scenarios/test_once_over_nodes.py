"""A message that was sent before, over several nodes: whoever is asked, it runs once."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Found, Holding, MessageKey, Signal
from reach.core import homes, lanes, once
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


def test_who_stayed_silent_is_told_by_the_names_of_agents_and_by_no_name_of_a_link() -> None:
    cores = Cores(2)
    core = cores.nodes[0]
    agent = core.agent("echo/1")
    agent.answers_lookups = False
    caller = core.caller()
    name = message_owned_by(core, core)
    caller.request(agent_type="echo", message_id=name, fresh=False, timeout_ms=60_000)
    cores.advance(once.PATIENCE_S + 2)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and "no answer from echo/1;" in error.message
    assert not [link for link in core.state.peers if link in error.message]


def test_what_a_process_says_of_who_has_a_message_is_not_repeated_at_length() -> None:
    """Found by reading: whatever a candidate said was the name of who has it stood in the error of the caller."""
    cores = Cores(2)
    core = cores.nodes[0]
    liar = core.agent("echo/1")
    liar.answers_lookups = False
    caller = core.caller()
    name = message_owned_by(core, core)
    caller.request(agent_type="echo", message_id=name, fresh=False, timeout_ms=60_000)
    until = core.state.now + once.PATIENCE_S + 2
    while core.state.now < until:
        for inquiry in core.state.inquiries.values():
            found = Found(nonce=inquiry.nonce)
            found.items.add(state=Found.RUNNING, agent_id="ghost\n" * 1000).key.CopyFrom(
                MessageKey(tenant="default", principal="anonymous", env="production", message_id=name)
            )
            liar.signal(Signal(found=found))
        cores.pump()
        cores.advance(once.ROUND_S)
    text = caller.error_of(name).message
    assert "no answer from" in text and "\n" not in text and len(text) < 400


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


# ---- those who knew of it are gone together ----


def dials(core: NodeCore, agent: Process, *, same: bool = True) -> Process:
    """An agent's process dials another node; or, if it is not the same, its successor does."""
    process = core.process(agent.name)
    process.forget()
    if same:
        process.incarnation, process.requests, process.running = agent.incarnation, agent.requests, agent.running
    process.connect(*agent.agents.values())
    return process


def test_an_owner_that_was_started_anew_waits_for_the_agents_of_its_former_life() -> None:
    cores = Cores(3)
    owner, entry, other = cores.nodes
    agent = owner.agent("echo/1")
    name = message_owned_by(owner, entry)
    owner.caller("first").request("same", message_id=name, timeout_ms=20_000)
    assert agent.has(name)
    idle = other.agent("echo/2")
    cores.kill(owner)
    owner = cores.start_again(owner)
    caller = entry.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=20_000)
    cores.advance(2.0)
    assert not idle.has(name)
    again = dials(owner, agent)
    cores.advance(1.0)
    again.answer(name, "once")
    assert caller.text_of(name) == "once" and not idle.has(name)
    cores.assert_settled()


def test_an_owner_that_started_for_the_first_time_waits_for_nobody() -> None:
    cores = Cores(3)
    owner, entry, other = cores.nodes
    agent = other.agent("echo/1")
    caller = entry.caller()
    caller.request("same", message_id=(name := message_owned_by(owner, entry)), fresh=False, timeout_ms=20_000)
    assert agent.has(name)
    agent.answer(name)
    cores.assert_settled()


@pytest.mark.parametrize("owner", [0, 1, 2])
@pytest.mark.parametrize("first", ["agent", "node"])
def test_what_an_agent_had_that_was_killed_together_with_its_home_is_not_given_to_its_successor(
    first: str, owner: int
) -> None:
    """Nobody is left who knows that it ran: not the agent, and not its home, which is started anew at once."""
    cores = Cores(3)
    home, entry, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], entry)
    home.caller("first").request("same", message_id=name, timeout_ms=20_000)
    assert agent.has(name)
    if first == "agent":
        agent.cut()
        cores.advance(0.5)
    cores.kill(home)
    successor = dials(other, agent, same=False)
    cores.start_again(home)
    cores.advance(2.0)
    caller = entry.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(9.0)
    assert not successor.has(name) and not caller.replies_to(name)
    cores.advance(4.0)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert not successor.has(name)
    cores.assert_settled()


def test_what_the_successor_of_both_is_given_later_runs() -> None:
    cores = Cores(3)
    home, entry, other = cores.nodes
    agent = home.agent("echo/1")
    cores.kill(home)
    successor = dials(other, agent, same=False)
    cores.start_again(home)
    cores.advance(20.0)
    caller = entry.caller()
    name = caller.request("an id of its application", fresh=False)
    successor.answer(name)
    assert not caller.reply_to(name).HasField("error")
    cores.assert_settled()


def test_an_agent_that_ends_while_its_home_lives_is_nobody_to_wait_for() -> None:
    """Its home knows what it had. Else each death of an agent would make every message that is not fresh wait."""
    cores = Cores(3)
    home, entry, other = cores.nodes
    agent = home.agent("echo/1")
    agent.cut()
    cores.advance(0.5)
    successor = dials(other, agent, same=False)
    caller = entry.caller()
    name = caller.request("an id of its application", fresh=False)
    successor.answer(name)
    assert not caller.reply_to(name).HasField("error")
    cores.assert_settled()


@pytest.mark.parametrize("owner", [1, 2])
def test_what_an_agent_brought_along_to_another_node_and_took_away_with_it_does_not_run(owner: int) -> None:
    """Its home is killed; it dials another node, says what it has, and is killed. Its successor is there at once."""
    cores = Cores(3)
    home, entry, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], entry)
    home.caller("first").request("same", message_id=name, timeout_ms=20_000)
    cores.kill(home)
    again = other.process(agent.name)
    again.incarnation = agent.incarnation
    key = MessageKey(tenant="default", principal="anonymous", env="production", message_id=name)
    again.connect(*agent.agents.values(), holding=[Holding(key=key, state=Holding.RUNNING)])
    again.cut()
    successor = dials(other, agent, same=False)
    for number, caller in enumerate((entry.caller(), other.caller())):
        caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
        cores.advance(12.0)
        assert not successor.has(name)
        error = caller.error_of(name)
        assert error.code == codes.AGENT_LOST and error.may_have_executed, number
    cores.assert_settled()


def test_an_id_of_an_applications_runs_as_soon_as_the_home_of_a_killed_agent_has_another_one() -> None:
    cores = Cores(3)
    home, entry, _ = cores.nodes
    agent = home.agent("echo/1")
    agent.cut()
    caller = entry.caller()
    name = caller.request("an id of its application", fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not caller.replies_to(name)  # it may come back
    successor = dials(home, agent, same=False)
    cores.advance(1.0)
    successor.answer(name)
    assert not caller.reply_to(name).HasField("error")
    cores.assert_settled()


@pytest.mark.parametrize("owner", [1, 2])
def test_a_home_keeps_that_an_agent_was_lost_though_its_entry_was_told(owner: int) -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], other)
    entry.caller("first").request("same", message_id=name, timeout_ms=20_000)
    agent.cut()
    successor = dials(home, agent, same=False)
    cores.advance(3.0)
    cores.kill(entry)  # with what it had told its caller, who did not hear it
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not successor.has(name)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(30.0)
    cores.assert_settled()


def test_what_an_agent_had_that_ended_long_before_its_home_was_settled_by_it() -> None:
    """Else an id of an application's would wait, after the loss of a node, for all that had ended at it."""
    cores = Cores(3)
    home, entry, other = cores.nodes
    agent = home.agent("echo/1")
    agent.cut()
    successor = dials(other, agent, same=False)
    cores.advance(3.0)
    cores.kill(home)
    cores.start_again(home)
    caller = entry.caller()
    name = caller.request("an id of its application", fresh=False)
    successor.answer(name)
    assert not caller.reply_to(name).HasField("error")
    cores.assert_settled()


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("owner", [1, 2])
def test_a_home_keeps_what_became_of_a_message_whose_entry_was_lost_before_it_ended(owner: int, answers: bool) -> None:
    """Its entry's to keep, and the entry is gone; then the agent is killed too, and its successor is there at once."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(cores.nodes[owner], other)
    entry.caller("first").request("same", message_id=name, timeout_ms=20_000)
    cores.kill(entry)
    if answers:
        agent.answer(name, "once")
    agent.cut()
    successor = dials(other, agent, same=False)
    cores.advance(3.0)
    caller = other.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert not successor.has(name)
    if answers:
        assert caller.text_of(name) == "once"
    else:
        error = caller.error_of(name)
        assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(30.0)
    cores.assert_settled()


def test_a_session_that_is_not_here_any_more_ends_no_wait_of_a_caller_who_joined_here() -> None:
    """A visitor's message is refused to its entry; the copy of a caller who came here was told FENCED as well."""
    cores = Cores(2)
    entry, home = cores.nodes
    home.pins = entry.pins  # one store
    agent = home.agent("echo/1")
    far, near = entry.caller("far"), home.caller("near")
    first, second = (far.request(each, session_id="s", timeout_ms=20_000, fresh=False) for each in ("one", "two"))
    near.request("two", message_id=second, session_id="s", timeout_ms=20_000, fresh=False)
    assert agent.has(first) and not agent.has(second)
    with home.step() as state:
        lane = state.lanes["default", "production", "echo", "s"]
        homes.bounce(state, lane, lanes.take_head(state, lane))  # as when its pin names another by now
    cores.pump()
    agent.answer(first)
    cores.advance(5.0)
    assert runs(agent) == 2
    agent.answer(second, "once")
    cores.advance(1.0)
    assert near.text_of(second) == far.text_of(second) == "once"
    cores.assert_settled()
