"""What a home and an entry hold to, each case left standing by a mutation of the code before it was written."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import AttemptState, Found, Goodbye, Loads, Signal, Unsubscribe
from agentreach.v1.registry_pb2 import AgentLoad, AgentStatus
from agentreach.wire.errors import failure
from reach.core import crossing, fence, loads, nodes, once, refusals, remote
from reach.core.agents import HEALTHY, Agent
from reach.core.ports import ANYBODY
from reach.core.requests import Request
from tests.support.core import Process
from tests.support.cores import Cores, NodeCore

SCOPE = ("default", "production")


def silence(cores: Cores, one: NodeCore, other: NodeCore) -> None:
    """Nothing that they say from now on arrives; neither has noticed yet."""
    cores._cut.add(frozenset((one.node_id, other.node_id)))


def seen(core: NodeCore, agent_id: str = "echo/1") -> Agent:
    found = core.state.directory.get(*SCOPE, agent_id)
    assert found is not None
    return found


def another_life(cores: Cores, core: NodeCore) -> NodeCore:
    """The node is killed and started anew under its id."""
    cores.kill(core)
    life = NodeCore(cores, core.node_id, 77)
    cores.nodes[cores.nodes.index(core)] = life
    cores._introduce(life)
    for other in cores.nodes:
        if other is not life:
            cores.link(life, other)
    return life


# ---- the entry is lost ----


def test_what_an_entry_that_was_started_anew_had_asked_for_is_cancelled_when_its_caller_does_not_come_back() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    another_life(cores, entry)
    cores.advance(9.0)
    assert not agent.cancels
    cores.advance(2.0)
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    home.assert_settled()


def test_a_caller_that_comes_back_to_an_entry_that_was_started_anew_joins_what_runs_at_the_home() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request("same", timeout_ms=60_000)
    life = another_life(cores, entry)
    cores.advance(1.0)
    again = life.caller()
    again.request("same", message_id=message, fresh=False, timeout_ms=60_000)
    cores.advance(1.0)
    assert {each.message_id for each in agent.requests} == {message} and not agent.cancels
    agent.answer(message, "once")
    assert again.text_of(message) == "once"
    cores.advance(30.0)
    cores.assert_settled()


@pytest.mark.parametrize("ended", [True, False])
def test_what_was_told_to_end_with_its_entry_is_not_run_again(ended: bool) -> None:
    """It has run, if only in part; the agent has forgotten what it was told to end, and the entry is gone."""
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    agent.confirms_cancels = ended
    message = caller.request("same", timeout_ms=60_000)
    agent.requests.clear()  # as an agent's table does when it is told to end it
    cores.kill(entry)
    cores.advance(11.0)
    again = other.caller()
    again.request("same", message_id=message, fresh=False, timeout_ms=60_000)
    cores.advance(1.0)
    assert not agent.requests
    error = again.error_of(message)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(30.0)
    cores.assert_settled()


def test_what_an_entry_that_does_not_come_back_had_asked_for_is_cancelled_after_its_window() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    cores.kill(entry)
    cores.advance(9.0)
    assert not agent.cancels
    cores.advance(2.0)
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    home.assert_settled()


def test_what_an_entry_that_left_had_asked_for_is_cancelled_when_its_callers_have_not_come_by_another_node() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    with home.step() as state:
        nodes.said_goodbye(state, state.nodes[entry.node_id], Goodbye(code=Goodbye.SHUTDOWN))
        remote.node_gone(state, entry.node_id)
    home.advance_alone(9.0)
    assert not agent.cancels
    home.advance_alone(2.0)
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]


def test_topics_of_a_node_that_does_not_come_back_are_wanted_there_no_more() -> None:
    cores = Cores(2)
    one, other = cores.nodes
    other.caller().subscribe("news")
    topic = (*SCOPE, "news")
    assert one.state.interests.of(topic)
    cores.kill(other)
    cores.advance(11.0)
    assert not one.state.interests.of(topic)


# ---- the home is lost ----


def test_what_a_home_that_was_started_anew_had_accepted_waits_for_its_agent_and_is_not_given_to_another() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=20_000)
    assert agent.has(message)
    another_life(cores, home)
    (request,) = entry.state.requests.values()
    assert request.forgotten and request.lost_at
    cores.advance(11.0)
    assert caller.error_of(message).code == codes.AGENT_LOST
    cores.advance(60.0)
    cores.assert_settled()


def test_a_link_that_says_nothing_for_twenty_seconds_is_cut() -> None:
    cores = Cores(2)
    one, other = cores.nodes
    silence(cores, one, other)
    cores.advance(19.0)
    assert one.state.nodes[other.node_id].connected
    cores.advance(7.0)
    assert not one.state.nodes[other.node_id].connected
    assert "nothing heard" in one.state.nodes[other.node_id].why_down


def test_what_waits_for_a_node_that_does_not_come_back_is_not_kept_for_another_life_of_it() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    silence(cores, entry, home)
    caller.request(timeout_ms=60_000)
    cores.advance(40.0)
    assert not list(entry.state.nodes[home.node_id].link.outstanding())
    cores.link(entry, home)
    assert not agent.requests
    cores.advance(60.0)
    cores.assert_settled()


# ---- what is seen late ----


def test_a_record_that_is_older_than_the_known_one_changes_nothing() -> None:
    cores = Cores(3)
    entry, home, former = cores.nodes
    home.agent("echo/1")
    old = seen(entry).to_record()
    old.node_id = former.node_id
    with entry.step() as state:
        remote.agent_seen(state, old, seen(entry).generation - 1)
    assert seen(entry).node_id == home.node_id
    with entry.step() as state:
        remote.agent_gone(state, *SCOPE, "echo/1", seen(entry).generation - 1)
    assert seen(entry).status == HEALTHY and not state.nodes[home.node_id].unregistered


def test_a_home_that_tells_of_another_process_of_that_name_does_not_keep_the_former_registered() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    node = entry.state.nodes[home.node_id]
    node.told[*SCOPE, "echo/1"].incarnation = b"another"
    with entry.step() as state:
        remote.agent_gone(state, *SCOPE, "echo/1", seen(entry).generation)
    assert state.directory.get(*SCOPE, "echo/1") is None


def test_that_a_former_process_is_gone_says_nothing_of_its_successor() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    gone = AgentLoad(agent_id="echo/1", tenant="default", env="production", incarnation=b"former")
    gone.status = AgentStatus.UNREACHABLE
    with entry.step() as state:
        loads.heard(state, state.nodes[home.node_id], Loads(agents=[gone]))
    assert seen(entry).status == HEALTHY


def test_a_complete_word_replaces_all_that_was_said_before_in_however_many_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loads, "AGENTS_A_SIGNAL", 1)
    cores = Cores(2)
    entry, home = cores.nodes
    for number in range(3):
        home.agent(f"echo/{number}")
    told = entry.state.nodes[home.node_id].told
    told[*SCOPE, "echo/left"] = AgentLoad(agent_id="echo/left")
    with home.step() as state:
        loads.tell_all(state, state.nodes[entry.node_id])
    cores.pump()
    assert sorted(key[2] for key in told) == ["echo/0", "echo/1", "echo/2"]


def test_what_a_home_says_of_another_attempt_or_another_home_is_not_believed() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    (request,) = entry.state.requests.values()
    for node_id, attempt in ((home.node_id, 2), (other.node_id, 1)):
        word = AttemptState(entry=request.entry, attempt=attempt, state=AttemptState.LOST)
        word.why.code = codes.AGENT_LOST
        with entry.step() as state:
            refusals.told(state, state.nodes[node_id], word)
        cores.pump()
    assert not caller.replies_to(message)
    agent.answer(message, "yes")
    assert caller.text_of(message) == "yes"
    cores.assert_settled()


# ---- the home retries nothing, keeps nothing, and joins what is equal ----


def test_a_home_tries_no_visiting_request_again_and_keeps_no_outcome_of_it() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agents = [home.agent("echo/1"), home.agent("echo/2")]
    caller = entry.caller()
    message = caller.request(idempotent=True, timeout_ms=60_000)
    failed, other = agents if agents[0].requests else agents[::-1]
    failed.answer(message, error=failure(codes.AGENT_ERROR, "once more", retryable=True))
    cores.advance(2.0)
    (request,) = entry.state.requests.values()
    assert request.attempt == 2 and other.got(message).attempt == 2, "the entry has tried it again"
    other.answer(message, "yes")
    assert caller.text_of(message) == "yes"
    assert not len(home.state.replay)
    cores.assert_settled()


def test_a_home_joins_equal_messages_of_two_nodes_for_as_long_as_either_waits_and_refuses_others() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, near, far = home.agent("echo/1"), home.caller("near"), entry.caller("far")
    message = near.request("same", message_id="m", timeout_ms=1_000)
    far.request("same", message_id="m", timeout_ms=60_000)
    cores.advance(2.0)
    assert near.error_of(message).code == codes.TIMEOUT and not agent.cancels and len(agent.requests) == 1
    agent.answer(message, "once")
    assert far.text_of(message) == "once"
    near.request("one", message_id="k", timeout_ms=60_000)
    far.request("another", message_id="k", timeout_ms=60_000)
    assert far.error_of("k").code == codes.IDEMPOTENCY_CONFLICT
    agent.answer("k", "one")
    cores.assert_settled()


def test_items_come_before_the_news_that_their_agent_was_lost() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    silence(cores, entry, home)
    for number in range(3):
        agent.answer(message, f"item {number}", more=True)
    agent.cut()
    cores.advance(8.0)
    cores._cut.clear()
    cores.pump()
    replies = caller.replies_to(message)
    assert [reply.payload.text for reply in replies[:-1]] == ["item 0", "item 1", "item 2"]
    assert replies[-1].error.code == codes.AGENT_LOST
    cores.advance(60.0)
    cores.assert_settled()


# ---- once ----


def test_a_message_does_not_run_while_a_linked_node_says_nothing() -> None:
    cores = Cores(2)
    entry, other = cores.nodes
    agent, caller = entry.agent("echo/1"), entry.caller()
    silence(cores, entry, other)
    entry.state.nodes[other.node_id].draining = True  # so that this node owns the message, and asks
    message = caller.request(fresh=False, timeout_ms=60_000)
    cores.advance(9.0)
    assert not agent.requests and not caller.replies_to(message)
    cores.advance(3.0)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_LOST and error.may_have_executed and other.node_id in error.message
    assert not agent.requests


def test_a_message_does_not_run_elsewhere_while_an_agent_that_may_have_it_is_out_of_reach() -> None:
    cores = Cores(2)
    entry, other = cores.nodes
    away, there = entry.agent("echo/away"), entry.agent("echo/there")
    caller = entry.caller()
    away.cut()
    entry.state.nodes[other.node_id].draining = True
    message = caller.request(fresh=False, timeout_ms=60_000)
    cores.advance(3.0)
    assert not there.requests
    away.connect()
    cores.advance(1.0)
    holder = next(each for each in (away, there) if each.has(message))
    holder.answer(message, "now")
    assert caller.text_of(message) == "now"


def test_an_answer_is_found_at_the_node_that_keeps_it_when_its_agent_is_gone() -> None:
    cores = Cores(2)
    entry, other = cores.nodes
    agent, first = entry.agent("echo/1"), entry.caller()
    for node in (*entry.state.nodes.values(), *other.state.nodes.values()):
        node.draining = True  # each owns what enters there
    message = first.request("same", fresh=False, timeout_ms=60_000, idempotent=True)
    cores.advance(0.1)
    agent.answer(message, "done")
    agent.leave()
    second = other.caller("second")
    second.request("same", message_id=message, fresh=False, timeout_ms=60_000, idempotent=True)
    cores.advance(1.0)
    assert second.text_of(message) == "done"


# ---- the fence ----


def test_a_word_that_is_older_than_five_seconds_keeps_no_session_served() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    with home.step() as state:
        fence.use(state, _Over())
        node = state.nodes[other.node_id]
        node.honoured_at = state.now - 5.0
        assert fence.holds(state)
        node.honoured_at = state.now - 5.1
        assert not fence.holds(state)


def test_a_lease_counts_no_longer_a_second_before_its_end() -> None:
    cores = Cores(2)
    home, _ = cores.nodes
    with home.step() as state:
        lease = _Over()
        fence.use(state, lease)
        lease.valid_until = state.now + 1.1
        assert fence.holds(state)
        lease.valid_until = state.now + 1.0
        assert not fence.holds(state)


def test_a_home_that_is_linked_and_not_registered_keeps_its_sessions() -> None:
    cores = Cores(2)
    one, other = cores.nodes
    with one.step() as state:
        remote.node_gone(state, other.node_id)
        assert not fence.may_void(state, other.node_id, 3600.0)


class _Over:
    """A lease that has ended."""

    valid_until = 0.0


# ---- waiting over nodes ----


def test_what_waits_elsewhere_counts_by_its_own_level_and_age_however_late_it_is_told() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=60_000)
    cores.advance(1.0)
    oldest = far.request(timeout_ms=60_000)
    cores.advance(1.0)
    younger = near.request(timeout_ms=60_000)
    cores.cut(entry, home)
    cores.link(entry, home)  # what was wanted is told anew
    cores.advance(1.0)
    high = far.request(timeout_ms=60_000, priority=pb.HIGH)
    cores.advance(1.0)
    order = []
    for _ in range(4):
        (running,) = agent.running.values()
        order.append(running.message_id)
        agent.answer(running)
        cores.advance(0.1)
    assert order == [held, high, oldest, younger]
    cores.advance(3.0)
    cores.assert_settled()


# ---- once, asked of others ----


def test_a_node_says_nothing_while_one_of_its_processes_says_nothing() -> None:
    cores = Cores(2)
    entry, other = cores.nodes
    silent, caller = other.agent("echo/1"), entry.caller()
    silent.answers_lookups = False
    entry.state.nodes[other.node_id].draining = True  # so that this node owns the message, and asks
    message = caller.request(fresh=False, timeout_ms=60_000)
    cores.advance(9.0)
    assert not silent.requests and not caller.replies_to(message)
    silent.answers_lookups = True
    cores.advance(1.0)
    silent.answer(message, "it was not there")
    assert caller.text_of(message) == "it was not there"
    cores.assert_settled()


def test_an_answer_to_an_earlier_round_of_questions_does_not_count_in_this_one() -> None:
    cores = Cores(2)
    entry, other = cores.nodes
    entry.agent("echo/1")
    silence(cores, entry, other)
    node = entry.state.nodes[other.node_id]
    node.draining = True
    entry.caller().request(fresh=False, timeout_ms=60_000)
    cores.advance(0.7)
    (inquiry,) = entry.state.inquiries.values()
    with entry.step() as state:
        once.told(state, node, Found(nonce=inquiry.nonce - 1))
    assert node in inquiry.waiting
    with entry.step() as state:
        once.told(state, node, Found(nonce=inquiry.nonce))
    assert node not in inquiry.waiting


def owned(entry: NodeCore, caller: Process, owner: NodeCore) -> str:
    """Send a message that is not fresh, and that this node owns."""
    while True:
        envelope = entry.envelope(fresh=False, timeout_ms=20_000)
        found = once.owner(entry.state, (ANYBODY.tenant, ANYBODY.principal, "production", envelope.message_id))
        if found is not None and found.node_id == owner.node_id:
            caller.send(envelope)
            entry.pump()
            return envelope.message_id


def test_a_stream_whose_owner_is_lost_midway_does_not_begin_anew() -> None:
    cores = Cores(3)
    owner, entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = owned(entry, caller, owner)
    assert entry.state.relayed
    agent.answer(message, "item 0", more=True)
    cores.kill(owner)
    cores.advance(60.0)
    assert [each.message_id for each in agent.requests] == [message]
    replies = caller.replies_to(message)
    assert [reply.payload.text for reply in replies[:-1]] == ["item 0"] and replies[-1].error.may_have_executed


def test_what_an_owner_that_is_lost_may_have_had_run_is_told_so() -> None:
    cores = Cores(2)
    owner, entry = cores.nodes
    owner.agent("echo/1")
    caller = entry.caller()
    message = owned(entry, caller, owner)
    cores.kill(owner)
    entry.state.nodes[owner.node_id].dead = True
    cores.advance(25.0)
    assert caller.error_of(message).may_have_executed


# ---- the fence of this node is not that of others ----


def test_a_node_without_its_lease_cancels_no_turn_of_an_owner_at_another_node() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.pins = entry.pins
    agent, caller = home.agent("chat/1"), entry.caller()
    turn = caller.request(agent_type="chat", session_id="s", timeout_ms=60_000)
    with entry.step() as state:
        fence.use(state, _Over())
        assert not fence.holds(state)
    cores.pump()
    assert not agent.cancels
    agent.answer(turn, "on")
    assert caller.text_of(turn) == "on"
    cores.assert_settled()


# ---- events ----


def test_a_topic_that_nobody_wants_any_more_since_the_link_was_cut_is_forgotten_when_it_is_back() -> None:
    cores = Cores(2)
    one, other = cores.nodes
    subscriber = other.caller()
    subscriber.subscribe("news", "sport", "weather")
    subscriber.signal(Signal(unsubscribe=Unsubscribe(topics=["weather"])))
    cores.pump()
    assert not one.state.interests.of((*SCOPE, "weather"))
    cores.cut(one, other)
    subscriber.signal(Signal(unsubscribe=Unsubscribe(topics=["news"])))
    cores.pump()
    cores.link(one, other)
    assert not one.state.interests.of((*SCOPE, "news")) and one.state.interests.of((*SCOPE, "sport"))


def test_what_goes_on_with_an_event_is_said_by_the_node_that_was_asked_alone() -> None:
    cores = Cores(3)
    one, other, third = cores.nodes
    subscriber, publisher = other.caller("subscriber"), one.caller("publisher")
    subscriber.subscribe("news")
    silence(cores, one, other)
    publisher.publish("news", timeout_ms=2_000)
    (number,) = one.state.crossings
    lie = Envelope(type=pb.RESPONSE, entry=one.state.nonce + number.to_bytes(8, "big"))
    with one.step() as state:
        crossing.counted(state, state.nodes[third.node_id], lie)
    assert one.state.crossings
    cores.advance(3.0)
    assert not one.state.crossings


# ---- refusals ----


def refused(core: NodeCore, node: NodeCore, code: codes.ErrorCode.ValueType, *, moved: bool = False) -> Request:
    """The home of the only request in flight says no."""
    (request,) = core.state.requests.values()
    state = AttemptState.LOST if moved else AttemptState.REFUSED
    word = AttemptState(entry=request.entry, attempt=request.attempt, state=state)
    word.why.CopyFrom(failure(code, "no", details={"moved": "true"} if moved else None))
    with core.step() as core_state:
        refusals.told(core_state, core_state.nodes[node.node_id], word)
    return request


def test_three_refusals_of_homes_are_no_failed_attempt_and_the_fourth_is_one() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    for number in range(6):
        home.agent(f"echo/{number}")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    for _ in range(3):
        request = refused(entry, home, codes.FENCED)
        assert request.attempt == 1 and not request.excluded and not caller.replies_to(message)
    request = refused(entry, home, codes.FENCED)
    assert request.excluded or request.attempt == 2 or caller.replies_to(message)


@pytest.mark.parametrize(("ran", "told"), [(False, codes.CONNECT_FAILED), (True, codes.AGENT_LOST)])
def test_a_caller_is_never_told_fenced_but_whether_an_agent_may_have_had_it(
    ran: bool, told: codes.ErrorCode.ValueType
) -> None:
    """FENCED is what nodes tell each other; a storm showed it to a caller."""
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    for _ in range(30):
        if caller.replies_to(message):
            break
        (request,) = entry.state.requests.values()
        request.ran = ran
        if request.attachment is not None:
            refused(entry, home, codes.FENCED)
        cores.advance(1.0)
    error = caller.error_of(message)
    assert (error.code, error.may_have_executed, error.retryable) == (told, ran, not ran)


def test_a_home_that_is_leaving_is_asked_for_its_agent_no_more() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    entry.caller().request(timeout_ms=60_000)
    refused(entry, home, codes.SHUTTING_DOWN)
    assert seen(entry).status == AgentStatus.DRAINING


def test_what_had_moved_with_its_agent_waits_until_it_is_seen_where() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    request = refused(entry, home, codes.AGENT_LOST, moved=True)
    assert request.lost_at and not caller.replies_to(message)
    cores.advance(11.0)
    assert caller.error_of(message).code == codes.AGENT_LOST
