"""Requests whose agent, or the link to it, was lost: wait, fail as never started, or fail as perhaps executed.

What tells them apart is how far the attempt's item came (behaviour.md §4). Decides nothing about the agent itself: that
it is lost was judged by `links`, `health` or `departures`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core import again, deadlines, outcomes, settle
from reach.core.requests import Attachment, Request, Stage
from reach.core.retry import Failed

if TYPE_CHECKING:
    from reach.core.state import State


def link_cut(state: State, attachment: Attachment) -> None:
    """The link of an agent was cut: its requests wait out their settle windows, or go elsewhere if never sent."""
    for request in list(attachment.attempts.values()):
        if request.stage is Stage.SETTLED or request.attachment is not attachment:
            continue
        request.lost_at = state.now
        deadlines.reschedule(state, request)
        if request.item is not None and request.item.seq == 0:
            again.never_sent(state, request)


def link_back(state: State, attachment: Attachment, *, resumed: bool) -> None:
    """The link is back in time: what was in flight still is.

    A resumed link has said what it took: a request that it did not take, and that ended meanwhile, is not there.
    """
    for request in list(attachment.attempts.values()):
        item = request.item
        if request.stage is not Stage.SETTLED:
            if request.forgotten:
                continue  # its home was started anew: only its agent knows it
            request.lost_at = 0.0
            deadlines.reschedule(state, request)
        elif resumed and item is not None and not item.accepted:
            settle.release(state, request)


def lost(state: State, request: Request, why: str, *, said_goodbye: bool = False, gone: bool = False) -> None:
    """The attempt's agent vanished. What was never handed over, or what its goodbye does not cover, has not run.

    `gone` says that it does not come back; else its link may still resume.
    """
    agent, item = request.agent, request.item
    assert agent is not None
    never_given = item is None or item.seq == 0 or (said_goodbye and not item.accepted and not item.doubtful)
    if never_given and not request.tied:
        error = failure(
            codes.CONNECT_FAILED,
            f"{agent.agent_id} was lost before the request was handed to it ({why}); nothing was started",
            agent_id=agent.agent_id,
        )
        if item is not None and request.attachment is not None:
            request.attachment.peer.link.withdraw(item)
        if not again.follows(state, request, Failed.CONNECT, error, over=True, tried=not said_goodbye):
            settle.fail(state, request, error)
        return
    seen = "accepted" if item is not None and item.accepted else "not acknowledged"
    error = failure(
        codes.AGENT_LOST,
        f"{agent.agent_id} was lost ({why}); the request had been sent and {seen}, so it may have executed",
        retryable=request.idempotent,
        may_have_executed=True,
        agent_id=agent.agent_id,
    )
    if again.follows(state, request, Failed.LOST, error, over=gone):
        return
    if request.attachment is not None and item is not None:
        request.attachment.peer.link.withdraw(item)  # what the caller was told has ended must not begin later
    request.lost_at = request.lost_at or state.now  # should it answer after all, that answer is kept
    settle.answer_error(state, request, error)
    outcomes.shrink(request)
    grace_s = state.rules.resume_window_s + state.rules.cancel_grace_s
    request.timer = state.wheel.schedule(request, max(request.deadline, state.now) + grace_s)


def agent_gone(state: State, attachment: Attachment, why: str, *, said_goodbye: bool = False) -> None:
    """The agent is no longer attached: its requests end now, and everything they hold is given back."""
    for request in list(attachment.attempts.values()):
        if request.stage is not Stage.SETTLED:
            lost(state, request, why, said_goodbye=said_goodbye, gone=True)
        if request.attachment is attachment:
            settle.release(state, request)
