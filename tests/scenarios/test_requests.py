"""Plays: a request, its answer, its errors, and whose word counts."""

from __future__ import annotations

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Hop
from agentreach.v1.error_pb2 import Error
from agentreach.v1.registry_pb2 import DRAINING
from agentreach.wire.errors import failure
from reach.core.ports import Identity
from tests.support.core import CoreMesh

MIB = 1 << 20


def test_a_request_reaches_an_agent_and_its_answer_the_caller() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request("hello")
    delivered = agent.got(message)
    assert (delivered.recipient, delivered.attempt, delivered.hop_count) == ("echo/1", 1, 1)
    assert caller.welcome is not None and delivered.source == caller.welcome.caller_id
    agent.answer(message, "HELLO")
    assert caller.text_of(message) == "HELLO"
    assert caller.reply_to(message).source == "echo/1"
    core.assert_settled()


def test_a_request_by_invoke_is_answered_on_its_call() -> None:
    core = CoreMesh()
    agent = core.agent()
    call, envelope = core.call()
    agent.answer(envelope.message_id, "OK")
    assert call.done and call.replies[0].payload.text == "OK"
    core.assert_settled()


def test_two_hundred_requests_at_once_spread_and_never_exceed_a_limit() -> None:
    core = CoreMesh()
    agents = [core.agent(f"echo/{number}", max_concurrency=50) for number in range(5)]
    caller = core.caller()
    envelopes = [core.envelope() for _ in range(260)]
    for envelope in envelopes:
        caller.send(envelope)
    core.pump()
    assert [len(agent.requests) for agent in agents] == [50] * 5
    assert len(core.state.queue) == 10
    for _ in range(2):
        for agent in agents:
            for request in list(agent.running.values()):
                agent.answer(request, pump=False)
        core.pump()
    core.assert_settled()
    assert len(caller.replies) == 260


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"agent_type": "nobody"}, codes.NO_ROUTE),
        ({"timeout_ms": 0}, codes.INVALID_ENVELOPE),
        ({"timeout_ms": 5}, codes.INVALID_ENVELOPE),
        ({"timeout_ms": 600_001}, codes.INVALID_ENVELOPE),
        ({"protocol_version": 2}, codes.INVALID_ENVELOPE),
        ({"priority": 9}, codes.INVALID_ENVELOPE),
        ({"profile": 17}, codes.INVALID_ENVELOPE),
        ({"policy": 99}, codes.INVALID_ENVELOPE),
        ({"agent_id": "Bad Id"}, codes.INVALID_ENVELOPE),
        ({"version": " "}, codes.INVALID_ENVELOPE),
        ({"version": " >=bad"}, codes.INVALID_ENVELOPE),
        ({"version": ">=bad"}, codes.INVALID_ENVELOPE),
        ({"version": "==1.*.5"}, codes.INVALID_ENVELOPE),
        ({"agent_id": "echo/1", "agent_type": "echo"}, codes.INVALID_ENVELOPE),
        ({"topic": "news"}, codes.INVALID_ENVELOPE),
        ({"agent_type": "echo", "broadcast": True}, codes.INVALID_ENVELOPE),
        ({"message_id": "m" * 200}, codes.INVALID_ENVELOPE),
        ({"session_id": "s" * 300}, codes.INVALID_ENVELOPE),
        ({"headers": {f"h{n}": "v" for n in range(1000)}}, codes.INVALID_ENVELOPE),
        ({"text": "x" * (MIB + 1)}, codes.PAYLOAD_TOO_LARGE),
        ({"signature": b"s" * (3 * MIB)}, codes.INVALID_ENVELOPE),
        ({"env": "no such place"}, codes.INVALID_ENVELOPE),
        ({"env": "staging"}, codes.NO_ROUTE),
    ],
)
def test_a_bad_request_gets_its_own_error_and_hurts_nobody_else(fields: dict[str, object], code: int) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    text = str(fields.pop("text", "hi"))
    bad = caller.request(text, **fields)
    assert caller.error_of(bad).code == code
    assert not agent.requests
    good = caller.request()
    agent.answer(good)
    assert caller.text_of(good) == "ok"
    core.assert_settled()


