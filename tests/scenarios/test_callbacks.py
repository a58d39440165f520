"""Requests with a reply_topic: one acceptance for the caller, one CALLBACK for the topic, whoever is still there."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.errors import failure
from reach.core.callback_book import GATHERED_BYTES_MAX
from reach.core.ports import Identity
from tests.support.core import CoreMesh, Process

TOPIC = "results/mine"


def stage(core: CoreMesh) -> tuple[Process, Process, Process]:
    """An agent, a caller, and a subscriber of the topic."""
    agent, caller, listener = core.agent(), core.caller(), core.process("listener")
    listener.subscribe(TOPIC)
    return agent, caller, listener


def accepted(reply: Envelope) -> dict[str, str]:
    """What an acceptance says."""
    assert reply.type == pb.RESPONSE and not reply.HasField("error") and not reply.more
    assert reply.reply_topic == TOPIC
    payload = reply.payload
    if payload.WhichOneof("content") == "json":
        return {name: value.string_value for name, value in payload.json.struct_value.fields.items()}
    found: dict[str, str] = json.loads(payload.body)
    return found


def callback(listener: Process) -> Envelope:
    """The one CALLBACK that came."""
    assert len(listener.callbacks) == 1, listener.callbacks
    return listener.callbacks[0]


def counted(core: CoreMesh) -> tuple[int, int, int]:
    """Accepted, published, unheard."""
    counts = core.state.stats.callbacks
    return counts["accepted"], counts["published"], counts["unheard"]


def notes(core: CoreMesh, trace_id: str) -> dict[str, str]:
    """Details of a message's stages by name."""
    return {name: detail for traced in core.state.traces.find(trace_id) for name, _, _, detail in traced.stages}


def test_the_caller_is_told_at_once_and_the_result_goes_to_the_topic() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC, trace_id="t" * 32)
    said = accepted(caller.reply_to(message))
    assert said == {"message_id": message, "trace_id": "t" * 32, "reply_topic": TOPIC}
    assert agent.running and not listener.callbacks
    agent.answer(message, "done")
    found = callback(listener)
    assert (found.type, found.correlation_id, found.trace_id) == (pb.CALLBACK, message, "t" * 32)
    assert (found.source, found.target.topic, found.payload.text) == ("echo/1", TOPIC, "done")
    assert found.message_id not in ("", message) and not found.entry and not found.more
    assert len(caller.replies_to(message)) == 1, "the acceptance is all that its caller gets"
    assert counted(core) == (1, 1, 0)
    assert notes(core, "t" * 32)["callback"] == f"{TOPIC}: 1 subscriber"
    core.advance(400)
    core.assert_settled()


@pytest.mark.parametrize("how", ["leave", "cut"])
def test_the_request_lives_on_without_its_caller(how: str) -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC, timeout_ms=60_000)
    if how == "leave":
        caller.leave()
    else:
        caller.cut()
        core.advance(20)
    assert not agent.cancels
    agent.answer(message, "done")
    assert callback(listener).payload.text == "done"
    core.assert_settled()


def test_the_deadline_bounds_it_whoever_is_there() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC, timeout_ms=3000)
    caller.leave()
    core.advance(3.1)
    found = callback(listener)
    assert found.error.code == codes.TIMEOUT and found.correlation_id == message and found.source == "echo/1"
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    core.advance(10)
    core.assert_settled()


@pytest.mark.parametrize("by", ["the same link", "a new link"])
def test_a_cancel_of_its_sender_ends_it_and_the_topic_hears_of_it(by: str) -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    canceller = caller if by == "the same link" else core.process("later")
    canceller.cancel(message)
    assert callback(listener).error.code == codes.CANCELLED
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    core.assert_settled()


def test_another_principal_cannot_cancel_it() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    core.process("stranger", who=Identity(principal="mallory")).cancel(message)
    assert not agent.cancels and not listener.callbacks
    agent.answer(message)
    assert callback(listener).payload.text == "ok"


