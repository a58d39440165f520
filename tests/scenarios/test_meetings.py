"""Plays in which two guarantees meet: breaker and queue, breaker and session, retry and queue, drain and restart."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.registry_pb2 import HEALTHY, UNREACHABLE
from agentreach.wire.errors import failure
from reach.core import drains
from reach.core.breaker import BreakerState
from reach.core.ports import ANYBODY
from tests.support.core import CoreMesh, Process, record

AGAIN = failure(codes.AGENT_ERROR, "again", retryable=True)


def _break(core: CoreMesh, caller: Process, agent_id: str) -> None:
    """Five requests that its agent does not answer."""
    for _ in range(5):
        caller.request(timeout_ms=1500, agent_id=agent_id)
        core.advance(1.6)
    assert core.attachment(agent_id).agent.shut


def _ramp(core: CoreMesh, caller: Process, process: Process, agent_id: str) -> None:
    """Its breaker opens, and a probe succeeds."""
    _break(core, caller, agent_id)
    core.advance(30)
    process.answer(caller.request(timeout_ms=2000, agent_id=agent_id))
    breaker = core.attachment(agent_id).agent.breaker
    assert breaker is not None and breaker.state(core.state.now) is BreakerState.RAMPING


def _echo(process: Process, envelope: pb.Envelope) -> None:
    process.answer(envelope, pump=False)


# ---- breaker and queue ----


def test_a_free_slot_of_the_only_agent_goes_to_who_waits_also_while_the_agent_ramps() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    _ramp(core, caller, agent, "echo/1")
    for _ in range(10):
        first, second = caller.request(timeout_ms=2000), caller.request(timeout_ms=2000)
        agent.answer(first)
        assert agent.has(second), "the agent is idle and nobody else is there"
        agent.answer(second)
    core.assert_settled()


def test_of_two_free_slots_who_waits_gets_that_of_the_agent_that_does_not_ramp() -> None:
    core = CoreMesh()
    caller = core.caller()
    agents = core.process("p", record("echo/1", max_concurrency=1), record("echo/2", max_concurrency=1))
    _ramp(core, caller, agents, "echo/1")
    ramping = 0
    for _ in range(20):
        on_two, on_one = caller.request(agent_id="echo/2"), caller.request(agent_id="echo/1")
        waits = caller.request()
        agents.answer(on_two, pump=False)
        agents.answer(on_one)  # in one frame: both are free when it is asked who waits
        ramping += agents.got(waits).recipient == "echo/1"
        agents.answer(waits)
    assert ramping < 8
    core.assert_settled()


def test_who_waits_is_told_at_once_that_the_last_breaker_has_opened() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=5)
    agent.confirms_cancels = False
    for _ in range(5):
        caller.request(timeout_ms=1500)
    waits = caller.request(timeout_ms=20_000)
    core.advance(2)
    assert core.attachment("echo/1").agent.shut
    error = caller.error_of(waits)
    assert error.code == codes.BREAKER_OPEN and error.retry_after_ms and not error.may_have_executed
    core.advance(10)
    core.assert_settled()


# ---- breaker and session ----


def test_a_new_conversation_goes_to_nobody_whose_breaker_is_open() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = core.agent("echo/1"), core.agent("echo/2")
    two.handler = _echo
    _break(core, caller, "echo/1")
    before = len(one.requests)
    for number in range(20):
        assert caller.text_of(caller.request(session_id=f"s{number}")) == "ok"
    assert len(one.requests) == before and core.attachment("echo/2").agent.pinned_sessions == 20
    core.assert_settled()


def test_a_new_conversation_gets_no_owner_while_every_breaker_is_open() -> None:
    core = CoreMesh()
    caller = core.caller()
    core.agent("echo/1")
    _break(core, caller, "echo/1")
    error = caller.error_of(caller.request(session_id="s"))
    assert error.code == codes.BREAKER_OPEN and error.retry_after_ms
    assert not core.state.lanes and not core.pins
    core.advance(10)
    core.assert_settled()


# ---- retry and queue ----


def test_no_more_than_three_retries_run_at_one_instance_also_when_they_waited_for_its_slots() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent(max_concurrency=10)
    failed = [caller.request(timeout_ms=20_000) for _ in range(10)]
    for message in failed:
        agent.answer(message, error=AGAIN)
    blocking = [caller.request(timeout_ms=20_000) for _ in range(10)]
    core.advance(0.5)
    assert len(core.state.queue) == 10
    for message in blocking:
        agent.answer(message)
        assert core.state.budget.in_flight <= 3
    assert core.state.budget.in_flight == 3 and core.state.stats.retries_suppressed >= 7
    core.advance(5)
    for message in [each for each in failed if not caller.replies_to(each)]:
        agent.answer(message)
    errors = [caller.error_of(each) for each in failed if caller.reply_to(each).HasField("error")]
    assert errors and all(error.code == codes.AGENT_ERROR and "not_retried" in error.details for error in errors)
    core.assert_settled()


def test_no_more_than_three_retries_of_conversations_run_at_their_owner() -> None:
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    failed = [caller.request(session_id=f"s{number}", timeout_ms=20_000) for number in range(5)]
    for message in failed:
        agent.answer(message, error=AGAIN)
    core.advance(0.5)
    assert core.state.budget.in_flight == 3
    told = [each for each in failed if caller.replies_to(each)]
    assert len(told) == 2 and all(caller.error_of(each).code == codes.AGENT_ERROR for each in told)
    for message in failed:
        if message not in told:
            agent.answer(message)
    core.assert_settled()


def test_a_retry_that_finds_the_queue_full_ends_with_what_it_failed_with() -> None:
    core = CoreMesh(queue_max=1)
    caller, agent = core.caller(), core.agent(max_concurrency=1)
    failed = caller.request(timeout_ms=20_000)
    agent.answer(failed, error=AGAIN)
    running, waits = caller.request(timeout_ms=20_000), caller.request(timeout_ms=20_000)
    core.advance(1)
    assert caller.error_of(failed).code == codes.AGENT_ERROR
    agent.answer(running)
    agent.answer(waits)
    core.assert_settled()


def test_a_retry_that_the_budget_forbids_is_counted_once_however_often_it_is_looked_at() -> None:
    core = CoreMesh()
    caller = core.caller()
    one, two = core.agent("echo/1"), core.agent("echo/2")
    one.frozen = two.frozen = True
    message = caller.request(idempotent=True, timeout_ms=60_000, profile=pb.EXTERNAL)
    held = one if core.attachment("echo/1").attempts else two
    assert held.peer is not None and held.peer.link.next_frame(core.state.now) is not None  # on its way, unacknowledged
    (two if held is one else one).frozen = False
    core.advance(4)
    for _ in range(10):
        core.state.budget.planned("echo", core.state.now)
    core.advance(7)
    assert core.state.stats.retries_suppressed == 1
    caller.cancel(message)
    core.advance(60)
    core.assert_settled()


# ---- retry and session ----


def test_what_the_store_cannot_pin_ends_one_by_one() -> None:
    """What one message went through says nothing of the others in its lane."""
    core = CoreMesh()
    caller, agent = core.caller(), core.agent()
    ran = caller.request(session_id="s", idempotent=True, timeout_ms=20_000)
    never_ran = caller.request(session_id="s", timeout_ms=20_000)
    assert agent.has(ran) and not agent.has(never_ran)
    core.agent("echo/2")
    core.registry_up = False
    agent.cut()
    core.advance(15)
    first, second = caller.error_of(ran), caller.error_of(never_ran)
    assert first.code == codes.AGENT_LOST and first.may_have_executed
    assert second.code == codes.REGISTRY_UNAVAILABLE and not second.may_have_executed and not second.attempts
    core.advance(30)
    core.assert_settled()


def test_a_copy_that_its_holder_takes_with_it_is_not_given_to_an_agent_that_does_not_own_the_conversation() -> None:
    core = CoreMesh()
    caller = core.caller()
    holding = frames.Holding(
        key=frames.MessageKey(tenant=ANYBODY.tenant, principal=ANYBODY.principal, message_id="m"),
        state=frames.Holding.RUNNING,
    )
    holder = Process(core, "holder", ANYBODY, "")
    core.processes.append(holder)
    holder.connect(record("echo/1"), holds=[("s", 5)], holding=[holding])
    other = core.agent("echo/2")
    caller.request(message_id="m", fresh=False, resent=True, idempotent=True, session_id="s", timeout_ms=60_000)
    assert holder.has("m")
    holder.answer("m", error=AGAIN)
    core.advance(2)
    assert not other.has("m") and caller.error_of("m").code == codes.AGENT_ERROR


# ---- drain, health and a restart ----


def test_a_drained_agent_stays_until_what_it_brought_along_has_ended() -> None:
    core = CoreMesh()
    agent = Process(core, "p", ANYBODY, "")
    core.processes.append(agent)
    key = frames.MessageKey(tenant=ANYBODY.tenant, principal=ANYBODY.principal, message_id="m")
    agent.connect(record("echo/1"), holding=[frames.Holding(key=key, state=frames.Holding.RUNNING)])
    attachment = core.attachment("echo/1")
    with core.step() as state:
        drains.agent(state, attachment, 30, "")
    core.advance(5)
    assert core.state.directory.get("default", "production", "echo/1") is not None, "it still works on m"
    reply = pb.Envelope(type=pb.RESPONSE, correlation_id="m", entry=b"formerly" + bytes(8), source="echo/1")
    agent.send(reply)
    core.advance(1)
    assert core.state.directory.get("default", "production", "echo/1") is None


def test_an_agent_that_was_stuck_is_asked_as_soon_as_its_link_is_back() -> None:
    core = CoreMesh()
    agent = core.agent()
    agent.answers_probes = False
    core.advance(45)
    assert core.status("echo/1") == UNREACHABLE
    agent.cut()
    agent.answers_probes = True
    agent.connect()
    core.advance(1)
    assert core.status("echo/1") == HEALTHY
