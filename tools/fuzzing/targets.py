"""What is fuzzed: each target takes any bytes and raises only for a fault of ours.

| target | the bytes are | what must hold |
|---|---|---|
| core | steps of attackers, frames and calls among them (`core_world`) | a neighbour is served, nothing is left |
| sdk | steps of a hostile node (`sdk_world`) | the process goes on, requests end |
| envelope | an Envelope | each check gives a fault or none; what passes can be digested, decoded, routed |
| record | an AgentRecord | what passes its check can be registered and matched |
| link | frames, with their lengths | acted on, dropped or `LinkError`; the books stay true |
| selector | two texts: what is asked for, what an agent is | a fault, or a match that can be decided |
| lineage | a lineage, and the content of one | believed, unknown or `Forged`; never believed unsigned |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from google.protobuf.message import DecodeError, Message

from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.frame_pb2 import Frame
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire import checks, limits
from agentreach.wire.content import content_digest
from agentreach.wire.link import Link, LinkError
from agentreach.wire.payload import PayloadError, decode
from reach.core.agents import Agent
from reach.core.lineage import Forged, LineageKeys
from reach.core.selector import Aliases, parse_selector
from tools.fuzzing import seeds
from tools.fuzzing.core_world import CoreWorld, packed, unpacked
from tools.fuzzing.drawing import Drawing
from tools.fuzzing.messages import Words, disturb
from tools.fuzzing.octets import damage
from tools.fuzzing.sdk_world import HostileNode, SdkDrawing, attack

_SEEDS = 24  # inputs to begin with, of each target
_STEPS = 25  # of a script
_KEYS = LineageKeys((1, b"k" * 32), (2, b"p" * 32))
_ALIASES = Aliases({"chat": "talk"})
_VERSIONS = (
    "1.0", ">=1,<2", "==1.*", "===1.0", "~=2.3", "!=1", "1!2.3rc1.post4.dev5+local", "nightly-7", "", "<2,>=",
    "==1.*.*", ">=1.0.0a1", "v1", "\u0661.0", "1" * 100, "1." * 60,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One target."""

    run: Callable[[bytes], None]
    begin: Callable[[Random], list[bytes]]
    """Inputs that are mostly valid."""
    mutate: Callable[[Random, bytes], bytes]
    cost: int = 1
    """How many inputs of the cheapest target take as long."""


# ---- scripts: the core and the SDK ----


def run_core(data: bytes) -> None:
    """Attack a core."""
    world = CoreWorld(seeds.words())
    world.play(unpacked(data))
    world.settle()


def run_sdk(data: bytes) -> None:
    """Attack a process."""
    logging.getLogger("agent_sdk").propagate = False
    faults = asyncio.run(attack(unpacked(data), honest_again=False))
    assert not faults, faults[0]


def _core_scripts(rng: Random) -> list[bytes]:
    drawing = Drawing(rng, seeds.words())
    return [packed(drawing.step() for _ in range(_STEPS)) for _ in range(_SEEDS)]


def _sdk_scripts(rng: Random) -> list[bytes]:
    drawing = SdkDrawing(rng, HostileNode().words)
    return [packed(drawing.step() for _ in range(_STEPS)) for _ in range(_SEEDS)]


def mutate_script(rng: Random, data: bytes) -> bytes:
    """Drop, repeat, swap or replace steps; or change one's message or bytes."""
    steps = list(unpacked(data))
    at = rng.randrange(len(steps) + 1)
    drawing = _drawing(rng)
    match rng.randrange(6):
        case 0 if steps:
            del steps[at : at + rng.choice((1, 1, 4))]
        case 1 if steps:
            steps.insert(at, rng.choice(steps))
        case 2:
            steps[at:at] = [drawing.step() for _ in range(rng.choice((1, 4)))]
        case 3 if steps:
            kind, content = steps[at % len(steps)]
            steps[at % len(steps)] = (kind, _disturbed(rng, content, Frame()))
        case 4 if steps:
            kind, content = steps[at % len(steps)]
            steps[at % len(steps)] = (kind, damage(rng, content, data))
        case _ if steps:
            steps[at % len(steps)] = (rng.randrange(32), steps[at % len(steps)][1])
    return packed(steps)


def _drawing(rng: Random) -> Drawing:
    drawing = _DRAWINGS.setdefault("one", Drawing(Random(1), seeds.words()))
    drawing.rng = rng
    return drawing


_DRAWINGS: dict[str, Drawing] = {}  # made once: it takes longer than a step


# ---- messages ----


def run_envelope(data: bytes) -> None:
    """Ask of an envelope all that is asked where it enters."""
    try:
        envelope = Envelope.FromString(data)
    except DecodeError:
        return
    checks.event_fault(envelope, limits.PAYLOAD_BYTES_MAX)
    checks.target_fault(envelope.target, envelope.env)
    checks.payload_size(envelope.payload)
    content_digest(envelope)
    try:
        decode(envelope.payload)
    except PayloadError:
        pass
    fault = checks.request_fault(envelope, limits.PAYLOAD_BYTES_MAX)
    if fault is None:
        str(parse_selector(envelope.target, "default", envelope.env, _ALIASES))


