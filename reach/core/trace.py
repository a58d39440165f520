"""What happened to each message: its stages with times, kept for `GetTrace` (behaviour.md §10).

A `Traced` is one message at this node; whoever sees it through appends to its `stages`. The book finds all messages of
a trace while they are in flight and for a while after: the last ones finished, and, in a ring of their own that the
normal traffic cannot wash out, those that failed or were slow.

Times are monotonic seconds; the wall clock is noted once a message, on receipt, and everything else is an offset to
it. The book knows nothing of what stages mean, save that the time inside an agent (`timing`) tells when its handler
started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from agentreach.v1 import admin_pb2

# Names of stages, in the order in which a message usually meets them.
RECEIVED = "received"
QUEUED = "queued"
ROUTED = "routed"
DELIVERED = "delivered"
ACCEPTED = "accepted"
STARTED = "started"
FIRST_ITEM = "first item"
REPLIED = "replied"
FAILED = "failed"
RETRIED = "retried"

STAGES_MAX = 64  # of one message; retries and moves fit, a peer that repeats progress for ever does not
FOUND_MAX = 1_000  # messages that one answer shows: well below gRPC's message limit, and read in milliseconds

Stage = tuple[str, float, int, str]
"""(name, at in monotonic seconds, attempt, detail)."""


class Traced:
    """One message on its way through this node."""

    __slots__ = (
        "agent_id",
        "message_id",
        "newer",
        "older",
        "open",
        "outcome",
        "parent_message_id",
        "received",
        "received_unix",
        "source",
        "stages",
        "tenant",
        "timings",
        "trace_id",
    )

    def __init__(
        self,
        message_id: str,
        parent_message_id: str,
        trace_id: str,
        source: str,
        received: float,
        received_unix: float,
        tenant: str = "",
    ) -> None:
        self.message_id = message_id
        self.parent_message_id = parent_message_id
        self.trace_id = trace_id
        self.source = source
        self.tenant = tenant
        self.agent_id = ""
        self.outcome = ""
        """"OK", the name of an ErrorCode, or empty while it runs."""
        self.received = received
        self.received_unix = received_unix
        self.stages: list[Stage] = []
        """In the order in which they became known. What a peer can repeat goes through `note`, which is bounded."""
        self.timings: list[tuple[float, int, int, int]] | None = None
        self.open = False
        self.older: Traced | None = None
        self.newer: Traced | None = None

    def note(self, name: str, at: float, attempt: int = 0, detail: str = "") -> None:
        """Append a stage, unless the message has `STAGES_MAX` already."""
        if len(self.stages) < STAGES_MAX:
            self.stages.append((name, at, attempt, detail))

    def timeline(self) -> list[Stage]:
        """The stages in time order, with what the agent's timing tells worked in."""
        stages = list(self.stages)
        for timing in self.timings or ():
            _work_in(stages, *timing)
        stages.sort(key=_at)
        return stages


class TraceBook:
    """The messages of the recent past by trace_id. Bounded: `recent_max` + `kept_max` finished ones, and those open.

    `slow_s`: a message that took so long is kept like a failed one, up to `kept_s`.
    """

    __slots__ = ("_kept", "_kept_max", "_kept_s", "_newest", "_recent", "_recent_max", "_slow_s", "in_flight")

    def __init__(
        self, recent_max: int = 50_000, kept_max: int = 10_000, kept_s: float = 900.0, slow_s: float = 5.0
    ) -> None:
        self._recent_max = recent_max
        self._kept_max = kept_max
        self._kept_s = kept_s
        self._slow_s = slow_s
        # The messages of one trace are a linked list, newest first: adding and removing cost the same for a trace_id
        # that was used once and for one that a caller uses for everything.
        self._newest: dict[str, Traced] = {}
        self._recent: deque[Traced] = deque()
        self._kept: deque[tuple[float, Traced]] = deque()
        self.in_flight = 0
        """Messages opened and not closed."""

    def __len__(self) -> int:
        return self.in_flight + len(self._recent) + len(self._kept)

    def open(self, traced: Traced) -> None:
        """Make a message findable. Whoever opens it closes it, on every path."""
        newest = self._newest
        trace_id = traced.trace_id
        older = newest.get(trace_id)
        if older is not None:
            older.newer = traced
            traced.older = older
        newest[trace_id] = traced
        traced.open = True
        self.in_flight += 1

    def close(self, traced: Traced, now: float, failed: bool) -> None:
        """The message has its outcome. Closing it again, or one that was never opened, changes nothing."""
        if not traced.open:
            return
        traced.open = False
        self.in_flight -= 1
        if failed or now - traced.received >= self._slow_s:
            self._kept.append((now, traced))
            self.expire(now)
            if len(self._kept) > self._kept_max:
                self._remove(self._kept.popleft()[1])
            return
        recent = self._recent
        recent.append(traced)
        if len(recent) > self._recent_max:
            self._remove(recent.popleft())

    def expire(self, now: float) -> None:
        """Let go of failed and slow messages that are older than `kept_s`. Also done at each such close."""
        kept = self._kept
        while kept and kept[0][0] <= now - self._kept_s:
            self._remove(kept.popleft()[1])

    def find(self, trace_id: str, limit: int = FOUND_MAX) -> list[Traced]:
        """The messages of a trace, in the order of their receipt; of more than `limit`, the newest."""
        found: list[Traced] = []
        traced = self._newest.get(trace_id)
        while traced is not None and len(found) < limit:
            found.append(traced)
            traced = traced.older
        found.reverse()
        return found

    def _remove(self, traced: Traced) -> None:
        older, newer = traced.older, traced.newer
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        elif older is not None:
            self._newest[traced.trace_id] = older
        else:
            del self._newest[traced.trace_id]
        traced.older = traced.newer = None


