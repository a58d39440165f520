"""What comes back after a node has lost its memory: agents with messages that they still hold, callers that ask again.

An agent that attaches says which messages it runs or has answered (`Attach.holding`). Each of those it runs takes a
slot until it says that it has ended, so its `max_concurrency` holds; a copy of any of them goes to it and to nobody
else: its own table joins or replays.

For a while after the start, or the loss of another node (`resume_window_s`), a request that was sent again (`resent`)
waits for who has it, or for any agent that can take it, instead of NO_ROUTE; a new one is told NO_ROUTE at once. One
that may have been running when the node went, and that nobody claims, is not run again unless it is `idempotent`:
AGENT_LOST. Everything that waits here is bounded, and has its own deadline like any other request. Why:
docs/decisions/0012.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from agentreach.wire.ids import uuid7_unix_ms
from agentreach.wire.names import normalise_env
from reach.core import credit, lanes, order, route, settle
from reach.core.agents import FULL
from reach.core.brought import Held, Parked, Returning
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.peers import Peer
    from reach.core.state import State

PARKED_MAX = 10_000  # resent requests that wait for what comes back; beyond, they are answered as any other
CLOCKS_DIFFER_MS = 5_000  # an id made so shortly after the start, by its maker's clock, may be older than the start
STIR_S = 0.05  # what waits is looked at again so soon after an agent came: many come at once


# ---- what agents bring along ----


def holds(state: State, attachment: Attachment, holdings: Iterable[pb.Holding]) -> None:
    """An agent that attached says what it still has: count its slots, and know where to send copies."""
    agent, table = attachment.agent, state.returning.held
    here = {request.key for request in attachment.attempts.values()}
    for holding in holdings:
        key = (agent.tenant, holding.key.principal, agent.env, holding.key.message_id)
        if key in here or holding.key.tenant != agent.tenant or normalise_env(holding.key.env) != agent.env:
            continue  # an attempt of this node's own has its slot already
        former = table.get(key, state.now)
        if former is not None:
            if former.attachment is attachment:
                continue
            _ended(state, former)
        held = Held(key, attachment, holding.state == pb.Holding.RUNNING and key[3] not in attachment.held)
        if held.running:
            attachment.held[key[3]] = held
            state.directory.reserve(agent)
        table.put(key, held, 1, state.now)
        state.replay.reopen(key, state.now)
    if attachment.held:
        state.directory.changed(agent)  # it may have more than it may
        state.log("info", "agent brought messages along", agent=agent.agent_id, running=len(attachment.held))
    _give_back(state)
    stir(state)


def answered(state: State, peer: Peer, envelope: Envelope) -> None:
    """A RESPONSE that no request waits for: perhaps the end of something that its agent brought along."""
    attachment = peer.attachment(envelope.source) if envelope.source else None
    if attachment is not None and not envelope.more:
        held = attachment.held.get(envelope.correlation_id)
        if held is not None:
            _ended(state, held)


def nothing_runs(state: State, attachment: Attachment) -> None:
    """A heartbeat says that nothing runs in the agent: whatever it brought along has ended."""
    for held in list(attachment.held.values()):
        _ended(state, held)


def _ended(state: State, held: Held) -> None:
    """What an agent brought along is over: its slot is free."""
    attachment = held.attachment
    if held.running:
        held.running = False
        del attachment.held[held.key[3]]
        state.directory.release(attachment.agent)
        if attachment.lanes_waiting:
            lanes.next_in_turn(state, attachment)


def _give_back(state: State) -> None:
    ended = state.returning.ended
    while ended:
        _ended(state, ended.pop())


def expire(state: State) -> None:
    """Forget what was brought along too long ago."""
    state.returning.held.expire(state.now)
    _give_back(state)


# ---- what is sent again ----


def opened(state: State) -> None:
    """The node can be reached from now on: the time for coming back begins."""
    state.returning.until = state.now + state.rules.resume_window_s


def node_lost(state: State) -> None:
    """Another node is lost: its agents and callers are on their way to the others, in any order."""
    state.returning.until = max(state.returning.until, state.now + state.rules.resume_window_s)


def is_held(state: State, request: Request) -> bool:
    """Whether an agent of this node brought the message along, and is still here."""
    held = holder(state, request)
    return held is not None and _is_here(held)


def holder(state: State, request: Request) -> Held | None:
    """Who brought the message along to this node; it may have left."""
    return state.returning.held.get(request.key, state.now) if len(state.returning.held) else None


def gone_with(state: State, request: Request) -> list[tuple[str, bytes]]:
    """The process that brought the message along, if it has left this node; it may be at another one."""
    held = holder(state, request)
    if held is None or _is_here(held):
        return []
    return [(held.attachment.agent.agent_id, held.attachment.agent.incarnation)]


def _is_here(held: Held) -> bool:
    agent = held.attachment.agent
    return held.attachment.peer.attachments.get((agent.env, agent.agent_id)) is held.attachment


def took(state: State, request: Request, envelope: Envelope, target: Target, parent: Lineage | None) -> bool:
    """True if this request went to who has it, waits here, or may not be run again."""
    returning = state.returning
    held = holder(state, request)
    if held is not None:
        if _to_holder(state, request, envelope, target, held, parent):
            return True
        if not request.idempotent and not _is_here(held):
            settle.fail(state, request, _left(request, held))
            return True
    if not envelope.resent:
        return False
    unclaimed = not request.fresh and not request.idempotent and _from_before(state, request)
    if state.now >= returning.until:
        if unclaimed:
            settle.fail(state, request, _unknown(request))
        return unclaimed
    request.ran = request.ran or not request.fresh
    if not unclaimed and _somebody(state, request, target):
        return False
    if len(returning.parked) >= PARKED_MAX:
        return False
    request.data = envelope.SerializeToString()
    request.parent = parent
    request.note("waiting", state.now, "sent again: until its agent is back")
    returning.parked[request.number] = Parked(request, target)
    if returning.timer is None:
        returning.timer = state.checks.schedule(returning, returning.until)
    return True


def _to_holder(
    state: State, request: Request, envelope: Envelope, target: Target, held: Held, parent: Lineage | None
) -> bool:
    attachment = held.attachment
    agent = attachment.agent
    if not _is_here(held):
        return False
    if agent.agent_id not in state.directory.pool_for(target, request.key[0], request.key[2]).members:
        return False  # what it claims was not meant for it
    lane = state.lanes.get((agent.tenant, agent.env, agent.agent_type, envelope.session_id))
    request.epoch = lane.epoch if lane is not None and lane.owner is attachment else 0
    request.reentrant = True  # the slot is counted already, and a place in the agent's own lane too
    request.retriable = request.idempotent and not envelope.session_id  # nobody but its owner
    request.credit = credit.UNBOUNDED  # items of a streamed reply come as they were kept
    request.tied = True  # an end of the agent before it takes the copy is no proof that nothing has run
    request.routed = "the agent that has it"
    state.stats.duplicates["joined" if held.running else "replayed"] += 1
    if request.line is not None:
        order.over(state, request)
    route.hand_over(state, request, envelope, attachment, parent)
    return True


def _somebody(state: State, request: Request, target: Target, data: bytes | None = None) -> bool:
    """Whether an agent could take it now, or as soon as it has a slot."""
    pool = state.directory.pool_for(target, request.key[0], request.key[2], data)
    return pool.has_usable or bool(pool.tiers[FULL].agents)


def _from_before(state: State, request: Request) -> bool:
    """True if another life of this node may have had the message. Only ids that carry a time say so for long."""
    made_unix_ms = uuid7_unix_ms(request.message_id)
    if made_unix_ms is None:
        return request.ran or state.now < state.returning.until
    return made_unix_ms <= state.returning.started_unix_ms + CLOCKS_DIFFER_MS


def _unknown(request: Request) -> Error:
    return failure(
        codes.AGENT_LOST,
        f"message {request.message_id} was sent before this node started, and no agent that came back has it; it may "
        "have executed, so it is not run again (idempotent requests are)",
        retryable=False,
        may_have_executed=True,
    )


def _left(request: Request, held: Held) -> Error:
    agent_id = held.attachment.agent.agent_id
    return failure(
        codes.AGENT_LOST,
        f"message {request.message_id} was sent before, and {agent_id}, which had it, is gone; it may have executed, "
        "so it is not run again (idempotent requests are)",
        retryable=False,
        may_have_executed=True,
        agent_id=agent_id,
    )


def stir(state: State) -> None:
    """An agent came, or is ready: see soon whether something waits for it."""
    returning = state.returning
    if returning.parked and returning.timer is not None:
        state.checks.cancel(returning.timer, returning)
        returning.timer = state.checks.schedule(returning, min(state.now + STIR_S, returning.until))


def on_timer(state: State, returning: Returning) -> None:
    """Let go on what can, and everything once the time for coming back is over."""
    returning.timer = None
    parked, returning.parked = returning.parked, {}
    over = state.now >= returning.until
    for number, each in parked.items():
        request = each.request
        if state.requests.get(number) is not request or request.stage is not Stage.ADMITTED:
            continue  # it ended meanwhile: its deadline, its caller
        if (
            over
            or returning.held.get(request.key, state.now)
            or _somebody(state, request, each.target, each.target_data)
        ):
            route.route(
                state, request, Envelope.FromString(request.data), each.target, each.target_data, request.parent
            )
        else:
            returning.parked[number] = each
    if returning.parked and returning.timer is None:
        returning.timer = state.checks.schedule(returning, returning.until)
