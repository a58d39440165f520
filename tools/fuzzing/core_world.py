"""The node's core, a healthy pair that must be served, and attackers who speak to it in any way they like.

`play` takes steps (`Step`, bytes): what may come is whatever bytes can come over a stream or a call, in any order. What
must hold after all of them, `settle` says. Nothing but `LinkError` may leave the core, and that ends only one link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from google.protobuf.message import DecodeError

from agentreach.v1.envelope_pb2 import REQUEST, Envelope
from agentreach.v1.frame_pb2 import Frame, Goodbye, Hello, ProbeReply, Signal
from agentreach.wire.link import LinkError
from reach.core import links, mesh
from reach.core.calls import Call
from reach.core.peers import Peer
from reach.core.ports import Identity
from reach.core.state import State
from tests.support.core import CoreMesh, Process
from tools.fuzzing.messages import Words

MALLORY = Identity(principal="mallory")
ATTACKERS = 2
CALLS_MAX = 16  # of an attacker at the same time; the oldest is hung up on
DELIVERED_MAX = 8  # the last ones, to be answered
HOLD = "hold"
SETTLE_S = 40.0  # longer than any resume window, cancel grace and heartbeat time


class Step(IntEnum):
    """What is done with the bytes of a step."""

    RAW = 0
    """A stream message as it is."""
    NUMBERED = 1
    """A frame, if they parse: given the number and the ack that are due, so that it gets past the link."""
    HELLO = 2
    """A new stream with this hello (or an ordinary one)."""
    CUT = 3
    WAIT = 4
    """Time passes: the first byte times 50 ms."""
    INVOKE = 5
    PUBLISH = 6
    HANG_UP = 7
    READ = 8
    """Takes what the node has said, and acknowledges it or not."""


class Attacker:
    """The other end of a link, without any manners."""

    def __init__(self, world: CoreWorld, number: int) -> None:
        self.world = world
        self.incarnation = bytes([number]) * 16
        self.peer: Peer | None = None
        self.token = b""
        self.seq = 0
        self.calls: list[Call] = []

    @property
    def state(self) -> State:
        """The node's."""
        return self.world.core.state

    @property
    def alive(self) -> Peer | None:
        """Its link, while the node goes on with it."""
        peer = self.peer
        if peer is None or peer.closing or not peer.connected or peer.stream is not self:
            return None
        return peer

    def hello(self, message: Hello) -> None:
        """Begin a stream and end the one before; a token of zeros stands for the real one."""
        if message.resume_token == bytes(16):
            message.resume_token = self.token
        former = self.alive
        with self.world.core.step() as state:
            peer = links.hello(state, MALLORY, message)
            if peer is None:
                return
            peer.stream = self
            if former is not None and former is not peer and not former.closing:
                links.cut(state, former)
        self.peer, self.token = peer, peer.token
        self.seq = peer.link.last_accepted

    def frame(self, data: bytes, *, numbered: bool) -> None:
        """One stream message, as `reach.node.streams` takes it."""
        peer, core = self.alive, self.world.core
        try:
            frame = Frame.FromString(data)
            if peer is None:
                self._first(frame)
                return
            if numbered:
                frame.ack = min(frame.ack, peer.link._next_seq - 1)
                if frame.seq in (0, 2):  # any other is a number seen before, or a gap, with an honest ack
                    frame.seq = self.seq + 1
            with core.step() as state:
                mesh.frame(state, peer, frame, 0)
            self.seq = peer.link.last_accepted
        except (DecodeError, LinkError) as error:
            if peer is not None:
                with core.step() as state:
                    links.farewell(state, peer, Goodbye.PROTOCOL_ERROR, str(error))

    def _first(self, frame: Frame) -> None:
        for signal in frame.signals:
            if signal.HasField("hello"):
                self.hello(signal.hello)
                return

    def read(self, *, acknowledge: bool) -> None:
        """Take what the node says, and learn from it."""
        peer = self.alive
        if peer is None:
            return
        while (data := peer.link.next_frame(self.state.now)) is not None:
            frame = Frame.FromString(data)
            self.world.learn(frame)
            for signal in frame.signals:
                if signal.HasField("probe"):  # so that its agents count as healthy and get work
                    probe = signal.probe
                    self._say(Signal(probe_reply=ProbeReply(agent_id=probe.agent_id, nonce=probe.nonce, ready=True)))
        if acknowledge:
            with self.world.core.step() as state:
                mesh.frame(state, peer, Frame(ack=peer.link._next_seq - 1), 0)

    def _say(self, signal: Signal) -> None:
        if (peer := self.alive) is not None:
            with self.world.core.step() as state:
                mesh.frame(state, peer, Frame(signals=[signal]), 0)

    def invoke(self, data: bytes, *, event: bool) -> None:
        """A unary call with these bytes."""
        try:
            envelope = Envelope.FromString(data)
        except DecodeError:
            return
        call = Call(self.state, streaming=not event and envelope.more)
        with self.world.core.step() as state:
            if event:
                mesh.publish(state, call, MALLORY, envelope)
            else:
                mesh.invoke(state, call, MALLORY, envelope)
        if not event and not call.done:
            self.calls.append(call)
            if len(self.calls) > CALLS_MAX:
                self.hang_up()

    def hang_up(self) -> None:
        """Leave the oldest call."""
        if self.calls:
            call = self.calls.pop(0)
            with self.world.core.step() as state:
                mesh.hang_up(state, call, MALLORY)

    def cut(self) -> None:
        """The stream breaks."""
        if (peer := self.alive) is not None:
            with self.world.core.step() as state:
                links.cut(state, peer)


