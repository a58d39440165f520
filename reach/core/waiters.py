"""Who waits for a request: its callers may leave one by one, by a cancel or because nobody reads their port any more.

The last one to leave ends the request. Decides whose wait ends, and never touches a request that somebody else made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import callbacks, credit, deadlines, settle
from reach.core.peers import Peer
from reach.core.requests import MessageKey, Port, Request, Stage, Waiter

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.state import State


def cancel(state: State, port: Port, key: MessageKey) -> None:
    """The caller behind `port` no longer wants the answer. Somebody else's request is not its to cancel."""
    books = [each for each in (state.by_key.get(key), state.relayed.get(key)) if each is not None]
    mine = [(each, waiter) for each in books for waiter in each.waiters if waiter.port is port]
    for request, waiter in mine or [(each, waiter) for each in books for waiter in callbacks.all_of(each)]:
        leave(state, request, waiter, failure(codes.CANCELLED, "the caller cancelled the request", retryable=False))


def leave(state: State, request: Request, waiter: Waiter, error: Error) -> None:
    """End one wait for a request; the last one's end is the request's."""
    if len(request.waiters) > 1:
        withdraw(state, request, waiter, error)
        deadlines.reschedule(state, request)
        return
    error.may_have_executed = request.item is not None and request.item.seq > 0
    if request.stage is Stage.DELIVERED:
        settle.give_up(state, request, error)
    else:
        settle.fail(state, request, error)


def port_gone(state: State, port: Port, requests: list[Request], *, said_goodbye: bool) -> None:
    """Nobody reads this port any more: every wait of its caller ends.

    A caller that did not say goodbye may come back and send its messages again. What an agent has got of them is not
    run a second time: the outcome is kept, and if the agent answers after all, that answer.
    """
    for request in requests:
        item = request.item
        sent = request.stage is Stage.DELIVERED and item is not None and item.seq > 0
        if said_goodbye or not sent or len(request.waiters) > 1:
            cancel(state, port, request.key)
            continue
        agent_id = request.agent.agent_id if request.agent is not None else ""
        settle.give_up(
            state,
            request,
            failure(
                codes.AGENT_LOST,
                f"its caller's link did not come back; {agent_id} was told to end it and may have executed",
                retryable=request.idempotent,
                agent_id=agent_id,
            ),
        )
        request.lost_at = state.now


class _Nobody:
    """Who waits for a request whose caller may come back by another node: nobody, for now."""

    __slots__ = ()

    streaming = True

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Nobody hears it."""
        return None


NOBODY = _Nobody()


def keep_for_who_comes_back(state: State, request: Request, waiter: Waiter, until: float) -> None:
    """The only one who waits is gone, and an agent has the request: up to a time its caller's copies may join it."""
    waiter.port = NOBODY
    waiter.deadline = min(waiter.deadline, until)
    if until > state.now:
        deadlines.reschedule(state, request)
    else:
        unclaimed(state, request)


def shut_out(state: State, port: Port, requests: list[Request], why: str) -> None:
    """What a caller may wait for no longer: it is told UNAUTHENTICATED, whatever comes of its requests.

    What its agents have got they are told to end, and it is kept as lost: nobody has it run a second time.
    """
    for request in requests:
        waiter = next((each for each in request.waiters if each.port is port), None)
        if waiter is None:
            continue
        sent = request.stage is Stage.DELIVERED and request.item is not None and request.item.seq > 0
        error = failure(codes.UNAUTHENTICATED, why, may_have_executed=sent or request.ran)
        if len(request.waiters) > 1:
            withdraw(state, request, waiter, error)
            continue
        port.deliver(settle.error_reply(error, request.message_id, request.trace_id).SerializeToString(), 1)
        forget(port, request)
        waiter.port = NOBODY
        if sent:
            unclaimed(state, request, "its caller's key ended")
        else:
            settle.fail(state, request, error)


def unclaimed(state: State, request: Request, why: str = "its caller's node was lost") -> None:
    """Its caller has not come back. What an agent has got is not run a second time: the outcome is kept."""
    agent_id = request.agent.agent_id if request.agent is not None else ""
    settle.give_up(
        state,
        request,
        failure(
            codes.AGENT_LOST,
            f"{why}; {agent_id} was told to end it and may have executed",
            retryable=request.idempotent,
            may_have_executed=True,
            agent_id=agent_id,
        ),
    )
    request.lost_at = state.now


def withdraw(state: State, request: Request, waiter: Waiter, error: Error) -> None:
    """End one of several waits for a request; the others go on."""
    reply = settle.error_reply(error, request.message_id, request.trace_id)
    waiter.port.deliver(reply.SerializeToString(), request.priority)
    request.waiters.remove(waiter)
    forget(waiter.port, request)
    credit.widen(state, request)


def peer_of(port: Port) -> Peer | None:
    """The link behind a port, if it is one."""
    return port if isinstance(port, Peer) else None


def remember(port: Port, request: Request) -> None:
    """Let a link know that it waits for this request."""
    if isinstance(port, Peer):
        port.requests[request.number] = request


def forget(port: Port, request: Request) -> None:
    """The link waits for it no longer."""
    if isinstance(port, Peer):
        port.requests.pop(request.number, None)
