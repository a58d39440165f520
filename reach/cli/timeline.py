"""What a trace says, as rows of a picture: for each message where its time went, nested below the one that caused it.

Pure: it turns a GetTraceReply into rows of text and knows no terminal. A stage begins a span that lasts until the
next stage; the span is named for where the message was meanwhile, because "5 s in the agent's local queue, 18 s in the
handler" is what somebody with a slow request wants to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentreach.v1.admin_pb2 import GetTraceReply, TracedMessage, TraceStage

_WHERE = {
    "received": "at the node",
    "queued": "in the node's queue",
    "routed": "in the link's outbox",
    "delivered": "on its way to the agent",
    "accepted": "in the agent's local queue",
    "started": "in the handler",
    "progress": "in the handler",
    "first item": "in the handler, streaming",
    "failed": "the attempt failed",
    "retried": "before the next attempt",
    "retry suppressed": "not tried again",
}
_ENDS = frozenset({"replied", "failed", "cancelled"})
_HANDLING = frozenset({"started", "progress", "first item"})
_AT_AGENT = frozenset({"accepted", *_HANDLING})
_DEPTH_MAX = 20  # deeper nesting is drawn at this depth: there is no room for more


@dataclass(frozen=True, slots=True)
class Span:
    """A time between two stages. Microseconds since the trace began."""

    where: str
    begin_us: int
    end_us: int
    detail: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the trace, `depth` levels below the first."""

    depth: int
    message_id: str
    source: str
    agent_id: str
    outcome: str
    begin_us: int
    end_us: int
    spans: tuple[Span, ...]
    ending: str
    """Detail of the last stage: what the failure was, say."""


def messages(reply: GetTraceReply) -> list[Message]:
    """The trace's messages in the order of reading: each before those it caused, those by time."""
    begins = [_begin_us(each) for each in reply.messages]
    zero = min((begin for begin in begins if begin), default=0)
    order = sorted(range(len(reply.messages)), key=lambda index: begins[index])
    known = {each.message_id for each in reply.messages}
    below: dict[str, list[int]] = {}
    tops: list[int] = []
    for index in order:
        parent = reply.messages[index].parent_message_id
        if parent in known and parent != reply.messages[index].message_id:
            below.setdefault(parent, []).append(index)
        else:
            tops.append(index)
    found: list[Message] = []
    seen: set[int] = set()

    def walk(first: int) -> None:
        waiting = [(first, 0)]
        while waiting:
            index, depth = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            each = reply.messages[index]
            found.append(_message(each, depth, max(0, begins[index] - zero)))
            waiting.extend((child, min(depth + 1, _DEPTH_MAX)) for child in reversed(below.get(each.message_id, ())))

    for top in tops:
        walk(top)
    for index in order:  # ids are chosen by senders: a ring of parents has no top, and is shown all the same
        walk(index)
    return found


def bar(span: Span, whole_us: int, width: int) -> str:
    """The span as blocks at its place in `width` columns; a span too short for one is a thin line."""
    if whole_us <= 0:
        return "▏".ljust(width)
    begin = min(width - 1, span.begin_us * width // whole_us)
    length = round((span.end_us - span.begin_us) * width / whole_us)
    drawn = "█" * min(length, width - begin) if length else "▏"
    return (" " * begin + drawn).ljust(width)


def whole_us(found: Sequence[Message]) -> int:
    """How long the trace took, from its first stage to its last."""
    return max((message.end_us for message in found), default=0)


def _begin_us(message: TracedMessage) -> int:
    """When the message was received, by the wall clock of its node; 0 if it has no stage."""
    if not message.stages:
        return 0
    first = message.stages[0]
    return first.at.ToMicroseconds() - first.offset_us


def _message(message: TracedMessage, depth: int, begin_us: int) -> Message:
    stages = _told_once(message.stages)
    several = len({stage.node_id for stage in stages}) > 1
    spans: list[Span] = []
    where = ""
    handled_attempt = -1
    for stage, following in pairwise(stages):
        if stage.name in _HANDLING:
            handled_attempt = stage.attempt
        # An acknowledgement may take 20 ms, and come after the handler began: the message does not go back.
        if not (stage.name == "accepted" and handled_attempt == stage.attempt):
            where = _where(stage, following, several=several)
        begin, end = begin_us + stage.offset_us, begin_us + following.offset_us
        detail = _told_otherwise(stage)
        if spans and spans[-1].where == where and spans[-1].attempt == stage.attempt:
            before = spans.pop()
            begin, detail = before.begin_us, ", ".join(part for part in (before.detail, detail) if part)
        spans.append(Span(where, begin, end, detail, stage.attempt))
    end_us = begin_us + (stages[-1].offset_us if stages else 0)
    ending = _told_otherwise(stages[-1]) if stages and stages[-1].name in _ENDS else ""
    if stages and not message.outcome:
        last = stages[-1]
        spans.append(
            Span(f"still {_where(last, None, several=several)}", end_us, end_us, _told_otherwise(last), last.attempt)
        )
    return Message(
        depth,
        message.message_id,
        message.source,
        message.agent_id,
        message.outcome,
        begin_us,
        end_us,
        tuple(spans),
        ending,
    )


def _told_once(stages: Sequence[TraceStage]) -> list[TraceStage]:
    """Without what the entry heard of an agent of another node, where that node itself tells of it."""
    entry = stages[0].node_id if stages else ""
    told = {stage.name for stage in stages if stage.node_id != entry}
    return [
        stage for stage in stages if stage.node_id != entry or stage.name not in _AT_AGENT or stage.name not in told
    ]


def _where(stage: TraceStage, following: TraceStage | None, *, several: bool) -> str:
    where = _WHERE.get(stage.name, f"after {stage.name}")
    if not several:
        return where
    if following is not None and following.node_id != stage.node_id and stage.name in ("delivered", "replied"):
        return f"on its way to {following.node_id}"
    return where.replace("the node", stage.node_id)


def _told_otherwise(stage: TraceStage) -> str:
    """The stage's detail without the times that the picture itself shows ("after 5.000 s in the agent's queue")."""
    parts = stage.detail.split(", ")
    return ", ".join(part for part in parts if not (part.startswith("after ") and " s in the " in part))
