"""Plays: a principal, or a tenant, that is at a limit is told so; what it has goes on, and so does everybody else."""

from __future__ import annotations

from typing import Any

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Unsubscribed
from reach.core import mesh as core_mesh
from reach.core.ports import Identity
from reach.core.quotas import AGENTS, LINKS, SESSIONS, STREAMS, TOPICS, Account
from tests.support.core import CoreMesh, Process, record

ANNA, BOB = Identity("acme", "anna"), Identity("acme", "bob")
EVE = Identity("other", "eve")


def mesh(**limits: Any) -> CoreMesh:
    return CoreMesh(**limits)


def topics_refused(process: Process) -> list[Unsubscribed]:
    return [each.unsubscribed for each in process.signals if each.HasField("unsubscribed")]


def account(core: CoreMesh, who: Identity) -> Account:
    assert core.state.quotas is not None
    return core.state.quotas.of((who.tenant, who.principal), core.state.now)


def refused(error: Error, setting: str, whose: str) -> int:
    """It says which limit of whom, and when to try again: the milliseconds."""
    assert error.code == codes.OVERLOADED and error.retryable
    assert setting in error.message and whose in error.message, error.message
    assert error.retry_after_ms > 0
    return error.retry_after_ms


def refusals(core: CoreMesh, kind: str) -> int:
    return core.state.stats.quota_refusals[kind]


def test_without_limits_nothing_is_kept_of_anybody() -> None:
    core = CoreMesh()
    caller = core.caller(who=BOB)
    assert core.state.quotas is None and caller.peer is not None and caller.peer.account is None


def test_requests_beyond_a_second_s_worth_are_refused_until_the_time_that_is_told_and_others_are_not() -> None:
    core = mesh(principal_requests_per_s=10, quota_burst_s=1.0)
    core.agent(who=ANNA).handler = lambda agent, request: agent.answer(request, pump=False)
    core.agent(who=EVE).handler = lambda agent, request: agent.answer(request, pump=False)
    flood, calm, stranger = core.caller("flood", BOB), core.caller("calm", ANNA), core.caller("stranger", EVE)
    sent = [flood.request() for _ in range(30)]
    assert [flood.text_of(each) for each in sent[:10]] == ["ok"] * 10
    waits = [refused(flood.error_of(each), "principal_requests_per_s", "principal bob") for each in sent[10:]]
    assert len(set(waits)) == 1 and refusals(core, "requests_per_s") == 20
    assert all(caller.text_of(caller.request()) == "ok" for caller in (calm, stranger) for _ in range(5))
    core.advance((waits[0] - 2) / 1000)
    assert flood.error_of(flood.request())
    core.advance(0.002)
    assert flood.text_of(flood.request()) == "ok", "the time that was told is true"
    assert flood.error_of(flood.request()).code == codes.OVERLOADED
    core.assert_settled()


def test_a_refused_request_is_found_in_the_trace_like_any_other() -> None:
    core = mesh(principal_requests_per_s=1, quota_burst_s=1.0)
    caller = core.caller(who=BOB)
    caller.request()
    second = caller.request(trace_id="t" * 32)
    found = core.state.traces.find("t" * 32)
    assert [(each.message_id, each.outcome) for each in found] == [(second, "OVERLOADED")]


def test_a_tenant_s_limit_names_the_tenant_and_spares_the_others() -> None:
    core = mesh(tenant_requests_per_s=4, quota_burst_s=1.0)
    for who in (ANNA, EVE):
        core.agent(who=who).handler = lambda agent, request: agent.answer(request, pump=False)
    anna, bob, eve = core.caller("a", ANNA), core.caller("b", BOB), core.caller("e", EVE)
    assert [caller.text_of(caller.request()) for caller in (anna, bob, anna, bob)] == ["ok"] * 4
    error = bob.error_of(bob.request())
    refused(error, "tenant_requests_per_s", "tenant acme")
    assert "other" not in error.message
    assert eve.text_of(eve.request()) == "ok"


def test_events_and_calls_count_as_requests_do() -> None:
    core = mesh(principal_requests_per_s=2, quota_burst_s=1.0)
    caller = core.caller(who=BOB)
    caller.publish("news")
    call, _ = core.call(who=BOB)
    assert call.replies[-1].error.code == codes.NO_ROUTE
    refused(caller.error_of(caller.publish("news")), "principal_requests_per_s", "principal bob")
    call, _ = core.call(who=BOB)
    refused(call.replies[-1].error, "principal_requests_per_s", "principal bob")


