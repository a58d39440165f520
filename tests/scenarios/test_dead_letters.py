"""Plays: requests that the mesh gave up are kept, shown without their payload, and sent once more."""

from __future__ import annotations

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from reach.core import redriving
from reach.core.ports import ANYBODY, Identity
from reach.core.redriving import Redriven
from tests.support.core import CoreMesh, Process

TOPIC = "results/mine"


def cut(core: CoreMesh, text: str = "secret words", **fields: object) -> tuple[Process, Process, str]:
    """Two agents, the second of which is called by the first beyond the hop limit of one; the cut call's id."""
    first, second = core.agent("first/1"), core.agent("second/1")
    outer = core.caller().request(agent_type="first")
    inner = first.call_from(outer, text, agent_type="second", **fields)
    assert first.error_of(inner).code == codes.HOP_LIMIT
    first.answer(outer)
    return first, second, inner


def listed(core: CoreMesh, who: Identity = ANYBODY, **asked: object) -> admin.ListDeadLettersReply:
    return redriving.listed(core.state, who, admin.ListDeadLettersRequest(**asked))  # type: ignore[arg-type]


def redrive(core: CoreMesh, message_id: str, who: Identity = ANYBODY, **asked: object) -> Redriven | Error:
    request = admin.RedriveDeadLetterRequest(message_id=message_id, **asked)  # type: ignore[arg-type]
    with core.step() as state:
        made = redriving.redrive(state, who, request)
    core.pump()
    return made


def redriven(core: CoreMesh, message_id: str, reply_topic: str = "") -> Redriven:
    made = redrive(core, message_id, reply_topic=reply_topic)
    assert isinstance(made, Redriven), made
    return made


def refused(core: CoreMesh, message_id: str, who: Identity = ANYBODY, **asked: object) -> Error:
    made = redrive(core, message_id, who, **asked)
    assert isinstance(made, Error)
    return made


def test_a_call_cut_at_the_hop_limit_is_kept_with_its_reason_and_trace() -> None:
    core = CoreMesh(max_hops=1)
    first, _, inner = cut(core, timeout_ms=4000, session_id="", dedup_key="step")
    (letter,) = listed(core).dead_letters
    assert (letter.message_id, letter.reason) == (inner, "HOP_LIMIT")
    assert letter.trace_id == first.reply_to(inner).trace_id
    assert letter.error.details["path"] == "first/1 → second"
    assert letter.envelope.target.agent_type == "second" and letter.envelope.source == "first/1"
    assert letter.expires_at.seconds - letter.at.seconds == 86_400 and not letter.redriven
    stages = [name for traced in core.state.traces.find(letter.trace_id) for name, *_ in traced.stages]
    assert "dead letter" in stages
    core.assert_settled()


def test_a_call_cut_as_a_repeat_is_kept_and_the_calls_above_it_are_not() -> None:
    core = CoreMesh(max_repeats=1)
    agent = core.agent("echo/1")
    outer = core.caller().request(dedup_key="step")
    inner = agent.call_from(outer, dedup_key="step")
    agent.answer(outer, error=agent.error_of(inner))
    assert [(each.message_id, each.reason) for each in listed(core).dead_letters] == [(inner, "LOOP_DETECTED")]
    core.assert_settled()


def test_nothing_of_a_payload_or_header_is_shown_or_logged() -> None:
    core = CoreMesh(max_hops=1)
    first, _second = core.agent("first/1"), core.agent("second/1")
    outer = core.caller().request(agent_type="first")
    envelope = core.envelope("secret words", agent_type="second", lineage=first.got(outer).lineage, source="first/1")
    envelope.headers["authorization"] = "secret header"
    envelope.payload.content_type = "text/plain"
    first.send(envelope)
    core.pump()
    reply = listed(core)
    assert b"secret" not in reply.SerializeToString()
    (letter,) = reply.dead_letters
    assert letter.payload_bytes == len("secret words") and letter.envelope.payload.content_type == "text/plain"
    assert core.logged("dead letter") and not any("secret" in str(line) for line in core.logs)


def test_what_nodes_wrote_is_taken_out_of_it() -> None:
    core = CoreMesh(max_hops=1)
    cut(core)
    (letter,) = core.state.dead_letters.find("default")
    kept = pb.Envelope.FromString(letter.data)
    written = ("recipient", "tenant", "principal", "entry", "lineage", "hop_count", "attempt", "parent_message_id")
    assert not any(getattr(kept, name) for name in written) and not kept.path
    assert kept.payload.text == "secret words"


