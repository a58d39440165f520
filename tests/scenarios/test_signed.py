"""Messages of those who must sign: what is believed, and every way in which a captured or forged one is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.wire import signing
from agentreach.wire.errors import failure
from reach.core import deadletters, mesh, redriving, signed
from reach.core.access import Patterns, Rights
from reach.core.calls import Call
from reach.core.ports import Identity
from reach.core.signed import NONCES_MAX, WINDOW_S, Nonces
from tests.support.core import CoreMesh, Process

KEY, SECRET = "0a1b2c3d", bytes(range(32))
RIGHTS = Rights(
    call=Patterns(["*"]), publish=Patterns(["*"], topics=True), subscribe=Patterns(["*"], topics=True), signs=True
)
SIGNER = Identity("default", "signer", RIGHTS, f"{KEY}#1", SECRET)
NODE = "node"
OPEN = replace(RIGHTS, signs=False, register=Patterns(["*"]))


class Scene:
    """An agent that answers, and a principal that must sign."""

    def __init__(self) -> None:
        self.core = CoreMesh()
        self.agent = self.core.agent(who=Identity("default", "serves", OPEN))
        self.nonces = 0

    @property
    def now_ms(self) -> int:
        return int(self.core.state.unix * 1000)

    def sign(
        self, envelope: Envelope, *, audience: str = NODE, late_s: float = 0.0, secret: bytes = SECRET
    ) -> Envelope:
        """Sign it as it stands."""
        self.nonces += 1
        nonce = self.nonces.to_bytes(16, "big")
        at_ms = self.now_ms - int(late_s * 1000)
        envelope.signature = signing.sign(envelope, secret, KEY, audience, at_ms, nonce)
        return envelope

    def invoke(self, envelope: Envelope, who: Identity = SIGNER) -> str:
        """Why it was refused; empty: it was taken in."""
        call = Call(self.core.state, streaming=False)
        sent = Envelope()
        sent.CopyFrom(envelope)
        with self.core.step() as state:
            mesh.invoke(state, call, who, sent)
        return self.why(call)

    def publish(self, envelope: Envelope) -> str:
        """The same of an event."""
        call = Call(self.core.state, streaming=False)
        sent = Envelope()
        sent.CopyFrom(envelope)
        with self.core.step() as state:
            mesh.publish(state, call, SIGNER, sent)
        return self.why(call)

    def by_link(self, caller: Process, envelope: Envelope) -> str:
        """The same of a request on a link."""
        sent = Envelope()
        sent.CopyFrom(envelope)
        before = len(self.agent.requests)
        caller.send(sent)
        self.core.pump()
        if len(self.agent.requests) > before:
            return ""
        return caller.error_of(envelope.message_id).message

    def why(self, call: Call) -> str:
        self.core.pump()
        if not call.replies or not call.replies[0].HasField("error"):
            return ""
        error = call.replies[0].error
        assert error.code == codes.PERMISSION_DENIED, error
        return error.message


@pytest.fixture
def scene() -> Scene:
    return Scene()


def request(message_id: str = "m-1", **fields: Any) -> Envelope:
    values: dict[str, Any] = {
        "message_id": message_id,
        "type": pb.REQUEST,
        "target": Target(agent_type="echo"),
        "payload": Payload(text="hi"),
        "timeout_ms": 5000,
        "fresh": True,
    }
    return Envelope(**(values | fields))


def test_a_signed_message_is_taken_in_and_the_same_bytes_a_second_time_are_not(scene: Scene) -> None:
    captured = scene.sign(request())
    assert scene.invoke(captured) == ""
    assert scene.invoke(captured) == "signature: it was seen before: sign each sending anew"
    assert len(scene.agent.requests) == 1


def test_sent_again_with_a_new_signature_it_is_the_same_message(scene: Scene) -> None:
    assert scene.invoke(scene.sign(request())) == ""
    again = request()
    again.fresh = False
    assert scene.invoke(scene.sign(again)) == ""
    assert len(scene.agent.requests) == 1  # joined to the first


def test_without_a_signature_or_with_one_that_is_none_nothing_enters(scene: Scene) -> None:
    assert "there is none" in scene.invoke(request())
    for data in (b"x", b"\x01", bytes(200), b"\xff" * 1_000):
        assert "malformed" in scene.invoke(request(signature=data))
    assert not scene.agent.requests


@pytest.mark.parametrize(
    "change",
    [
        {"message_id": "m-2"},
        {"payload": Payload(text="ho")},
        {"target": Target(agent_type="echo", labels={"a": "b"})},
        {"headers": {"a": "b"}},
        {"session_id": "s"},
        {"reply_topic": "mine"},
        {"env": "staging"},
        {"idempotent": True},
    ],
    ids=str,
)
def test_a_captured_message_that_was_changed_is_not_believed(scene: Scene, change: dict[str, Any]) -> None:
    captured = scene.sign(request())
    forged = Envelope()
    forged.CopyFrom(captured)
    for name in change:
        forged.ClearField(name)  # type: ignore[arg-type]  # a name of its fields
    forged.MergeFrom(Envelope(**change))
    assert "does not fit" in scene.invoke(forged)


def test_the_time_left_may_be_stamped_anew_on_the_way(scene: Scene) -> None:
    captured = scene.sign(request())
    captured.timeout_ms = 1_000
    assert scene.invoke(captured) == ""


@pytest.mark.parametrize("late_s", [WINDOW_S + 1, -WINDOW_S - 1])
def test_what_is_too_old_or_too_far_ahead_is_refused(scene: Scene, late_s: float) -> None:
    scene.core.advance(2 * WINDOW_S)
    assert "the limit is 300 s" in scene.invoke(scene.sign(request(), late_s=late_s))


def test_a_replay_is_refused_for_as_long_as_its_time_would_be_believed(scene: Scene) -> None:
    captured = scene.sign(request(), late_s=-WINDOW_S + 1)  # by a clock that runs ahead
    assert scene.invoke(captured) == ""
    for _ in range(6):
        assert "seen before" in scene.invoke(captured)
        scene.core.advance(WINDOW_S / 3)
    scene.core.advance(WINDOW_S / 3)
    assert "the limit is 300 s" in scene.invoke(captured)


def test_a_message_for_another_node_or_another_link_is_refused(scene: Scene) -> None:
    assert "it is for 'node-2', and this is node node" in scene.invoke(scene.sign(request(), audience="node-2"))
    one, other = scene.core.caller("one", SIGNER), scene.core.caller("other", SIGNER)
    assert one.peer is not None and other.peer is not None
    captured = scene.sign(request(), audience=one.peer.link_id)
    assert "it is for" in scene.by_link(other, captured)
    assert "it is for" in scene.invoke(captured)
    assert scene.by_link(one, captured) == ""


def test_a_key_signs_for_itself_only(scene: Scene) -> None:
    other = Identity("default", "signer", RIGHTS, "ffffffff#1", SECRET)
    assert "it names key '0a1b2c3d', and the message came by another" in scene.invoke(scene.sign(request()), other)
    assert "does not fit" in scene.invoke(scene.sign(request(), secret=bytes(32)))
    without = Identity("default", "signer", RIGHTS, f"{KEY}#1", b"")
    assert "does not fit" in scene.invoke(scene.sign(request(), secret=b""), without)


def test_what_was_signed_for_the_node_before_it_started_is_refused_and_for_its_link_is_not(scene: Scene) -> None:
    assert "before this node started" in scene.invoke(scene.sign(request(), late_s=20.0))
    caller = scene.core.caller("slow-clock", SIGNER)
    assert caller.peer is not None
    behind = scene.sign(request("m-2"), audience=caller.peer.link_id, late_s=20.0)
    assert scene.by_link(caller, behind) == ""


def test_without_an_audience_a_message_never_counts_as_fresh_and_needs_an_id(scene: Scene) -> None:
    assert scene.invoke(scene.sign(request(), audience="")) == ""
    (taken,) = scene.core.state.requests.values()
    assert not taken.fresh
    assert "needs a message_id" in scene.invoke(scene.sign(request(""), audience=""))
    event = Envelope(message_id="e", type=pb.EVENT, target=Target(topic="t"), payload=Payload(text="x"))
    assert "an event needs an audience" in scene.publish(scene.sign(event, audience=""))


def test_events_are_signed_too(scene: Scene) -> None:
    event = Envelope(message_id="e", type=pb.EVENT, target=Target(topic="t"), payload=Payload(text="x"))
    assert "there is none" in scene.publish(event)
    captured = scene.sign(event)
    assert scene.publish(captured) == ""
    assert "seen before" in scene.publish(captured)


def test_who_need_not_sign_is_not_asked_to(scene: Scene) -> None:
    assert scene.invoke(request(), Identity("default", "other", OPEN)) == ""


def test_a_refusal_is_told_for_the_audit_log(scene: Scene) -> None:
    with scene.core.step() as state:
        mesh.invoke(state, Call(state, streaming=False), SIGNER, request())
        told = [effect for effect in state.effects if getattr(effect, "action", "") == "message.denied"]
    assert [(line.principal, line.key_id) for line in told] == [("signer", KEY)]  # type: ignore[union-attr]
    assert scene.core.state.stats.denied == 1


def test_what_is_remembered_is_bounded_and_what_is_forgotten_counts_as_seen() -> None:
    nonces = Nonces()
    for number in range(NONCES_MAX + 10):
        assert nonces.take(1_000_000 + number, number.to_bytes(16, "big"), 1_000_000)
    assert len(nonces) == NONCES_MAX and nonces.floor_ms == 1_000_009
    for number in (0, 9, 10, NONCES_MAX + 9):
        assert not nonces.take(1_000_000 + number, number.to_bytes(16, "big"), 1_000_000)
    assert not nonces.take(1_000_009, bytes(15) + b"x", 1_000_000)  # never seen, but nobody can tell


def test_principals_that_are_gone_are_forgotten(scene: Scene) -> None:
    for name in ("a", "b", "c"):
        who = Identity("default", name, RIGHTS, f"{KEY}#1", SECRET)
        assert scene.invoke(scene.sign(request(f"of-{name}")), who) == ""
        scene.core.advance(WINDOW_S + 1)
    assert set(scene.core.state.nonces) == {("default", "c")}
    assert signed.WINDOW_S == 300


def test_a_dead_letter_of_who_must_sign_is_sent_once_more_without_a_new_signature(scene: Scene) -> None:
    core = scene.core
    core.state.principals = {("default", "signer"): RIGHTS}
    assert scene.invoke(scene.sign(request())) == ""
    with core.step() as state:
        (taken,) = state.requests.values()
        deadletters.bury(state, taken, failure(codes.AGENT_ERROR, "in vain"))
    ops = Identity("default", "ops", replace(OPEN, admin=True))
    with core.step() as state:
        made = redriving.redrive(state, ops, admin.RedriveDeadLetterRequest(message_id="m-1"))
    assert not isinstance(made, codes.Error), made
    core.pump()
    assert scene.agent.requests[-1].message_id == made.message_id