def test_what_a_process_sends_again_after_a_cut_is_not_refused_though_it_is_all_at_once() -> None:
    core = mesh(principal_requests_per_s=10, quota_burst_s=1.0)
    agent, caller = core.agent(who=ANNA), core.caller(who=BOB)
    sent = [caller.request(timeout_ms=60_000) for _ in range(10)]
    for message_id in sent:
        caller.request(message_id=message_id, fresh=False, timeout_ms=60_000)
    assert not caller.replies, "they wait on"
    assert caller.error_of(caller.request()).code == codes.OVERLOADED
    eleventh = caller.request(message_id=sent[0], fresh=False, timeout_ms=60_000)
    assert caller.error_of(eleventh).may_have_executed, "there is an end to that too, and it tells no lie"
    for message_id in sent[1:]:
        agent.answer(message_id)
        assert caller.text_of(message_id) == "ok"
    agent.answer(sent[0])
    core.assert_settled()


def test_bytes_beyond_the_limit_refuse_new_work_and_let_answers_through() -> None:
    core = mesh(principal_bytes_per_s=10_000, quota_burst_s=1.0)
    agent = core.agent(who=BOB)
    caller, other = core.caller("c", BOB), core.caller("o", ANNA)
    first = caller.request("x" * 30_000, timeout_ms=60_000)
    assert agent.has(first)
    late = caller.request("small")
    wait_ms = refused(caller.error_of(late), "principal_bytes_per_s", "principal bob")
    caller.request("x" * 30_000, message_id=first, fresh=False, timeout_ms=60_000)
    assert not caller.replies_to(first), "what it sends again waits on: it has had its bytes"
    assert 2_000 < wait_ms < 2_300 and refusals(core, "bytes_per_s") == 1
    assert agent.has(other.request("x" * 5_000))
    agent.answer(first, "y" * 20_000)
    assert caller.text_of(first) == "y" * 20_000, "the agent is the same principal's, and its answer is due"
    core.advance(wait_ms / 1000)
    assert agent.has(caller.request("small"))


def test_a_link_too_many_is_refused_at_hello_and_one_that_comes_back_is_not() -> None:
    core = mesh(principal_links_max=2)
    first, second = core.caller("one", BOB), core.caller("two", BOB)
    third = core.caller("three", BOB)
    assert first.welcome is not None and second.welcome is not None and third.peer is None
    assert core.caller("other", ANNA).welcome is not None
    assert refusals(core, "links_max") == 1
    first.cut()
    assert first.connect() is not None, "it has its place"
    second.leave()
    assert third.connect() is not None
    assert account(core, BOB).counts[LINKS] == 2


def test_agents_are_counted_over_all_links_of_their_principal_and_with_those_on_their_way_in() -> None:
    core = mesh(principal_agents_max=3)
    one = core.process("one", record("echo/1"), record("echo/2"), who=BOB)
    core.holds_registrations = True
    two = core.process("two", record("echo/3"), record("echo/4"), who=BOB)
    core.holds_registrations = False
    core.answer_store()
    core.pump()
    assert two.welcome is not None
    answers = {each.agent_id: each for each in two.welcome.agents}
    assert answers["echo/3"].generation and not answers["echo/3"].HasField("error")
    refused(answers["echo/4"].error, "principal_agents_max", "principal bob")
    assert core.process("others", record("echo/5"), who=ANNA).welcome is not None
    assert account(core, BOB).counts[AGENTS] == 0, "they stand in the directory now"
    again = core.process("successor", record("echo/1"), who=BOB)
    assert again.welcome is not None and again.welcome.agents[0].generation, "who takes a place over needs none"
    one.leave()
    assert core.process("three", record("echo/6"), who=BOB).welcome.agents[0].generation  # type: ignore[union-attr]


def test_agents_of_a_tenant_are_those_of_all_nodes() -> None:
    core = mesh(tenant_agents_max=2)
    directory = core.state.directory
    core.process("one", record("echo/1"), who=ANNA)
    directory.of_tenant["acme"] += 1  # as one that another node registered is
    late = core.process("two", record("echo/2"), who=BOB)
    assert late.welcome is not None
    refused(late.welcome.agents[0].error, "tenant_agents_max", "tenant acme")


