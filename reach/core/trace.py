"""What happened to each message: its stages with times, kept for `GetTrace` (behaviour.md §10).

A `Traced` is one message at this node with its stages. The book finds the messages of a trace for a while after their
end: the last ones finished, and, in a ring of their own that the normal traffic cannot wash out, those that failed or
were slow. (Those in flight are found among the requests.)

Times are monotonic seconds; the wall clock is noted once a message, on receipt, and everything else is an offset to
it. The book knows nothing of what stages mean, save that the time inside an agent (`timing`) tells when its handler
started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from agentreach.v1 import admin_pb2

# Names of stages, in the order in which a message usually meets them.
RECEIVED: Final = "received"
QUEUED: Final = "queued"
ROUTED: Final = "routed"
DELIVERED: Final = "delivered"
ACCEPTED: Final = "accepted"
STARTED: Final = "started"
FIRST_ITEM: Final = "first item"
REPLIED: Final = "replied"
FAILED: Final = "failed"
RETRIED: Final = "retried"

FOUND_MAX: Final = 1_000  # messages that one answer shows: well below gRPC's message limit, and read in milliseconds

Stage = tuple[str, float, int, str]
"""(name, at in monotonic seconds, attempt, detail)."""

Timing = tuple[float, int, int, int]
"""(replied at, µs in the agent's queue, µs in the handler, attempt)."""

# A finished message as the book keeps it: a tuple of plain values. The garbage collector stops looking at such, and at
# what they hold; with an object and a list for each of 50,000 messages every full collection took 60 ms, at full
# speed once a second. Stages are made of the times when somebody asks: (trace_id, number of the trace's message before
# this one, the fields of `Traced` up to received_unix, those of `Journey`).
_Packed = tuple[str, int, str, str, str, str, str, str, str, float, float, "Journey"]

Journey = tuple[str, float, float, float, int, int, int, tuple[Stage, ...]]
"""(how it was routed, delivered at, accepted at, ended at, attempt, µs in the agent's queue, µs in the handler, notes).

Times are 0 for what did not happen; the notes are all other stages."""


class Traced:
    """One message on its way through this node."""

    __slots__ = (
        "agent_id",
        "env",
        "message_id",
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
        env: str = "",
    ) -> None:
        self.message_id = message_id
        self.parent_message_id = parent_message_id
        self.trace_id = trace_id
        self.source = source
        self.tenant = tenant
        self.env = env
        self.agent_id = ""
        self.outcome = ""
        """"OK", the name of an ErrorCode, or empty while it runs."""
        self.received = received
        self.received_unix = received_unix
        self.stages: list[Stage] = []
        """In the order in which they became known."""
        self.timings: tuple[Timing, ...] = ()

    def timeline(self) -> list[Stage]:
        """The stages in time order, with what the agent's timing tells worked in."""
        stages = list(self.stages)
        for timing in self.timings:
            _work_in(stages, *timing)
        stages.sort(key=_at)
        return stages


class TraceBook:
    """The messages of the recent past by trace_id. Bounded: `recent_max` + `kept_max` finished ones, and those open.

    `slow_s`: a message that took so long is kept like a failed one, up to `kept_s`.
    """

    __slots__ = ("_closed", "_kept", "_kept_max", "_kept_s", "_last", "_recent", "_recent_max", "_slow_s")

    def __init__(
        self, recent_max: int = 50_000, kept_max: int = 10_000, kept_s: float = 900.0, slow_s: float = 5.0
    ) -> None:
        self._recent_max = max(1, recent_max)
        self._kept_max = kept_max
        self._kept_s = kept_s
        self._slow_s = slow_s
        self._kept: deque[tuple[float, Traced]] = deque()
        # Message number n stands at place n % recent_max. Each names the one before it of the same trace, so that a
        # trace_id that everything uses costs no more than one that is used once; numbers that have been written over
        # are known by being too small.
        self._recent: list[_Packed | None] = [None] * self._recent_max
        self._closed = 0
        self._last: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._kept) + min(self._closed, self._recent_max)

    def keep(self, traced: Traced, now: float) -> None:
        """A message that failed or was slow has its outcome. What is added to its stages later shows too."""
        self._kept.append((now, traced))
        self.expire(now)
        if len(self._kept) > self._kept_max:
            self._kept.popleft()

    def is_slow(self, total_s: float) -> bool:
        """Whether a message that took so long is to be kept like a failed one."""
        return total_s >= self._slow_s

    def finished(
        self,
        trace_id: str,
        message_id: str,
        parent_message_id: str,
        source: str,
        tenant: str,
        env: str,
        agent_id: str,
        outcome: str,
        received: float,
        received_unix: float,
        journey: Journey,
    ) -> None:
        """An ordinary message has its outcome. The arguments are the fields of `Traced`."""
        number = self._closed
        self._closed = number + 1
        place = number % self._recent_max
        last = self._last
        before = self._recent[place]
        if before is not None and last[before[0]] == number - self._recent_max:
            del last[before[0]]
        self._recent[place] = (
            trace_id,
            last.get(trace_id, -1),
            message_id,
            parent_message_id,
            source,
            tenant,
            env,
            agent_id,
            outcome,
            received,
            received_unix,
            journey,
        )
        last[trace_id] = number

    def expire(self, now: float) -> None:
        """Let go of failed and slow messages that are older than `kept_s`. Also done at each such close."""
        kept = self._kept
        while kept and kept[0][0] <= now - self._kept_s:
            kept.popleft()

    def find(self, trace_id: str, limit: int = FOUND_MAX) -> list[Traced]:
        """The messages of a trace, in the order of their receipt; of more than `limit`, the newest.

        Those kept are searched one by one: under a millisecond for 10,000, and only when asked.
        """
        found = [traced for _, traced in self._kept if traced.trace_id == trace_id]
        finished: list[Traced] = []
        number = self._last.get(trace_id, -1)
        oldest = self._closed - self._recent_max
        for _ in range(limit):
            packed = self._recent[number % self._recent_max]
            if number < 0 or number < oldest or packed is None:
                break
            finished.append(_unpacked(packed))
            number = packed[1]
        found += reversed(finished)
        found.sort(key=_received)
        return found[-limit:]


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


