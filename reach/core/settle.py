"""How requests end: replies, failures, deadlines, cancels, lost links. Each ends once, and gives everything back.

A settled request whose agent may still be working keeps its slot until the agent confirms the end, the grace passes
(`forced_releases`), or the agent is gone; only then is it released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Signal, StreamCredit
from agentreach.wire import limits
from agentreach.wire.checks import payload_size
from agentreach.wire.errors import failure
from reach.core import health, outcomes, replay, sessions, writing
from reach.core.peers import Peer
from reach.core.requests import Attachment, MessageKey, Port, Request, Stage, Waiter
from reach.core.trace import Journey, Traced, put_journey

if TYPE_CHECKING:
    from agentreach.wire.link import Item
    from reach.core.state import State

SETTLE_SHARE = 0.1  # of the time left: how long a request waits for a lost link to come back
CREDIT_INITIAL = limits.STREAM_CREDIT_INITIAL
AVOID_S_MAX = 300.0  # an agent's retry_after is believed up to here
CONTROL_BYTES_MAX = 256 << 10  # of an envelope besides its payload: ids, headers, a path of ten hops, its lineage


# ---- replies from agents ----


def respond(state: State, peer: Peer, envelope: Envelope) -> None:
    """A RESPONSE came from a process: match it to the attempt it answers, or drop and count it."""
    request = _answered(state, peer, envelope)
    if request is None:
        state.stats.duplicates["late"] += 1
        return
    if request.stage is Stage.SETTLED:
        _late(state, request, envelope)
    elif envelope.more and not envelope.HasField("error"):
        _item(state, request, envelope)
    else:
        _final(state, request, envelope)


def _answered(state: State, peer: Peer, envelope: Envelope) -> Request | None:
    entry = envelope.entry
    if len(entry) == 16 and entry[:8] == state.nonce:
        request = state.requests.get(int.from_bytes(entry[8:], "big"))
        if request is None or request.attachment is None or request.attachment.peer is not peer:
            return None
        return request if envelope.attempt == request.attempt else None
    if entry:
        return None
    # A hand-written agent that does not echo `entry`: its link and the message_id say enough if nobody shares them.
    found = [
        request
        for attachment in peer.attachments.values()
        for request in attachment.attempts.values()
        if request.message_id == envelope.correlation_id
    ]
    return found[0] if len(found) == 1 else None


def _item(state: State, request: Request, envelope: Envelope) -> None:
    number = request.items
    now = state.now
    if number >= request.credit:
        agent_id = request.agent.agent_id if request.agent else ""
        give_up(
            state,
            request,
            failure(
                codes.AGENT_ERROR,
                f"{agent_id} sent more items than the caller takes (stream_credit ignored)",
                may_have_executed=True,
                agent_id=agent_id,
            ),
        )
        return
    data = _as_given(state, request, envelope)
    if data is None:
        give_up(state, request, _reply_too_large(state, request, envelope))
        return
    request.items = number + 1
    request.items_at = now
    if number == 0:
        request.note("first item", now)
        reschedule(state, request)
    for waiter in request.waiters:
        waiter.port.deliver(data, request.priority, final=False)
        if not waiter.port.streaming and number % 32 == 0:  # it collects all items, and takes them as they come
            _take_more(state, request, waiter, number + 2 * CREDIT_INITIAL)


def _final(state: State, request: Request, envelope: Envelope) -> None:
    timing = envelope.timing
    queue_us, handler_us = timing.queue_us, timing.handler_us
    now = state.now
    if queue_us or handler_us:
        request.queue_us, request.handler_us = queue_us, handler_us
    handled_s = request.handled_s = handler_us / 1e6
    transport_s = now - request.delivered_at - queue_us / 1e6 - handled_s
    request.transport_s = transport_s if transport_s > 0 else 0.0
    if envelope.HasField("error"):
        _refused(state, request, envelope)
        return
    data = _as_given(state, request, envelope)
    if data is None:
        fail(state, request, _reply_too_large(state, request, envelope))
        return
    _answer(state, request, data, "OK", None)
    release(state, request)


def _refused(state: State, request: Request, envelope: Envelope) -> None:
    """The agent answered with an error of its own, or one that a call it made ended with."""
    said, agent = envelope.error, request.agent
    assert agent is not None
    known = said.code and said.code in codes.ErrorCode.values()
    error = failure(  # rebuilt, so that nothing of it is longer than an error may be
        said.code if known else codes.AGENT_ERROR,
        said.message,
        retryable=said.retryable,
        may_have_executed=said.may_have_executed,
        retry_after_ms=said.retry_after_ms,
        agent_id=said.agent_id or agent.agent_id,
        attempts=request.attempt,
        details=said.details,
    )
    if error.code == codes.OVERLOADED and error.retry_after_ms:
        state.directory.avoid(agent, state.now + min(AVOID_S_MAX, error.retry_after_ms / 1000))
    # The seat of retries: whether another attempt follows is decided here from error, profile and budget.
    fail(state, request, error)


def _late(state: State, request: Request, envelope: Envelope) -> None:
    """The agent confirms the end of a request that was answered without it."""
    if envelope.more:
        return
    state.stats.duplicates["late"] += 1
    if request.lost_at and not envelope.HasField("error") and not request.node_made_id:
        data = _as_given(state, request, envelope)
        if data is not None:
            outcomes.confirmed(state, request)  # the AGENT_LOST that it was answered with gives way to the truth
            request.failed = False
            outcomes.keep(state, request, data)
    release(state, request)


def _as_given(state: State, request: Request, envelope: Envelope) -> bytes | None:
    """The RESPONSE as its callers get it; None if its payload is over the limit."""
    agent = request.agent
    assert agent is not None
    data = writing.answered(request, envelope, agent.agent_id)
    bound = state.rules.payload_bytes_max
    size = len(data)
    if size <= bound:
        return data
    return data if size <= bound + CONTROL_BYTES_MAX and payload_size(envelope.payload) <= bound else None


def _reply_too_large(state: State, request: Request, envelope: Envelope) -> Error:
    size, bound = envelope.ByteSize(), state.rules.payload_bytes_max
    agent_id = request.agent.agent_id if request.agent else ""
    return failure(
        codes.PAYLOAD_TOO_LARGE,
        f"{agent_id} answered with {size} bytes and the limit is {bound}; answer with a BlobRef, or yield it in items",
        may_have_executed=True,
        agent_id=agent_id,
    )


# ---- failures ----


def error_reply(error: Error, message_id: str, trace_id: str) -> Envelope:
    """The RESPONSE that carries an error."""
    return Envelope(type=pb.RESPONSE, correlation_id=message_id, trace_id=trace_id, error=error)


def fail(state: State, request: Request, error: Error) -> None:
    """End a request with an error; nothing of it is left with an agent."""
    _answer_error(state, request, error)
    release(state, request)


def give_up(state: State, request: Request, error: Error) -> None:
    """End a request with an error while an agent may be working on it: the agent is told, its slot waits for it."""
    request.lost_at = 0.0
    _answer_error(state, request, error)
    _let_go(state, request)


def _answer_error(state: State, request: Request, error: Error) -> None:
    error.attempts = max(error.attempts, request.attempt)
    if request.items:
        error.details["items"] = str(request.items)
    reply = error_reply(error, request.message_id, request.trace_id)
    reply.entry = request.entry
    reply.epoch = request.epoch
    if request.session_event:
        reply.session_event = pb.SessionEvent.ValueType(request.session_event)
    _answer(state, request, reply.SerializeToString(), codes.ErrorCode.Name(error.code), error)


def _answer(state: State, request: Request, reply: bytes, outcome: str, error: Error | None) -> None:
    """Give the outcome to all who wait, keep it for those who ask again, and close the books on the request."""
    now = state.now
    item: Item | None = None
    for waiter in request.waiters:
        item = waiter.port.deliver(reply, request.priority)
        forget_waiter(waiter.port, request)
    request.waiters.clear()
    request.stage = Stage.SETTLED
    request.failed = error is not None
    state.unsettled -= 1
    if request.timer is not None:
        state.wheel.cancel(request.timer, request)
        request.timer = None
    if request.node_made_id or (
        error is not None and not replay.is_stored(error.code, error.retryable, error.may_have_executed)
    ):
        del state.by_key[request.key]
    elif request.fresh and item is not None:
        item.owner = request  # it stays in `by_key` until the caller has the reply for sure
        request.reply = item
        outcomes.shrink(request)
    else:
        del state.by_key[request.key]
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
            agent.agent_id if agent is not None else "",
            outcome,
            received,
            received + state.unix_offset,
            journey,
        )
    else:
        state.traces.keep(traced(state, request, outcome, journey), now)
    state.stats.finished(
        request.agent_type,
        outcome,
        delivered - received if delivered else None,
        request.transport_s,
        request.handled_s,
        total_s,
    )
    if error is not None:
        state.log("debug", "request failed", request.trace_id, code=outcome, agent=error.agent_id, why=error.message)


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
    )
    found.agent_id = request.agent.agent_id if request.agent is not None else ""
    found.outcome = outcome
    accepted_at = item.accepted_at if item is not None else 0.0
    put_journey(
        found,
        journey or (request.routed, request.delivered_at, accepted_at, 0.0, request.attempt, 0, 0, request.notes),
    )
    return found


def _let_go(state: State, request: Request) -> None:
    """Take the attempt back from its agent, or tell the agent to end it and wait for that."""
    attachment, item = request.attachment, request.item
    if attachment is None or item is None:
        release(state, request)
        return
    peer = attachment.peer
    if item.seq == 0:
        peer.link.withdraw(item)
        unsaturate(state, attachment)
        release(state, request)
        return
    peer.link.withdraw(item)  # sent or not: after a cut it must not come again
    tell_cancelled(state, request, attachment)
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
    attachment = request.attachment
    if attachment is not None:
        attachment.attempts.pop(request.number, None)
        if request.holds_slot:
            request.holds_slot = False
            state.directory.release(attachment.agent)
        if attachment.lanes_waiting:
            sessions.next_in_turn(state, attachment)
    if request.lane is not None:
        sessions.leave(state, request)


# ---- deadlines and cancels ----


def reschedule(state: State, request: Request) -> None:
    """Set the request's one timer to the next moment at which something must be decided about it."""
    when = min([waiter.deadline for waiter in request.waiters], default=request.deadline)
    if request.items:
        when = min(when, request.items_at + state.rules.idle_timeout_s)
    if request.lost_at:
        when = min(when, request.lost_at + settle_window_s(state, request))
    if request.timer is not None:
        state.wheel.cancel(request.timer, request)
    request.timer = state.wheel.schedule(request, when)