def test_what_is_refused_at_once_is_told_to_the_caller_and_never_published() -> None:
    core = CoreMesh()
    _, caller, listener = stage(core)
    nobody = caller.request(reply_topic=TOPIC, agent_type="nobody")
    late = caller.request(reply_topic=TOPIC, timeout_ms=1)
    illegal = caller.request(reply_topic="/x")
    assert caller.error_of(nobody).code == codes.NO_ROUTE
    assert caller.error_of(late).code == codes.INVALID_ENVELOPE
    assert "reply_topic" in caller.error_of(illegal).message
    core.state.draining = True
    assert caller.error_of(caller.request(reply_topic=TOPIC)).code == codes.SHUTTING_DOWN
    assert not listener.callbacks and counted(core) == (0, 0, 0)
    core.assert_settled()


def test_an_error_of_the_agent_is_a_callback_with_that_error() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    agent.refuse(message)
    found = callback(listener)
    assert found.error.code == codes.REJECTED and found.error.agent_id == found.source == "echo/1"
    core.assert_settled()


def test_a_lost_agent_is_a_callback_too() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    caller.request(reply_topic=TOPIC)
    agent.cut()
    core.advance(2)
    assert callback(listener).error.code == codes.AGENT_LOST
    core.advance(30)
    core.assert_settled()


def test_without_a_subscriber_it_is_counted_and_traced_and_no_error() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(reply_topic=TOPIC, trace_id="t" * 32)
    agent.answer(message)
    assert counted(core) == (1, 0, 1)
    assert notes(core, "t" * 32)["callback"] == f"{TOPIC}: 0 subscribers"
    core.assert_settled()


def test_only_subscribers_of_its_tenant_and_env_hear_of_it() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    stranger = core.process("stranger", who=Identity(tenant="other"))
    tester = core.process("tester", env="test")
    stranger.subscribe(TOPIC)
    tester.subscribe(TOPIC)
    agent.answer(caller.request(reply_topic=TOPIC))
    assert len(listener.callbacks) == 1 and not stranger.callbacks and not tester.callbacks


# ---- once means once ----


def test_a_copy_of_a_running_one_is_accepted_again_and_runs_and_is_published_once() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC)
    other = core.process("other")
    other.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    caller.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert accepted(other.reply_to(message))["message_id"] == message
    assert len(caller.replies_to(message)) == 2
    assert len(agent.requests) == 1
    agent.answer(message, "done")
    assert callback(listener).payload.text == "done"
    core.assert_settled()


def test_fifty_copies_submitted_at_once_run_once_and_are_published_once() -> None:
    core = CoreMesh()
    agent, _, listener = stage(core)
    callers = [core.caller(f"c{number}") for number in range(50)]
    for caller in callers:
        caller.send(core.envelope("work", message_id="one", fresh=False, reply_topic=TOPIC))
    core.pump()
    assert all(accepted(caller.reply_to("one")) for caller in callers)
    agent.answer("one", "once")
    assert len(agent.requests) == 1 and callback(listener).payload.text == "once"
    assert counted(core) == (50, 1, 0)
    core.assert_settled()


def test_a_copy_of_a_finished_one_is_accepted_again_and_not_published_again() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC)
    agent.answer(message, "done")
    caller.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert len(caller.replies_to(message)) == 2
    accepted(caller.replies_to(message)[1])
    assert len(agent.requests) == 1 and callback(listener).payload.text == "done"
    core.assert_settled()


def test_its_result_can_be_fetched_by_sending_it_without_a_topic() -> None:
    core = CoreMesh()
    agent, caller, _ = stage(core)
    message = caller.request("work", reply_topic=TOPIC)
    early = core.process("early")
    early.request("work", message_id=message, fresh=False)
    agent.answer(message, "done")
    late = core.process("late")
    late.request("work", message_id=message, fresh=False)
    assert early.text_of(message) == late.text_of(message) == "done"
    assert len(agent.requests) == 1
    core.assert_settled()


