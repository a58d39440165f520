"""What follows a failed attempt: another one, elsewhere or later, or the failure as the request's outcome.

The order is breaker, then budget, then retry (behaviour.md §4): an agent whose breaker is open is no candidate, a type
or an instance that gets too many retries gets no more, and only then the outcome table and the profile are asked
(`retry.decide`). An attempt that its agent may still be working on keeps its slot under its old number, until the agent
confirms the end or the grace passes; the request goes on under a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import breakers, deadlines, lanes, retry, route, settle, waiters, waiting
from reach.core.agents import BROKEN
from reach.core.peers import Peer
from reach.core.requests import Request, Stage
from reach.core.retry import Failed, GiveUp, Reason, Retry, Wait

if TYPE_CHECKING:
    from reach.core.pool import Pool
    from reach.core.state import State


_SUPPRESSED = "retry suppressed"
_WORTH_TELLING = (Reason.EXHAUSTED, Reason.DEADLINE)  # what else forbids it stands in the error itself


def follows(
    state: State, request: Request, how: Failed, error: Error, *, over: bool = False, tried: bool = True
) -> bool:
    """The current attempt failed. True: the request goes on; False: `error` is to be its outcome.

    `over` says that its agent is certainly not working on it any more, `tried` False that no hand-over was tried.
    """
    breakers.failed(state, request, how, tried=tried)
    agent = request.agent
    if agent is None or request.items or not request.retriable:
        return False
    decision = retry.decide(
        how,
        profile=profile_of(request),
        attempt=request.attempt,
        agent_id=agent.agent_id,
        excluded=request.excluded,
        idempotent=request.idempotent,
        pinned=request.lane is not None,
        now=state.now,
        deadline=request.deadline,
        rng=state.rng,
        error=error,
    )
    match decision:
        case Wait():
            return True
        case GiveUp(reason):
            if reason in _WORTH_TELLING:
                error.details["not_retried"] = reason.value
            # A TIMEOUT with no time for another attempt: this one may have what is left.
            return reason is Reason.DEADLINE and how is Failed.TIMEOUT
        case Retry():
            return _go_on(state, request, how, error, decision, over)


def profile_of(request: Request) -> int:
    """The message's call profile."""
    return int(Envelope.FromString(request.data).profile)


def unacknowledged(state: State, request: Request) -> None:
    """The attempt was not acknowledged in its time: another instance gets it, if running it twice does no harm."""
    if request.stage is not Stage.DELIVERED or request.lost_at:
        return
    breakers.failed(state, request, Failed.UNKNOWN)
    if not request.idempotent or request.lane is not None or not _has_other(state, request):
        return
    assert request.agent is not None
    follows(state, request, Failed.UNKNOWN, _not_acknowledged(request.agent.agent_id))


def never_sent(state: State, request: Request) -> None:
    """The link was lost before the attempt was given to it: another instance at once, if there is one."""
    if request.lane is not None or request.tied or not _has_other(state, request):
        return
    agent, attachment, item = request.agent, request.attachment, request.item
    if agent is None or attachment is None or item is None:
        return
    error = failure(
        codes.CONNECT_FAILED,
        f"{agent.agent_id} was lost before the request was handed to it (its link was cut); nothing was started",
        agent_id=agent.agent_id,
    )
    attachment.peer.link.withdraw(item)
    if not follows(state, request, Failed.CONNECT, error, over=True, tried=False):
        settle.fail(state, request, error)


def timed_out(state: State, request: Request) -> bool:
    """The time of the current attempt is over. False: the request ended with it."""
    request.attempt_until = 0.0
    agent = request.agent
    assert agent is not None
    error = deadlines.timed_out(request)
    error.message = f"{agent.agent_id} did not answer within the time of one attempt ({error.message})"
    if follows(state, request, Failed.TIMEOUT, error):
        return True
    settle.give_up(state, request, error)
    return False


