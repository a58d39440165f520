"""Requests with a `reply_topic`: their caller is told at once that they were taken in, and the outcome goes to a topic.

The request is like any other: one deadline, one outcome, a trace, a cancel. Only the one who waits for it is no link
and no call, but a `Callback`, which nobody can take away by leaving. Until the request is admitted it passes refusals
on to the caller; what is refused or over within the step in which it came has no callback. From its acceptance on
there is exactly one CALLBACK, with the result or the error, by the deadline at the latest.

Once means once: a copy of the message is answered with the acceptance again, and what was published on a topic is not
published there a second time. Decided here is what is published and how often; how an event reaches its subscribers is
`events`'.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.payload import Form, encode, form_of
from reach.core import actors, admit, events, gathered, waiters
from reach.core.callback_book import ENTRY_BYTES, GATHERED_BYTES_MAX
from reach.core.lineage import Forged
from reach.core.requests import MessageKey, Port, Request, Stage, Waiter

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from agentreach.wire.outbox import Item
    from reach.core.ports import Identity
    from reach.core.state import State

_INSTEAD = "return one value, or have it called with InvokeStream or stream() instead of a reply_topic"


class Callback:
    """The `Port` of a request whose outcome is published on `topic` (empty: nowhere, nobody wants to hear it)."""

    __slots__ = (
        "_caller",
        "_form",
        "_items",
        "_items_bytes",
        "_lineage",
        "_refused",
        "_request",
        "_state",
        "_trace_id",
        "key",
        "topic",
    )
    streaming = False

    def __init__(self, state: State, caller: Port, who: Identity, envelope: Envelope, topic: str) -> None:
        self._state = state
        self._caller: Port | None = caller
        self._form: Form = form_of(envelope.payload)
        self._items: list[bytes] = []
        self._items_bytes = 0
        self._lineage = envelope.lineage
        self._refused = False
        self._request: Request | None = None
        self._trace_id = ""
        self.key: MessageKey = (who.tenant, who.principal, "", "")
        self.topic = topic

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Take a reply: gather an item, publish the outcome; before the acceptance, tell the caller."""
        if self._caller is not None:
            self._refused = self._refused or final
            return self._caller.deliver(reply, priority, final=final)
        if final:
            self._finish(reply)
        elif self._items_bytes >= 0:
            self._gather(reply)
        return None

    def accept(self, envelope: Envelope, key: MessageKey, request: Request | None = None) -> bool:
        """The message is in the books: tell its caller so, and let the caller go.

        `envelope` is the REQUEST. False if the caller was told already that it is refused, or how it ended.
        """
        caller = self._caller
        if self._refused or caller is None:
            return False
        self._caller = None
        self._request, self.key, self._trace_id = request, key, envelope.trace_id
        self._state.stats.callbacks["accepted"] += bool(self.topic)
        said = {"message_id": key[3], "trace_id": envelope.trace_id, "reply_topic": self.topic}
        acceptance = Envelope(
            type=pb.RESPONSE,
            correlation_id=key[3],
            trace_id=envelope.trace_id,
            reply_topic=self.topic,
            payload=encode(said, self._form),
        )
        caller.deliver(acceptance.SerializeToString(), admit.PRIORITY_LANE[envelope.priority])
        return True

    def published_error(self, key: MessageKey) -> bool | None:
        """Whether an error (True) or a result (False) of this message was published on this topic; None: neither."""
        return self._state.callbacks.published.get((key, self.topic), self._state.now)

    # ---- the reply ----

    def _gather(self, reply: bytes) -> None:
        """Keep an item until the reply is complete."""
        state, book, size = self._state, self._state.callbacks, len(reply)
        too_many = self._items_bytes + size > state.rules.payload_bytes_max
        if too_many or book.gathered_bytes + size > GATHERED_BYTES_MAX:
            self._let_go()
            self._items_bytes = -1
            book.over.append(self)
            return
        self._items.append(reply)
        self._items_bytes += size
        book.gathered_bytes += size

    def _let_go(self) -> None:
        self._state.callbacks.gathered_bytes -= max(0, self._items_bytes)
        self._items, self._items_bytes = [], 0

    def end_over(self) -> None:
        """The items are too many: end the request, unless it has ended meanwhile."""
        request, state = self._request, self._state
        waiter = _waiter(request, self) if request is not None else None
        if request is None or waiter is None or request.stage is Stage.SETTLED:
            return
        waiters.leave(state, request, waiter, self._too_large(request))

    def _finish(self, reply: bytes) -> None:
        """The one outcome."""
        envelope = Envelope.FromString(reply)
        items, request = self._items, self._request
        too_many = self._items_bytes < 0
        self._let_go()
        if not envelope.HasField("error") and request is not None and request.items:
            if too_many:
                fault: Error | None = self._too_large(request)
            else:
                parts = [Envelope.FromString(item) for item in items]
                if envelope.HasField("payload"):
                    parts.append(envelope)
                fault = gathered.as_list(parts, envelope, self._form, _INSTEAD)
            if fault is not None:
                envelope.ClearField("payload")
                envelope.error.CopyFrom(fault)
        self.publish(envelope)

    def _too_large(self, request: Request) -> Error:
        bound = min(self._state.rules.payload_bytes_max, GATHERED_BYTES_MAX)
        return gathered.too_large(request.items, bound, _INSTEAD)

    def publish(self, outcome: Envelope) -> None:
        """Make the CALLBACK of a final RESPONSE and send it to the topic's subscribers."""
        state, request, topic = self._state, self._request, self.topic
        self._request = None
        if not topic:
            return
        tenant, principal, env, message_id = self.key
        failed = outcome.HasField("error")
        parent = self._parent(request)  # before the envelope is made: it reads the request's
        outcome.type = pb.CALLBACK
        outcome.message_id = admit.new_id(state)
        outcome.correlation_id = message_id
        outcome.trace_id = outcome.trace_id or self._trace_id
        outcome.target.topic = topic
        outcome.tenant, outcome.principal, outcome.env = tenant, principal, env
        if parent is not None:  # of the request as it was delivered, or of the call that it was sent from
            its_own = parent.message_id == message_id
            outcome.actors.extend(parent.actors if its_own else actors.behind(parent, principal))
        if failed and not outcome.source:
            outcome.source = outcome.error.agent_id
        for name in ("entry", "attempt", "epoch", "sequence", "more", "reply_topic"):
            outcome.ClearField(name)
        matched = events.call_back(state, outcome, parent)
        state.callbacks.published.put((self.key, topic), failed, ENTRY_BYTES, state.now)
        state.stats.callbacks["published" if matched else "unheard"] += 1
        if request is not None:
            heard = f"{matched} subscriber{'s'[: matched != 1]}"
            request.note("callback", state.now, f"{topic}: {heard}")

    def _parent(self, request: Request | None) -> Lineage | None:
        """The call that the CALLBACK belongs to: what its subscribers' handlers do counts as done after the agent."""
        state = self._state
        delivered = Envelope.FromString(request.data).lineage if request is not None and request.data else b""
        lineage = delivered or self._lineage
        if request is not None and request.agent is not None and request.agent.principal != self.key[1]:
            holders = [request.agent.principal, self.key[1]]  # it may not have been delivered
        else:
            holders = [self.key[1]]
        for principal in holders if lineage else ():
            with contextlib.suppress(Forged):
                return state.lineage.verify(lineage, principal)
        return None


def same_wait(held: Port, port: Port) -> bool:
    """Whether a repeated message comes from one that waits already: the same port, or a callback to the same topic."""
    return held is port or (isinstance(held, Callback) and isinstance(port, Callback) and held.topic == port.topic)


def replayed(callback: Callback, envelope: Envelope, key: MessageKey, outcome: bytes) -> None:
    """A finished message came again: accepted again, and its outcome published on this topic if it was not before.

    An error that gave way to the agent's late answer was published as an error; the answer is news.
    """
    if not callback.accept(envelope, key):
        return
    found = Envelope.FromString(outcome)
    before = callback.published_error(key)
    if before is None or (before and not found.HasField("error")):
        callback.publish(found)


def all_of(request: Request) -> list[Waiter]:
    """The callbacks of a request: a cancel by whoever sent it, on whatever link, is meant for them."""
    return [waiter for waiter in request.waiters if isinstance(waiter.port, Callback)]


def _waiter(request: Request, port: Port) -> Waiter | None:
    return next((waiter for waiter in request.waiters if waiter.port is port), None)


def end_over(state: State) -> None:
    """End the requests whose items became too many to gather."""
    over, state.callbacks.over = state.callbacks.over, []
    for callback in over:
        callback.end_over()