def test_a_topic_that_comes_later_gets_the_outcome_of_what_has_run() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", fresh=False)
    agent.answer(message, "done")
    caller.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert callback(listener).payload.text == "done" and len(agent.requests) == 1
    core.assert_settled()


def test_other_content_under_its_id_is_a_conflict() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC)
    other = core.process("other")
    other.request("other work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert other.error_of(message).code == codes.IDEMPOTENCY_CONFLICT
    agent.answer(message, "done")
    assert callback(listener).payload.text == "done"


def test_a_large_result_is_published_once_too() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC)
    agent.answer(message, "x" * 100_000)
    caller.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert len(caller.replies_to(message)) == 2 and len(agent.requests) == 1
    assert len(callback(listener).payload.text) == 100_000
    core.assert_settled()


def test_the_late_answer_of_a_lost_agent_is_published_when_its_message_comes_again() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request("work", reply_topic=TOPIC, timeout_ms=60_000)
    agent.cut()
    core.advance(6.5)
    assert [found.error.code for found in listener.callbacks] == [codes.AGENT_LOST]
    agent.connect()
    agent.answer(message, "done after all")
    caller.request("work", reply_topic=TOPIC, message_id=message, fresh=False)
    assert len(agent.requests) == 1
    assert [found.payload.text for found in listener.callbacks] == ["", "done after all"]
    core.advance(30)
    core.assert_settled()


# ---- streamed replies ----


def test_the_items_of_a_streamed_reply_are_one_callback_with_a_list() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    for number in range(100):
        agent.answer(message, f"w{number}", more=True, sequence=number)
    assert not listener.callbacks and core.state.callbacks.gathered_bytes
    agent.answer(message, "end", sequence=100)
    values = [value.string_value for value in callback(listener).payload.json.list_value.values]
    assert values == [*(f"w{number}" for number in range(100)), "end"]
    assert not core.state.callbacks.gathered_bytes
    core.assert_settled()


def test_a_stream_that_breaks_off_is_one_callback_with_the_error_and_the_count() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    agent.answer(message, "a", more=True)
    agent.answer(message, error=failure(codes.AGENT_ERROR, "broke"), sequence=1)
    found = callback(listener)
    assert found.error.code == codes.AGENT_ERROR and found.error.details["items"] == "1"
    assert not core.state.callbacks.gathered_bytes
    core.assert_settled()


def test_items_that_no_list_can_hold_are_told_as_such() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    envelope = agent.got(message)
    agent.send(
        Envelope(
            type=pb.RESPONSE, correlation_id=message, entry=envelope.entry, attempt=envelope.attempt, more=True,
            payload=pb.Payload(content_type="application/octet-stream", body=b"\0"),
        )
    )  # fmt: skip
    agent.answer(message, "end", sequence=1)
    assert callback(listener).error.code == codes.REJECTED


def test_items_larger_than_one_payload_end_the_request_down_to_its_handler() -> None:
    core = CoreMesh(payload_bytes_max=10_000)
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    for number in range(3):
        agent.answer(message, "x" * 4_000, more=True, sequence=number)
    error = callback(listener).error
    assert error.code == codes.PAYLOAD_TOO_LARGE and error.may_have_executed
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    assert not core.state.callbacks.gathered_bytes
    core.advance(10)
    core.assert_settled()


def test_items_of_all_callbacks_together_are_bounded() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    message = caller.request(reply_topic=TOPIC)
    core.state.callbacks.gathered_bytes = GATHERED_BYTES_MAX - 100
    agent.answer(message, "x" * 200, more=True)
    assert callback(listener).error.code == codes.PAYLOAD_TOO_LARGE
    assert core.state.callbacks.gathered_bytes == GATHERED_BYTES_MAX - 100


# ---- sessions ----


