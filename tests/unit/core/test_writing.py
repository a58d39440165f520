"""What is appended as bytes equals what the ordinary protobuf objects say."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Hop, Payload, Target, Timing
from agentreach.v1.error_pb2 import Error
from agentreach.v1.peer_pb2 import Lineage
from reach.core import writing
from reach.core.calls import Call
from reach.core.lineage import LineageKeys, valid_until_unix_ms
from reach.core.requests import Request, Waiter
from reach.core.rules import Rules
from reach.core.state import State

words = st.text(max_size=20)
long_words = st.one_of(words, st.text("aж", min_size=120, max_size=300))
numbers = st.integers(0, 2**32 - 1)

hops = st.builds(Hop, agent_id=words, message_id=words, session_id=words, dedup_key=words, detached=st.booleans())
targets = st.builds(Target, agent_type=words, capabilities=st.lists(words, max_size=2), hash_key=words)
payloads = st.one_of(
    st.builds(Payload, body=st.binary(max_size=300), content_type=words), st.builds(Payload, text=long_words)
)
envelopes = st.builds(
    Envelope,
    protocol_version=st.integers(0, 2),
    message_id=long_words,
    fresh=st.booleans(),
    type=st.sampled_from((pb.MESSAGE_TYPE_UNSPECIFIED, pb.REQUEST, pb.RESPONSE, pb.CANCEL)),
    source=words,
    recipient=words,
    tenant=words,
    principal=words,
    actors=st.lists(words, max_size=2),
    target=targets,
    payload=payloads,
    correlation_id=words,
    entry=st.binary(max_size=20),
    trace_id=words,
    session_id=long_words,
    epoch=st.integers(0, 2**64 - 1),
    session_event=st.sampled_from((pb.SESSION_EVENT_UNSPECIFIED, pb.STARTED, pb.LOST)),
    timeout_ms=numbers,
    lineage=st.binary(max_size=200),
    hop_count=numbers,
    path=st.lists(hops, max_size=3),
    dedup_key=words,
    reply_topic=st.sampled_from(("", "results")),
    attempt=numbers,
    sequence=numbers,
    more=st.booleans(),
    headers=st.dictionaries(words, words, max_size=3),
)
parents = st.one_of(
    st.none(),
    st.builds(
        Lineage,
        path=st.lists(hops, max_size=10),
        hop_count=st.integers(1, 300),
        tenant=words,
        principal=st.sampled_from(["", "who", "ada"]),
        actors=st.lists(words, max_size=3),
    ),
)


def _state(now: float) -> State:
    keys = LineageKeys((3, b"k" * 40))
    return State(Rules(), rng=Random(1), nonce=b"12345678", lineage=keys, now=now, unix=1.8e9)


def _request(state: State, envelope: Envelope, left_s: float) -> Request:
    key = ("tenant", "who", "production", envelope.message_id)
    deadline = state.now + left_s
    waiter = Waiter(Call(state, streaming=False), envelope.message_id, deadline)
    return Request(
        7, key, b"1234567800000007", state.now, deadline, waiter, "trace ж", "caller/x", 1, envelope.fresh, False
    )


@given(
    envelope=envelopes,
    parent=parents,
    left_s=st.floats(0.0, 600.0),
    attempt=st.integers(1, 4),
    epoch=st.integers(0, 2**63),
)
def test_a_delivery_says_what_the_sender_said_and_what_the_node_knows(
    envelope: Envelope, parent: Lineage | None, left_s: float, attempt: int, epoch: int
) -> None:
    state = _state(1000.0)
    request = _request(state, envelope, left_s)
    request.attempt, request.epoch = attempt, epoch
    expected = Envelope()
    expected.CopyFrom(envelope)
    got = Envelope.FromString(writing.delivered(state, request, envelope, writing.recipient_fields("echo/1"), parent))
    earlier = list(parent.path) if parent is not None else []
    own = Hop(
        agent_id="echo/1",
        message_id=envelope.message_id,
        session_id=envelope.session_id,
        dedup_key=envelope.dedup_key,
        detached=bool(envelope.reply_topic),
    )
    lineage = state.lineage.verify(got.lineage)
    actors = list(parent.actors) if parent is not None else []
    if parent is not None and parent.principal == "ada":  # another one than who sends
        actors.append("ada")
    deadline_ms = int((request.deadline + state.unix_offset) * 1000)
    hop_count = (parent.hop_count if parent is not None else 0) + 1
    assert lineage == Lineage(
        message_id=envelope.message_id,
        trace_id="trace ж",
        path=[*earlier, own],
        hop_count=hop_count,
        deadline_unix_ms=deadline_ms,
        valid_until_unix_ms=valid_until_unix_ms(deadline_ms),
        tenant="tenant",
        principal="who",
        env="production",
        actors=actors,
    )
    expected.type = pb.REQUEST
    expected.recipient, expected.tenant, expected.principal = "echo/1", "tenant", "who"
    expected.ClearField("actors")
    expected.actors.extend(actors)
    expected.ClearField("path")
    expected.ClearField("session_event")
    expected.path.extend([*earlier, own])
    expected.entry, expected.trace_id, expected.lineage = request.entry, "trace ж", got.lineage
    expected.hop_count, expected.attempt, expected.epoch = hop_count, attempt, epoch
    expected.fresh = envelope.fresh and attempt == 1  # a later one is not: its agent may know it
    expected.timeout_ms = max(1, int((request.deadline - state.now) * 1000))
    assert got == expected


@given(
    envelope=envelopes,
    error=st.one_of(st.none(), st.builds(Error, message=words)),
    timing=st.builds(Timing, queue_us=numbers, handler_us=numbers),
    items=st.integers(0, 300),
    epoch=st.integers(0, 2**63),
    event=st.sampled_from((pb.SESSION_EVENT_UNSPECIFIED, pb.STARTED, pb.MOVED, pb.LOST)),
)
def test_an_answer_says_only_what_the_node_vouches_for(
    envelope: Envelope, error: Error | None, timing: Timing, items: int, epoch: int, event: pb.SessionEvent.ValueType
) -> None:
    state = _state(1000.0)
    request = _request(state, Envelope(message_id="m ж"), 5.0)
    request.items, request.epoch, request.session_event = items, epoch, event
    envelope.timing.CopyFrom(timing)
    if error is not None:
        envelope.error.CopyFrom(error)
    expected = Envelope()
    expected.CopyFrom(envelope)
    got = Envelope.FromString(writing.answered(request, envelope, "echo/1"))
    for name in ("target", "path", "actors", "recipient", "lineage", "tenant", "principal", "hop_count"):
        expected.ClearField(name)
    expected.type, expected.source, expected.correlation_id = pb.RESPONSE, "echo/1", "m ж"
    expected.trace_id, expected.entry = "trace ж", request.entry
    expected.epoch, expected.session_event, expected.sequence = epoch, event, items
    assert got == expected