def next_attempt(state: State, request: Request) -> None:
    """The time of the next attempt has come."""
    lane = request.lane
    if lane is not None:
        request.retry_at = 0.0
        state.lanes_ready.append(lane)
        return
    waiting.leave(state, request)
    request.stage = Stage.BETWEEN
    tenant, _, env, _ = request.key
    envelope = Envelope.FromString(request.data)
    target = envelope.target
    pool = state.directory.pool_for(target, tenant, env)
    policy = route.policy_of(state, pool, target)
    readmit = bool(request.same_at) and state.now >= request.same_at
    request.retry_at = request.same_at if request.same_at > state.now else 0.0
    full: set[str] = set()  # with retries
    while True:
        without = request.excluded | full
        agent = route.choose(state, pool, target, "", policy, without, readmit and not full, request)
        if agent is None or state.budget.has_room(agent.link):
            break
        full.add(agent.agent_id)
    if agent is not None:
        request.retry_at = 0.0
        request.routed = route.routed(policy, len(pool))
        route.hand_over(state, request, envelope, route.attachment_of(agent), request.parent)
    elif full:
        no_room(state, request, " and ".join(sorted(full)[:3]))
    elif not _may_wait(state, request, pool, readmit=readmit):
        _end(state, request, fail_fast=bool(pool.tiers[BROKEN].agents))


def _may_wait(state: State, request: Request, pool: Pool, *, readmit: bool) -> bool:
    """Nobody can take the retry now: wait for a slot, or until those that failed it may get it again."""
    without = frozenset() if readmit else request.excluded
    if waiting.has_full(pool, without):
        waiting.push(state, request, pool, request.data, without)
        return True
    if request.retry_at and not request.excluded.isdisjoint(pool.members):
        deadlines.reschedule(state, request)
        return True
    return False


def _go_on(state: State, request: Request, how: Failed, error: Error, decision: Retry, over: bool) -> bool:
    if not state.budget.allows(request.agent_type, state.now):
        error.details["not_retried"] = "the retry budget of the target's type is used up"
        if not request.notes or request.notes[-1][0] != _SUPPRESSED:  # an unacknowledged one asks again and again
            state.stats.retries_suppressed += 1
            request.note(_SUPPRESSED, state.now, "retry budget used up")
        return False
    state.budget.planned(request.agent_type, state.now)
    agent, lane = request.agent, request.lane
    assert agent is not None
    name = codes.ErrorCode.Name(error.code)
    request.note("failed", state.now, f"{name} at {agent.agent_id}")
    request.note("retried", state.now, _planned(how, decision, state.now))
    state.log("debug", "attempt failed", request.trace_id, agent=agent.agent_id, code=name, attempt=request.attempt)
    request.ran = request.ran or error.may_have_executed
    request.last_error = error
    error.attempts = request.attempt
    if over:
        settle.give_back(state, request)
    else:
        _abandon(state, request)
    request.excluded = decision.exclude
    request.same_at = decision.same_at or 0.0
    request.retry_at = decision.at
    request.attempt_until = 0.0
    if lane is not None:
        lane.running.discard(request)
        lanes.put_back(state, lane, request)
        if decision.at <= state.now:
            next_attempt(state, request)
        deadlines.reschedule(state, request)
        return True
    request.stage = Stage.BETWEEN
    if decision.at <= state.now:
        next_attempt(state, request)
        if request.stage is Stage.DELIVERED:
            deadlines.reschedule(state, request)
    else:
        deadlines.reschedule(state, request)
    return True


def _planned(how: Failed, decision: Retry, now: float) -> str:
    """When another attempt may be made, for a trace; and when where it failed, if that is later."""
    pause_ms = round((decision.at - now) * 1000)
    when = f"in {pause_ms} ms" if pause_ms else "at once"
    if decision.same_at is None:
        return f"{how.value}: next attempt {when}, at another agent only"
    same_ms = round((decision.same_at - now) * 1000)
    return f"{how.value}: next attempt {when}" + (f", at the same agent in {same_ms} ms" if same_ms > pause_ms else "")


