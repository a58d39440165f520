"""What was asked, what ran, and what came back; and everything that happened, as a digest that must come out again.

The ledger stands outside of every process: it survives their deaths, and sees true times. It is the simulator's
external counter of side effects.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from agentreach.v1.frame_pb2 import Frame

if TYPE_CHECKING:
    from agentreach.v1.envelope_pb2 import Envelope

    from .network import Connection, End
    from .process import Process
    from .world import World

LAST_EVENTS = 400  # kept for whoever reads about a violation


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, statement: str, detail: str, group: int | None, at: float) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.at = at
        self.invariant = invariant
        self.statement = statement
        self.detail = detail
        self.group = group
        """The message concerned, if it is one."""


@dataclass(slots=True, eq=False)
class Ask:
    """One request (or one copy of one) as its sender sees it. Times are true seconds."""

    number: int
    group: int
    """Copies of one message have the number of the first."""
    by: Process
    target: str
    kind: str
    timeout_s: float
    idempotent: bool = False
    session: str = ""
    profile: str = ""
    message_id: str = ""
    """Empty: made by the SDK or the node, so it has no copies."""
    nested: bool = False
    issued_at: float = 0.0
    ended_at: float | None = None
    outcome: str = ""
    """`OK`, the name of an error's code, `cancelled` by its sender, or `left` by its consumer."""
    may_have_executed: bool = False
    run: int = 0
    """By a success: the run that made the reply."""
    run_group: int = 0
    """By a success: the message that the run was about."""
    items: list[int] = field(default_factory=list)
    attempts: int = 0
    told_items: int | None = None
    text: str = ""
    ends: int = 0
    left: bool = False
    """Its consumer left a streamed reply before the end."""
    parent: Run | None = None
    """The handler's call that asked, if one did."""

    @property
    def deadline(self) -> float:
        """When it must have ended."""
        return self.issued_at + self.timeout_s

    def __str__(self) -> str:
        return f"m{self.group}" if self.number == self.group else f"m{self.group} (copy {self.number})"


@dataclass(slots=True, eq=False)
class Run:
    """One call of a handler: a side effect."""

    number: int
    group: int
    message_id: str
    process: Process
    agent_id: str
    agent_type: str
    started_at: float
    attempt: int
    session: str
    epoch: int
    hops: int
    """How many agents the call tree went through, by the envelope."""
    path: int
    """How many its path names."""
    life: bytes
    """Which life of which node delivered it."""
    limit: int
    ended_at: float | None = None
    state: str = "running"
    """`running`, `done`, `cancelled`, `died` with its process, `said no: …`, or what it raised."""


