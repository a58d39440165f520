"""Back-pressure of streamed replies: a producer may send as many items as the slowest of its consumers takes.

Counts items only; what they say is `replies`' and how long a pause may last is `deadlines`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.frame_pb2 import Signal, StreamCredit
from agentreach.wire import limits
from reach.core.requests import Attachment, Port, Request, Stage, Waiter

if TYPE_CHECKING:
    from reach.core.state import State

CREDIT_INITIAL = limits.STREAM_CREDIT_INITIAL
UNBOUNDED = 1 << 32  # of a reply that an agent has already: its items come as they were kept


def grant(state: State, port: Port, entry: bytes, up_to: int) -> None:
    """A consumer takes items up to this number; the producer may send what all its consumers take."""
    if len(entry) != 16 or entry[:8] != state.nonce:
        return
    request = state.requests.get(int.from_bytes(entry[8:], "big"))
    if request is None or request.stage is not Stage.DELIVERED:
        return
    for waiter in request.waiters:
        if waiter.port is port and up_to > waiter.credit:
            take_more(state, request, waiter, up_to)
            return


def take_more(state: State, request: Request, waiter: Waiter, up_to: int) -> None:
    """One of those who wait takes items up to this number."""
    waiter.credit = up_to
    widen(state, request)


def widen(state: State, request: Request) -> None:
    """Tell the producer how many items all who wait take, if that is more than before."""
    credit = min([each.credit for each in request.waiters])
    attachment = request.attachment
    if attachment is None:
        return
    if request.credit == UNBOUNDED:
        _tell_credit(state, request, attachment, credit)  # the producer may still be at work and wait for it
        return
    if credit <= request.credit:
        return
    if request.credit <= request.items:
        request.items_at = state.now  # the pause was the consumer's; the producer's idle time starts now
    request.credit = credit
    _tell_credit(state, request, attachment, credit)


def _tell_credit(state: State, request: Request, attachment: Attachment, up_to: int) -> None:
    signal = Signal(stream_credit=StreamCredit(correlation_id=request.message_id, entry=request.entry, up_to=up_to))
    attachment.peer.link.signal(signal)
    state.woken.add(attachment.peer)


def grant_again(state: State, attachment: Attachment) -> None:
    """A link that begins anew has forgotten its signals: repeat how many items each producer may send."""
    for request in attachment.attempts.values():
        if request.credit > CREDIT_INITIAL:
            _tell_credit(
                state, request, attachment, min([each.credit for each in request.waiters], default=request.credit)
            )
