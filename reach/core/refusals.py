"""What an agent's home says of an attempt that it was given: it was refused, or its agent was lost.

A refusal is no failed attempt: this node's view was wrong, is put right, and somebody else is chosen (behaviour.md §4).
Not so where the agent may have run it already: that waits for the agent. Answers of agents are `replies`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import AttemptState
from agentreach.wire.errors import failure
from reach.core import again, deadlines, homes, loads, remote, settle
from reach.core.agents import DRAINING, UNREACHABLE
from reach.core.requests import Attachment, Request, Stage
from reach.core.retry import Failed

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State

REFUSALS_MAX = 3  # of homes, of one request, that are no failed attempt


def told(state: State, node: NodePeer, told: AttemptState) -> None:
    """The home of an agent tells what became of an attempt: it was refused, or its agent was lost."""
    entry = told.entry
    if len(entry) != 16 or entry[:8] != state.nonce:
        return
    request = state.requests.get(int.from_bytes(entry[8:], "big"))
    if request is None or request.attachment is None or request.attachment.peer is not node:
        return
    if request.attempt != told.attempt:
        return
    if request.stage is Stage.SETTLED:
        settle.release(state, request)
    elif told.state == AttemptState.REFUSED:
        _refused(state, request, request.attachment, told.why)
    elif told.state == AttemptState.LOST:
        _lost(state, request, told.why)


def _refused(state: State, request: Request, attachment: Attachment, why: Error) -> None:
    agent = attachment.agent
    request.note("refused", state.now, f"by node {agent.node_id}: {why.message[:200]}")
    state.stats.home_refusals += 1
    if why.code == codes.OVERLOADED:
        loads.count_full(state, agent)
    elif why.code in (codes.NO_ROUTE, codes.NO_AGENT_AVAILABLE):
        remote.set_status(state, attachment, UNREACHABLE)
    elif why.code == codes.SHUTTING_DOWN:
        remote.set_status(state, attachment, DRAINING)
    item = request.item
    if request.tied or (item is not None and item.doubtful):
        request.tied = True  # it may have run at this process: wait for where that is now, like after a cut
        request.lost_at = request.lost_at or state.now
        request.forgotten = True
        deadlines.reschedule(state, request)
        return
    if request.lane is not None:
        homes.refused(state, request, why)
        return
    request.refusals += 1
    code = why.code if why.code == codes.OVERLOADED else codes.AGENT_LOST if request.ran else codes.CONNECT_FAILED
    error = failure(
        code,
        f"{agent.agent_id} was not given the request by its home, node {agent.node_id}: {why.message}",
        agent_id=agent.agent_id,
        retry_after_ms=why.retry_after_ms,
        retryable=code != codes.AGENT_LOST or request.idempotent,
    )
    if request.refusals <= REFUSALS_MAX:
        again.not_taken(state, request, error)
    elif not again.follows(state, request, Failed.CONNECT, error, over=True):
        settle.fail(state, request, error)


def _lost(state: State, request: Request, why: Error) -> None:
    if "moved" in why.details:  # the view will say where to; until then it waits as after a cut
        request.lost_at = state.now
        deadlines.reschedule(state, request)
        return
    agent = request.agent
    assert agent is not None
    error = failure(
        codes.AGENT_LOST,
        why.message,
        retryable=request.idempotent,
        may_have_executed=True,
        agent_id=agent.agent_id,
    )
    if not again.follows(state, request, Failed.LOST, error, over=True):
        settle.fail(state, request, error)