def test_no_usable_agent_is_said_with_the_reasons() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.say(DRAINING)
    error = caller.error_of(caller.request())
    assert error.code == codes.NO_AGENT_AVAILABLE and "1 draining" in error.message
    core.assert_settled()


def test_what_a_sender_claims_of_the_nodes_fields_is_overwritten() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(
        source="echo/1",
        tenant="other",
        principal="root",
        actors=["root"],
        hop_count=7,
        path=[Hop(agent_id="a/1")],
        recipient="b/1",
        entry=b"x" * 16,
        attempt=9,
    )
    got = agent.got(message)
    assert caller.welcome is not None
    assert got.source == caller.welcome.caller_id
    assert (got.tenant, got.principal, list(got.actors)) == ("default", "anonymous", [])
    assert (got.hop_count, [hop.agent_id for hop in got.path]) == (1, ["echo/1"])
    assert (got.recipient, got.attempt) == ("echo/1", 1) and got.entry != b"x" * 16
    agent.answer(message)
    core.assert_settled()


def test_a_process_may_send_as_one_of_its_agents_only() -> None:
    core = CoreMesh()
    agent, other = core.agent("echo/1"), core.agent("other/1")
    mine = other.request(source="other/1")
    assert agent.got(mine).source == "other/1"
    forged = other.request(source="echo/1")
    assert other.welcome is not None and agent.got(forged).source == other.welcome.caller_id
    agent.answer(mine)
    agent.answer(forged)
    core.assert_settled()


def test_a_response_counts_only_from_the_link_and_for_the_attempt_it_belongs_to() -> None:
    core = CoreMesh()
    agent, mallory, caller = core.agent("echo/1"), core.agent("mal/1"), core.caller()
    message = caller.request()
    delivered = agent.got(message)
    mallory.answer(delivered, "forged")
    agent.send(Envelope(type=pb.RESPONSE, correlation_id=message, entry=delivered.entry, attempt=2))
    agent.send(Envelope(type=pb.RESPONSE, correlation_id=message, entry=b"n" * 16, attempt=1))
    agent.send(Envelope(type=pb.RESPONSE, correlation_id=message, entry=delivered.entry[:8] + b"\xff" * 8, attempt=1))
    mallory.send(Envelope(type=pb.RESPONSE, correlation_id=message))
    core.pump()
    assert not caller.replies
    agent.answer(message, "true")
    assert caller.text_of(message) == "true"
    core.assert_settled()


def test_an_agent_that_echoes_nothing_is_matched_by_its_link_and_the_message_id() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    reply = Envelope(type=pb.RESPONSE, correlation_id=message)
    reply.payload.text = "plain"
    agent.send(reply)
    core.pump()
    assert caller.text_of(message) == "plain"
    core.assert_settled()


def test_what_an_agent_claims_in_its_reply_is_overwritten() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(trace_id="t1")
    delivered = agent.got(message)
    reply = Envelope(
        type=pb.RESPONSE,
        correlation_id="other",
        entry=delivered.entry,
        attempt=1,
        source="boss/1",
        tenant="other",
        principal="root",
        trace_id="t2",
        epoch=99,
        session_event=pb.LOST,
        lineage=b"x",
        path=[Hop(agent_id="a/1")],
    )
    agent.send(reply)
    core.pump()
    got = caller.reply_to(message)
    assert (got.source, got.tenant, got.principal, got.trace_id) == ("echo/1", "", "", "t1")
    assert (got.epoch, got.session_event, got.lineage, len(got.path)) == (0, 0, b"", 0)
    core.assert_settled()


@pytest.mark.parametrize("code", [codes.REJECTED, codes.AGENT_ERROR, codes.OVERLOADED, codes.AGENT_LOST, 0, 4711])
def test_an_agents_error_reaches_the_caller_with_its_code(code: int) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    error = Error(message="no\nway", retry_after_ms=20_000)
    error.code = code  # type: ignore[assignment]
    agent.answer(message, error=error)
    core.advance(2.0)
    got = caller.error_of(message)
    assert got.code == (code if code in codes.ErrorCode.values() and code else codes.AGENT_ERROR)
    assert got.message == "no way" and got.agent_id == "echo/1" and got.attempts == 1
    core.assert_settled()


