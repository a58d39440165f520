"""What an agent's home knows of the outcomes that it gave to other nodes, and what it makes of it."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import CANCEL, Envelope
from agentreach.v1.frame_pb2 import Goodbye, Signal
from agentreach.wire import ids
from agentreach.wire.errors import failure
from reach.core import once, visiting
from reach.core.agents import DRAINING, HEALTHY
from reach.core.answered import ANSWERED_S_MAX
from reach.core.replay import OUTCOME_BYTES_MAX
from tests.scenarios.test_once_over_nodes import dials, message_owned_by, runs
from tests.support.core import Process
from tests.support.cores import Cores, NodeCore


def ranked(*core: NodeCore) -> str:
    """A message_id of which the first of these nodes is the owner, then the second, and so on."""

    def rank(name: str, node: NodeCore) -> bytes:
        return once._rank("\0".join(("default", "anonymous", "production", name)).encode(), node.node_id)

    def stands(name: str) -> bool:
        ranks = [rank(name, node) for node in core]
        return ranks == sorted(ranks, reverse=True)

    return next(name for name in (f"m-{number}" for number in range(10_000)) if stands(name))


def answered_and_entry_killed(cores: Cores, name: str, **fields: object) -> tuple[Process, Process]:
    """The first node acknowledged the outcome of an agent of the second, and was killed. Returns it and an idle one."""
    entry, home, other = cores.nodes
    agent, idle = home.agent("echo/1"), other.agent("echo/2")
    idle.say(DRAINING)
    entry.caller("first").request("same", message_id=name, timeout_ms=20_000, **fields)
    agent.answer(name, "once")
    cores.kill(entry)
    idle.say(HEALTHY)
    return agent, idle


# ---- nobody waits in a circle ----


def test_a_caller_who_comes_to_the_home_is_not_sent_to_the_owner_and_back() -> None:
    cores = Cores(3)
    _, home, other = cores.nodes
    name = ranked(other, home)
    agent, idle = answered_and_entry_killed(cores, name)
    agent.say(DRAINING)
    caller = home.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert len(agent.requests) == 2 and agent.requests[1].resent and not idle.has(name)
    agent.answer(agent.requests[1], "replayed")
    assert caller.text_of(name) == "replayed"
    cores.advance(30.0)
    cores.assert_settled()


@pytest.mark.parametrize("acknowledged", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_a_home_that_is_the_entry_as_well_knows_the_outcome_when_the_owner_is_gone(
    stays: bool, acknowledged: bool
) -> None:
    cores = Cores(3)
    home, owner, third = cores.nodes
    agent, idle = home.agent("echo/1"), third.agent("echo/2")
    name = ranked(owner, third, home)
    idle.say(DRAINING)
    caller = home.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=60_000)
    assert agent.has(name)
    owner.alive = False
    agent.answer(name, "once")
    if acknowledged:
        with home.step() as state:
            link = state.nodes[owner.node_id].link
            for item in link.outstanding():
                once.outcomes.confirmed(state, item.owner)
                item.owner = None
    idle.say(HEALTHY)
    if stays:
        agent.say(DRAINING)
    else:
        agent.leave()
    cores.kill(owner)
    cores.advance(0.2)
    if stays and acknowledged:
        agent.answer(agent.requests[-1], "once")
    cores.advance(1.0)
    if acknowledged and not stays:
        assert caller.error_of(name).code == codes.AGENT_LOST
    else:
        assert caller.text_of(name) == "once"
    assert not idle.has(name)
    cores.advance(60.0)
    cores.assert_settled()


def test_an_owner_that_is_told_by_who_waits_there_does_not_wait_for_it() -> None:
    """The home relayed a message of which it heard later: had the owner relayed it back, each would have waited."""
    cores = Cores(3)
    first, home, owner = cores.nodes
    cores.cut(first, owner)  # so the owner has to ask again and again
    agent = home.agent("echo/1")
    name = message_owned_by(owner, home)
    caller = home.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=60_000)
    first.caller("first").request("same", message_id=name, timeout_ms=60_000)
    agent.answer(name, "once")
    cores.advance(15.0)
    error = caller.error_of(name)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert runs(agent) == 1


@pytest.mark.parametrize("text", ["same", "something else"])
def test_a_home_that_heard_of_it_while_the_owner_asked_knows_when_the_owner_is_gone(text: str) -> None:
    cores = Cores(3)
    first, home, owner = cores.nodes
    cores.cut(first, owner)  # so the owner has to ask again and again
    agent = home.agent("echo/1")
    name = message_owned_by(owner, home)
    caller = home.caller()
    caller.request(text, message_id=name, fresh=False, timeout_ms=60_000)
    first.caller("first").request("same", message_id=name, timeout_ms=60_000)
    agent.answer(name, "once")
    cores.kill(owner)
    cores.advance(0.2)
    if text == "same":
        agent.answer(agent.requests[-1], "once")
        assert caller.text_of(name) == "once"
    else:
        assert caller.error_of(name).code == codes.IDEMPOTENCY_CONFLICT
        assert runs(agent) == 1


def test_a_copy_joins_the_one_that_the_home_took_back_from_an_owner_that_is_gone() -> None:
    """The outcome is its agent's to give, for it is too large to be kept at a node."""
    cores = Cores(3)
    home, owner, third = cores.nodes
    agent = home.agent("echo/1")
    name = ranked(owner, third, home)
    callers = [home.caller("one"), home.caller("two")]
    callers[0].request("same", message_id=name, fresh=False, timeout_ms=60_000)
    owner.alive = False
    agent.answer(name, "x" * OUTCOME_BYTES_MAX)
    cores.kill(owner)
    assert [envelope.resent for envelope in agent.requests] == [False, True]
    callers[1].request("same", message_id=name, fresh=False, timeout_ms=60_000)
    assert len(agent.requests) == 2
    agent.answer(agent.requests[-1], "once")
    assert [caller.text_of(name) for caller in callers] == ["once"] * 2


