"""Order within a session while it is not known whether its messages have run.

A message that is not fresh is asked about, or given to the node that owns it, before it comes to its session's lane.
Others of the same sender and session, fresh ones too, must not overtake it there: they stand in line behind it. What
has been found at work somewhere leaves the line; what nobody has goes on when it is the first; what another node owns
stays in it until it is answered, and others that this node also owns follow it at once.

A message that was sent from within a handler does not stand in line: the line may be waiting for that very handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.errors import failure
from reach.core import once, route, settle
from reach.core.requests import Request, Stage

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.nodes import NodePeer
    from reach.core.state import State

LineKey = tuple[str, str, str, str]
"""(tenant, principal, env, session_id)."""

RETRY_AFTER_MS = 1_000


class Place:
    """A request's place in line."""

    __slots__ = ("node", "ready", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ready = False
        """It may go on as soon as it is the first."""
        self.node: NodePeer | None = None
        """Who was given it to own."""


class Line:
    """The requests of one session, in their order."""

    __slots__ = ("key", "places")

    def __init__(self, key: LineKey) -> None:
        self.key = key
        self.places: list[Place] = []

    def place_of(self, request: Request) -> Place | None:
        """Where it stands."""
        return next((place for place in self.places if place.request is request), None)


def applies(envelope: Envelope, parent: Lineage | None) -> bool:
    """Whether a message stands in line at all."""
    return bool(envelope.session_id) and (parent is None or not parent.hop_count)


def _key(request: Request, session_id: str) -> LineKey:
    tenant, principal, env, _ = request.key
    return tenant, principal, env, session_id


def _line(state: State, request: Request, envelope: Envelope) -> Line | None:
    return request.line or state.lines.get(_key(request, envelope.session_id))


def _enter(state: State, request: Request, session_id: str) -> Place:
    line = request.line
    if line is None:
        key = _key(request, session_id)
        line = state.lines.get(key)
        if line is None:
            line = state.lines[key] = Line(key)
        request.line = line
        line.places.append(Place(request))
    place = line.place_of(request)
    assert place is not None
    place.ready, place.node = False, None
    return place


def asks(state: State, request: Request, session_id: str) -> None:
    """Others are asked whether they have it."""
    _enter(state, request, session_id)


def relayed(state: State, request: Request, session_id: str, node: NodePeer) -> None:
    """It was given to the node that owns it."""
    _enter(state, request, session_id).node = node


def may_follow(state: State, request: Request, envelope: Envelope, node: NodePeer) -> bool:
    """Whether a message may be given to its owner now; False: it stands in line, or has ended.

    It may if all that are before it were given to the same node.
    """
    line = _line(state, request, envelope)
    if line is None:
        return True
    for place in line.places:
        if place.request is request:
            break
        if place.node is not node:
            _wait(state, request, envelope, line, request.parent)
            return False
    return True


def waits(state: State, request: Request, envelope: Envelope, parent: Lineage | None) -> bool:
    """True if a message on its way to its session's lane must wait for others; or has ended, for too many do."""
    line = _line(state, request, envelope)
    if line is None or not applies(envelope, parent):
        return False
    if line.places[0].request is request:
        over(state, request)  # it enters the lane in this step, and those behind it after that
        return False
    _wait(state, request, envelope, line, parent)
    return True


def _wait(state: State, request: Request, envelope: Envelope, line: Line, parent: Lineage | None) -> None:
    if request.line is None and len(line.places) >= state.rules.lane_max:
        settle.fail(
            state,
            request,
            failure(
                codes.OVERLOADED,
                f"session {envelope.session_id} has {len(line.places)} messages waiting, its limit; wait for answers",
                retry_after_ms=RETRY_AFTER_MS,
            ),
        )
        return
    request.data = envelope.SerializeToString()
    request.parent = parent
    request.ran = request.ran or not (request.fresh or request.inquired)
    request.note("waiting", state.now, "for earlier messages of its session, which were sent before")
    _enter(state, request, envelope.session_id).ready = True


def decided(state: State, request: Request) -> None:
    """Nobody has it: it goes on when it is the first."""
    line = request.line
    place = line.place_of(request) if line is not None else None
    assert line is not None and place is not None
    place.ready = True
    state.lines_ready.append(line)


def over(state: State, request: Request) -> None:
    """It has ended, or is where it was found: those behind it may go on."""
    line, request.line = request.line, None
    assert line is not None
    line.places = [place for place in line.places if place.request is not request]
    if line.places:
        state.lines_ready.append(line)
    elif state.lines.get(line.key) is line:
        del state.lines[line.key]


def go_on(state: State) -> None:
    """Let those go on that are the first of their lines and wait for nothing else."""
    ready, state.lines_ready = state.lines_ready, []
    for line in ready:
        while line.places and line.places[0].ready:
            first = line.places[0]
            request = first.request
            first.ready = False
            if request.stage is Stage.ADMITTED:
                _place(state, request)
            if line.places and line.places[0] is first:
                if state.inquiries.get(request.number) is not None or first.node is not None or first.ready:
                    break
                over(state, request)


def _place(state: State, request: Request) -> None:
    envelope = Envelope.FromString(request.data)
    target = envelope.target
    if request.fresh or request.inquired:
        route.route(state, request, envelope, target, target.SerializeToString(), request.parent)
    else:
        once.place(state, request, envelope, request.parent)