def test_a_submitted_message_of_a_session_keeps_its_place_and_tells_of_the_session() -> None:
    core = CoreMesh()
    agent, caller, listener = stage(core)
    messages = [caller.request(str(number), session_id="s", reply_topic=TOPIC) for number in range(3)]
    for number, message in enumerate(messages):
        assert len(agent.requests) == number + 1
        agent.answer(message, f"done {number}")
    assert [found.correlation_id for found in listener.callbacks] == messages
    assert [found.session_event for found in listener.callbacks] == [pb.STARTED, 0, 0]
    core.assert_settled()


# ---- call trees ----


def test_what_a_handler_submits_may_outlive_it() -> None:
    core = CoreMesh()
    planner, worker, caller = core.agent("planner/1"), core.agent("worker/1"), core.caller()
    listener = core.process("listener")
    listener.subscribe(TOPIC)
    outer = caller.request(agent_type="planner", timeout_ms=2_000)
    inner = planner.call_from(outer, agent_type="worker", timeout_ms=60_000, reply_topic=TOPIC)
    planner.answer(outer)
    core.advance(30)
    assert not worker.cancels and not listener.callbacks
    worker.answer(inner, "at last")
    found = callback(listener)
    assert found.payload.text == "at last" and found.trace_id == caller.reply_to(outer).trace_id
    core.assert_settled()


def test_a_loop_that_goes_by_callbacks_dies_like_any_other() -> None:
    core = CoreMesh()
    worker, planner, caller = core.agent("worker/1"), core.agent("planner/1"), core.caller()
    planner.subscribe(TOPIC, agent_id="planner/1")
    caller.request(agent_type="worker", reply_topic=TOPIC)
    rounds = 0
    while worker.running and rounds < 50:
        rounds += 1
        worker.answer(next(iter(worker.running.values())))
        last = planner.callbacks[-1]
        planner.request(agent_type="worker", reply_topic=TOPIC, lineage=last.lineage, source="planner/1")
    assert rounds < 12
    assert core.state.stats.loops["hop_limit"] >= 1


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_acceptance_has_one_callback_and_each_refusal_none(seed: int) -> None:
    core, rng = CoreMesh(seed), Random(seed)
    agents = [core.agent(f"echo/{number}", max_concurrency=3) for number in range(2)]
    callers = [core.caller(f"c{number}") for number in range(3)]
    listener = core.process("listener")
    listener.subscribe(TOPIC)
    sent: list[tuple[Process, str]] = []
    for _ in range(120):
        agent, caller = rng.choice(agents), rng.choice(callers)
        match rng.randrange(9):
            case 0 | 1 | 2:
                timeout_ms = rng.choice((200, 2_000, 20_000))
                idempotent, profile = rng.random() < 0.5, rng.choice((0, pb.RPC, pb.TASK))
                how = {"timeout_ms": timeout_ms, "idempotent": idempotent, "profile": profile}
                sent.append((caller, caller.request(reply_topic=TOPIC, **how)))
            case 3 | 4 if agent.running and agent.connected:
                running = rng.choice(list(agent.running.values()))
                if rng.random() < 0.7:
                    agent.answer(running, more=False)
                else:
                    agent.answer(running, error=failure(codes.AGENT_ERROR, "no", retryable=rng.random() < 0.5))
            case 5 if sent:
                _, message = rng.choice(sent)
                caller.cancel(message)
            case 6 if agent.connected:
                agent.cut()
            case 7 if not agent.connected:
                agent.connect()
            case _:
                core.advance(rng.random() * 2)
    for agent in agents:
        agent.handler = lambda process, request: process.answer(request, pump=False)
        if not agent.connected:
            agent.connect()
        for running in list(agent.running.values()):
            agent.answer(running)
    core.advance(400)
    told = Counter(found.correlation_id for found in listener.callbacks)
    for caller, message in sent:
        refused = caller.reply_to(message).HasField("error")
        assert told.pop(message, 0) == (0 if refused else 1), message
    assert not told
    core.assert_settled()
