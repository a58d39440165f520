"""Where a request enters: checked, placed in its call tree, joined to its twin, or given an entry of its own.

What comes out is either a refusal on the port it came by, or a `Request` with a deadline, handed to routing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire import ids, limits, salvage
from agentreach.wire.checks import request_fault
from agentreach.wire.content import content_digest
from agentreach.wire.errors import failure
from agentreach.wire.names import normalise_env
from reach.core import (
    auditing,
    callbacks,
    credit,
    deadlines,
    once,
    outcomes,
    quotas,
    route,
    senders,
    settle,
    signed,
    waiters,
)
from reach.core.profiles import whole_timeout_ms
from reach.core.redacting import redact
from reach.core.replay import Conflict, Elsewhere, Stored, TooOld
from reach.core.requests import MessageKey, Port, Request, Stage, Waiter
from reach.core.trace import Traced

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.peers import Peer
    from reach.core.ports import Identity
    from reach.core.state import State

ECHOED_CHARS_MAX: Final = 4096  # of a message_id that is too long: its sender still knows by it what was refused

PRIORITY_LANE: Final = {pb.PRIORITY_UNSPECIFIED: 1, pb.HIGH: 0, pb.NORMAL: 1, pb.LOW: 2}


def admit(
    state: State, port: Port, who: Identity, envelope: Envelope, spent_ms: int, peer: Peer | None, caller_id: str
) -> None:
    """Take in one REQUEST that came by `port`; `spent_ms` of its time has passed since it was stamped."""
    parent: Lineage | None = None
    came_by = peer
    unsigned = signed.fault(state, who, envelope, peer) if who.rights is not None and who.rights.signs else None
    if envelope.tenant != who.tenant:
        envelope.tenant = who.tenant
    lineage = envelope.lineage
    message_id = envelope.message_id
    node_made_id = not message_id
    if node_made_id:
        message_id = new_id(state)
        envelope.message_id = message_id
    source = envelope.source
    if source != caller_id:
        source = senders.stamp_source(state, who, envelope, peer, caller_id)
    target = envelope.target
    target_data = target.SerializeToString()
    fault = _fault(state, who, envelope, target_data) or unsigned
    if fault is not None:
        deny(state, port, envelope, source, fault, who, came_by)
        return
    callback: callbacks.Callback | None = None
    if envelope.reply_topic:
        port = callback = callbacks.Callback(state, port, who, envelope, envelope.reply_topic)
        peer = None  # the caller may go: its link has no wait to take with it
    if lineage or who.rights is not None:
        parent, fault = senders.admitted(state, who, envelope, target_data)
        if fault is not None:
            deny(state, port, envelope, source, fault, who, came_by)
            return
        target_data = target.SerializeToString()
    if not envelope.trace_id:
        envelope.trace_id = ids.trace_id(state.rng.getrandbits(128))
    left_s = time_left_s(state, envelope, parent, spent_ms)
    if left_s <= 0:
        refuse(state, port, envelope, source, _too_late(envelope))
        return
    key = (who.tenant, who.principal, normalise_env(envelope.env), message_id)
    twin = state.by_key.get(key)
    fresh = envelope.fresh or node_made_id
    if twin is not None or not fresh:
        if _known(state, port, envelope, key, twin or state.relayed.get(key), left_s, source):
            return
        fresh = False
    fault = _shut_door(state, envelope, parent)
    if fault is not None:
        refuse(state, port, envelope, source, fault)
        return
    request = open_request(state, port, envelope, key, left_s, peer, fresh)
    if node_made_id and callback is None:  # an accepted caller was told the id, and may use it again
        request.node_made_id = True
    if fresh or not state.nodes:
        route.route(state, request, envelope, target, target_data, parent)
    else:
        once.place(state, request, envelope, parent)
    if callback is not None:
        callback.accept(envelope, key, request)


def _fault(state: State, who: Identity, envelope: Envelope, target_data: bytes) -> Error | None:
    fault = quotas.request_fault(state, who, envelope) if state.quotas is not None else None
    nested = bool(envelope.lineage)
    return fault or request_fault(envelope, state.rules.payload_bytes_max, nested=nested, target_data=target_data)


def _known(
    state: State, port: Port, envelope: Envelope, key: MessageKey, twin: Request | None, left_s: float, source: str
) -> bool:
    """True if this message is under way or finished here, and its sender has joined or been answered."""
    if twin is not None:
        if twin.stage is not Stage.SETTLED:
            _join(state, port, envelope, twin, left_s, source)
            return True
        outcomes.keep_unconfirmed(state, twin)
    return _replayed(state, port, envelope, key, left_s, source)


def new_id(state: State) -> str:
    """A message_id made by the node."""
    return ids.uuid7(int(state.unix * 1000), state.rng.getrandbits(74))


def time_left_s(state: State, envelope: Envelope, parent: Lineage | None, spent_ms: int) -> float:
    """Seconds until the deadline: its own time, and never beyond its parent's, unless it outlives that on purpose."""
    left_ms = float(whole_timeout_ms(envelope.timeout_ms, envelope.profile) - spent_ms)
    if parent is not None and parent.deadline_unix_ms and not envelope.reply_topic:
        left_ms = min(left_ms, parent.deadline_unix_ms - state.unix * 1000)
        if left_ms < limits.TIMEOUT_MS_MIN:
            return 0.0
    return left_ms / 1000


