"""What a frame of another node means: requests for agents of this node, replies to requests of this node, signals.

The counterpart of `mesh.frame` for links between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.frame_pb2 import Frame, Signal
from reach.core import (
    claims,
    crossing,
    fence,
    health,
    homes,
    interest,
    links,
    loads,
    mesh,
    nodes,
    once,
    refusals,
    replies,
    visiting,
    wants,
)
from reach.core.effects import Forwarding

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State

RESPONSE, EVENT, CANCEL, CALLBACK = int(pb.RESPONSE), int(pb.EVENT), int(pb.CANCEL), int(pb.CALLBACK)


def frame(state: State, node: NodePeer, received: Frame, spent_ms: int) -> None:
    """Act on a frame of a link between nodes. Raises `LinkError` if the peer broke the numbering."""
    if node.closing:
        return
    link = node.link
    node.heard_at = state.now
    if not link.receive(received, state.now):
        return
    if link.confirmed:
        links.confirmed(state, link.confirmed)
    for signal in received.signals:
        _signal(state, node, signal)
        if node.closing:
            return
    if received.envelopes:
        spent_ms += received.age_ms
        for envelope in received.envelopes:
            kind = envelope.type
            if kind == RESPONSE:
                if crossing.is_count(state, envelope.entry):
                    crossing.counted(state, node, envelope)
                else:
                    replies.respond(state, node, envelope)
            elif kind == CANCEL:
                visiting.cancel(state, node, envelope)
            elif kind in (EVENT, CALLBACK):
                crossing.arrived(state, node, envelope, spent_ms)
            elif not envelope.recipient:
                once.admit_relayed(state, node, envelope, spent_ms)
            else:
                visiting.admit_from(state, node, envelope, spent_ms)
    if node.filled and not link.full:
        node.filled = False
        for attachment in node.agents.values():
            health.unsaturate(state, attachment)


def _signal(state: State, node: NodePeer, signal: Signal) -> None:
    kind = signal.WhichOneof("kind")
    handler = _SIGNALS.get(kind) if kind is not None else None
    if handler is not None:
        handler(state, node, signal)


def _loads(state: State, node: NodePeer, signal: Signal) -> None:
    loads.heard(state, node, signal.loads)


def _attempt_state(state: State, node: NodePeer, signal: Signal) -> None:
    refusals.told(state, node, signal.attempt_state)


def _stream_credit(state: State, node: NodePeer, signal: Signal) -> None:
    visiting.grant(state, node, signal.stream_credit)


def _progress(state: State, node: NodePeer, signal: Signal) -> None:
    mesh.progress(state, node, signal)


def _interest(state: State, node: NodePeer, signal: Signal) -> None:
    interest.heard(state, node, signal.interest)


def _pins_honoured(state: State, node: NodePeer, signal: Signal) -> None:
    fence.heard(state, node, signal.pins_honoured)


def _want(state: State, node: NodePeer, signal: Signal) -> None:
    wants.heard(state, node, signal.want)


def _grant(state: State, node: NodePeer, signal: Signal) -> None:
    wants.granted(state, node, signal.grant)


def _lookup(state: State, node: NodePeer, signal: Signal) -> None:
    claims.asked(state, node, signal.lookup)


def _found(state: State, node: NodePeer, signal: Signal) -> None:
    once.told(state, node, signal.found)


def _forward(state: State, node: NodePeer, signal: Signal) -> None:
    state.effects.append(Forwarding(node, forward=signal.forward))


def _forwarded(state: State, node: NodePeer, signal: Signal) -> None:
    state.effects.append(Forwarding(node, forwarded=signal.forwarded))


def _handover(state: State, node: NodePeer, signal: Signal) -> None:
    homes.handed_on(state, node, signal.handover)


def _goodbye(state: State, node: NodePeer, signal: Signal) -> None:
    nodes.said_goodbye(state, node, signal.goodbye)


_SIGNALS: dict[str, Callable[[State, NodePeer, Signal], None]] = {
    "loads": _loads,
    "attempt_state": _attempt_state,
    "stream_credit": _stream_credit,
    "progress": _progress,
    "interest": _interest,
    "pins_honoured": _pins_honoured,
    "handover": _handover,
    "want": _want,
    "grant": _grant,
    "lookup": _lookup,
    "found": _found,
    "forward": _forward,
    "forwarded": _forwarded,
    "goodbye": _goodbye,
}
