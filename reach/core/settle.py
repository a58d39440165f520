"""How a request ends: once. Each end answers all who wait, closes the books, and gives everything back.

A settled request whose agent may still be working keeps its slot until the agent confirms the end, the grace passes
(`forced_releases`), or the agent is gone; only then is it released. Why a request ends is decided elsewhere: `replies`,
`deadlines`, `waiters`, `losses`, and whoever refuses it before it reaches an agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from reach.core import (
    again,
    breakers,
    deadletters,
    health,
    lanes,
    order,
    outcomes,
    relays,
    replay,
    visiting,
    waiters,
    waiting,
)
from reach.core.quotas import STREAMS
from reach.core.redacting import redact
from reach.core.requests import Attachment, Request, Stage
from reach.core.trace import Journey, Traced, put_journey

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.state import State


_IN_VAIN = frozenset(
    {codes.AGENT_ERROR, codes.AGENT_LOST, codes.TIMEOUT, codes.CONNECT_FAILED, codes.OVERLOADED, codes.BREAKER_OPEN}
)
"""How a TASK ends whose attempts are used up. (A refusal is an answer, and a loop has its letter already.)"""


def error_reply(error: Error, message_id: str, trace_id: str) -> Envelope:
    """The RESPONSE that carries an error."""
    return Envelope(type=pb.RESPONSE, correlation_id=message_id, trace_id=trace_id, error=error)


def fail(state: State, request: Request, error: Error, *, by_agent: bool = False) -> None:
    """End a request with an error, which may be its agent's answer; nothing of it is left with an agent."""
    answer_error(state, request, error, by_agent=by_agent)
    release(state, request)


def give_up(state: State, request: Request, error: Error) -> None:
    """End a request with an error while an agent may be working on it: the agent is told, its slot waits for it."""
    request.lost_at = 0.0
    answer_error(state, request, error)
    _let_go(state, request, cancels=not request.relayed or error.code != codes.TIMEOUT)


def answer_error(state: State, request: Request, error: Error, *, by_agent: bool = False) -> None:
    """Give an error to all who wait; what the request holds is still held."""
    redact(state, error)
    if request.visitor is not None and not by_agent:
        request.verdict = visiting.verdict_of(request, error)
        if not request.verdict:
            request.fresh = request.node_made_id = False  # of this nobody knows but this node, not even the agent
    error.attempts = max(error.attempts, request.attempt)
    if request.ran:
        error.may_have_executed = True
    if request.attempt > 1 and error.code in _IN_VAIN and again.profile_of(request) == pb.TASK:
        deadletters.bury(state, request, error)
    if request.items:
        error.details["items"] = str(request.items)
    reply = error_reply(error, request.message_id, request.trace_id)
    reply.entry = request.entry
    reply.epoch = request.epoch
    if request.session_event:
        reply.session_event = pb.SessionEvent.ValueType(request.session_event)
    answer(state, request, reply.SerializeToString(), codes.ErrorCode.Name(error.code), error)


def answer(state: State, request: Request, reply: bytes, outcome: str, error: Error | None) -> None:
    """Give the outcome to all who wait, keep it for those who ask again, and close the books on the request.

    What the request holds is still held: `release` gives it back.
    """
    now = state.now
    item: Item | None = None
    kept_by_entry = request.visitor is None or (request.verdict != visiting.LOST and request.visitor.node.connected)
    if not kept_by_entry and request.verdict != visiting.REFUSED:
        request.node_made_id = False  # its entry may be lost, and its caller asks again by another node
    if request.session_event and request.lane is not None and outcome != "CANCELLED":
        request.lane.event = 0  # somebody was told
    alone = len(request.waiters) == 1
    for waiter in request.waiters:
        item = waiter.port.deliver(reply, request.priority)
        waiters.forget(waiter.port, request)
    request.waiters.clear()
    request.stage = Stage.SETTLED
    request.failed = error is not None
    state.unsettled -= 1
    if request.streams_of is not None:
        request.streams_of.give_back(STREAMS)
        request.streams_of = None
    if request.timer is not None:
        state.wheel.cancel(request.timer, request)
        request.timer = None
    if request.line is not None:
        order.over(state, request)
    if request.relayed:
        relays.answered(state, request)  # its owner keeps the outcome
    elif (request.node_made_id and (request.visitor is None or item is None)) or (
        error is not None and not replay.is_stored(error.code, error.retryable, error.may_have_executed)
    ):
        outcomes.forget(state, request)
    elif (request.fresh or request.node_made_id) and alone and item is not None:
        item.owner = request  # it stays in `by_key` until the caller has the reply for sure
        request.reply = item
        outcomes.shrink(request)
    else:
        outcomes.forget(state, request)
        outcomes.keep(state, request, reply)
    _close_books(state, request, outcome, error, now)


