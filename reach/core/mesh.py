"""The reducer: what happens to the node's state when something arrives or a time has come.

Each entry point takes a whole frame, call or tick, decides synchronously, and ends with `finish_step`; the engine then
carries out what the state asks for (`woken`, `calls`, `effects`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import frame_pb2
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Frame, Signal
from agentreach.wire.errors import clean
from agentreach.wire.names import as_name, normalise_env
from reach.core import (
    admit,
    arrivals,
    callbacks,
    claims,
    credit,
    deadlines,
    departures,
    drains,
    events,
    fence,
    health,
    heartbeats,
    interest,
    lanes,
    links,
    loads,
    moves,
    nodes,
    once,
    order,
    owners,
    quotas,
    rebalance,
    replies,
    returning,
    unstored,
    visiting,
    waiters,
    waiting,
    wants,
)
from reach.core.brought import Returning
from reach.core.claims import Asking, Inquiry
from reach.core.drains import Drain
from reach.core.fence import Fence
from reach.core.lanes import Lane
from reach.core.loads import LoadsDue
from reach.core.peers import Peer
from reach.core.rebalance import Balance
from reach.core.requests import Attachment, Request, Stage
from reach.core.topics import Publishing
from reach.core.unstored import Unstored
from reach.core.wants import Granted

if TYPE_CHECKING:
    from reach.core.calls import Call
    from reach.core.ports import Identity
    from reach.core.state import Checked, State

AFTER_FAULT_S: Final = 1.0
SIGNALS_WAITING_MAX: Final = 10_000  # answers to signals that a peer does not read: beyond, it is a slow consumer

RESPONSE: Final = int(pb.RESPONSE)
EVENT: Final = int(pb.EVENT)
CANCEL: Final = int(pb.CANCEL)
CALLBACK: Final = int(pb.CALLBACK)


def frame(
    state: State, peer: Peer, received: Frame, spent_ms: int, size: int = 0, unread: Iterable[Envelope] = ()
) -> None:
    """Act on a frame of a link, of `size` bytes. `spent_ms` of its envelopes' time passed in this process's stalls.

    `unread` is what is known of envelopes of it that could not be parsed; they are answered with an error.

    Raises `LinkError` if the peer broke the numbering.
    """
    if peer.closing:
        return
    link = peer.link
    peer.heard_at = state.now
    if peer.account is not None:
        peer.account.received(state.now, size)
    if not link.receive(received, state.now):
        return
    if link.confirmed:
        links.confirmed(state, link.confirmed)
    if peer.gaps:
        events.tell_gaps(state, peer)
    signals = received.signals
    if signals:
        for signal in signals:
            _signal(state, peer, signal)
            if peer.closing:  # nothing counts after a goodbye: what it asks for would be nobody's, for ever
                return
        if link.signals_waiting > SIGNALS_WAITING_MAX:
            state.overrun.add(peer)
    envelopes = received.envelopes
    if envelopes:
        spent_ms += received.age_ms
        who, caller_id = peer.who, peer.caller_id
        for envelope in envelopes:
            kind = envelope.type
            if kind == RESPONSE:
                replies.respond(state, peer, envelope)
            elif kind == EVENT:
                events.publish(state, peer, who, envelope, spent_ms, peer, caller_id)
            elif kind == CANCEL:
                env = normalise_env(envelope.env)
                waiters.cancel(state, peer, (who.tenant, who.principal, env, envelope.correlation_id))
            elif kind != CALLBACK:
                admit.admit(state, peer, who, envelope, spent_ms, peer, caller_id)
    for envelope in unread:
        admit.unreadable(state, peer, envelope)
    if peer.filled and not link.full:
        peer.filled = False
        for attachment in peer.attachments.values():
            health.unsaturate(state, attachment)
            owners.changed(state, attachment)


def invoke(state: State, call: Call, who: Identity, envelope: Envelope) -> None:
    """A request came by a call of its own."""
    caller_id = f"caller/{as_name(who.principal)}"
    fault = quotas.call_fault(state, call, who, envelope)
    if fault is not None:
        envelope.tenant = who.tenant
        admit.refuse(state, call, envelope, caller_id, fault)
        return
    admit.admit(state, call, who, envelope, 0, None, caller_id)
    call.message_id = envelope.message_id
    call.env = normalise_env(envelope.env)


def publish(state: State, call: Call, who: Identity, envelope: Envelope) -> None:
    """An event came by a call of its own."""
    quotas.call_fault(state, call, who, envelope)
    events.publish(state, call, who, envelope, 0, None, f"caller/{as_name(who.principal)}")


def hang_up(state: State, call: Call, who: Identity) -> None:
    """The call's client is gone or wants no more."""
    waiters.cancel(state, call, (who.tenant, who.principal, call.env, call.message_id))
    call.let_go()


def tick(state: State) -> None:
    """Do what is due by `state.now`.

    A fault of ours in one of them is the caller's to log. It costs the others nothing: they are due again at once, and
    the one with the fault a second later, so that nothing is left without a timer.
    """
    requests = deque(state.wheel.due(state.now))
    checks = deque(state.checks.due(state.now))
    when = state.now + AFTER_FAULT_S
    try:
        while requests:
            deadlines.on_timer(state, requests[0])
            requests.popleft()
        while checks:
            _check(state, checks[0])
            checks.popleft()
    finally:
        for request in requests:
            request.timer = state.wheel.schedule(request, when)
            when = state.now
        for item in checks:
            token = state.checks.schedule(item, when)
            if not isinstance(item, Drain):  # which is never cancelled
                item.timer = token
            when = state.now
    if len(state.returning.held):
        returning.expire(state)
    state.replay.expire(state.now)
    state.dead_letters.expire(state.now)
    state.traces.expire(state.now)