# ---- for how long ----


def test_what_is_remembered_counts_more_than_that_the_table_of_outcomes_let_go_of_younger_ones() -> None:
    cores = Cores(2, replay_entries_max=1)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    old, *younger = (ids.uuid7(int(home.state.unix * 1000) + number, number) for number in range(3))
    entry.caller("first").request("same", message_id=old, timeout_ms=20_000)
    agent.answer(old, "once")
    near = home.caller("near")
    for name in younger:
        near.request(message_id=name, fresh=False)
        agent.answer(name)
    assert home.state.replay.forgotten_unix_ms >= 0
    cores.kill(entry)
    caller = home.caller()
    caller.request("same", message_id=old, fresh=False, timeout_ms=20_000)
    agent.answer(agent.requests[-1], "replayed")
    assert caller.text_of(old) == "replayed"


@pytest.mark.parametrize(("later_s", "runs_again"), [(ANSWERED_S_MAX - 20.0, False), (ANSWERED_S_MAX + 5.0, True)])
def test_an_id_that_was_used_long_ago_is_a_new_message_s(later_s: float, runs_again: bool) -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    entry.caller("first").request("same", message_id="report-1", timeout_ms=20_000)
    agent.answer("report-1", "once")
    agent.leave()
    cores.STEP_S = 5.0
    cores.advance(later_s / 2)
    asks = entry.caller("asks")
    asks.request("same", message_id="report-1", fresh=False, timeout_ms=100)  # who asks does not make it younger
    cores.advance(later_s / 2)
    successor = home.agent("echo/10")
    caller = entry.caller("again")
    caller.request("same", message_id="report-1", fresh=False, timeout_ms=20_000)
    cores.STEP_S = 0.05
    cores.advance(1.0)
    assert successor.has("report-1") == runs_again
    if not runs_again:
        assert caller.error_of("report-1").code == codes.AGENT_LOST


# ---- what a copy is told ----


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("idempotent", [True, False])
def test_an_idempotent_message_runs_again_where_the_process_that_answered_it_is_gone(idempotent: bool, at: int) -> None:
    cores = Cores(3)
    _, home, other = cores.nodes
    name = message_owned_by(home, other)
    agent, idle = answered_and_entry_killed(cores, name, idempotent=idempotent)
    agent.leave()
    caller = cores.nodes[at].caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=30_000, idempotent=idempotent)
    cores.advance(1.0)
    assert idle.has(name) == idempotent
    if idempotent:
        idle.answer(name, "again")
        assert caller.text_of(name) == "again"
    else:
        assert caller.error_of(name).code == codes.AGENT_LOST
    cores.advance(30.0)
    cores.assert_settled()