class CoreWorld:
    """A core and who is around it."""

    def __init__(self, words: Words, seed: int = 1, **rules: object) -> None:
        self.words = words
        self.core = CoreMesh(seed, **rules)
        self.neighbour = self.core.agent("echo/1", capabilities=["talk"], labels={"zone": "a"}, version="1.0")
        self.neighbour.handler = _answer
        self.asker = self.core.caller("asker")
        self.victim = self.core.caller("victim")
        """It calls the attackers' agents."""
        self.attackers = [Attacker(self, number + 1) for number in range(ATTACKERS)]
        self.held = ""
        """A request of the neighbour that is under way: nobody but its agent can answer or end it."""
        self.asked = 0
        self.called: list[str] = []

    def play(self, steps: Iterable[tuple[int, bytes]]) -> None:
        """Do all steps; the neighbour is served throughout."""
        for kind, data in steps:
            self.step(kind, data)
        self.ask()

    def step(self, kind: int, data: bytes) -> None:
        """Do one; the lowest bit of `kind` says who."""
        who = self.attackers[kind % ATTACKERS]
        match Step(kind // ATTACKERS % len(Step)):
            case Step.RAW:
                who.frame(data, numbered=False)
            case Step.NUMBERED:
                who.frame(data, numbered=True)
            case Step.HELLO:
                try:
                    who.hello(Hello.FromString(data))
                except DecodeError:
                    who.hello(Hello(incarnation=who.incarnation))
            case Step.CUT:
                who.cut()
            case Step.WAIT:
                self.core.advance((data or b"\x01")[0] / 20)
                self.ask()
            case Step.INVOKE:
                who.invoke(data, event=False)
            case Step.PUBLISH:
                who.invoke(data, event=True)
            case Step.HANG_UP:
                who.hang_up()
            case Step.READ:
                who.read(acknowledge=data[:1] > b"\x7f")
        self.core.pump()

    def ask(self) -> None:
        """The neighbour's requests: one must be answered at once, one was under way since the last time."""
        self._answer_held()
        message = self.asker.request("hi", agent_id="echo/1")
        assert self.asker.text_of(message) == "ok", "the neighbour was not served"
        self.asked += 1
        self.called.append(self.victim.request("hi", agent_type="evil", timeout_ms=3000))
        for process in (self.asker, self.neighbour):  # what a test would look at later is not wanted here
            for kept in (process.replies, process.requests, process.events, process.cancels, process.signals):
                kept.clear()
        self.held = self.asker.request(HOLD, agent_id="echo/1", timeout_ms=600_000)

    def _answer_held(self) -> None:
        if self.held:
            (request,) = [each for each in self.neighbour.running.values() if each.message_id == self.held]
            self.neighbour.answer(request, "held")
            assert self.asker.text_of(self.held) == "held", "somebody else answered the neighbour's request"
            self.held = ""

    def learn(self, frame: Frame) -> None:
        """What the node told an attacker is used against it."""
        for envelope in frame.envelopes:
            if envelope.type == REQUEST:
                self.words.delivered.append(envelope)
                del self.words.delivered[:-DELIVERED_MAX]
            entries = (envelope.entry, *_guessed(envelope.entry))
            self.words.learn((envelope.message_id, envelope.source), (*entries, envelope.lineage))

    def settle(self) -> None:
        """The attackers go; nothing of theirs may be left, and the neighbour is there as ever."""
        for who in self.attackers:
            while who.calls:
                who.hang_up()
            who.cut()
        self.core.advance(SETTLE_S)
        self.ask()
        self._answer_held()
        for message in self.called:
            self.victim.reply_to(message)  # whatever it says, it is one
        self.core.assert_settled()
        state = self.core.state
        assert set(state.peers.values()) == {each.peer for each in (self.neighbour, self.asker, self.victim)}, (
            "a link of an attacker is left"
        )
        assert [agent.agent_id for agent in state.directory] == ["echo/1"], "an agent of an attacker is left"
        assert state.topics.count == 0 and not state.arriving


def _guessed(entry: bytes) -> Iterator[bytes]:
    """Entries of others: the next ones, and the one before."""
    if len(entry) == 16:
        number = int.from_bytes(entry[8:], "big")
        yield from (entry[:8] + near.to_bytes(8, "big") for near in (number - 1, number + 1, number + 2) if near >= 0)


def _answer(process: Process, envelope: Envelope) -> None:
    assert envelope.type == REQUEST
    if envelope.payload.text != HOLD:
        process.answer(envelope, pump=False)


# ---- steps as bytes, for a fuzzer that knows bytes only ----


def packed(steps: Iterable[tuple[int, bytes]]) -> bytes:
    """Steps as one string of bytes."""
    return b"".join(bytes([kind]) + len(data).to_bytes(2, "big") + data for kind, data in steps if len(data) < 1 << 16)


def unpacked(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Any bytes as steps: never fails."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 1 : at + 3], "big")
        yield data[at], data[at + 3 : at + 3 + length]
        at += 3 + length