def _check(state: State, item: Checked) -> None:
    match item:
        case Attachment():
            health.on_timer(state, item)
        case nodes.NodePeer():
            nodes.on_timer(state, item)
        case Peer():
            links.on_timer(state, item)
        case Lane():
            lanes.on_timer(state, item)
        case Publishing():
            item.timer = None
            events.finish(state, item)
        case Returning():
            returning.on_timer(state, item)
        case Inquiry():
            once.on_timer(state, item)
        case Asking():
            claims.on_timer(state, item)
        case Fence():
            fence.on_timer(state, item)
        case Granted():
            wants.on_timer(state, item)
        case Balance():
            rebalance.on_timer(state, item)
        case LoadsDue():
            loads.on_timer(state, item)
        case Drain():
            drains.on_timer(state, item)
        case Unstored():
            unstored.on_timer(state, item)


def next_tick_at(state: State) -> float | None:
    """When `tick` must be called next; None while nothing is scheduled."""
    times = [at for at in (state.wheel.next_at(), state.checks.next_at()) if at is not None]
    return min(times, default=None)


def finish_step(state: State) -> None:
    """End of a step: part with links that take nothing, let sessions go on whose lane, slot or owner changed."""
    if state.callbacks.over:
        callbacks.end_over(state)
    while state.overrun:
        peer = state.overrun.pop()
        if isinstance(peer, nodes.NodePeer):
            nodes.end(state, peer, frame_pb2.Goodbye.SLOW_CONSUMER, "its outbox is full of what it does not take")
        elif not peer.closing:
            state.stats.slow_consumers += 1
            why = "its outbox is full of what it does not take"
            links.farewell(state, peer, frame_pb2.Goodbye.SLOW_CONSUMER, why)
    directory = state.directory
    if directory.news:
        loads.tell_news(state)
    if state.topics.news:
        interest.tell_news(state)
    while state.lanes_ready or state.lines_ready or directory.freed or directory.shrunk:
        if state.lines_ready:
            order.go_on(state)
        if state.lanes_ready:
            lanes.drain_ready(state)
        if directory.freed:
            waiting.serve(state)
        if directory.shrunk:
            waiting.recheck(state)


# ---- signals ----


def _signal(state: State, peer: Peer, signal: Signal) -> None:
    kind = signal.WhichOneof("kind")
    handler = _SIGNALS.get(kind) if kind is not None else None
    if handler is not None:
        handler(state, peer, signal)


def progress(state: State, peer: Peer, signal: Signal) -> None:
    """A handler says how far it is."""
    said = signal.progress
    entry = said.entry
    if len(entry) != 16 or entry[:8] != state.nonce:
        return
    request = state.requests.get(int.from_bytes(entry[8:], "big"))
    if request is None or request.attachment is None or request.attachment.peer is not peer:
        return
    if request.stage is not Stage.DELIVERED:
        return
    if said.started and not request.started:
        request.started = True
        request.note("started", state.now)
    if said.text or said.HasField("percent"):
        percent = f"{said.percent:g} % " if said.HasField("percent") else ""
        request.note("progress", state.now, f"{percent}{clean(state.redaction.text(said.text), 200)}")
    _reset_idle(state, request)
    if request.visitor is not None:
        visiting.progressed(state, request, said)


def _reset_idle(state: State, request: Request) -> None:
    if request.items:
        request.items_at = state.now


def _attach(state: State, peer: Peer, signal: Signal) -> None:
    arrivals.arrive(state, peer, [signal.attach], with_welcome=False)


def _detach(state: State, peer: Peer, signal: Signal) -> None:
    departures.detach(state, peer, signal.detach)


def _heartbeat(state: State, peer: Peer, signal: Signal) -> None:
    heartbeats.heard(state, peer, signal.heartbeat)


def _status_change(state: State, peer: Peer, signal: Signal) -> None:
    attachment = peer.attachment(signal.status_change.agent_id)
    if attachment is not None:
        attachment.keeps_sessions = signal.status_change.keeps_sessions and attachment.drain is None
        health.said(state, attachment, signal.status_change.status)


def _probe_reply(state: State, peer: Peer, signal: Signal) -> None:
    attachment = peer.attachment(signal.probe_reply.agent_id)
    if attachment is not None:
        health.answered(state, attachment, signal.probe_reply)


def _credit(state: State, peer: Peer, signal: Signal) -> None:
    credit.grant(state, peer, signal.stream_credit.entry, signal.stream_credit.up_to)


def _subscribe(state: State, peer: Peer, signal: Signal) -> None:
    events.subscribe(state, peer, signal.subscribe)


def _unsubscribe(state: State, peer: Peer, signal: Signal) -> None:
    events.unsubscribe(state, peer, signal.unsubscribe)


def _session_snapshot(state: State, peer: Peer, signal: Signal) -> None:
    moves.snapshot(state, peer, signal.session_snapshot)


def _session_ready(state: State, peer: Peer, signal: Signal) -> None:
    moves.ready(state, peer, signal.session_ready)


def _found(state: State, peer: Peer, signal: Signal) -> None:
    once.told(state, peer, signal.found)


def _goodbye(state: State, peer: Peer, signal: Signal) -> None:
    links.goodbye(state, peer, signal.goodbye)


_SIGNALS: dict[str, Callable[[State, Peer, Signal], None]] = {
    "heartbeat": _heartbeat,
    "stream_credit": _credit,
    "progress": progress,
    "probe_reply": _probe_reply,
    "attach": _attach,
    "detach": _detach,
    "status_change": _status_change,
    "subscribe": _subscribe,
    "unsubscribe": _unsubscribe,
    "found": _found,
    "session_snapshot": _session_snapshot,
    "session_ready": _session_ready,
    "goodbye": _goodbye,
}
