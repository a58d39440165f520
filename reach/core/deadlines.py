"""A request's one timer: deadlines, a stream's pauses, the wait for a lost link, the grace after a cancel.

Decides when a request must be looked at again, and what has become of it by then. That a time has passed is all it
knows: how the end is told and what it gives back is `settle`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import again, breakers, health, losses, settle, waiters
from reach.core.requests import Request, Stage
from reach.core.retry import Failed

if TYPE_CHECKING:
    from reach.core.state import State

SETTLE_SHARE = 0.1  # of the time left: how long a request waits for a lost link to come back


def reschedule(state: State, request: Request) -> None:
    """Set the request's one timer to the next moment at which something must be decided about it."""
    when = min([waiter.deadline for waiter in request.waiters], default=request.deadline)
    if request.items:
        when = min(when, request.items_at + state.rules.idle_timeout_s)
    if request.lost_at:
        when = min(when, request.lost_at + settle_window_s(state, request))
    if request.attempt_until and not request.items:
        when = min(when, request.attempt_until)
    if request.retry_at:
        when = min(when, request.retry_at)
    if request.timer is not None:
        state.wheel.cancel(request.timer, request)
    request.timer = state.wheel.schedule(request, when)


def settle_window_s(state: State, request: Request) -> float:
    """How long a request waits for its agent's lost link to come back."""
    if request.attachment is not None and request.attachment.remote:
        return state.rules.resume_window_s  # the agent may live, and come back by another node
    share = SETTLE_SHARE * (request.deadline - request.lost_at)
    return min(state.rules.resume_window_s, max(state.rules.settle_min_s, share))


def on_timer(state: State, request: Request) -> None:
    """The request's timer has come."""
    if request.number not in state.requests:
        return  # it ended in this very tick
    request.timer = None
    now = state.now
    if request.is_settled:
        _force_release(state, request)
        return
    if request.lost_at and now >= request.lost_at + settle_window_s(state, request):
        losses.lost(state, request, "its link was cut and did not come back in time")
        return
    if request.items and now >= request.items_at + state.rules.idle_timeout_s:
        _idle(state, request)
        return
    if request.attempt_until and not request.items and now >= request.attempt_until:
        if not again.timed_out(state, request):
            return
        if request.is_settled:
            return
    late = [waiter for waiter in request.waiters if waiter.deadline <= now]
    if len(late) == len(request.waiters):
        if all(waiter.port is waiters.NOBODY for waiter in late):
            waiters.unclaimed(state, request)
            return
        item, attachment = request.item, request.attachment
        if item is not None and attachment is not None and item.seq and not item.accepted and attachment.peer.connected:
            health.unacknowledged(state, attachment, item)
        if item is not None and item.seq and (request.started or not request.waits_at_home):
            breakers.failed(state, request, Failed.TIMEOUT)
        settle.give_up(state, request, timed_out(request))
        return
    for waiter in late:
        waiters.withdraw(state, request, waiter, timed_out(request))
    if request.retry_at and request.retry_at <= now:
        again.next_attempt(state, request)
        if request.is_settled:
            return
    reschedule(state, request)


def timed_out(request: Request) -> Error:
    """The deadline passed: where the request was by then, and whether it may have run."""
    item, agent = request.item, request.agent
    if request.stage is Stage.BETWEEN or (request.stage is Stage.QUEUED and request.last_error is not None):
        name = codes.ErrorCode.Name(request.last_error.code) if request.last_error is not None else "failure"
        where, ran = f"was waiting for another attempt after {name} in attempt {request.attempt}", request.ran
    elif request.stage is Stage.QUEUED:
        place = "for a free slot" if request.lane is None else "in its session's lane"
        where, ran = f"was queued {place}; it was never started", False
    elif item is None or agent is None:
        where, ran = "was being routed; it was never started", False
    elif item.seq == 0 and not request.tied:
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
            settle.give_up(state, request, error)
            return
        for waiter in stalled:
            waiters.withdraw(state, request, waiter, error)
        request.items_at = state.now
        reschedule(state, request)
        return
    breakers.failed(state, request, Failed.TIMEOUT)
    settle.give_up(
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
    settle.release(state, request)
    if attachment is not None:
        health.doubt(state, attachment)
