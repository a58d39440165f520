"""Plays: what a trace tells of a message, stage by stage, read off after it has ended."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import RESPONSE, ROUND_ROBIN, Envelope, Timing
from agentreach.v1.frame_pb2 import Progress, Signal
from reach.core.trace import Traced
from tests.support.core import CoreMesh, Process

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _traced(core: CoreMesh) -> Traced:
    (traced,) = core.state.traces.find(TRACE)
    return traced


def _names(core: CoreMesh) -> list[str]:
    return [name for name, *_ in _traced(core).timeline()]


def _detail(core: CoreMesh, stage: str) -> str:
    (detail,) = [detail for name, _, _, detail in _traced(core).timeline() if name == stage]
    return detail


def _progress(agent: Process, message: str, **fields: object) -> None:
    delivered = agent.got(message)
    progress = Progress(message_id=message, entry=delivered.entry, **fields)  # type: ignore[arg-type]
    agent.signal(Signal(progress=progress))
    agent.core.pump()


def test_a_request_is_received_routed_delivered_accepted_started_and_replied() -> None:
    core = CoreMesh()
    agents, caller = [core.agent("echo/1"), core.agent("echo/2")], core.caller()
    message = caller.request(trace_id=TRACE, agent_type="echo", policy=ROUND_ROBIN)
    agent = next(each for each in agents if each.has(message))
    core.advance(0.2)
    _progress(agent, message, started=True)
    agent.answer(message)
    assert _names(core) == ["received", "routed", "delivered", "accepted", "started", "replied"]
    assert _detail(core, "routed") == "ROUND_ROBIN, 2 candidates"
    assert _detail(core, "delivered") == next(iter(agent.agents))
    assert _traced(core).outcome == "OK"


def test_time_in_the_agents_queue_and_in_its_handler_is_read_off_at_a_glance() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(trace_id=TRACE, timeout_ms=60_000)
    core.advance(23)
    delivered = agent.got(message)
    reply = Envelope(
        type=RESPONSE,
        correlation_id=message,
        entry=delivered.entry,
        attempt=delivered.attempt,
        timing=Timing(queue_us=5_000_000, handler_us=18_000_000),
    )
    reply.payload.text = "ok"
    agent.send(reply)
    core.pump()
    assert _detail(core, "started") == "after 5.000 s in the agent's queue"
    assert _detail(core, "replied") == "after 18.000 s in the handler"
    (started,) = [at for name, at, *_ in _traced(core).timeline() if name == "started"]
    assert abs(started - _traced(core).received - 5) < 0.1


def test_a_session_message_shows_its_lane_and_its_pin() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    first = caller.request(session_id="s")
    message = caller.request(session_id="s", trace_id=TRACE)
    agent.answer(first)
    agent.answer(message)
    assert _names(core)[:3] == ["received", "queued", "routed"]
    assert _detail(core, "routed").startswith("session pin, epoch ")


def test_a_failed_request_shows_the_class_of_its_failure_and_how_far_it_came() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(trace_id=TRACE, timeout_ms=1000)
    core.advance(2)
    assert caller.error_of(message).code == codes.TIMEOUT
    assert _names(core) == ["received", "routed", "delivered", "accepted", "failed"]
    assert _detail(core, "failed").startswith("TIMEOUT") and _traced(core).outcome == "TIMEOUT"
    assert agent.cancels


def test_a_request_without_a_route_was_received_and_failed() -> None:
    core = CoreMesh()
    caller = core.caller()
    assert caller.error_of(caller.request(trace_id=TRACE)).code == codes.NO_ROUTE
    assert _names(core) == ["received", "failed"]


def test_a_types_own_policy_holds_for_a_target_by_capability_too() -> None:
    core = CoreMesh(policies={"echo": "ROUND_ROBIN"})
    agent, caller = core.agent(capabilities=["ner"]), core.caller()
    message = caller.request(capabilities=["ner"], trace_id="t-policy")
    agent.answer(message)
    (traced,) = core.state.traces.find("t-policy")
    assert [detail for name, _, _, detail in traced.timeline() if name == "routed"] == ["ROUND_ROBIN, 1 candidate"]


def test_an_agent_that_says_nothing_of_its_time_counts_in_no_phase_of_its_own() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.answer(caller.request())
    (numbers,) = [record for name, record in core.state.stats.types() if name == "echo"]
    assert (numbers.handle.count, numbers.deliver.count, numbers.total.count) == (0, 0, 1)