def settle_window_s(state: State, request: Request) -> float:
    """How long a request waits for its agent's lost link to come back."""
    share = SETTLE_SHARE * (request.deadline - request.lost_at)
    return min(state.rules.resume_window_s, max(state.rules.settle_min_s, share))


def on_timer(state: State, request: Request) -> None:
    """The request's timer has come."""
    if request.number not in state.requests:
        return  # it ended in this very tick
    request.timer = None
    now = state.now
    if request.stage is Stage.SETTLED:
        _force_release(state, request)
        return
    if request.lost_at and now >= request.lost_at + settle_window_s(state, request):
        lost(state, request, "its link was cut and did not come back in time")
        return
    if request.items and now >= request.items_at + state.rules.idle_timeout_s:
        _idle(state, request)
        return
    late = [waiter for waiter in request.waiters if waiter.deadline <= now]
    if len(late) == len(request.waiters):
        item, attachment = request.item, request.attachment
        if item is not None and attachment is not None and item.seq and not item.accepted and attachment.peer.connected:
            health.unacknowledged(state, attachment, item)
        give_up(state, request, timed_out(request))
        return
    for waiter in late:
        withdraw_waiter(state, request, waiter, timed_out(request))
    reschedule(state, request)


def timed_out(request: Request) -> Error:
    """The deadline passed: where the request was by then, and whether it may have run."""
    item, agent = request.item, request.agent
    if request.stage is Stage.QUEUED:
        where, ran = "was queued in its session's lane; it was never started", False
    elif item is None or agent is None:
        where, ran = "was being routed; it was never started", False
    elif item.seq == 0:
        where, ran = f"was waiting in the outbox of {agent.agent_id}; it was never started", False
    elif not item.accepted:
        where, ran = f"was sent to {agent.agent_id}, which has not acknowledged it", True
    else:
        where, ran = f"was {'being handled' if request.started else 'delivered'} at {agent.agent_id}", True
    return failure(
        codes.TIMEOUT,
        f"the deadline passed; the request {where}",
        retryable=not ran or request.idempotent,
        may_have_executed=ran,
        agent_id=agent.agent_id if agent is not None else "",
    )


