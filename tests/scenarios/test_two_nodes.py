"""A caller at one node and an agent at another: nobody can tell."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.registry_pb2 import AgentStatus
from reach.core import lookups, nodes, remote
from tests.support.cores import Cores


def test_a_request_reaches_an_agent_of_another_node_and_its_answer_comes_back() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request("hello")
    assert agent.has(message)
    delivered = agent.got(message)
    assert delivered.recipient == "echo/1" and delivered.hop_count == 1 and delivered.attempt == 1
    assert [hop.agent_id for hop in delivered.path] == ["echo/1"]
    assert delivered.source == caller.peer.caller_id  # type: ignore[union-attr]
    agent.answer(message, "hi there")
    assert caller.text_of(message) == "hi there"
    assert caller.reply_to(message).source == "echo/1"
    cores.assert_settled()


def test_it_works_the_other_way_round_too() -> None:
    cores = Cores(2)
    home, entry = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request()
    agent.answer(message, "yes")
    assert caller.text_of(message) == "yes"
    cores.assert_settled()


def test_an_agents_error_is_the_callers_error() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request()
    agent.refuse(message, codes.REJECTED)
    error = caller.error_of(message)
    assert error.code == codes.REJECTED and error.agent_id == "echo/1"
    cores.assert_settled()


def test_a_cancel_reaches_the_agent() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request()
    caller.cancel(message)
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    assert caller.error_of(message).code == codes.CANCELLED
    cores.assert_settled()


def test_the_deadline_is_the_entrys_and_the_agent_is_told() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=1000)
    cores.advance(1.2)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and error.may_have_executed
    assert agent.cancels
    cores.assert_settled()


def test_items_of_a_streamed_reply_come_in_order_and_credit_goes_back() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request()
    for number in range(50):
        agent.answer(message, f"item {number}", more=True)
    agent.answer(message, "end")
    texts = [reply.payload.text for reply in caller.replies_to(message)]
    assert texts == [*(f"item {number}" for number in range(50)), "end"]
    assert [reply.sequence for reply in caller.replies_to(message)] == list(range(51))
    cores.assert_settled()


def test_slots_are_the_homes_and_a_refusal_is_no_attempt() -> None:
    cores = Cores(3)
    one, two, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    first, second = one.caller(), two.caller()
    cores.views_stand = True
    held = first.request()
    other = second.request(timeout_ms=3000)  # node two has not heard yet that the slot is taken
    assert not agent.has(other)
    agent.answer(held, "done")
    cores.advance(1.0)
    assert agent.has(other) and agent.got(other).attempt == 1
    agent.answer(other, "done")
    assert second.text_of(other) == "done"
    assert second.reply_to(other).error.attempts == 0
    cores.assert_settled()


def test_an_agent_that_left_its_home_is_not_chosen_there_but_elsewhere() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    other = entry.agent("echo/2")
    other.say(AgentStatus.DEGRADED)  # so that the remote one is preferred
    caller = entry.caller()
    cores.views_stand = True
    agent.leave()
    message = caller.request()
    assert other.has(message)
    other.answer(message, "here")
    assert caller.text_of(message) == "here"
    cores.views_stand = False
    cores.assert_settled()


def test_an_agent_lost_at_its_home_is_lost_for_the_caller_with_may_have_executed() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=20_000)
    agent.cut()
    cores.advance(4.0)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(30.0)
    cores.assert_settled()


def test_a_cut_between_nodes_that_mends_loses_nothing() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=20_000)
    cores.cut(entry, home)
    agent.answer(message, "kept")
    cores.advance(2.0)
    assert not caller.replies_to(message)
    cores.link(entry, home)
    assert caller.text_of(message) == "kept"
    cores.assert_settled()


def test_a_killed_homes_agent_that_comes_back_by_another_node_gets_the_request_again() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=20_000)
    assert agent.has(message)
    cores.kill(home)
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(1.0)
    assert again.has(message) and not again.got(message).fresh
    again.answer(message, "done once")
    assert caller.text_of(message) == "done once"
    cores.assert_settled()


def test_a_killed_homes_agent_that_does_not_come_back_is_lost_after_the_resume_window() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    assert agent.has(message)
    cores.kill(home)
    cores.advance(9.0)
    assert not caller.replies_to(message)
    cores.advance(2.0)
    assert caller.error_of(message).code == codes.AGENT_LOST
    cores.advance(90.0)
    cores.assert_settled()


def test_a_nested_call_over_nodes_counts_agents_and_not_nodes() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    outer, inner = two.agent("outer/1"), one.agent("inner/1")
    caller = one.caller()
    message = caller.request(agent_type="outer")
    nested = outer.call_from(message, agent_type="inner")
    assert inner.got(nested).hop_count == 2
    assert [hop.agent_id for hop in inner.got(nested).path] == ["outer/1", "inner/1"]
    inner.answer(nested, "in")
    assert outer.text_of(nested) == "in"
    outer.answer(message, "out")
    assert caller.text_of(message) == "out"
    cores.assert_settled()


def test_a_status_change_is_known_at_every_node_at_once() -> None:
    cores = Cores(3)
    one, two, home = cores.nodes
    agent = home.agent("echo/1")
    assert one.status("echo/1") == two.status("echo/1") == AgentStatus.HEALTHY
    agent.say(AgentStatus.DRAINING)
    assert one.status("echo/1") == two.status("echo/1") == AgentStatus.DRAINING
    cores.assert_settled()


def test_an_agent_that_moves_to_another_node_is_known_there_alone() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    agent = one.agent("echo/1")
    moved = two.process("echo-1")
    moved.incarnation = agent.incarnation
    moved.forget()
    moved.connect(*agent.agents.values())
    assert one.attachment("echo/1").remote and not two.attachment("echo/1").remote
    caller = one.caller()
    message = caller.request()
    assert moved.has(message)
    moved.answer(message, "ok")
    assert caller.text_of(message) == "ok"
    cores.assert_settled()


# ---- events ----


def test_an_event_reaches_subscribers_at_every_node_and_crosses_once_to_each() -> None:
    cores = Cores(3)
    one, two, three = cores.nodes
    subscribers = [core.caller(f"s{number}") for number, core in enumerate((one, two, two, three))]
    for subscriber in subscribers:
        subscriber.subscribe("news")
    crossed = two.state.nodes["n0"].link.last_accepted
    publisher = one.caller("publisher")
    event = publisher.publish("news")
    assert [len(subscriber.events) for subscriber in subscribers] == [1, 1, 1, 1]
    assert two.state.nodes["n0"].link.last_accepted == crossed + 1
    counts = publisher.reply_to(event).payload.json.struct_value.fields
    assert counts["matched"].number_value == counts["accepted"].number_value == 4
    cores.assert_settled()


def test_whoever_unsubscribes_or_goes_gets_no_event_from_other_nodes() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    subscriber = two.caller("s")
    subscriber.subscribe("news")
    publisher = one.caller("publisher")
    subscriber.leave()
    event = publisher.publish("news")
    assert publisher.reply_to(event).payload.json.struct_value.fields["matched"].number_value == 0
    assert not one.state.crossings
    cores.assert_settled()


def test_a_subscriber_that_came_before_the_nodes_were_linked_is_known_after() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    cores.cut(one, two)
    cores.advance(11.0)
    subscriber = two.caller("s")
    subscriber.subscribe("news")
    cores.link(one, two)
    publisher = one.caller("publisher")
    publisher.publish("news")
    assert len(subscriber.events) == 1
    cores.assert_settled()


def test_an_event_to_a_selector_reaches_an_agent_of_another_node() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    agents = [two.agent("echo/1"), one.agent("echo/2"), two.agent("echo/3")]
    publisher = one.caller("publisher")
    publisher.publish(agent_type="echo", broadcast=True)
    assert [len(agent.events) for agent in agents] == [1, 1, 1]
    assert agents[0].events[0].recipient == "echo/1" and agents[0].events[0].hop_count == 1
    cores.assert_settled()


def test_what_a_node_does_not_answer_counts_as_unknown() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    subscriber = two.caller("s")
    subscriber.subscribe("news")
    cores.kill(two)
    publisher = one.caller("publisher")
    event = publisher.publish("news")
    cores.advance(2.5)
    counts = publisher.reply_to(event).payload.json.struct_value.fields
    assert counts["unknown"].number_value == 1
    assert not one.state.crossings


# ---- agents that are registered nowhere for a while ----


def test_an_agent_whose_key_ends_with_its_dead_home_gets_its_request_again_where_it_comes_back() -> None:
    cores = Cores(3)
    entry, home, other = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=30_000)
    record = entry.attachment("echo/1").agent
    cores.kill(home)
    cores.gone.append((home, record, record.generation))  # the lease of its home has ended
    cores.advance(2.0)
    assert entry.state.directory.get("default", "production", "echo/1") is None
    assert not caller.replies_to(message), "the process may live, and come to another node"
    again = other.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    cores.advance(0.5)
    assert again.has(message) and not again.got(message).fresh
    again.answer(message, "late but once")
    assert caller.text_of(message) == "late but once"
    cores.advance(1.0)
    assert not entry.state.orphans
    cores.assert_settled()


def test_one_that_comes_back_to_the_callers_own_node_gets_it_there() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=30_000)
    record = entry.attachment("echo/1").agent
    cores.kill(home)
    cores.gone.append((home, record, record.generation))
    cores.advance(1.0)
    again = entry.process("echo-1")
    again.incarnation = agent.incarnation
    again.forget()
    again.connect(*agent.agents.values())
    assert again.has(message)
    again.answer(message, "here")
    assert caller.text_of(message) == "here"
    cores.assert_settled()


def test_one_that_does_not_come_back_is_lost_when_the_resume_window_is_over() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    record = entry.attachment("echo/1").agent
    cores.kill(home)
    cores.gone.append((home, record, record.generation))
    cores.advance(9.0)
    assert not caller.replies_to(message)
    cores.advance(1.5)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    cores.advance(90.0)
    cores.assert_settled()


def test_an_agent_that_left_while_its_answer_was_on_the_way_has_answered() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=30_000)
    record = entry.attachment("echo/1").agent
    entry.state.nodes["n1"].told.clear()
    cores.gone.append((home, record, record.generation))
    cores.pump()
    agent.answer(message, "it was under way")
    assert caller.text_of(message) == "it was under way"
    cores.advance(1.0)
    assert not entry.state.orphans
    cores.assert_settled()


def test_a_node_that_is_not_in_the_registry_or_is_another_start_than_the_one_there_is_not_welcome() -> None:
    cores = Cores(2)
    dialler, core = cores.nodes
    with core.step() as state:
        state.view_complete_at = state.now
    known = nodes.hello_for(dialler.state, nodes.of(dialler.state, core.node_id))
    assert not nodes.refusal(core.state, known)
    stranger, namesake = frames.NodeHello(), frames.NodeHello()
    stranger.CopyFrom(known)
    stranger.node_id = "a-stranger"
    namesake.CopyFrom(known)
    namesake.incarnation = b"another process."
    assert "a-stranger is not registered" in nodes.refusal(core.state, stranger)
    assert f"{dialler.node_id} is not registered" in nodes.refusal(core.state, namesake)
    cores.cut(dialler, core)
    with core.step() as state:
        remote.node_gone(state, dialler.node_id)
    assert not nodes.refusal(core.state, known), "it was linked before: it may only have lost its registry"
    core.see(dialler)
    assert not nodes.refusal(core.state, known)


def test_a_view_that_is_too_old_to_know_turns_no_node_away() -> None:
    cores = Cores(2)
    dialler, core = cores.nodes
    hello = nodes.hello_for(dialler.state, nodes.of(dialler.state, core.node_id))
    hello.incarnation = b"another process."
    for age_s, welcome in ((lookups.OLD_S, False), (lookups.OLD_S + 0.1, True)):
        core.state.view_complete_at = core.state.now - age_s
        assert (not nodes.refusal(core.state, hello)) is welcome


# ---- a link between two nodes that both live ----


def test_a_partition_of_two_registered_nodes_cancels_nothing() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    cores.cut(entry, home)
    cores.advance(15.0)
    assert not agent.cancels and caller.error_of(message).code == codes.AGENT_LOST
    cores.link(entry, home)
    agent.answer(message, "kept")
    again = entry.caller("again")
    again.request(message_id=message, fresh=False)
    assert again.text_of(message) == "kept", "who asks again gets the answer"


def test_what_may_run_twice_goes_elsewhere_when_the_link_to_a_home_stays_cut() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000, idempotent=True)
    other = entry.agent("echo/2")
    cores.cut(entry, home)
    cores.advance(12.0)
    assert other.has(message)
    other.answer(message, "elsewhere")
    assert caller.text_of(message) == "elsewhere"


def test_a_leaving_nodes_callers_may_come_by_another_node_so_nothing_of_theirs_is_cancelled_at_once() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1")
    caller = entry.caller()
    message = caller.request(timeout_ms=60_000)
    with entry.step() as state:
        nodes.farewell(state)
    cores.pump()
    cores.cut(entry, home)
    cores.advance(5.0)
    assert agent.has(message) and not agent.cancels


def test_a_node_that_has_not_seen_the_registry_welcomes_no_other() -> None:
    cores = Cores(2)
    dialler, core = cores.nodes
    hello = nodes.hello_for(dialler.state, nodes.of(dialler.state, core.node_id))
    with core.step() as state:
        state.view_complete_at = float("-inf")  # as at its start
    assert "has not seen the registry yet" in nodes.refusal(core.state, hello)