def test_a_new_conversation_too_many_is_refused_and_those_that_run_go_on_until_they_are_forgotten() -> None:
    core = mesh(principal_sessions_max=2, session_ttl_s=100.0)
    core.agent(who=ANNA).handler = lambda agent, request: agent.answer(request, pump=False)
    caller = core.caller(who=BOB)
    for name in ("a", "b", "a", "b"):
        assert caller.text_of(caller.request(session_id=name)) == "ok"
    refused(caller.error_of(caller.request(session_id="c")), "principal_sessions_max", "principal bob")
    anna = core.caller("anna", ANNA)
    assert anna.text_of(anna.request(session_id="d")) == "ok"
    core.advance(101)
    assert account(core, BOB).counts[SESSIONS] == 0
    assert caller.text_of(caller.request(session_id="c")) == "ok"
    core.assert_settled()


def test_sessions_that_never_find_an_agent_take_no_place() -> None:
    core = mesh(principal_sessions_max=1)
    caller = core.caller(who=BOB)
    for number in range(3):
        assert caller.error_of(caller.request(session_id=f"s{number}")).code == codes.NO_ROUTE
    assert account(core, BOB).counts[SESSIONS] == 0


def test_a_subscription_too_many_is_refused_with_its_topic_and_its_place_comes_back() -> None:
    core = mesh(principal_topics_max=2)
    one, two = core.caller("one", BOB), core.caller("two", BOB)
    one.subscribe("a")
    two.subscribe("a", "b")
    assert [list(each.topics) for each in topics_refused(two)] == [["b"]]
    refused(topics_refused(two)[0].error, "principal_topics_max", "principal bob")
    two.subscribe("a")
    assert len(topics_refused(two)) == 1, "it has that one"
    one.leave()
    two.subscribe("b")
    assert len(topics_refused(two)) == 1 and account(core, BOB).counts[TOPICS] == 2
    two.leave()
    assert account(core, BOB).is_idle(core.state.now)


def streams(core: CoreMesh, caller: Process, agent: Process, count: int) -> list[str]:
    sent = [caller.request(timeout_ms=60_000) for _ in range(count)]
    for message_id in sent:
        agent.answer(message_id, "item", more=True)
    return sent


def test_a_streamed_reply_too_many_ends_with_an_error_and_its_handler_is_told() -> None:
    core = mesh(principal_streams_max=2)
    agent, caller = core.agent(who=ANNA), core.caller(who=BOB)
    one, two, three = streams(core, caller, agent, 3)
    error = caller.error_of(three)
    refused(error, "principal_streams_max", "principal bob")
    assert error.may_have_executed and not [each for each in caller.replies_to(three) if each.more]
    plain = caller.request()
    agent.answer(plain)
    assert caller.text_of(plain) == "ok", "what is no stream is not meant"
    agent.answer(one, "end", sequence=1)
    (four,) = streams(core, caller, agent, 1)
    caller.cancel(two)
    agent.answer(four, "end", sequence=1)
    assert caller.text_of(four) == "end"
    assert account(core, BOB).counts[STREAMS] == 0
    core.advance(10)
    core.assert_settled()


def test_a_call_for_a_stream_counts_from_its_start_until_it_ends_or_its_client_hangs_up() -> None:
    core = mesh(principal_streams_max=2)
    agent = core.agent(who=ANNA)
    (one, first), (two, second) = core.call(who=BOB, streaming=True), core.call(who=BOB, streaming=True)
    three, _ = core.call(who=BOB, streaming=True)
    refused(three.replies[-1].error, "principal_streams_max", "principal bob")
    assert three.done and not one.done and not two.done and len(agent.requests) == 2
    plain, _ = core.call(who=BOB)
    assert not plain.done
    agent.answer(first.message_id)
    assert account(core, BOB).counts[STREAMS] == 1
    with core.step() as state:
        core_mesh.hang_up(state, two, BOB)
    assert account(core, BOB).counts[STREAMS] == 0
    assert not core.call(who=BOB, streaming=True)[0].done
    assert second.message_id