def _idle(state: State, request: Request) -> None:
    """No item for too long: the consumer's fault if it granted nothing, else the agent's."""
    idle_s = state.rules.idle_timeout_s
    stalled = [waiter for waiter in request.waiters if waiter.credit <= request.items]
    agent_id = request.agent.agent_id if request.agent else ""
    if stalled:
        error = failure(
            codes.TIMEOUT,
            f"the caller took no item for {idle_s:g} s; the stream was ended after {request.items} items",
            may_have_executed=True,
            agent_id=agent_id,
        )
        if len(stalled) == len(request.waiters):
            give_up(state, request, error)
            return
        for waiter in stalled:
            withdraw_waiter(state, request, waiter, error)
        request.items_at = state.now
        reschedule(state, request)
        return
    give_up(
        state,
        request,
        failure(
            codes.TIMEOUT,
            f"{agent_id} sent no item for {idle_s:g} s after {request.items} items (progress() keeps a stream alive)",
            may_have_executed=True,
            agent_id=agent_id,
        ),
    )


def _force_release(state: State, request: Request) -> None:
    attachment = request.attachment
    state.stats.forced_releases += 1
    state.log(
        "warning",
        "slot taken back: the handler did not end after its cancel",
        request.trace_id,
        agent=attachment.agent.agent_id if attachment else "",
        message_id=request.message_id,
    )
    release(state, request)


