"""What an agent's RESPONSE means: an item, the final answer, an error, a late confirmation, or nothing to us.

A reply is believed only of the attempt it answers, on the link that the attempt was given to. What its caller is then
told, and what is given back, is `settle`'s; how many items may come is `credit`'s. Nothing here knows deadlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.checks import payload_size
from agentreach.wire.errors import failure
from reach.core import again, breakers, credit, deadlines, nodes, outcomes, quotas, relays, returning, settle, writing
from reach.core.peers import Peer
from reach.core.requests import Request, Stage
from reach.core.retry import failed_as

if TYPE_CHECKING:
    from reach.core.state import State

AVOID_S_MAX = 300.0  # an agent's retry_after is believed up to here


def respond(state: State, peer: Peer, envelope: Envelope) -> None:
    """A RESPONSE came from a process: match it to the attempt it answers, or drop and count it."""
    request = _answered(state, peer, envelope)
    if request is not None and envelope.session_event and request.attachment is not None and request.attachment.remote:
        request.session_event, request.epoch = int(envelope.session_event), envelope.epoch  # its home knows
    if request is None:
        state.stats.duplicates["late"] += 1
        returning.answered(state, peer, envelope)
        return
    if request.stage is Stage.SETTLED:
        _late(state, request, envelope)
    elif envelope.more and not envelope.HasField("error"):
        _item(state, request, envelope)
    else:
        _final(state, request, envelope)


def _answered(state: State, peer: Peer, envelope: Envelope) -> Request | None:
    entry = envelope.entry
    if len(entry) == 16 and entry[:8] == state.nonce:
        request = state.requests.get(int.from_bytes(entry[8:], "big"))
        if request is None or request.attachment is None or request.attachment.peer is not peer:
            return None
        return request if envelope.attempt == request.attempt else None
    if entry:
        return None
    # A hand-written agent that does not echo `entry`: its link and the message_id say enough if nobody shares them.
    found = [
        request
        for attachment in peer.attachments.values()
        for request in attachment.attempts.values()
        if request.message_id == envelope.correlation_id
    ]
    return found[0] if len(found) == 1 else None


def _item(state: State, request: Request, envelope: Envelope) -> None:
    numbered = request.attachment is not None and request.attachment.peer.numbers_items
    if numbered and envelope.sequence > request.items:
        return  # its agent is about to begin from the start: nothing may be given before what comes first
    if request.items and request.attachment is not None and numbered:
        request.repeats = 0
        if envelope.sequence < request.items:  # it was sent again, or its agent has moved and begins from the start
            if not envelope.sequence:
                credit.grant_again(state, request.attachment)
            return
    elif request.repeats:
        if request.repeats == request.items and request.attachment is not None:
            credit.grant_again(state, request.attachment)  # only now its home knows the request
        request.repeats -= 1
        return
    number = request.items
    now = state.now
    if number >= request.credit:
        agent_id = request.agent.agent_id if request.agent else ""
        settle.give_up(
            state,
            request,
            failure(
                codes.AGENT_ERROR,
                f"{agent_id} sent more items than the caller takes (stream_credit ignored)",
                may_have_executed=True,
                agent_id=agent_id,
            ),
        )
        return
    data = _as_given(state, request, envelope)
    if data is None:
        settle.give_up(state, request, _reply_too_large(state, request, envelope))
        return
    if number == 0 and (too_many := quotas.stream_fault(state, request)) is not None:
        settle.give_up(state, request, too_many)
        return
    request.items = number + 1
    request.items_at = now
    if number == 0:
        request.note("first item", now)
        deadlines.reschedule(state, request)
    for waiter in request.waiters:
        waiter.port.deliver(data, request.priority, final=False)
        if not waiter.port.streaming and number % 32 == 0:  # it collects all items, and takes them as they come
            credit.take_more(state, request, waiter, number + 2 * credit.CREDIT_INITIAL)


def _final(state: State, request: Request, envelope: Envelope) -> None:
    if envelope.HasField("timing"):  # a hand-written agent may not say
        timing = envelope.timing
        queue_us, handler_us = timing.queue_us, timing.handler_us
        if queue_us or handler_us:
            request.queue_us, request.handler_us = queue_us, handler_us
        handled_s = request.handled_s = handler_us / 1e6
        transport_s = state.now - request.delivered_at - queue_us / 1e6 - handled_s
        request.transport_s = transport_s if transport_s > 0 else 0.0
    if envelope.HasField("error"):
        _refused(state, request, envelope)
        return
    if request.agent is not None and not request.relayed:
        breakers.answered(state, request.agent, request.delivered_at)
        request.judged = True
    data = _as_given(state, request, envelope)
    if data is None:
        settle.fail(state, request, _reply_too_large(state, request, envelope))
        return
    settle.answer(state, request, data, "OK", None)
    settle.release(state, request)


def _refused(state: State, request: Request, envelope: Envelope) -> None:
    """The agent answered with an error of its own, or one that a call it made ended with."""
    said, agent = envelope.error, request.agent
    assert agent is not None
    if request.relayed:
        node = request.attachment.peer if request.attachment is not None else None
        if said.code == codes.SHUTTING_DOWN and not said.may_have_executed and isinstance(node, nodes.NodePeer):
            relays.declined(state, request, node)
        else:
            settle.fail(state, request, said, by_agent=True)
        return
    known = said.code and said.code in codes.ErrorCode.values()
    error = failure(  # rebuilt, so that nothing of it is longer than an error may be
        said.code if known else codes.AGENT_ERROR,
        said.message,
        retryable=said.retryable,
        may_have_executed=said.may_have_executed,
        retry_after_ms=said.retry_after_ms,
        agent_id=said.agent_id or agent.agent_id,
        attempts=request.attempt,
        details=said.details,
    )
    if error.code == codes.OVERLOADED and error.retry_after_ms:
        state.directory.avoid(agent, state.now + min(AVOID_S_MAX, error.retry_after_ms / 1000))
    if not again.follows(state, request, failed_as(error), error, over=True):
        settle.fail(state, request, error, by_agent=True)


def _late(state: State, request: Request, envelope: Envelope) -> None:
    """The agent confirms the end of a request that was answered without it."""
    if envelope.more:
        return
    state.stats.duplicates["fenced" if request.fenced else "late"] += 1
    if request.lost_at and not envelope.HasField("error") and not request.node_made_id:
        data = _as_given(state, request, envelope)
        if data is not None:
            outcomes.confirmed(state, request)  # the AGENT_LOST that it was answered with gives way to the truth
            request.failed = False
            outcomes.keep(state, request, data)
    settle.release(state, request)


def _as_given(state: State, request: Request, envelope: Envelope) -> bytes | None:
    """The RESPONSE as its callers get it; None if its payload is over the limit."""
    agent = request.agent
    assert agent is not None
    data = writing.answered(request, envelope, envelope.source if request.relayed else agent.agent_id)
    bound = state.rules.payload_bytes_max
    size = len(data)
    if size <= bound:
        return data
    return data if size <= bound + writing.CONTROL_BYTES_MAX and payload_size(envelope.payload) <= bound else None


def _reply_too_large(state: State, request: Request, envelope: Envelope) -> Error:
    size, bound = envelope.ByteSize(), state.rules.payload_bytes_max
    agent_id = request.agent.agent_id if request.agent else ""
    return failure(
        codes.PAYLOAD_TOO_LARGE,
        f"{agent_id} answered with {size} bytes and the limit is {bound}; answer with a BlobRef, or yield it in items",
        may_have_executed=True,
        agent_id=agent_id,
    )