class Ledger:
    """The books of one world."""

    def __init__(self, world: World, *, trace: bool, follow: int | None) -> None:
        self.world = world
        self.asks: dict[int, Ask] = {}
        self.groups: dict[int, list[Ask]] = {}
        self.runs: dict[int, list[Run]] = {}
        """By the message's group."""
        self.all_runs: list[Run] = []
        self.running: dict[str, list[Run]] = {}
        """By process."""
        self.published: dict[tuple[str, int], dict[str, int]] = {}
        """(topic, number) to what its publisher was told."""
        self.heard: dict[tuple[str, str, str], list[int]] = {}
        """(subscriber, topic, publisher): the numbers of what it got, in order."""
        self.steps = 0
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self.of_followed: list[str] = []
        self._digest = blake2b(digest_size=12)
        self._trace = trace
        self._follow = follow
        self._followed_ids: set[str] = set()

    # ---- events ----

    def event(self, what: str, who: object = "", detail: str = "", group: int | None = None) -> None:
        """Something happened."""
        self.steps += 1
        line = f"{self.world.now:10.4f} {self.steps:6d}  {what:<14} {who!s:<12} {detail}"
        self._digest.update(line.encode())
        self.last.append(line)
        if group is not None and group == self._follow:
            self.of_followed.append(line)
        if self._trace:
            print(line)

    @property
    def digest(self) -> str:
        """Of everything so far, every frame included."""
        return self._digest.hexdigest()

    def frame(self, connection: Connection, end: End, data: bytes | None) -> None:
        """A message of a connection was taken by the other end."""
        # The order of a map's entries on the wire differs from process to process: length and sum do not see it.
        self._digest.update(b"%d%r%d %d" % (connection.number, end.to_node, len(data or b""), sum(data or b"")))
        if data is None or not (self._trace or self._follow is not None):
            return
        frame = Frame.FromString(data)
        way = f"{end.process}>{end.other.process}"
        if self._trace:
            kinds = " ".join(signal.WhichOneof("kind") or "?" for signal in frame.signals)
            print(f"{self.world.now:10.4f}         frame          {way} seq {frame.seq} ack {frame.ack} {kinds}")
        for envelope in frame.envelopes:
            message_id = envelope.correlation_id or envelope.message_id
            line = f"{way} {message_id} {_shown(envelope)}"
            if self._trace:
                print(f"{self.world.now:10.4f}           envelope     {line}")
            if message_id in self._followed_ids or f'"ask":{self._follow},'.encode() in envelope.payload.body:
                self._followed_ids.add(message_id)
                self.of_followed.append(f"{self.world.now:10.4f}         envelope       {line}")

    # ---- asks ----

    def asked(self, ask: Ask) -> None:
        """A request is about to be made."""
        ask.issued_at = self.world.now
        self.asks[ask.number] = ask
        self.groups.setdefault(ask.group, []).append(ask)
        detail = f"{ask} {ask.kind} to {ask.target} within {ask.timeout_s:.3f} s {ask.profile} {ask.session}"
        self.event("asks", ask.by, detail + (" idempotent" if ask.idempotent else ""), ask.group)

    def ended(self, ask: Ask, outcome: str, text: str = "") -> None:
        """It has its outcome."""
        ask.ends += 1
        ask.ended_at = self.world.now
        ask.outcome, ask.text = outcome, text
        late = f" may_have_executed={ask.may_have_executed}" if outcome not in ("OK", "cancelled", "left") else ""
        self.event("ends", ask.by, f"{ask} {outcome}{late} run {ask.run} {text}", ask.group)
        self.world.check("outcome", ask)

    # ---- runs ----

    def began(self, run: Run) -> None:
        """A handler was called."""
        self.all_runs.append(run)
        self.runs.setdefault(run.group, []).append(run)
        self.running.setdefault(run.process.name, []).append(run)
        detail = f"m{run.group} run {run.number} of {run.agent_id} attempt {run.attempt} {run.message_id}"
        session = f" session {run.session} epoch {run.epoch}" if run.session else ""
        self.event("runs", run.process, detail + session, run.group)
        self.world.check("start", run)

    def finished(self, run: Run, state: str) -> None:
        """The handler has ended."""
        run.ended_at, run.state = self.world.now, state
        self.running[run.process.name].remove(run)
        self.event("ran", run.process, f"m{run.group} run {run.number} {state}", run.group)

    def died(self, process: Process) -> None:
        """A process was killed, and its handlers with it."""
        self.event("killed", process)
        for run in self.running.pop(process.name, []):
            run.ended_at, run.state = self.world.now, "died"

    # ---- events of topics ----

    def hears(self, subscriber: Process, topic: str, publisher: str, number: int) -> None:
        """A subscriber got an event."""
        self.event("hears", subscriber, f"{topic} {number} of {publisher}")
        numbers = self.heard.setdefault((subscriber.name, topic, publisher), [])
        numbers.append(number)
        self.world.check("heard", (subscriber.name, topic, publisher, numbers))


def _shown(envelope: Envelope) -> str:
    from agentreach.v1 import envelope_pb2 as pb
    from agentreach.v1 import error_pb2 as codes

    kind = pb.MessageType.Name(envelope.type)
    if envelope.HasField("error"):
        return f"{kind} {codes.ErrorCode.Name(envelope.error.code)} {envelope.error.message[:120]}"
    return f"{kind} attempt {envelope.attempt} to {envelope.recipient or envelope.target.agent_type} " + (
        f"item {envelope.sequence}" if envelope.more else ""
    )