def add_timing(traced: Traced, replied_at: float, queue_us: int, handler_us: int, attempt: int) -> None:
    """Note what a RESPONSE's `timing` says of the time inside the agent. Cheap: it is worked out when somebody asks."""
    timing = (replied_at, queue_us, handler_us, attempt)
    if traced.timings is None:
        traced.timings = [timing]
    elif len(traced.timings) < STAGES_MAX:
        traced.timings.append(timing)


def to_proto(messages: Iterable[Traced], node_id: str) -> admin_pb2.GetTraceReply:
    """The reply to GetTrace: each message with its stages in time order, times on this node's wall clock."""
    reply = admin_pb2.GetTraceReply()
    for traced in messages:
        message = reply.messages.add(
            message_id=traced.message_id,
            parent_message_id=traced.parent_message_id,
            source=traced.source,
            agent_id=traced.agent_id,
            outcome=traced.outcome,
        )
        received_us = round(traced.received_unix * 1_000_000)
        for name, at, attempt, detail in traced.timeline():
            offset_us = max(0, round((at - traced.received) * 1_000_000))
            stage = message.stages.add(name=name, node_id=node_id, offset_us=offset_us, attempt=attempt, detail=detail)
            seconds, microseconds = divmod(received_us + offset_us, 1_000_000)
            stage.at.seconds = seconds
            stage.at.nanos = microseconds * 1000
    return reply


def _at(stage: Stage) -> float:
    return stage[1]


def _work_in(stages: list[Stage], replied_at: float, queue_us: int, handler_us: int, attempt: int) -> None:
    """Put 'started' where an attempt's timing says it was, and say in words how long each part took.

    The agent's clock is not ours, so the handler's start is counted back from the reply. Both this and the arrival of
    a `progress` signal are later than the truth (by the way of the reply, or of the signal): the earlier one counts.
    An agent that reports more time than passed is held to the moment of the delivery.
    """
    started = replied_at - handler_us / 1_000_000
    signalled = -1
    delivered = None
    for index, (name, at, of_attempt, _) in enumerate(stages):
        if of_attempt != attempt:
            continue
        if name == DELIVERED:
            delivered = at
        elif name == STARTED:
            started = min(started, at)
            signalled = index
    if delivered is not None and started < delivered:
        started = delivered
    stage = (STARTED, started, attempt, f"after {queue_us / 1_000_000:.3f} s in the agent's queue")
    if signalled >= 0:
        stages[signalled] = stage
    else:
        # Sorting puts it where its time is; of equal times it stands before what the handler brought about.
        results = (FIRST_ITEM, REPLIED, FAILED)
        places = (index for index, known in enumerate(stages) if known[2] == attempt and known[0] in results)
        stages.insert(next(places, len(stages)), stage)
    for index, (name, at, of_attempt, detail) in enumerate(stages):
        if of_attempt == attempt and at >= replied_at and name in (REPLIED, FAILED) and not detail:
            stages[index] = (name, at, attempt, f"after {handler_us / 1_000_000:.3f} s in the handler")
            break