@pytest.mark.parametrize("at", [1, 2])
def test_a_copy_with_other_content_is_a_conflict_though_its_entry_is_gone(at: int) -> None:
    cores = Cores(3)
    _, home, other = cores.nodes
    name = message_owned_by(home, other)
    agent, idle = answered_and_entry_killed(cores, name)
    caller = cores.nodes[at].caller()
    caller.request("something else", message_id=name, fresh=False, timeout_ms=30_000)
    cores.advance(1.0)
    assert caller.error_of(name).code == codes.IDEMPOTENCY_CONFLICT
    assert runs(agent, idle) == 1


# ---- who cancels what ----


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_caller_s_cancel_reaches_the_agent_wherever_it_is(at: int, leaves: bool) -> None:
    """Where the caller's node is the agent's home as well, a node between them owns the message."""
    cores = Cores(3)
    entry, owner, _ = cores.nodes
    agent = cores.nodes[at].agent("echo/1")
    name = message_owned_by(owner, entry)
    caller = entry.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=60_000)
    assert agent.has(name)
    if leaves:
        caller.signal(Signal(goodbye=Goodbye()))
    else:
        caller.send(Envelope(type=CANCEL, correlation_id=name))
    cores.advance(1.0)
    assert len(agent.cancels) == 1
    if not leaves:
        assert caller.error_of(name).code == codes.CANCELLED


# ---- which attempt's ----


@pytest.mark.parametrize("end", ["its agent is lost", "its agent fails"])
def test_what_an_attempt_ended_with_is_no_outcome_once_its_entry_makes_another(end: str) -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    one = home.agent("echo/1")
    name = message_owned_by(other, home)
    caller = entry.caller("first")
    caller.request("same", message_id=name, idempotent=True, timeout_ms=20_000)
    two = home.agent("echo/2")
    if end == "its agent is lost":
        dials(home, one, same=False).say(DRAINING)
    else:
        one.answer(name, error=failure(codes.INTERNAL, "no", retryable=True, may_have_executed=True))
        one.say(DRAINING)
    cores.advance(3.0)
    two.answer(name, "once")
    assert caller.text_of(name) == "once"
    cores.kill(entry)
    for at in (other, home):
        again = at.caller()
        again.request("same", message_id=name, fresh=False, idempotent=True, timeout_ms=20_000)
        cores.advance(1.0)
        assert two.requests[-1].resent
        two.answer(two.requests[-1], "once")
        assert again.text_of(name) == "once"


@pytest.mark.parametrize("same_entry", [True, False])
def test_an_unacknowledged_end_is_kept_unless_its_own_entry_tries_again(same_entry: bool) -> None:
    """While the end of one attempt is on its way, another attempt comes; that one leaves nothing behind."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    name = message_owned_by(home, other)
    entry.caller().request("same", message_id=name, idempotent=True, timeout_ms=20_000)
    given = Envelope.FromString(entry.state.by_key["default", "anonymous", "production", name].data)
    entry.alive = False
    agent.answer(name, error=failure(codes.INTERNAL, "the first", retryable=True, may_have_executed=True))
    given.attempt = 2
    if not same_entry:
        given.attempt, given.entry = 1, other.state.nonce + bytes(8)
    with home.step() as state:
        by = state.nodes[entry.node_id if same_entry else other.node_id]
        visiting.admit_from(state, by, given, 0)
        visiting.cancel(state, by, given)  # whose outcome is not kept
    agent.answer(agent.requests[-1], error=failure(codes.CANCELLED, "as told"))
    caller = home.caller()
    caller.request("same", message_id=name, fresh=False, idempotent=True, timeout_ms=20_000)
    cores.kill(entry)
    cores.advance(1.0)
    if same_entry:
        assert not caller.replies_to(name) and agent.requests[-1].resent
        agent.answer(agent.requests[-1], "the last")
        assert caller.text_of(name) == "the last"
    else:
        assert caller.error_of(name).message == "the first"


def test_a_home_that_ended_a_message_itself_does_not_take_its_agent_for_who_knows() -> None:
    """The agent was told to end it, and would run it again."""
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    name = entry.caller("first").request("same", timeout_ms=1_000)
    caller = home.caller()
    caller.request("same", message_id=name, fresh=False, timeout_ms=3_000)
    cores.advance(4.0)
    assert caller.error_of(name).code == codes.TIMEOUT and len(agent.cancels) == 1
    agent.refuse(name, codes.CANCELLED)
    cores.kill(entry)
    again = home.caller("again")
    again.request("same", message_id=name, fresh=False, timeout_ms=3_000)
    assert runs(agent) == 1 and again.error_of(name).code == codes.TIMEOUT
