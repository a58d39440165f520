"""Answers of several nodes to one question, made one. Pure.

Each function takes the replies, the asked node's own first, and the limit that was asked for (0: the most that one
node gives). Who did not answer is added by `reach.node.everywhere`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from agentreach.v1 import admin_pb2 as admin
from reach.core.breaker import BreakerState
from reach.core.redriving import LISTED_BYTES_MAX, LISTED_MAX
from reach.core.trace import FOUND_MAX, ROUTED
from reach.node.operations import BREAKERS_MAX
from reach.node.queries import SESSIONS_MAX

_SEVERITY = [state.value for state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING)]


def traces(replies: Sequence[admin.GetTraceReply], limit: int = 0) -> admin.GetTraceReply:
    """Each message once, with the stages of every node that it passed, in their order.

    A home knows a request of another node's caller as a message of its own, which begins after its entry's and ends
    before. Where the nodes' clocks say otherwise they differ: the home's `offset_us` are moved by so much; `at` stays.
    """
    found: dict[tuple[str, str], list[admin.TracedMessage]] = {}
    for message in chain.from_iterable(reply.messages for reply in replies):
        if message.stages:
            found.setdefault((message.message_id, message.source), []).append(message)
    merged = [_one(parts) for parts in found.values()]
    merged.sort(key=_began_us)
    return admin.GetTraceReply(messages=merged[-(limit or FOUND_MAX) :])


def _one(parts: list[admin.TracedMessage]) -> admin.TracedMessage:
    if len(parts) == 1:
        return parts[0]
    entry = max(parts, key=lambda part: (_chose(part), _took_us(part)))
    *stages, last = entry.stages
    for part in parts:
        if part is not entry:
            stages += _within(part, _began_us(entry), _took_us(entry) if entry.outcome else None)
    stages.append(last)  # sorting leaves it behind what ended at the same time
    stages.sort(key=lambda stage: stage.offset_us)
    whole = admin.TracedMessage()
    whole.CopyFrom(entry)
    del whole.stages[:]
    whole.stages.extend(stages)
    return whole


def _within(part: admin.TracedMessage, began_us: int, took_us: int | None) -> list[admin.TraceStage]:
    """The part's stages, their offsets those of a message that began then, and took so long if that is known."""
    first_us = _began_us(part) - began_us
    if took_us is not None:
        first_us = min(first_us, took_us - _took_us(part))
    moved = []
    for stage in part.stages:
        copy = admin.TraceStage()
        copy.CopyFrom(stage)
        copy.offset_us = max(first_us, 0) + stage.offset_us
        moved.append(copy)
    return moved


def _chose(message: admin.TracedMessage) -> bool:
    """Entries choose an agent, and say how; to a home it is named."""
    return any(stage.name == ROUTED and stage.detail for stage in message.stages)


def _began_us(message: admin.TracedMessage) -> int:
    return message.stages[0].at.ToMicroseconds() - message.stages[0].offset_us


def _took_us(message: admin.TracedMessage) -> int:
    return message.stages[-1].offset_us


def sessions(replies: Sequence[admin.ListSessionsReply], limit: int) -> admin.ListSessionsReply:
    """The longest idle last. Entries know of a session what its home does not, and the latest epoch is the truth."""
    found: dict[tuple[str, str, str], admin.SessionInfo] = {}
    for info in chain.from_iterable(reply.sessions for reply in replies):
        key = (info.env, info.agent_id.partition("/")[0].lower(), info.session_id)
        known = found.get(key)
        if known is None or known.epoch < info.epoch:
            found[key] = info
        elif known.epoch == info.epoch:
            known.idle_s = min(known.idle_s, info.idle_s)
            known.waiting += info.waiting
            known.turn = max(known.turn, info.turn)
            known.moving |= info.moving
    ordered = sorted(found.values(), key=lambda info: info.idle_s)
    return admin.ListSessionsReply(sessions=ordered[: min(limit or SESSIONS_MAX, SESSIONS_MAX)])


def breakers(replies: Sequence[admin.ListBreakersReply], limit: int) -> admin.ListBreakersReply:
    """The worst first. Each node has its own view of an agent: one row a node."""
    found = list(chain.from_iterable(reply.breakers for reply in replies))
    found.sort(key=lambda info: (_severity(info.state), info.agent_id, info.node_id))
    return admin.ListBreakersReply(breakers=found[: min(limit or BREAKERS_MAX, BREAKERS_MAX)])


def _severity(state: str) -> int:
    return _SEVERITY.index(state) if state in _SEVERITY else len(_SEVERITY)


def dead_letters(replies: Sequence[admin.ListDeadLettersReply], limit: int) -> admin.ListDeadLettersReply:
    """The youngest first, as many as fit into one answer."""
    found = list(chain.from_iterable(reply.dead_letters for reply in replies))
    found.sort(key=lambda letter: -letter.at.ToNanoseconds())
    kept = sum(reply.kept for reply in replies)
    shown = _fitting(found[: min(limit or LISTED_MAX, LISTED_MAX)], LISTED_BYTES_MAX)
    return admin.ListDeadLettersReply(dead_letters=shown, kept=kept)


def _fitting(letters: Iterable[admin.DeadLetter], bytes_max: int) -> list[admin.DeadLetter]:
    fitting: list[admin.DeadLetter] = []
    size = 0
    for letter in letters:
        size += letter.ByteSize()
        if size > bytes_max:
            break
        fitting.append(letter)
    return fitting
