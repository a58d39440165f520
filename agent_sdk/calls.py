"""Requests that wait for their answers: one entry per message_id, however many wait for it.

A call ends exactly once: by its RESPONSE, by its own guard shortly after the deadline, by cancellation, or with the
link. When the node has forgotten the link, what is pending is sent again under its message_id, in its old order, with
the time that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent_sdk import moving
from agent_sdk.errors import ErrorCode, IdempotencyConflict, Internal, ReachError, Timeout, from_proto
from agent_sdk.messages import Reply
from agent_sdk.outgoing import NOT_FRESH, RESENT, TIMEOUT_MS
from agent_sdk.pending import Call, Joiner
from agentreach.aio.clock import boot_time
from agentreach.policy.wheel import TimerWheel
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire import payload as payloads
from agentreach.wire.framing import varint
from agentreach.wire.limits import (
    FRAME_ENVELOPES_ENOUGH,
    FRAME_ENVELOPES_MAX,
    STREAM_CREDIT_INITIAL,
    TIMEOUT_MS_MIN,
)  # fmt: skip
from agentreach.wire.outbox import Item

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink

GRACE_S: Final = 0.25
"""The node answers at the deadline; this much later the SDK does it itself, so that nobody waits for a dead node."""

_TICK_S: Final = 0.0625
_BUFFERED_ITEMS_MAX: Final = 4 * STREAM_CREDIT_INITIAL  # a node that ignores credits loses the stream, not our memory


class Calls:
    """The pending calls of one link."""

    def __init__(self, owner: MeshLink) -> None:
        self._owner = owner
        self._calls: dict[str, Call] = {}
        self._wheel: TimerWheel[Call] = TimerWheel(_TICK_S)
        self.epochs: dict[tuple[bytes, str], int] = {}
        """The last epoch seen of each session."""
        self._returning_until = 0.0
        """The link began anew a moment ago: up to here the agents asked for may still be on their way back."""

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, message_id: str) -> Call | None:
        """The call under way with this id, if there is one."""
        return self._calls.get(message_id)

    @property
    def under_way(self) -> bool:
        """True while a request that was sent is not answered."""
        return any(call.item is not None for call in self._calls.values())

    def begin(self, call: Call, now: float, kept: bool = False) -> None:
        """Send a call and wait for its answer until shortly after its deadline; `kept`: it waits for the next node."""
        owner = self._owner
        self._calls[call.message_id] = call
        self._share()
        call.token = self._wheel.schedule(call, call.deadline + GRACE_S)
        if not kept:
            data = call.data if not self._returning_until else self._marked(call.data)
            call.item = self._put(data, call.priority, now)
        if owner._ticker is None:
            owner.tick_on()

    def _put(self, data: bytes, priority: int, now: float) -> Item:
        """Put a request or an event on the link, signed if it must be: each time anew."""
        signer = self._owner.signer
        return self._owner.send(data if signer is None else signer.signed(data), priority, now)

    def join(self, call: Call, content: tuple[bytes, bytes], deadline: float) -> Joiner:
        """Wait for a call that is under way. Raises `IdempotencyConflict` if it is about something else."""
        if call.content != content or call.reader is not None:
            raise IdempotencyConflict(
                f"message_id {call.message_id!r} is under way in this process with other content",
                trace_id=call.trace_id,
            )
        joiner = Joiner(deadline, self._owner.loop.create_future())
        if call.joined is None:
            call.joined = []
        call.joined.append(joiner)
        return joiner

    # ---- answers ----

    def on_response(self, envelope: pb.Envelope, now: float) -> None:
        """Take a RESPONSE to its call; one that nobody waits for is dropped."""
        call = self._calls.get(envelope.correlation_id)
        if call is None:
            return
        if call.session is not None and envelope.epoch:
            self._saw_epoch(call.session, envelope.epoch)
        if envelope.HasField("error"):
            error = from_proto(envelope.error, envelope.trace_id or call.trace_id)
            doubtful = call.item is not None and call.item.doubtful
            if self._owner.leaving and error.code is ErrorCode.SHUTTING_DOWN and not error.may_have_executed:
                if not doubtful:
                    call.item = None
                return  # the node has not taken it: the next one may
            if doubtful:
                error.may_have_executed = True  # a node that has forgotten the request had it before this one
            self._failed(call, error, now)
        elif envelope.more or call.expected or call.reader is not None:
            self._item(call, envelope, now)
        elif envelope.HasField("payload"):
            self._end(call)
            if call.joined is None:
                future = call.future
                if not future.done():
                    future.set_result(Reply(envelope, call.trace_id))
            else:
                self._resolve(call, Reply(envelope, call.trace_id))
        elif envelope.sequence == 0:  # a generator that gave nothing
            self._end(call)
            self._resolve(call, Reply(envelope, call.trace_id, []))
        else:
            self._failed(call, Internal("the items of the reply are missing", may_have_executed=True), now)

    def _item(self, call: Call, envelope: pb.Envelope, now: float) -> None:
        """Take an item, or the end, of a streamed reply."""
        sequence, more = envelope.sequence, envelope.more
        call.entry = envelope.entry
        if sequence != call.expected:
            if sequence > call.expected:
                self._failed(
                    call, Internal(f"item {call.expected} of the reply is missing", may_have_executed=True), now
                )
            elif sequence == 0:  # sent again from the start: grant what we are ready for
                call.granted = STREAM_CREDIT_INITIAL
                self.grant(call, call.expected)
            return
        if more or envelope.HasField("payload"):
            call.expected += 1
            try:
                value = payloads.decode(envelope.payload)
            except payloads.PayloadError as error:
                self._failed(call, Internal(f"item {sequence} cannot be read: {error}", may_have_executed=True), now)
                return
            self._keep(call, value, envelope, now)
        if not more:
            self._end(call)
            reader = call.reader
            if reader is not None:
                reader.last = reader.last or envelope
                reader.end(None)
            else:
                self._resolve(call, Reply(envelope, call.trace_id, call.collected or []))

    def _keep(self, call: Call, value: Any, envelope: pb.Envelope, now: float) -> None:
        reader = call.reader
        if reader is None:
            if call.collected is None:
                call.collected = []
            call.collected.append(value)
            self.grant(call, call.expected)
            return
        if len(reader.items) >= _BUFFERED_ITEMS_MAX:
            self._failed(call, Internal("the reply outran its credit", may_have_executed=True), now)
            return
        reader.last = envelope
        reader.items.append(value)
        reader.wake()

    def grant(self, call: Call, taken: int) -> None:
        """Let the producer go on, after `taken` items were taken by the consumer."""
        if call.granted - taken <= STREAM_CREDIT_INITIAL // 2:
            call.granted = taken + STREAM_CREDIT_INITIAL
            credit = frames.StreamCredit(correlation_id=call.message_id, entry=call.entry, up_to=call.granted)
            self._owner.signal(frames.Signal(stream_credit=credit))

    def on_progress(self, progress: frames.Progress) -> None:
        """The handler says that it is at work; only traces and idle clocks of the mesh care."""

    def _resolve(self, call: Call, reply: Reply) -> None:
        future = call.future
        if not future.done():
            future.set_result(reply)
        if call.joined:
            for joiner in call.joined:
                if not joiner.future.done():
                    joiner.future.set_result(reply)

    def _failed(self, call: Call, error: ReachError, now: float) -> None:
        if call.joined and isinstance(error, Timeout) and self._outlived(call, error, now):
            return
        self._end(call)
        if call.expected:
            error.details["items"] = str(call.expected)  # the node may count another's, from whom this one took over
        if call.reader is not None:
            call.reader.end(error)
            return
        for future in [call.future, *(joiner.future for joiner in call.joined or ())]:
            if not future.done():
                future.set_exception(error)

    def _outlived(self, call: Call, error: ReachError, now: float) -> bool:
        """The first deadline has passed: those who still have time go on with the same message_id."""
        if not call.future.done():
            call.future.set_exception(error)
        waiting = [joiner for joiner in call.joined or () if not joiner.future.done()]
        for joiner in waiting:
            if joiner.deadline <= now + TIMEOUT_MS_MIN / 1000:
                joiner.future.set_exception(error)
        call.joined = [joiner for joiner in waiting if not joiner.future.done()]
        if not call.joined:
            return False
        call.deadline = max(joiner.deadline for joiner in call.joined)
        if call.token is not None:
            self._wheel.cancel(call.token, call)
        call.token = self._wheel.schedule(call, call.deadline + GRACE_S)
        self._send_again(call, now)
        return True

    def _end(self, call: Call) -> None:
        self._calls.pop(call.message_id, None)
        self._share()
        if call.token is not None:
            self._wheel.cancel(call.token, call)
            call.token = None

    def _share(self) -> None:
        """Have what is under way in four frames, if each is worth one: else the ends take turns in working."""
        under_way = len(self._calls)
        self._owner.link.enough = max(under_way // 4, FRAME_ENVELOPES_ENOUGH) if under_way else FRAME_ENVELOPES_MAX

    def _saw_epoch(self, session: tuple[bytes, str], epoch: int) -> None:
        epochs = self.epochs
        if session not in epochs and len(epochs) >= _SESSIONS_MAX:
            del epochs[next(iter(epochs))]
        epochs[session] = epoch

    # ---- leaving ----

    def leave(self, call: Call, joiner: Joiner | None = None) -> None:
        """A waiter has gone. With the last one the request is cancelled, down to its handler."""
        if joiner is not None and call.joined:
            call.joined = [other for other in call.joined if other is not joiner]
        others = [joiner for joiner in call.joined or () if not joiner.future.done()]
        if others or (joiner is not None and not call.future.done()):
            return
        if self._calls.get(call.message_id) is call:
            self.cancel(call)

    def cancel(self, call: Call) -> None:
        """Withdraw a request: one that was never sent vanishes, any other is followed by a CANCEL."""
        self._end(call)
        owner = self._owner
        item = call.item
        if item is None or (owner.link.withdraw(item) and not call.may_have_executed):
            return
        cancel = pb.Envelope(type=pb.CANCEL, correlation_id=call.message_id, entry=call.entry)
        if owner.env:
            cancel.env = owner.env
        owner.send(cancel.SerializeToString(), call.priority)

    # ---- time ----

    def tick(self, now: float) -> bool:
        """End what is past its deadline. Returns True while anything is pending."""
        if self._calls:
            stall_s = self._owner.stalls.stall_s(now)  # what was received meanwhile has not been read yet
            for call in self._wheel.due(now - stall_s):
                if self._calls.get(call.message_id) is call:
                    call.token = None
                    self._overdue(call, now)
        return bool(self._calls)

    def _overdue(self, call: Call, now: float) -> None:
        error = moving.late(self._owner, call)
        if not (call.joined and isinstance(error, Timeout) and self._outlived(call, error, now)):
            self.cancel(call)
            self._failed(call, error, now)

    # ---- the node has forgotten the link ----

    def not_taken(self) -> None:
        """A goodbye came, and with it the last acknowledgement: what that does not cover was never taken."""
        for call in self._calls.values():
            item = call.item
            if item is not None and not item.accepted and not item.doubtful:
                self._owner.link.withdraw(item)
                call.item = None

    def before_restart(self) -> None:
        """Take every request out of the link, so that the old order holds when they are sent again."""
        for call in self._calls.values():
            if call.item is not None:
                self._owner.link.withdraw(call.item)

    def after_restart(self, *, was_up: bool) -> None:
        """Send every pending request again, with the time that is left.

        If there was a node before (`was_up`), say so, with these and for a while with all: one that has just started
        then waits for the agents that are on their way back to it as well.
        """
        now = boot_time()
        if was_up:
            self._returning_until = now + RETURNING_S
        for call in list(self._calls.values()):
            self._send_again(call, now, RESENT if was_up else b"")

    def _marked(self, data: bytes) -> bytes:
        """A new request as it is sent shortly after the link began anew: it may wait, too."""
        if boot_time() < self._returning_until:
            return data + RESENT
        self._returning_until = 0.0
        return data

    def _send_again(self, call: Call, now: float, why: bytes = b"") -> None:
        left_ms = int((call.deadline - now) * 1000)
        if left_ms < TIMEOUT_MS_MIN:
            return  # a node would refuse it as out of bounds; its guard is due
        doubtful = call.may_have_executed
        mark = why + NOT_FRESH if doubtful else why
        item = self._put(b"".join((call.data, TIMEOUT_MS, varint(left_ms), mark)), call.priority, now)
        item.doubtful = doubtful
        call.item = item

    def fail_all(self, error: ReachError) -> None:
        """The link is over: every call ends with what ended it."""
        for call in list(self._calls.values()):
            own = type(error)(
                error.message, trace_id=call.trace_id, may_have_executed=call.may_have_executed, details=error.details
            )
            self._failed(call, own, float("inf"))


RETURNING_S: Final = 10.0
"""A node's default `resume_window_s`: after that nobody is awaited any more."""
_SESSIONS_MAX: Final = 10_000  # epochs remembered; the oldest are forgotten first
