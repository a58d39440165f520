"""Requests for which only a free slot is missing: they wait, and a freed slot finds its waiter (behaviour.md §6).

Who goes first, what fits, and who gives way is `waitqueue`'s. Decided here: that a request waits, what it is told if it
may not, which freed agents are offered to those who wait, and when waiting has become senseless because nobody who
matches is left. A session's messages wait in its lane instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import again, breakers, deadlines, route, settle, wants
from reach.core.agents import BROKEN, FULL, LEAVING, USABLE_TIERS, Agent
from reach.core.requests import Request, Stage

if TYPE_CHECKING:
    from reach.core.pool import Pool
    from reach.core.state import State

RETRY_AFTER_MS_MIN = 100
_NOT_AWAITED = frozenset({LEAVING, BROKEN})  # capacity is not why these take nothing


def has_full(pool: Pool, without: frozenset[str]) -> bool:
    """Whether somebody who may get the request lacks nothing but a slot."""
    full = pool.tiers[FULL].agents
    return bool(full) if not without else any(agent.agent_id not in without for agent in full)


def push(state: State, request: Request, pool: Pool, data: bytes, without: frozenset[str] = frozenset()) -> None:
    """Let a request wait for a slot of its selector; it is OVERLOADED if there is no room for it.

    `data` is its envelope, serialised; agents in `without` are not waited for.
    """
    now = state.now
    request.data = data
    pushed = state.queue.push(
        request,
        pool.selector,
        level=request.priority,
        principal=request.key[:2],
        size=len(data),
        time_s=request.deadline - request.received,
        now=now,
        without=without,
    )
    if not pushed.waits:
        settle.fail(state, request, request.last_error or _no_room(state, pool, without))
        return
    request.in_queue = True
    request.stage = Stage.QUEUED
    request.note("queued", now, f"no free slot, {state.queue.size(pool.selector, without)} waiting")
    state.directory.wanted = True
    if state.remote_agents:
        wants.wish(state, pool)
    for other in pushed.displaced:
        other.in_queue = False
        settle.fail(state, other, other.last_error or _displaced(state))
    if request.last_error is not None:
        deadlines.reschedule(state, request)


def leave(state: State, request: Request) -> None:
    """The request waits no longer, whatever the reason."""
    if request.in_queue:
        request.in_queue = False
        state.queue.remove(request)
        watch(state)


def watch(state: State) -> None:
    """Have freed agents noted while anybody waits for one, here or at another node."""
    state.directory.wanted = bool(state.queue) or bool(state.wants.wishes)


def serve(state: State) -> None:
    """Offer every agent that can take work again to those who wait, until it is full or nobody wants it.

    One that ramps gets its share first, and then what the others left: nobody would offer it again in time.
    """
    directory = state.directory
    freed = directory.freed
    ramping: list[Agent] = []
    while freed or ramping:
        is_last = not freed
        agent = ramping.pop() if is_last else freed.pop()
        if directory.get(agent.tenant, agent.env, agent.agent_id) is not agent:
            continue
        while agent.tier < USABLE_TIERS:
            if agent.suspect and not is_last and not breakers.admits(state, agent):
                ramping.append(agent)
                break
            wish = wants.outranks(state, agent) if state.wants.wishes else None
            if wish is not None:
                wants.grant(state, wish, agent)
                continue
            request = state.queue.take(agent, state.now)
            if request is None:
                break
            start(state, request, agent)
    watch(state)


def start(state: State, request: Request, agent: Agent) -> None:
    """A slot of the agent is free for one that waited, and was taken out of the queue."""
    request.in_queue = False
    request.retry_at = 0.0
    if request.deadline <= state.now:  # its timer is a tick late
        settle.fail(state, request, deadlines.timed_out(request))
        return
    if request.attempt and not state.budget.has_room(agent.link):
        again.no_room(state, request, agent.agent_id)
        return
    request.routed = f"waited for a slot, {agent.agent_id} was free first"
    route.hand_over(state, request, Envelope.FromString(request.data), route.attachment_of(agent), request.parent)


def recheck(state: State) -> None:
    """Somebody left, is leaving or broke: those who wait for nobody any more are told now, not at their deadline."""
    directory = state.directory
    directory.shrunk = False
    for selector, without in state.queue.keys_now():
        pool = directory.pool(selector)
        if any(agent.tier not in _NOT_AWAITED and agent.agent_id not in without for agent in pool):
            continue
        for request in list(state.queue.waiting(selector, without)):
            leave(state, request)
            if request.retry_at > state.now and not without.isdisjoint(pool.members):
                request.stage = Stage.BETWEEN  # from then on those that failed it may have it again
            else:
                settle.fail(state, request, request.last_error or route.nobody(state, pool, request))


def _no_room(state: State, pool: Pool, without: frozenset[str]) -> Error:
    after_s = state.queue.retry_after_s(pool.selector, state.now, without)
    full = pool.tiers[FULL].agents
    behind = sum(agent.saturated for agent in full)
    why = f"; {behind} of them take nothing more or have not acknowledged a delivery" if behind else ""
    waiting = state.queue.size(pool.selector, without)
    return failure(
        codes.OVERLOADED,
        f"all {len(full)} usable agents matching {pool.selector} are full ({pool.why_unusable()}{why}) and the queue "
        f"takes no more ({waiting} wait for them, {len(state.queue)} on node {state.rules.node_id}); try later",
        retry_after_ms=max(RETRY_AFTER_MS_MIN, int(after_s * 1000)),
        details={name: str(count) for name, count in pool.counts().items()},
    )


def _displaced(state: State) -> Error:
    return failure(
        codes.OVERLOADED,
        "the queue is full, and the place went to somebody who had less than an equal part of it; it was never started",
        retry_after_ms=RETRY_AFTER_MS_MIN * 10,
    )