def _unpacked(packed: _Packed) -> Traced:
    trace_id, _, message_id, parent, source, tenant, env, agent_id, outcome, received, unix, journey = packed
    traced = Traced(message_id, parent, trace_id, source, received, unix, tenant, env)
    traced.agent_id = agent_id
    traced.outcome = outcome
    put_journey(traced, journey)
    return traced


def put_journey(traced: Traced, journey: Journey) -> None:
    """Write a message's times into its stages."""
    routed, delivered, accepted, ended, attempt, queue_us, handler_us, notes = journey
    stages = traced.stages
    stages.append((RECEIVED, traced.received, 0, ""))
    stages.extend(notes)
    if delivered:
        stages.append((ROUTED, delivered, attempt, routed))
        stages.append((DELIVERED, delivered, attempt, traced.agent_id))
    if accepted:
        stages.append((ACCEPTED, accepted, attempt, ""))
    if ended:
        ok = traced.outcome == "OK"
        stages.append((REPLIED, ended, attempt, "") if ok else (FAILED, ended, attempt, traced.outcome))
        if queue_us or handler_us:
            traced.timings = ((ended, queue_us, handler_us, attempt),)


def _received(traced: Traced) -> float:
    return traced.received


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
        if of_attempt == attempt and at >= replied_at and name in (REPLIED, FAILED):
            spent = f"after {handler_us / 1_000_000:.3f} s in the handler"
            stages[index] = (name, at, attempt, f"{detail}, {spent}" if detail else spent)
            break
