"""Where mutations begin: a valid message of every kind, made from the contract itself."""

from __future__ import annotations

from random import Random

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.frame_pb2 import Attach, Frame, Goodbye, Hello, Signal, Subscribe
from agentreach.v1.peer_pb2 import Lineage
from agentreach.v1.registry_pb2 import AgentRecord
from tools.fuzzing.messages import Words, fill

KINDS = tuple(field.name for field in Signal.DESCRIPTOR.oneofs_by_name["kind"].fields)
TARGETS = (
    {"agent_id": "echo/1"}, {"agent_type": "echo"}, {"capabilities": ["talk"]}, {"labels": {"zone": "a"}},
    {"version": ">=1,<3"}, {"agent_type": "evil", "version": "1.0"}, {"agent_id": "evil/1"},
)  # fmt: skip
WORDS = (
    "echo/1", "echo", "evil/1", "evil", "evil/2", "talk", "zone", "news", "1.0", ">=1,<3", "m1", "m2", "m3", "s1", "s2",
    "production",
)  # fmt: skip


def words() -> Words:
    """What an attacker knows from the start."""
    return Words(WORDS, (bytes(16), b"noncenon" + (1).to_bytes(8, "big"), b"noncenon" + (2).to_bytes(8, "big")))


def hello(*agent_ids: str, incarnation: bytes = b"e" * 16) -> Hello:
    """A process that comes with these agents."""
    records = [
        AgentRecord(agent_id=each, capabilities=["talk"], labels={"zone": "a"}, version="1.0") for each in agent_ids
    ]
    return Hello(
        agents=[Attach(record=record) for record in records], incarnation=incarnation, protocol_version=1, sdk="fuzz"
    )


def signals(rng: Random, known: Words) -> list[Signal]:
    """One of every kind, its fields at random; and those that have an effect as they are meant."""
    found = []
    for kind in KINDS:
        signal = Signal()
        inner = getattr(signal, kind)
        inner.SetInParent()
        fill(rng, inner, known, density=0.7)
        found.append(signal)
    return [
        *found,
        Signal(hello=hello("evil/1")),
        Signal(attach=hello("evil/2").agents[0]),
        Signal(subscribe=Subscribe(topics=["news"])),
        Signal(goodbye=Goodbye(code=Goodbye.NORMAL)),
    ]


def envelopes(rng: Random) -> list[Envelope]:
    """Requests, events, answers and cancels that pass every check."""
    found = []
    for number, target in enumerate(TARGETS):
        common = {"message_id": f"m{number}", "timeout_ms": rng.choice((10, 200, 5000))}
        payload = rng.choice((Payload(text="hi"), Payload(body=b"\x00\x01"), Payload()))
        found.append(Envelope(target=Target(**target), payload=payload, fresh=rng.random() < 0.5, **common))
        found.append(Envelope(target=Target(**target), session_id=f"s{number % 3}", profile=pb.RPC, **common))
        found.append(Envelope(type=pb.EVENT, target=Target(**target, broadcast=number % 2 == 0), **common))
        found.append(Envelope(type=pb.CANCEL, correlation_id=f"m{number}"))
        entry = b"noncenon" + number.to_bytes(8, "big")
        for more in (False, True):
            found.append(
                Envelope(
                    type=pb.RESPONSE, correlation_id=f"m{number}", entry=entry, attempt=1, more=more, source="evil/1"
                )
            )
    found.append(Envelope(type=pb.EVENT, target=Target(topic="news"), payload=Payload(text="e")))
    return found


def frames(rng: Random, known: Words) -> list[bytes]:
    """Frames with the above, one or several each."""
    alone = [Frame(signals=[signal]) for signal in signals(rng, known)]
    alone += [Frame(seq=1, envelopes=[envelope]) for envelope in envelopes(rng)]
    mixed = Frame(seq=2, ack=1, age_ms=5, envelopes=envelopes(rng), signals=signals(rng, known))
    return [frame.SerializeToString() for frame in [*alone, mixed, Frame(), Frame(ack=1)]]


def lineages() -> list[Lineage]:
    """Parents, as a node would sign them."""
    path = [pb.Hop(agent_id=f"echo/{n}", message_id=f"m{n}", dedup_key="k") for n in range(3)]
    return [
        Lineage(),
        Lineage(message_id="m1", trace_id="0" * 32, tenant="default", principal="mallory", path=path, hop_count=3),
    ]