def test_an_agents_error_is_held_to_the_size_of_an_error() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    details = {f"d{number}": "x" * 50_000 for number in range(40)}
    agent.answer(message, error=Error(code=codes.AGENT_ERROR, message="x" * MIB, details=details))
    assert caller.reply_to(message).ByteSize() < 64 << 10
    core.assert_settled()


@pytest.mark.parametrize("field", ["payload", "signature"])
def test_a_reply_over_the_limit_fails_that_request_only(field: str) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    big, small = caller.request(), caller.request()
    if field == "payload":
        agent.answer(big, "x" * (5 * MIB))
    else:
        agent.answer(big, "x", signature=b"s" * (5 * MIB))
    agent.answer(small)
    error = caller.error_of(big)
    assert error.code == codes.PAYLOAD_TOO_LARGE and error.may_have_executed
    assert caller.text_of(small) == "ok"
    core.assert_settled()


def test_an_agent_that_is_busy_is_biased_away_from() -> None:
    core = CoreMesh()
    one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    first = caller.request()
    busy, other = (one, two) if one.has(first) else (two, one)
    busy.answer(first, error=failure(codes.OVERLOADED, "busy", retry_after_ms=3000))
    for _ in range(5):
        other.answer(caller.request())
    core.advance(0.5)
    other.answer(first)
    assert caller.text_of(first) == "ok"
    core.advance(3.1)
    for _ in range(30):
        message = caller.request()
        (busy if busy.has(message) else other).answer(message)
    assert len(busy.requests) > 1
    core.assert_settled()


def test_equal_ids_of_two_tenants_envs_or_principals_are_two_messages() -> None:
    core = CoreMesh()
    agent = core.agent()
    callers = [core.caller("one"), core.caller("two", who=Identity("default", "bob"))]
    for caller in callers:
        caller.request("x", message_id="same")
    assert len(agent.requests) == 2
    for number, request in enumerate(list(agent.running.values())):
        agent.answer(request, str(number))
    assert [caller.text_of("same") for caller in callers] == ["0", "1"]
    stranger = core.caller("three", who=Identity("elsewhere", "bob"))
    assert stranger.error_of(stranger.request("x", message_id="same")).code == codes.NO_ROUTE
    core.assert_settled()


def test_requests_in_flight_are_bounded() -> None:
    core = CoreMesh(requests_in_flight_max=3)
    agent, caller = core.agent(), core.caller()
    messages = [caller.request() for _ in range(4)]
    assert caller.error_of(messages[3]).code == codes.OVERLOADED
    for message in messages[:3]:
        agent.answer(message)
    agent.answer(caller.request())
    core.assert_settled()


def test_an_agent_with_a_full_outbox_is_seen_as_full_until_its_link_takes_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = True
    for _ in range(1100):
        caller.send(core.envelope(timeout_ms=20_000))
    core.pump()
    assert len(core.state.queue) == 1100 - 1024 and not caller.replies
    agent.frozen = False
    core.pump()
    assert len(agent.requests) == 1100
    agent.answer(caller.request())
    for request in list(agent.running.values()):
        agent.answer(request, pump=False)
    core.assert_settled()


def test_a_caller_that_takes_no_replies_ends_with_slow_consumer_and_nobody_else_does() -> None:
    core = CoreMesh()
    agent, slow, caller = core.agent(), core.caller("slow"), core.caller("good")
    for _ in range(80):
        slow.send(core.envelope())
    core.pump()
    slow.frozen = True
    for request in list(agent.running.values()):
        agent.answer(request, "x" * MIB)
    assert slow.peer is not None and slow.peer.closing
    assert core.state.stats.slow_consumers == 1
    good = caller.request()
    agent.answer(good)
    assert caller.text_of(good) == "ok"
    core.assert_settled()