def _close_books(state: State, request: Request, outcome: str, error: Error | None, now: float) -> None:
    """Trace and count a request that has its outcome."""
    if request.type_stats is not None:
        state.stats.ended(request.type_stats)
        request.type_stats = None
    agent, item, delivered, received = request.agent, request.item, request.delivered_at, request.received
    total_s = now - received
    journey = (
        request.routed,
        delivered,
        item.accepted_at if item is not None else 0.0,
        now,
        request.attempt,
        request.queue_us,
        request.handler_us,
        request.notes,
    )
    if error is None and not state.traces.is_slow(total_s):
        state.traces.finished(
            request.trace_id,
            request.message_id,
            request.parent_message_id,
            request.source,
            request.key[0],
            request.key[2],
            agent.agent_id if agent is not None else "",
            outcome,
            received,
            received + state.unix_offset,
            journey,
        )
    else:
        state.traces.keep(traced(state, request, outcome, journey), now)
    if request.visitor is not None or request.relayed:
        return  # another node counts it, and says what failed
    state.stats.finished(
        request.agent_type,
        outcome,
        delivered - received if delivered else None,
        request.transport_s,
        request.handled_s,
        total_s,
    )
    if error is not None:
        state.log(
            state.failure_level(outcome),
            "request failed",
            request.trace_id,
            agent=error.agent_id or (agent.agent_id if agent is not None else ""),
            target=request.agent_type,
            code=outcome,
            why=error.message,
        )


def traced(state: State, request: Request, outcome: str = "", journey: Journey | None = None) -> Traced:
    """A request for its trace; by default as it stands now, in flight."""
    item = request.item
    found = Traced(
        request.message_id,
        request.parent_message_id,
        request.trace_id,
        request.source,
        request.received,
        request.received + state.unix_offset,
        request.key[0],
        request.key[2],
    )
    found.agent_id = request.agent.agent_id if request.agent is not None else ""
    found.outcome = outcome
    accepted_at = item.accepted_at if item is not None else 0.0
    put_journey(
        found,
        journey or (request.routed, request.delivered_at, accepted_at, 0.0, request.attempt, 0, 0, request.notes),
    )
    return found


def _let_go(state: State, request: Request, *, cancels: bool = True) -> None:
    """Take the attempt back from its agent, or tell the agent to end it and wait for that.

    A node that owns a message is not told that its time is over: it sees that by itself, and keeps that outcome; what
    was cancelled may run again.
    """
    attachment, item = request.attachment, request.item
    if attachment is None or item is None:
        release(state, request)
        return
    peer = attachment.peer
    if item.seq == 0:
        peer.link.withdraw(item)
        health.unsaturate(state, attachment)
        release(state, request)
        return
    peer.link.withdraw(item)  # sent or not: after a cut it must not come again
    if cancels:
        tell_cancelled(state, request, attachment)
    outcomes.shrink(request)
    request.timer = state.wheel.schedule(request, state.now + state.rules.cancel_grace_s)


def tell_cancelled(state: State, request: Request, attachment: Attachment) -> None:
    """Tell an agent to end a request that it may be working on."""
    agent, peer = attachment.agent, attachment.peer
    tenant, principal, env, message_id = request.key
    cancel = Envelope(
        type=pb.CANCEL,
        correlation_id=message_id,
        entry=request.entry,
        attempt=request.attempt,
        recipient=agent.agent_id,
        tenant=tenant,
        principal=principal,
        env=env,
        trace_id=request.trace_id,
    )
    peer.link.put(cancel, state.now, request.priority)
    state.woken.add(peer)


def release(state: State, request: Request) -> None:
    """Give back the slot, the lane's place and the entry of a settled request. Safe to call twice."""
    if state.requests.pop(request.number, None) is None:
        return
    if request.timer is not None:
        state.wheel.cancel(request.timer, request)
        request.timer = None
    if request.attachment is not None:
        give_back(state, request)
    if request.in_queue:
        waiting.leave(state, request)
    if request.lane is not None:
        lanes.leave(state, request)


def give_back(state: State, request: Request) -> None:
    """End the request's current attempt: its agent is done with it, or gone."""
    attachment = request.attachment
    assert attachment is not None
    attachment.attempts.pop(request.number, None)
    agent = attachment.agent
    if request.holds_slot:
        request.holds_slot = False
        state.directory.release(agent)
    if request.budgeted is not None:
        state.budget.ended(request.budgeted)
        request.budgeted = None
    if agent.suspect and not request.judged:
        breakers.ended_unjudged(state, agent, request.delivered_at)
    if attachment.lanes_waiting:
        lanes.next_in_turn(state, attachment)
    if request.stage is not Stage.SETTLED:
        clear_attempt(request)


def clear_attempt(request: Request) -> None:
    """Forget the attempt in the request, which goes on without it."""
    request.attachment = request.item = None
    request.reentrant = request.started = request.judged = False
    request.lost_at = request.attempt_until = 0.0
    request.queue_us = request.handler_us = 0
