"""Plays of single attempts: what each leaves behind where it failed, where the next one may go, and who is told."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core.ports import Identity
from tests.support.core import CoreMesh, Process

AGAIN = failure(codes.AGENT_ERROR, "again", retryable=True)


def _two(core: CoreMesh, max_concurrency: int = 0) -> tuple[Process, Process]:
    one = core.agent("echo/1", max_concurrency=max_concurrency)
    return one, core.agent("echo/2", max_concurrency=max_concurrency)


def _name(process: Process) -> str:
    return next(iter(process.agents))


def _in_flight(core: CoreMesh, process: Process) -> int:
    return core.attachment(_name(process)).agent.in_flight


def _holder(core: CoreMesh, one: Process, two: Process) -> tuple[Process, Process]:
    """Who has the one attempt, and the other."""
    return (one, two) if core.attachment(_name(one)).attempts else (two, one)


# ---- what an attempt leaves behind ----


def test_what_was_never_sent_and_went_elsewhere_is_not_sent_when_the_link_is_back() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    one.frozen = two.frozen = True
    message = caller.request()
    held, other = _holder(core, one, two)
    other.frozen = False
    held.cut()
    other.answer(message)
    held.connect()
    assert not held.has(message) and not held.cancels
    core.advance(1)
    core.assert_settled()


def test_a_blink_of_a_link_with_unsent_requests_does_not_trip_its_agents_breaker() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    one.frozen = two.frozen = True
    for _ in range(12):
        caller.request(timeout_ms=60_000, agent_type="echo", policy=pb.ROUND_ROBIN)
    two.frozen = False
    core.pump()
    one.cut()
    assert len(two.requests) == 9, "what was not sent goes elsewhere, three at a time"
    one.connect()
    assert not core.attachment("echo/1").agent.shut, "no hand-over was tried: that its link is cut is verdict enough"
    for message in list(two.requests):
        two.answer(message)
    core.advance(0.5)
    for agent in (one, two):
        for message in list(agent.running.values()):
            agent.answer(message)
    assert len(caller.replies) == 12 and not any(reply.HasField("error") for reply in caller.replies)
    core.assert_settled()


def test_an_attempt_whose_time_passed_in_the_outbox_gives_its_slot_back_at_once() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    one.frozen = two.frozen = True
    message = caller.request(idempotent=True, timeout_ms=3000)
    held, other = _holder(core, one, two)
    other.frozen = False
    core.advance(1.4)
    assert other.has(message) and _in_flight(core, held) == 0
    other.answer(message)
    held.frozen = False
    core.pump()
    assert not held.has(message) and not held.cancels, "there is nothing that it could cancel"
    core.assert_settled()


def test_an_attempt_that_was_given_up_while_its_link_is_cut_keeps_its_slot_until_the_link_may_be_back() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    message = caller.request(idempotent=True, timeout_ms=10_000)
    held, other = _holder(core, one, two)
    held.confirms_cancels = False
    held.cut()
    core.advance(1.5)
    other.answer(message)
    core.advance(7)
    assert held.connect() is not None
    assert _in_flight(core, held) == 1, "its handler still runs"
    held.answer(message)
    assert _in_flight(core, held) == 0 and core.state.stats.forced_releases == 0
    core.assert_settled()


def test_deliveries_that_are_not_acknowledged_trip_the_breaker_before_their_deadlines() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    agent.frozen = True
    for _ in range(5):
        caller.request(timeout_ms=60_000)
    assert agent.peer is not None and agent.peer.link.next_frame(core.state.now) is not None
    core.advance(7)
    assert core.attachment("echo/1").agent.shut
    core.advance(120)
    core.assert_settled()


def test_what_was_told_to_be_lost_is_not_begun_when_the_link_is_back() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    agent.frozen = True
    message = caller.request(timeout_ms=10_000)
    assert agent.peer is not None and agent.peer.link.next_frame(core.state.now) is not None  # it went, and got lost
    agent.cut()
    core.advance(2)
    assert caller.error_of(message).code == codes.AGENT_LOST
    welcome = agent.connect()
    assert welcome is not None and welcome.resumed
    assert not agent.has(message)
    core.advance(30)
    core.assert_settled()


def test_an_attempt_at_an_agent_that_is_gone_leaves_nothing_behind() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    message = caller.request(idempotent=True, timeout_ms=10_000)
    held, other = _holder(core, one, two)
    held.leave()
    assert len(core.state.requests) == 1
    core.advance(0.5)
    other.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()
    core.advance(30)
    assert core.state.stats.forced_releases == 0


def test_who_does_not_acknowledge_by_a_short_deadline_gets_nothing_new() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    one.frozen = True
    message = caller.request(agent_id="echo/1", timeout_ms=400)
    assert one.peer is not None and one.peer.link.next_frame(core.state.now) is not None
    core.advance(0.41)
    assert caller.error_of(message).code == codes.TIMEOUT
    for _ in range(10):
        assert two.has(caller.request(agent_type="echo", policy=pb.RANDOM, timeout_ms=60_000))


def test_a_retry_that_finds_only_full_agents_keeps_its_deadline() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    filler = caller.request(agent_id="echo/2", timeout_ms=60_000)
    one.frozen = True
    message = caller.request(timeout_ms=8000)
    one.cut()
    core.advance(2)
    assert len(core.state.queue) == 1, "it was never sent, and nobody else has a slot"
    core.advance(6.1)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and not error.may_have_executed
    two.answer(filler)
    core.advance(30)
    core.assert_settled()


def test_streams_that_fall_silent_trip_the_breaker() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    for message in [caller.request(timeout_ms=120_000) for _ in range(5)]:
        agent.answer(message, more=True)
    core.advance(31)
    assert core.attachment("echo/1").agent.shut
    core.assert_settled()


def test_a_rate_limit_is_believed_for_five_minutes_at_most() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=5000)
    agent.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=3_600_000))
    assert 0 < core.attachment("echo/1").agent.avoid_until - core.state.now <= 300
    core.advance(6)
    core.assert_settled()


def _break(core: CoreMesh, caller: Process, agent_id: str) -> None:
    for _ in range(5):
        caller.request(timeout_ms=1500, agent_id=agent_id)
        core.advance(1.6)
    core.advance(30)


def test_a_probe_that_says_nothing_makes_room_for_another() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    _break(core, caller, "echo/1")
    agent.refuse(caller.request())
    probe = caller.request()
    assert agent.has(probe), (
        "a refusal is a caller's own mistake: it says neither that the agent works nor that it fails"
    )
    caller.cancel(probe)
    assert agent.has(caller.request()), "nor does a cancel"


def test_an_agent_that_ramps_gets_a_part_of_its_share() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core)
    _break(core, caller, "echo/1")
    for process in (one, two):
        process.handler = lambda process, envelope: process.answer(envelope, pump=False)
    caller.request(agent_id="echo/1")
    before = len(one.requests)
    for _ in range(100):
        assert caller.text_of(caller.request(agent_type="echo", policy=pb.RANDOM)) == "ok"
    assert len(one.requests) - before < 15, "a twentieth of half of them"
    core.assert_settled()


def test_timeouts_within_the_time_that_an_agent_takes_trip_nobody() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    for _ in range(10):
        message = caller.request(timeout_ms=10_000)
        core.advance(3)
        agent.answer(message)
    for _ in range(8):
        caller.request(timeout_ms=2000)
        core.advance(2.1)
    assert not core.attachment("echo/1").agent.shut, "it takes three seconds, and is asked for two"
    for _ in range(5):
        caller.request(timeout_ms=4000)
        core.advance(4.1)
    assert core.attachment("echo/1").agent.shut
    core.advance(10)
    core.assert_settled()


# ---- when the next one may go where ----


def test_no_more_than_three_retries_are_under_way_at_one_instance() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    failed = [caller.request(timeout_ms=20_000) for _ in range(5)]
    for message in failed:
        agent.answer(message, error=AGAIN)
    core.advance(0.3)
    assert core.state.budget.in_flight == 3 and len(agent.requests) == 8
    assert core.state.stats.retries_suppressed >= 2
    core.advance(2)
    told = [message for message in failed if caller.replies_to(message)]
    assert len(told) == 2
    for message in told:
        error = caller.error_of(message)
        assert error.code == codes.AGENT_ERROR and "budget" in error.details["not_retried"]
    for message in set(failed) - set(told):
        agent.answer(message)
    core.assert_settled()


def test_a_retry_that_waits_for_a_slot_does_not_take_that_of_who_failed_it_before_its_time() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    filler = caller.request(agent_id="echo/2", timeout_ms=60_000)
    message = caller.request(timeout_ms=20_000)
    one.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=3000))
    core.advance(0.5)
    assert len(core.state.queue) == 1
    one.answer(caller.request(agent_id="echo/1"))  # its slot is free again
    core.advance(2.4)
    assert len(one.requests) == 2 and len(core.state.queue) == 1
    core.advance(0.2)
    assert one.got(message).attempt == 2, "its time has come, and nobody else has a slot"
    one.answer(message)
    two.answer(filler)
    core.assert_settled()


def test_a_retry_that_got_a_slot_is_not_made_once_more_when_those_that_failed_it_may_have_it_again() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    filler = caller.request(agent_id="echo/2", timeout_ms=60_000)
    message = caller.request(timeout_ms=20_000)
    one.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=3000))
    core.advance(0.5)
    two.answer(filler)
    assert two.got(message).attempt == 2
    core.advance(5)
    assert len(one.requests) == 1 and len(two.requests) == 2
    two.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_retry_whose_last_other_candidate_leaves_waits_for_the_time_of_who_failed_it() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    caller.request(agent_id="echo/2", timeout_ms=60_000)
    message = caller.request(timeout_ms=20_000)
    one.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=3000))
    core.advance(0.5)
    assert len(core.state.queue) == 1
    two.leave()
    assert not caller.replies_to(message) and not core.state.queue
    core.advance(2.4)
    assert len(one.requests) == 1
    core.advance(0.2)
    assert one.got(message).attempt == 2
    one.answer(message)
    core.assert_settled()


def test_a_retry_whose_last_candidate_leaves_ends_with_what_it_failed_with() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = _two(core, max_concurrency=1)
    caller.request(agent_id="echo/2", timeout_ms=60_000)
    message = caller.request(timeout_ms=5000)
    one.answer(message, error=failure(codes.OVERLOADED, "busy", retry_after_ms=9000))
    core.advance(0.5)
    assert len(core.state.queue) == 1
    two.leave()
    error = caller.error_of(message)
    assert error.code == codes.OVERLOADED and error.retry_after_ms == 9000 and error.attempts == 1
    core.advance(1)
    core.assert_settled()


def test_a_retry_that_finds_nobody_looks_again_after_the_next_back_off() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=5000)
    agent.answer(message, error=AGAIN)
    agent.leave()
    core.advance(0.25)
    assert not caller.replies_to(message)
    other = core.agent("echo/2")
    core.advance(0.5)
    other.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_retry_that_finds_nobody_ever_ends_with_what_it_failed_with() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    message = caller.request(timeout_ms=5000)
    agent.answer(message, error=AGAIN)
    agent.leave()
    core.advance(1)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_ERROR and error.attempts == 1
    core.assert_settled()


# ---- who waits for the first one ----


def test_who_gives_way_in_a_full_queue_is_told_so() -> None:
    core = CoreMesh(queue_selector_max=2)
    agent = core.agent(max_concurrency=1, who=Identity("default", "agent"))
    many, few = core.caller("many", who=Identity("default", "many")), core.caller("few", who=Identity("default", "few"))
    running = many.request(timeout_ms=20_000)
    first, second = many.request(timeout_ms=20_000), many.request(timeout_ms=20_000)
    waits = few.request(timeout_ms=20_000)
    error = many.error_of(second)
    assert error.code == codes.OVERLOADED and error.retry_after_ms and not error.may_have_executed
    for message in (running, first, waits):
        agent.answer(message)
    assert few.text_of(waits) == many.text_of(first) == "ok"
    core.assert_settled()


def test_who_waits_is_not_given_to_an_agent_that_says_goodbye() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    caller.request(timeout_ms=20_000)
    waits = caller.request(timeout_ms=20_000)
    agent.leave()
    assert caller.error_of(waits).code == codes.NO_ROUTE and not agent.has(waits)
    core.advance(1)
    core.assert_settled()


def test_who_waited_beyond_its_deadline_is_not_started_though_its_timer_is_late() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    running = caller.request(timeout_ms=20_000)
    waits = caller.request(timeout_ms=2000)
    core.state.now += 3  # this node's loop stood still
    agent.answer(running)
    assert not agent.has(waits)
    error = caller.error_of(waits)
    assert error.code == codes.TIMEOUT and "never started" in error.message
    core.assert_settled()


def test_who_waits_goes_before_who_comes_in_the_frame_that_frees_the_slot() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    running, waits = caller.request(timeout_ms=20_000), caller.request(timeout_ms=20_000)
    agent.answer(running, pump=False)
    comes = agent.request(timeout_ms=20_000)
    assert agent.has(waits) and not agent.has(comes)
    agent.answer(waits)
    agent.answer(comes)
    core.assert_settled()
