"""What can be read of a frame one of whose envelopes cannot."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import REQUEST, RESPONSE, Envelope, Payload
from agentreach.v1.frame_pb2 import Frame, Probe, Signal
from agentreach.wire import framing
from agentreach.wire.salvage import framed, salvaged
from tests.support.deep import deep

GOOD = Envelope(message_id="good", payload=Payload(text="x"))
PROBE = Signal(probe=Probe(agent_id="a/1", nonce=7))


def frame(*envelopes: bytes, seq: int = 3) -> bytes:
    head = Frame(seq=seq, ack=2, signals=[PROBE]).SerializeToString()
    return head + b"".join(framing.ENVELOPES + framing.varint(len(each)) + each for each in envelopes)


def test_one_envelope_too_deep_is_known_by_its_ids_and_all_others_are_whole() -> None:
    bad = deep(Envelope(message_id="bad", source="a/1", trace_id="t", timeout_ms=5), 60)
    data = frame(GOOD.SerializeToString(), bad, GOOD.SerializeToString())
    with pytest.raises(DecodeError):
        Frame.FromString(data)
    found = salvaged(data)
    assert found is not None
    read, unread = found
    assert read == Frame(seq=3, ack=2, signals=[PROBE], envelopes=[GOOD, GOOD])
    assert unread == [Envelope(message_id="bad", source="a/1", trace_id="t")]


def test_an_answer_too_deep_becomes_an_error_in_its_place() -> None:
    answer = Envelope(type=RESPONSE, correlation_id="m", entry=b"e", attempt=2, source="a/1")
    found = salvaged(frame(deep(answer, 60)))
    assert found is not None
    (said,), unread = found[0].envelopes, found[1]
    assert said.error.code == codes.AGENT_ERROR and not unread
    said.ClearField("error")
    assert said == answer


@pytest.mark.parametrize(
    "part", [b"\x0a\x02\xff\xfe", b"\xba\x3e\x02\xff\xfe\xbb"], ids=["its id", "a group left open"]
)
def test_text_that_is_none_costs_the_message_and_what_cannot_be_told_apart_the_frame(part: bytes) -> None:
    found = salvaged(frame(Envelope(message_id="bad", type=REQUEST).SerializeToString() + b"\x92\x01\x02\xff\xfe"))
    assert found is not None and [each.message_id for each in found[1]] == ["bad"]
    assert salvaged(frame(part)) is None


@given(st.binary(max_size=60))
def test_anything_at_all_is_a_frame_or_none(data: bytes) -> None:
    found = salvaged(data)
    if found is not None:
        found[0].SerializeToString()
    salvaged(frame(data))


@given(st.binary(max_size=60), st.integers(0, 60))
def test_what_is_cut_off_is_no_frame_or_one_that_reads(data: bytes, at: int) -> None:
    salvaged(frame(deep(GOOD, 60), data)[: -at or None])


def test_an_envelope_that_reads_alone_and_not_in_a_frame_is_refused() -> None:
    deepest = next(levels for levels in range(60, 0, -1) if _reads_alone(deep(GOOD, levels)))
    with pytest.raises(DecodeError):
        framed(deep(GOOD, deepest))
    assert framed(deep(GOOD, deepest - 1)).message_id == "good"
    assert framed(GOOD.SerializeToString()) == GOOD


def _reads_alone(data: bytes) -> bool:
    try:
        Envelope.FromString(data)
    except DecodeError:
        return False
    return True
