"""Steps against a `CoreWorld`, drawn from a random source: new messages, mutated ones, and damaged bytes."""

from __future__ import annotations

from random import Random

from agentreach.v1.envelope_pb2 import RESPONSE, Envelope, Target
from agentreach.v1.frame_pb2 import Frame, Signal
from tools.fuzzing import seeds
from tools.fuzzing.core_world import ATTACKERS, Step
from tools.fuzzing.messages import Words, disturb, fill
from tools.fuzzing.octets import damage

_KINDS = (
    [Step.NUMBERED] * 12 + [Step.RAW] * 2 + [Step.HELLO] * 2 + [Step.INVOKE, Step.READ] * 3
    + [Step.PUBLISH, Step.WAIT, Step.HANG_UP, Step.CUT]
)  # fmt: skip


class Drawing:
    """What an attacker thinks of next."""

    def __init__(self, rng: Random, words: Words) -> None:
        self.rng = rng
        self.words = words
        self.envelopes = seeds.envelopes(rng)
        self.signals = seeds.signals(rng, words)

    def step(self) -> tuple[int, bytes]:
        """One step."""
        rng = self.rng
        kind = rng.choice(_KINDS)
        match kind:
            case Step.NUMBERED:
                data = self.frame().SerializeToString()
            case Step.RAW:
                data = damage(rng, self.frame().SerializeToString(), self.frame().SerializeToString())
            case Step.HELLO:
                data = self.hello()
            case Step.INVOKE | Step.PUBLISH:
                data = self.envelope().SerializeToString()
            case _:
                data = rng.randbytes(1)
        return kind * ATTACKERS + rng.randrange(ATTACKERS), data

    def hello(self) -> bytes:
        """A hello: honest, resuming, or disturbed."""
        rng = self.rng
        hello = seeds.hello(*rng.sample(("evil/1", "evil/2", "evil/3"), rng.randrange(3)))
        if rng.random() < 0.5:
            hello.resume_token = bytes(16)
            hello.last_seq = rng.choice((0, 0, 1, 2, 5, (1 << 64) - 1))
        if rng.random() < 0.4:
            disturb(rng, hello, self.words)
        return hello.SerializeToString()

    def frame(self) -> Frame:
        """A frame of some signals and envelopes."""
        rng = self.rng
        frame = Frame(
            seq=rng.choice((0,) * 20 + (1, 2, 3, (1 << 64) - 1)), ack=rng.choice((0, 1, 2, 3, (1 << 64) - 1)),
            age_ms=rng.choice((0, 0, 0, 5, 10_000, (1 << 32) - 1)),
        )  # fmt: skip
        frame.envelopes.extend(self.envelope() for _ in range(rng.choice((0, 1, 1, 2, 4))))
        frame.signals.extend(self.signal() for _ in range(rng.choice((0, 0, 1, 2))))
        return frame

    def envelope(self) -> Envelope:
        """An answer to what was delivered, a valid envelope, a disturbed one, or anything."""
        rng, envelope = self.rng, Envelope()
        if self.words.delivered and rng.random() < 0.3:
            return self.answer(rng.choice(self.words.delivered))
        roll = rng.random()
        if roll < 0.15:
            fill(rng, envelope, self.words, density=rng.choice((0.1, 0.4, 0.9)))
            return envelope
        envelope.CopyFrom(rng.choice(self.envelopes))
        envelope.message_id = rng.choice(("", f"m{rng.randrange(8)}", f"n{rng.getrandbits(40)}"))
        if self.words.blobs:
            envelope.entry = rng.choice(self.words.blobs)
        if roll < 0.6:
            for _ in range(rng.randrange(1, 4)):
                disturb(rng, envelope, self.words)
        if roll > 0.9:
            envelope.lineage = rng.choice(self.words.blobs)
        return envelope

    def answer(self, request: Envelope) -> Envelope:
        """A RESPONSE, final or not, in order or not, perhaps disturbed; or a nested request."""
        rng, echoed = self.rng, {"entry": request.entry, "attempt": request.attempt, "epoch": request.epoch}
        if rng.random() < 0.2:
            target = Target(agent_type=rng.choice(("evil", "echo")))
            return Envelope(target=target, lineage=request.lineage, source=request.recipient, timeout_ms=1000)
        if rng.random() < 0.2:
            echoed["entry"] = rng.choice(self.words.blobs)  # somebody else's, perhaps
        response = Envelope(
            type=RESPONSE, correlation_id=request.message_id, source=request.recipient, sequence=rng.randrange(3),
            more=rng.random() < 0.4, **echoed,
        )  # fmt: skip
        if rng.random() < 0.3:
            fill(rng, response.error, self.words, density=0.6)
        if rng.random() < 0.4:
            disturb(rng, response, self.words)
        return response

    def signal(self) -> Signal:
        """A signal: as it is meant, or with something else in it."""
        signal = Signal()
        signal.CopyFrom(self.rng.choice(self.signals))
        if signal.HasField("goodbye") and self.rng.random() < 0.8:
            signal.goodbye.Clear()
            signal.subscribe.topics.append("news")
        if self.rng.random() < 0.5:
            disturb(self.rng, signal, self.words)
        return signal