def open_request(
    state: State, port: Port, envelope: Envelope, key: MessageKey, left_s: float, peer: Peer | None, fresh: bool
) -> Request:
    """Enter a request in the books."""
    now = state.now
    number = state.next_number
    state.next_number = number + 1
    deadline = now + left_s
    request = Request(
        number,
        key,
        state.nonce + number.to_bytes(8, "big"),
        now,
        deadline,
        Waiter(port, key[3], deadline),
        envelope.trace_id,
        envelope.source,
        PRIORITY_LANE[envelope.priority],
        fresh,
        envelope.idempotent,
    )
    parent_message_id = envelope.parent_message_id
    if parent_message_id:
        request.parent_message_id = parent_message_id
    state.requests[number] = request
    state.by_key[key] = request
    state.unsettled += 1
    if peer is not None:
        peer.requests[number] = request
    request.timer = state.wheel.schedule(request, deadline)
    return request


def refuse(state: State, port: Port, envelope: Envelope, source: str, error: Error) -> None:
    """Answer a request that gets no entry: bad, late, or not for now."""
    redact(state, error)
    if not envelope.trace_id:
        envelope.trace_id = ids.trace_id(state.rng.getrandbits(128))
    message_id = envelope.message_id[:ECHOED_CHARS_MAX]
    trace_id = envelope.trace_id[: limits.TRACE_ID_CHARS_MAX]
    code = codes.ErrorCode.Name(error.code)
    traced = Traced(
        message_id[: limits.MESSAGE_ID_CHARS_MAX],
        "",
        trace_id,
        source,
        state.now,
        state.unix,
        envelope.tenant,
        normalise_env(envelope.env),
    )
    traced.stages += (("received", state.now, 0, ""), ("failed", state.now, 0, code))
    traced.outcome = code
    state.traces.keep(traced, state.now)
    state.stats.finished(envelope.target.agent_type, code, None, None, None, 0.0)
    state.log(
        state.failure_level(code),
        "refused",
        trace_id,
        target=envelope.target.agent_type[:64],
        code=code,
        why=error.message,
    )
    port.deliver(settle.error_reply(error, message_id, trace_id).SerializeToString(), 1)


def deny(
    state: State, port: Port, envelope: Envelope, source: str, error: Error, who: Identity, peer: Peer | None
) -> None:
    """Refuse what its sender has no right to send, and have it told."""
    refuse(state, port, envelope, source, error)
    if error.code == codes.PERMISSION_DENIED:
        about = {
            "message": envelope.message_id[: limits.MESSAGE_ID_CHARS_MAX],
            "to": senders.addressed(envelope.target),
            "on_behalf_of": senders.on_behalf_of(state, who, envelope),
        }
        auditing.denied(state, "message.denied", who, peer, about, error.message, envelope.trace_id)


def unreadable(state: State, peer: Peer, envelope: Envelope) -> None:
    """Answer a message of which no more could be read than by whom, and which, it is."""
    if envelope.type in (pb.MESSAGE_TYPE_UNSPECIFIED, pb.REQUEST, pb.EVENT):
        envelope.tenant = peer.who.tenant
        source = senders.stamp_source(state, peer.who, envelope, peer, peer.caller_id)
        refuse(state, peer, envelope, source, failure(codes.INVALID_ENVELOPE, salvage.WHY))


def _too_late(envelope: Envelope) -> Error:
    return failure(
        codes.TIMEOUT,
        f"the deadline passed before the request was taken in (timeout_ms {envelope.timeout_ms}); nothing was started",
        retryable=False,
    )


def _shut_door(state: State, envelope: Envelope, parent: Lineage | None) -> Error | None:
    """Why this new request is not taken in now, or None. A node that leaves takes what its last requests need."""
    if state.draining and (parent is None or not parent.hop_count):  # without a hop it is a letter that is redriven
        return failure(codes.SHUTTING_DOWN, f"node {state.rules.node_id} is leaving: use another node")
    return _full(state)