def test_redriven_it_is_a_new_call_of_its_own_under_a_new_id() -> None:
    core = CoreMesh(max_hops=1)
    _, second, inner = cut(core, timeout_ms=4000)
    made = redriven(core, inner)
    delivered = second.got(made.message_id)
    assert made.message_id != inner and delivered.payload.text == "secret words"
    assert (delivered.hop_count, len(delivered.path), delivered.source) == (1, 1, "first/1")
    assert 3900 <= delivered.timeout_ms <= 4000 and made.trace_id == delivered.trace_id
    second.answer(made.message_id)
    (letter,) = listed(core).dead_letters
    assert letter.redriven and letter.redriven_as == made.message_id
    outcomes = {traced.message_id: traced.outcome for traced in core.state.traces.find(made.trace_id)}
    assert outcomes[inner] == "HOP_LIMIT" and outcomes[made.message_id] == "OK"
    assert core.state.stats.dead_letters["redriven"] == 1
    core.assert_settled()


def test_a_letter_is_redriven_once() -> None:
    core = CoreMesh(max_hops=1)
    _, second, inner = cut(core)
    made = redriven(core, inner)
    error = refused(core, inner)
    assert error.code == codes.REJECTED and made.message_id in error.message
    assert len(second.requests) == 1


def test_its_outcome_is_published_where_it_is_asked_for() -> None:
    core = CoreMesh(max_hops=1)
    _, second, inner = cut(core)
    listener = core.process("listener")
    listener.subscribe(TOPIC)
    made = redriven(core, inner, reply_topic=TOPIC)
    second.answer(made.message_id, "done")
    assert [found.correlation_id for found in listener.callbacks] == [made.message_id]
    core.assert_settled()


def test_a_letter_with_a_reply_topic_keeps_it() -> None:
    core = CoreMesh(max_hops=1)
    listener = core.process("listener")
    listener.subscribe(TOPIC)
    _, second, inner = cut(core, reply_topic=TOPIC)
    assert not listener.callbacks, "a cut call was refused at once"
    made = redriven(core, inner)
    second.answer(made.message_id, "done")
    assert listener.callbacks[0].payload.text == "done"
    core.assert_settled()


def test_what_is_refused_at_the_door_leaves_the_letter_to_be_tried_again() -> None:
    core = CoreMesh(max_hops=1)
    _, second, inner = cut(core)
    core.state.draining = True
    assert refused(core, inner).code == codes.SHUTTING_DOWN
    core.state.draining = False
    second.leave()
    assert refused(core, inner).code == codes.NO_ROUTE
    assert not listed(core).dead_letters[0].redriven
    again = core.agent("second/2")
    redriven(core, inner)
    assert again.requests
    assert refused(core, inner, reply_topic="/x").code == codes.REJECTED
    assert refused(core, "never heard of").code == codes.NO_ROUTE


def test_one_that_dies_again_leaves_a_letter_of_its_own() -> None:
    core = CoreMesh(max_hops=1)
    _, second, inner = cut(core)
    made = redriven(core, inner)
    deeper = second.call_from(made.message_id, agent_type="first")
    assert second.error_of(deeper).code == codes.HOP_LIMIT
    assert [letter.message_id for letter in listed(core).dead_letters] == [deeper, inner]


def test_equal_ids_of_two_principals_are_told_apart_and_tenants_see_only_their_own() -> None:
    core = CoreMesh(max_hops=1)
    for name in ("ada", "bob"):
        who = Identity(principal=name)
        agent = core.agent(f"{name}/1", who=who)
        outer = core.caller(who=who).request(agent_type=name)
        agent.call_from(outer, name, agent_type="ada", message_id="same")
    assert len(listed(core, message_id="same").dead_letters) == 2
    error = refused(core, "same")
    assert error.code == codes.INVALID_ENVELOPE and "principal bob" in error.message
    assert isinstance(redrive(core, "same", principal="bob"), Redriven)
    assert not listed(core, Identity(tenant="other")).dead_letters
    assert refused(core, "same", Identity(tenant="other"), principal="ada").code == codes.NO_ROUTE


def test_they_are_bounded_and_go_after_their_time() -> None:
    core = CoreMesh(max_hops=1, dead_letters_max=3, dead_letters_s=60.0)
    first, _second = core.agent("first/1"), core.agent("second/1")
    outer = core.caller().request(agent_type="first", timeout_ms=60_000)
    made = [first.call_from(outer, agent_type="second") for _ in range(5)]
    reply = listed(core, limit=2)
    assert [letter.message_id for letter in reply.dead_letters] == [made[4], made[3]] and reply.kept == 3
    assert core.state.stats.dead_letters["dropped"] == 2
    core.advance(61)
    assert not listed(core).dead_letters and core.state.stats.dead_letters["expired"] == 3