def withdraw_waiter(state: State, request: Request, waiter: Waiter, error: Error) -> None:
    """End one of several waits for a request; the others go on."""
    reply = error_reply(error, request.message_id, request.trace_id)
    waiter.port.deliver(reply.SerializeToString(), request.priority)
    request.waiters.remove(waiter)
    forget_waiter(waiter.port, request)
    _widen(state, request)


def cancel(state: State, port: Port, key: MessageKey) -> None:
    """The caller behind `port` no longer wants the answer. Somebody else's request is not its to cancel."""
    request = state.by_key.get(key)
    waiter = next((w for w in request.waiters if w.port is port), None) if request is not None else None
    if request is None or waiter is None:
        return
    error = failure(codes.CANCELLED, "the caller cancelled the request", retryable=False)
    if len(request.waiters) > 1:
        withdraw_waiter(state, request, waiter, error)
        reschedule(state, request)
        return
    error.may_have_executed = request.item is not None and request.item.seq > 0
    if request.stage is Stage.DELIVERED:
        give_up(state, request, error)
    else:
        fail(state, request, error)


def port_gone(state: State, port: Port, requests: list[Request], *, said_goodbye: bool) -> None:
    """Nobody reads this port any more: every wait of its caller ends.

    A caller that did not say goodbye may come back and send its messages again. What an agent has got of them is not
    run a second time: the outcome is kept, and if the agent answers after all, that answer.
    """
    for request in requests:
        item = request.item
        sent = request.stage is Stage.DELIVERED and item is not None and item.seq > 0
        if said_goodbye or not sent or len(request.waiters) > 1:
            cancel(state, port, request.key)
            continue
        agent_id = request.agent.agent_id if request.agent is not None else ""
        give_up(
            state,
            request,
            failure(
                codes.AGENT_LOST,
                f"its caller's link did not come back; {agent_id} was told to end it and may have executed",
                retryable=request.idempotent,
                agent_id=agent_id,
            ),
        )
        request.lost_at = state.now


# ---- lost links and agents ----


def link_cut(state: State, attachment: Attachment) -> None:
    """The link of an agent was cut: its requests wait out their settle windows."""
    for request in attachment.attempts.values():
        if request.stage is not Stage.SETTLED:
            request.lost_at = state.now
            reschedule(state, request)


def link_back(state: State, attachment: Attachment, *, resumed: bool) -> None:
    """The link is back in time: what was in flight still is.

    A resumed link has said what it took: a request that it did not take, and that ended meanwhile, is not there.
    """
    for request in list(attachment.attempts.values()):
        item = request.item
        if request.stage is not Stage.SETTLED:
            request.lost_at = 0.0
            reschedule(state, request)
        elif resumed and item is not None and not item.accepted:
            release(state, request)