def _full(state: State) -> Error | None:
    """Why no further request can be entered in the books, or None."""
    if state.unsettled < state.rules.requests_in_flight_max:
        return None
    return failure(
        codes.OVERLOADED,
        f"node {state.rules.node_id} has {state.unsettled} requests in flight, its limit; try again later",
        retry_after_ms=1000,
    )


def _join(state: State, port: Port, envelope: Envelope, twin: Request, left_s: float, source: str) -> None:
    """The same message is in flight: wait for the same outcome, or re-bind the wait that this port has already."""
    if content_digest(envelope) != content_digest(Envelope.FromString(twin.data)):
        state.stats.duplicates["conflict"] += 1
        refuse(state, port, envelope, source, conflict(envelope.message_id))
        return
    deadline = state.now + left_s
    twin.fresh = False  # there is more than one copy: the acknowledgement of one says nothing about the others
    for waiter in twin.waiters:
        if callbacks.same_wait(waiter.port, port):
            waiter.deadline = deadline
            break
    else:
        if twin.items:
            refuse(state, port, envelope, source, streams_already(twin))
            return
        state.stats.duplicates["joined"] += 1
        twin.waiters.append(Waiter(port, envelope.message_id, deadline))
        waiters.remember(port, twin)
    twin.deadline = max(twin.deadline, deadline)
    deadlines.reschedule(state, twin)
    if isinstance(port, callbacks.Callback):
        port.accept(envelope, twin.key, twin)


def _replayed(state: State, port: Port, envelope: Envelope, key: MessageKey, left_s: float, source: str) -> bool:
    """True if this message is finished already (or cannot be known not to be) and was answered so."""
    found = outcomes.find(state, key, content_digest(envelope))
    match found:
        case None:
            return False
        case Conflict():
            state.stats.duplicates["conflict"] += 1
            refuse(state, port, envelope, source, conflict(envelope.message_id))
        case TooOld():
            refuse(
                state,
                port,
                envelope,
                source,
                failure(
                    codes.AGENT_LOST,
                    f"message {envelope.message_id} is too old to know whether it was handled; it is not run again",
                    retryable=False,
                    may_have_executed=True,
                ),
            )
        case Elsewhere() if isinstance(port, callbacks.Callback) and port.published_error(key) is False:
            state.stats.duplicates["replayed"] += 1
            port.accept(envelope, key)
        case Elsewhere():
            attachment = route.incarnation(state, key, found.agent_id, found.incarnation)
            if attachment is None and envelope.idempotent:
                return False  # its result is gone, and it may run again
            if attachment is None:
                refuse(state, port, envelope, source, _result_gone(envelope.message_id, found.agent_id))
                return True
            if (fault := _full(state)) is not None:
                refuse(state, port, envelope, source, fault)
                return True
            state.stats.duplicates["replayed"] += 1
            request = open_request(state, port, envelope, key, left_s, waiters.peer_of(port), False)
            request.reentrant = True  # it is answered from the agent's table: that takes no slot
            request.retriable = request.idempotent and not envelope.session_id  # nobody else has that answer
            request.tied = envelope.resent = True
            request.credit = credit.UNBOUNDED  # the items of a streamed reply come as they were kept
            route.hand_over(state, request, envelope, attachment, None)
            if isinstance(port, callbacks.Callback):
                port.accept(envelope, key, request)
        case Stored():
            state.stats.duplicates["replayed"] += 1
            if isinstance(port, callbacks.Callback):
                callbacks.replayed(port, envelope, key, found.outcome)
            else:
                port.deliver(found.outcome, 1)
    return True


def streams_already(twin: Request) -> Error:
    """Why nobody can join a request whose items are on their way to another."""
    return failure(
        codes.AGENT_LOST,
        f"message {twin.message_id} is being answered with a stream of which another caller got {twin.items} items; "
        "they cannot be had again, and it is not run twice",
        retryable=False,
        may_have_executed=True,
        agent_id=twin.agent.agent_id if twin.agent is not None else "",
        details={"items": str(twin.items)},
    )


def conflict(message_id: str) -> Error:
    """The same id was sent with other content."""
    return failure(
        codes.IDEMPOTENCY_CONFLICT,
        f"message {message_id} was sent before with other content; use a new message_id for a new message",
    )


def _result_gone(message_id: str, agent_id: str) -> Error:
    return failure(
        codes.AGENT_LOST,
        f"message {message_id} was handled by {agent_id}, which is gone, and its result with it; it is not run again",
        retryable=False,
        may_have_executed=True,
        agent_id=agent_id,
    )