def _abandon(state: State, request: Request) -> None:
    """The request goes on without its attempt, whose agent is told to end it and keeps its slot until it has."""
    attachment, item, agent = request.attachment, request.item, request.agent
    assert attachment is not None and item is not None and agent is not None
    peer = attachment.peer
    peer.link.withdraw(item)
    if item.seq == 0:
        settle.give_back(state, request)
        return
    left = Request(
        request.number,
        request.key,
        request.entry,
        request.received,
        request.deadline,
        request.waiters[0],
        request.trace_id,
        request.source,
        request.priority,
        request.fresh,
        request.idempotent,
    )
    left.waiters = []
    left.stage = Stage.SETTLED
    left.failed = left.node_made_id = True  # what it answers is nobody's any more
    left.attempt, left.agent, left.attachment, left.item = request.attempt, agent, attachment, item
    left.agent_type, left.delivered_at = request.agent_type, request.delivered_at
    left.holds_slot, left.reentrant, left.ancestors = request.holds_slot, request.reentrant, request.ancestors
    left.budgeted, left.judged = request.budgeted, request.judged
    state.requests[left.number] = left
    attachment.attempts[left.number] = left
    settle.tell_cancelled(state, left, attachment)
    cut_s = 0.0 if peer.connected else state.rules.resume_window_s
    left.timer = state.wheel.schedule(left, state.now + cut_s + state.rules.cancel_grace_s)
    renumber(state, request)
    request.attachment = request.item = request.budgeted = None
    request.holds_slot = request.reentrant = False
    settle.clear_attempt(request)


def renumber(state: State, request: Request) -> None:
    """Let a request go on under another number: what comes for the former one is not its any more."""
    former = request.number
    number = request.number = state.next_number
    state.next_number = number + 1
    request.entry = state.nonce + number.to_bytes(8, "big")
    state.requests[number] = request
    for waiter in request.waiters:
        if isinstance(waiter.port, Peer):
            waiter.port.requests.pop(former, None)
            waiters.remember(waiter.port, request)


def _has_other(state: State, request: Request) -> bool:
    """Whether another agent could take the request now."""
    agent = request.agent
    tenant, _, env, _ = request.key
    envelope = Envelope.FromString(request.data)
    pool = state.directory.pool_for(envelope.target, tenant, env)
    return any(
        other is not agent and other.agent_id not in request.excluded
        for other in pool.first_usable(2 + len(request.excluded))
    )


def not_taken(state: State, request: Request, error: Error) -> None:
    """The home of the chosen agent did not give it to the agent: no attempt was made, somebody else is chosen."""
    lane = request.lane
    settle.give_back(state, request)
    request.attempt -= 1
    request.last_error = error
    request.attempt_until = 0.0
    if lane is not None:
        lane.running.discard(request)
        lanes.put_back(state, lane, request)
        state.lanes_ready.append(lane)
        deadlines.reschedule(state, request)
        return
    request.stage = Stage.BETWEEN
    next_attempt(state, request)
    if not request.is_settled:
        deadlines.reschedule(state, request)


def no_room(state: State, request: Request, agent_ids: str) -> None:
    """Who could take the retry has as many under way as one instance may."""
    request.stage = Stage.BETWEEN
    suppressed(state, request, agent_ids)
    _end(state, request)


def suppressed(state: State, request: Request, agent_ids: str) -> Error:
    """What a request ends with whose retry has no room at these agents."""
    why = f"{agent_ids} may have no more retries under way"
    state.stats.retries_suppressed += 1
    request.note(_SUPPRESSED, state.now, why)
    error = request.last_error
    assert error is not None
    error.details["not_retried"] = f"the retry budget is used up: {why}"
    return error


def _end(state: State, request: Request, *, fail_fast: bool = False) -> None:
    """Nobody can take the next attempt: look again after the next back-off, or let the last failure be the outcome.

    `fail_fast`: only breakers stand between it and an agent; nobody waits for these.
    """
    settings = retry.patience(profile_of(request))
    tries = request.attempt + request.fruitless
    if tries < settings.attempts(pinned=False) and not fail_fast:
        when = state.now + settings.wait_s(tries, state.rng)
        if when <= request.deadline - retry.LEFT_MIN_S:
            request.fruitless += 1
            request.retry_at = when
            deadlines.reschedule(state, request)
            return
    error = request.last_error
    assert error is not None
    error.details.setdefault("not_retried", "no other agent could take it")
    settle.fail(state, request, error)


def _not_acknowledged(agent_id: str) -> Error:
    return failure(
        codes.AGENT_LOST,
        f"{agent_id} did not acknowledge the request in time; it may have executed",
        retryable=True,
        may_have_executed=True,
        agent_id=agent_id,
    )