def lost(state: State, request: Request, why: str, *, said_goodbye: bool = False) -> None:
    """The attempt's agent vanished. What was never handed over, or what its goodbye does not cover, has not run."""
    agent, item = request.agent, request.item
    assert agent is not None
    if item is None or item.seq == 0 or (said_goodbye and not item.accepted and not item.doubtful):
        # The seat of the retry that is always safe: another instance at once.
        error = failure(
            codes.CONNECT_FAILED,
            f"{agent.agent_id} was lost before the request was handed to it ({why}); nothing was started",
            agent_id=agent.agent_id,
        )
        if item is not None and request.attachment is not None:
            request.attachment.peer.link.withdraw(item)
        fail(state, request, error)
        return
    seen = "accepted" if item.accepted else "not acknowledged"
    error = failure(
        codes.AGENT_LOST,
        f"{agent.agent_id} was lost ({why}); the request had been sent and {seen}, so it may have executed",
        retryable=request.idempotent,
        may_have_executed=True,
        agent_id=agent.agent_id,
    )
    if request.attachment is not None:
        request.attachment.peer.link.withdraw(item)  # what the caller was told has ended must not begin later
    request.lost_at = request.lost_at or state.now  # should it answer after all, that answer is kept
    _answer_error(state, request, error)
    grace_s = state.rules.resume_window_s + state.rules.cancel_grace_s
    request.timer = state.wheel.schedule(request, max(request.deadline, state.now) + grace_s)


def agent_gone(state: State, attachment: Attachment, why: str, *, said_goodbye: bool = False) -> None:
    """The agent is no longer attached: its requests end now, and everything they hold is given back."""
    for request in list(attachment.attempts.values()):
        if request.stage is not Stage.SETTLED:
            lost(state, request, why, said_goodbye=said_goodbye)
        release(state, request)


def resent(state: State, request: Request) -> bytes:
    """The request's envelope for another sending to the same process: not fresh, with the time that is left."""
    envelope = Envelope.FromString(request.data)
    envelope.fresh = False
    envelope.timeout_ms = max(1, int((request.deadline - state.now) * 1000))
    return envelope.SerializeToString()


def unsaturate(state: State, attachment: Attachment) -> None:
    """Let requests see the agent again once its outbox has room and nothing is overdue."""
    agent = attachment.agent
    if agent.saturated and attachment.peer.connected and not attachment.peer.link.full and not attachment.overdue:
        agent.saturated = False
        state.directory.changed(agent)


# ---- streamed replies ----


def grant(state: State, port: Port, entry: bytes, up_to: int) -> None:
    """A consumer takes items up to this number; the producer may send what all its consumers take."""
    if len(entry) != 16 or entry[:8] != state.nonce:
        return
    request = state.requests.get(int.from_bytes(entry[8:], "big"))
    if request is None or request.stage is not Stage.DELIVERED:
        return
    for waiter in request.waiters:
        if waiter.port is port and up_to > waiter.credit:
            _take_more(state, request, waiter, up_to)
            return


def _take_more(state: State, request: Request, waiter: Waiter, up_to: int) -> None:
    waiter.credit = up_to
    _widen(state, request)


def _widen(state: State, request: Request) -> None:
    """Tell the producer how many items all who wait take, if that is more than before."""
    credit = min([each.credit for each in request.waiters])
    attachment = request.attachment
    if credit <= request.credit or attachment is None:
        return
    if request.credit <= request.items:
        request.items_at = state.now  # the pause was the consumer's; the producer's idle time starts now
    request.credit = credit
    _tell_credit(state, request, attachment)


def _tell_credit(state: State, request: Request, attachment: Attachment) -> None:
    credit = StreamCredit(correlation_id=request.message_id, entry=request.entry, up_to=request.credit)
    signal = Signal(stream_credit=credit)
    attachment.peer.link.signal(signal)
    state.woken.add(attachment.peer)


def grant_again(state: State, attachment: Attachment) -> None:
    """A link that begins anew has forgotten its signals: repeat how many items each producer may send."""
    for request in attachment.attempts.values():
        if request.credit > CREDIT_INITIAL:
            _tell_credit(state, request, attachment)


# ---- who waits ----


def peer_of(port: Port) -> Peer | None:
    """The link behind a port, if it is one."""
    return port if isinstance(port, Peer) else None


def remember_waiter(port: Port, request: Request) -> None:
    """Let a link know that it waits for this request."""
    if isinstance(port, Peer):
        port.requests[request.number] = request


def forget_waiter(port: Port, request: Request) -> None:
    """The link waits for it no longer."""
    if isinstance(port, Peer):
        port.requests.pop(request.number, None)