def run_record(data: bytes) -> None:
    """Register what may be registered, and look for it."""
    try:
        record = AgentRecord.FromString(data)
    except DecodeError:
        return
    if checks.record_fault(record) is None:
        record.agent_id = record.agent_id or f"{record.agent_type}/1"
        agent = Agent.from_record(record)
        target = Target(agent_type=record.agent_type, labels=record.labels, version=record.version)
        target.capabilities.extend(record.capabilities)
        if checks.target_fault(target) is None and (target.ListFields()):
            parse_selector(target, agent.tenant, agent.env, _ALIASES).describes(agent)


def _envelopes(rng: Random) -> list[bytes]:
    return [envelope.SerializeToString() for envelope in seeds.envelopes(rng)]


def _records(rng: Random) -> list[bytes]:
    hello = seeds.hello("evil/1", "evil/2", "echo/1")
    return [attach.record.SerializeToString() for attach in hello.agents]


def _disturbed(rng: Random, data: bytes, message: Message) -> bytes:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return damage(rng, data)
    for _ in range(rng.randrange(1, 4)):
        disturb(rng, message, _words())
    return message.SerializeToString()


def _words() -> Words:
    return Words([*seeds.WORDS, *_VERSIONS], [b"", bytes(16)])


def _mutate_message(kind: type[Message]) -> Callable[[Random, bytes], bytes]:
    def mutate(rng: Random, data: bytes) -> bytes:
        return damage(rng, data) if rng.random() < 0.3 else _disturbed(rng, data, kind())

    return mutate


# ---- the link ----


def run_link(data: bytes) -> None:
    """Give frames to a link that has something of its own under way."""
    link = Link()
    link.put(Envelope(message_id="m"), 0.0)
    now = 0.0
    for kind, content in unpacked(data):
        now += 0.01
        try:
            match kind % 8:
                case 0:
                    link.put_bytes(content, now, kind // 8 % 3)
                case 1:
                    link.next_frame(now)
                case 2:
                    link.cut()
                    if not link.resume(int.from_bytes(content[:2], "big")):
                        link.restart()
                case _:
                    frame = Frame.FromString(content)
                    last = link.last_accepted
                    acts = link.receive(frame, now)
                    assert acts is (frame.seq in (0, last + 1))
        except DecodeError:
            continue
        except LinkError:
            link.cut()
            link.restart()
        assert link.unacked == sum(len(frame.items) for frame in link._kept)
        assert link.waiting == sum(item.data is not None for lane in link._lanes for item in lane)
        assert link.acknowledged < link._next_seq


# ---- texts ----


def run_selector(data: bytes) -> None:
    """The bytes are a target's version and an agent's, apart by a zero byte."""
    wanted, _, version = data.decode(errors="replace").partition("\x00")
    target = Target(agent_type="echo", version=wanted)
    record = AgentRecord(agent_id="echo/1", agent_type="echo", version=version)
    if checks.target_fault(target) is None and checks.record_fault(record) is None:
        selector = parse_selector(target, "default", "", _ALIASES)
        selector.describes(Agent.from_record(record))
    checks.target_fault(Target(agent_id=wanted))
    checks.target_fault(Target(topic=wanted))
    checks.target_fault(Target(capabilities=[wanted], labels={wanted: version}))


def run_lineage(data: bytes) -> None:
    """The bytes as a lineage are not believed; as the content of a signed one they are read or refused."""
    try:
        assert _KEYS.verify(data) is None, "a lineage was believed that nobody signed"
    except Forged:
        pass
    try:
        assert _KEYS.verify(_KEYS.sign_bytes(data)) is not None
    except Forged:
        pass


def _texts(rng: Random) -> list[bytes]:
    return [f"{rng.choice(_VERSIONS)}\x00{rng.choice(_VERSIONS)}".encode() for _ in range(_SEEDS)]


def _lineages(rng: Random) -> list[bytes]:
    found = [lineage.SerializeToString() for lineage in seeds.lineages()]
    return [*found, *(b"\x01" + bytes(32) + data for data in found), *(b"\x02" * 33 + data for data in found)]


def _mutate_text(rng: Random, data: bytes) -> bytes:
    return damage(rng, data, rng.choice(_VERSIONS).encode())


TARGETS: dict[str, Fuzzed] = {
    "core": Fuzzed(run_core, _core_scripts, mutate_script, cost=200),
    "sdk": Fuzzed(run_sdk, _sdk_scripts, mutate_script, cost=10_000),
    "envelope": Fuzzed(run_envelope, _envelopes, _mutate_message(Envelope)),
    "record": Fuzzed(run_record, _records, _mutate_message(AgentRecord)),
    "link": Fuzzed(run_link, _core_scripts, mutate_script, cost=10),
    "selector": Fuzzed(run_selector, _texts, _mutate_text),
    "lineage": Fuzzed(run_lineage, _lineages, _mutate_text),
}


def wander(name: str, rng: Random, inputs: int) -> None:
    """Fuzz without coverage: so many inputs, each a mutation of one before. Raises `Found` with the bytes."""
    target = TARGETS[name]
    kept = target.begin(rng)
    for number in range(inputs):
        data = kept[number] if number < len(kept) else target.mutate(rng, rng.choice(kept))
        try:
            target.run(data)
        except Exception as error:
            raise Found(name, data) from error
        if rng.random() < 0.2:
            kept[rng.randrange(len(kept))] = data


class Found(Exception):
    """An input that a target does not stand."""

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(f"target {name} fails on {len(data)} bytes: {data[:200].hex()}")
        self.name, self.data = name, data
