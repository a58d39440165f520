"""Runs one agent's handlers: what is delivered, joined, queued, cancelled, answered.

Each delivered message is answered exactly once for each waiter. The same message never runs twice while it is known:
in flight it is joined, finished it is replayed. A place counts as free only when its handler has really ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from agent_sdk import standing
from agent_sdk.errors import from_proto
from agent_sdk.handlers import Handler
from agent_sdk.lanes import Lanes
from agent_sdk.pace import Dropped, Pace
from agent_sdk.probes import Probes
from agent_sdk.replies import UNKNOWN_CONTENT, Known, Replies, fingerprint_of
from agent_sdk.responses import addressed, correlation_field, error_core, head, timing
from agent_sdk.run import run
from agent_sdk.sessions import Hooks, Sessions
from agent_sdk.watch import Watch
from agent_sdk.work import Key, Work, key_of
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2, registry_pb2
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire import errors as wire_errors
from agentreach.wire.content import content_digest
from agentreach.wire.outbox import HIGH, LOW, NORMAL, Item

if TYPE_CHECKING:
    from agent_sdk.client import Mesh
    from agent_sdk.link import MeshLink

log = logging.getLogger("agent_sdk")

QUEUED_MAX: Final = 1000  # messages that wait in the agent: the node reserves slots, so a session's lane or leftovers
_TIMEOUT_MS_UNKNOWN: Final = 600_000
_LANES: Final[dict[int, int]] = {pb.HIGH: HIGH, pb.LOW: LOW}
_CANCEL: Final = int(pb.CANCEL)
_EVENT: Final = int(pb.EVENT)

Pick = Callable[[pb.Envelope], Handler | None]
"""Which handler takes an envelope."""


class Host:
    """One agent on one link."""

    def __init__(self, owner: MeshLink, record: registry_pb2.AgentRecord, pick: Pick, hooks: Hooks) -> None:
        self.owner = owner
        self.record = record
        self.agent_id = record.agent_id
        self.env = record.env
        self.head = head(record.agent_id)
        self.mesh: Mesh | None = None
        self.failure: BaseException | None = None
        self.gone = asyncio.Event()
        """Set when the agent is no longer registered and will not be: `failure` says why, if it was not our wish."""
        self.registered = asyncio.Event()  # set while the node knows the agent, and once there is a `failure`
        self.ready = asyncio.Event()  # set once the node would route to the agent, and once there is a `failure`
        self.draining = False
        self.let_go: asyncio.Event | None = None  # set once the node has let a draining agent go
        self.expired = False  # the time of its drain is over: handlers are cancelled for that
        self.ordered: asyncio.Task[None] | None = None  # the drain that the node has ordered
        self.pool: ThreadPoolExecutor | None = None
        self.configured: Callable[[frames.ConfigUpdate], None] | None = None  # the node has settings for the agent
        self._probes = Probes()
        self._pick = pick
        self._lanes: Lanes[Work] = Lanes(record.max_concurrency, record.session_concurrency)
        self._running: dict[Key, Work] = {}
        self.replies = Replies()
        self.sessions = Sessions(self, hooks)
        self._unacknowledged: deque[tuple[Work, Item]] = deque()
        self._watch = Watch()
        self._pace = Pace()
        self._last_completed = boot_time()
        self._dropped = Dropped()
        self._idle: asyncio.Event = asyncio.Event()

    # ---- registration ----

    def attach(self) -> frames.Attach:
        """How the agent is registered, with all that it still holds."""
        return standing.attach(self.record, self.draining, self._running, self._unacknowledged)

    def attached(self, attached: frames.Attached) -> None:
        """The node's answer to an attach."""
        if attached.HasField("error"):
            if attached.error.retryable or attached.error.code == error_pb2.FENCED:  # no registry; two came at once
                self.owner.attach_later(self, attached.error)
                return
            self.ended(from_proto(attached.error))
            if self.owner.hosts.get(self.agent_id) is self:
                del self.owner.hosts[self.agent_id]
        else:
            self.registered.set()

    def ended(self, failure: BaseException) -> None:
        """The agent's registration is over, against our will."""
        self.failure = self.failure or failure
        self.gone.set()
        self.registered.set()
        self.ready.set()

    def lost(self, reason: str) -> None:
        """The node dropped the agent without anybody replacing it: register again."""
        log.warning("%s was detached by the node (%s): attaching it again", self.agent_id, reason or "no reason given")
        self.registered.clear()
        self.owner.attach_again(self)

    def load(self, now: float) -> registry_pb2.AgentLoad:
        """What a heartbeat says of this agent."""
        draining = self.draining
        return standing.load(self.record, draining, self._running, self._lanes.active, now - self._last_completed)

    def probe(self, probe: frames.Probe) -> None:
        """Answer by the loop, or by a spare thread of the pool, that runs the handlers."""
        self._probes.answer(self, probe.nonce)

    @property
    def busy(self) -> bool:
        """True while a message is handled or waits to be."""
        return bool(self._running)

    def state_of(self, key: frames.MessageKey) -> frames.Found.State.ValueType:
        """What is known here of a message."""
        full = key_of(key)
        if full in self._running:
            return frames.Found.RUNNING
        return frames.Found.DONE if self.replies.known(full, boot_time()) else frames.Found.NO

    # ---- what comes in ----

    def deliver(self, envelope: pb.Envelope, now: float, lost_ms: int, kind: int) -> None:
        """Take a REQUEST, a CANCEL or an EVENT (`kind`) for this agent; `lost_ms` have passed since it was stamped."""
        if kind == _CANCEL:
            self._cancel(envelope)
            return
        key = key_of(envelope)
        work = self._running.get(key)
        if work is not None:
            self._join(work, envelope, now, lost_ms)
            return
        fresh = envelope.fresh
        if not fresh:
            known = self.replies.known(key, now)
            if known is not None:
                self._replay(envelope, known)
                return
        left_ms = envelope.timeout_ms or _TIMEOUT_MS_UNKNOWN
        replies = kind != _EVENT
        if left_ms <= lost_ms and replies:
            self._refuse(envelope, error_pb2.TIMEOUT, f"its time passed before {self.agent_id} could start it")
            return
        handler = self._pick(envelope)
        if handler is None:
            if replies:
                self._refuse(envelope, error_pb2.REJECTED, f"{self.agent_id} has no handler for this")
            return
        work = Work(self, key, envelope, handler, now - lost_ms / 1000, now + (left_ms - lost_ms) / 1000, fresh)
        work.waiters.append((envelope.entry, envelope.attempt, envelope.epoch))
        work.replies = replies
        self._take(work)

    def take_event(self, envelope: pb.Envelope, handler: Handler) -> None:
        """Run an `.on_event` handler; one publisher's events of a topic run one after another."""
        now = boot_time()
        key = (*key_of(envelope)[:3], f"{envelope.target.topic} {envelope.message_id}")
        if key in self._running:
            return
        work = Work(self, key, envelope, handler, now, now + _TIMEOUT_MS_UNKNOWN / 1000)
        work.replies = False
        work.session = ("event", envelope.target.topic, envelope.source)
        self._take(work)

    def _take(self, work: Work) -> None:
        envelope = work.envelope
        if work.session is None:
            session_id = envelope.session_id
            if session_id:
                work.session = (work.key[0], session_id)
        priority = envelope.priority
        if priority:
            work.lane = _LANES.get(priority, NORMAL)
        if self._lanes.queued >= QUEUED_MAX:
            if work.replies:
                self._refuse(envelope, error_pb2.OVERLOADED, f"{self.agent_id} has {QUEUED_MAX} messages waiting")
            else:
                self._dropped.one(self.agent_id, work.handler.name, work.received)
            return
        self._running[work.key] = work
        self._watch.add(work)
        if self.owner._ticker is None:
            self.owner.tick_on()
        if self._lanes.admit(work) or (self.record.reentrant and self._within_own_call(work)):
            self._start(work)

    def _within_own_call(self, work: Work) -> bool:
        """True if an ancestor of this message runs here: the call tree may use its slot again."""
        ancestors = {hop.message_id for hop in work.envelope.path}
        if not any(other.message_id in ancestors and other.admitted for other in self._running.values()):
            return False
        for started in self._lanes.withdraw(work):
            self._start(started)
        return self._lanes.admit(work, over_limit=True)

    def _start(self, work: Work) -> None:
        work.task = self.owner.loop.create_task(run(work))

    def _join(self, work: Work, envelope: pb.Envelope, now: float, lost_ms: int) -> None:
        """The same message again while it runs: one more waits for its answer."""
        if content_digest(work.envelope) != content_digest(envelope):
            self._conflict(envelope)
            return
        waiter = (envelope.entry, envelope.attempt, envelope.epoch)
        if waiter not in work.waiters:
            work.waiters.append(waiter)
        work.deadline = max(work.deadline, now + ((envelope.timeout_ms or _TIMEOUT_MS_UNKNOWN) - lost_ms) / 1000)
        if not work.handler.streams:
            return
        if work.items is None:
            work.waiters.remove(waiter)
            self._items_gone(envelope)
            return
        for item in work.items:
            self.owner.send(addressed(self.head, correlation_field(work.message_id), waiter, item), work.lane)

    def _conflict(self, envelope: pb.Envelope) -> None:
        self._refuse(
            envelope, error_pb2.IDEMPOTENCY_CONFLICT, f"message_id {envelope.message_id!r} was used with other content"
        )

    def _replay(self, envelope: pb.Envelope, known: Known) -> None:
        cores, tail, fingerprint = known
        if fingerprint != UNKNOWN_CONTENT and fingerprint != fingerprint_of(envelope):
            self._conflict(envelope)
            return
        if not cores:
            self._items_gone(envelope)
            return
        waiter = (envelope.entry, envelope.attempt, envelope.epoch)
        correlation = correlation_field(envelope.message_id)
        for core in cores:
            self.owner.send(addressed(self.head, correlation, waiter, core, tail if core is cores[-1] else b""))

    def _items_gone(self, envelope: pb.Envelope) -> None:
        self._refuse(
            envelope, error_pb2.AGENT_LOST, f"{self.agent_id} no longer keeps the whole answer to this message"
        )

    def _refuse(self, envelope: pb.Envelope, code: error_pb2.ErrorCode.ValueType, message: str) -> None:
        error = wire_errors.failure(code, message, agent_id=self.agent_id)
        waiter = (envelope.entry, envelope.attempt, envelope.epoch)
        self.owner.send(addressed(self.head, correlation_field(envelope.message_id), waiter, error_core(error)))

    def credit(self, credit: frames.StreamCredit) -> None:
        """The consumer of a streamed reply takes more."""
        for work in self._of_message(credit.correlation_id):
            if not credit.entry or any(credit.entry == waiter[0] for waiter in work.waiters):
                work.credit = max(work.credit, credit.up_to)
                if work.credit_waiter is not None and not work.credit_waiter.done():
                    work.credit_waiter.set_result(None)

    def _of_message(self, message_id: str) -> list[Work]:
        return [work for work in self._running.values() if work.message_id == message_id]

    # ---- cancel ----

    def _cancel(self, envelope: pb.Envelope) -> None:
        """Withdraw one waiter; the handler ends with its last one."""
        for work in self._of_message(envelope.correlation_id):
            leaving = [w for w in work.waiters if w[0] == envelope.entry and w[1] == envelope.attempt]
            if not leaving or work.cancelled:
                continue
            if len(work.waiters) > len(leaving):
                work.waiters = [w for w in work.waiters if w not in leaving]
                core = error_core(wire_errors.failure(error_pb2.CANCELLED, "cancelled", agent_id=self.agent_id))
                for waiter in leaving:
                    self.owner.send(addressed(self.head, correlation_field(work.message_id), waiter, core), work.lane)
            else:
                self.stop(work, error_pb2.CANCELLED, "cancelled")

    def stop(self, work: Work, code: error_pb2.ErrorCode.ValueType, message: str) -> None:
        """Cancel a work. One that waits is answered at once, a running one when its handler has ended."""
        work.cancelled = True
        if not work.admitted:
            for started in self._lanes.withdraw(work):
                self._start(started)
            self._running.pop(work.key, None)
            work.ended = True
            self.answer(work, error_core(wire_errors.failure(code, message, agent_id=self.agent_id)))
            self._settled()
        elif not work.handler.sync:
            if work.task is not None and work.started:  # a task cancelled before its first step would never answer
                work.task.cancel()
        elif work.credit_waiter is not None and not work.credit_waiter.done():
            work.credit_waiter.set_result(None)  # a `def` generator that waits to go on ends instead

    # ---- answers ----

    def finish(self, work: Work, core: bytes, keep: bool) -> None:
        """The handler has really ended: answer, remember, start who waits."""
        now = boot_time()
        self._last_completed = now
        work.ended = True
        started = work.started or now
        tail = timing(int((started - work.received) * 1e6), int((now - started) * 1e6))
        self._running.pop(work.key, None)
        try:
            if work.replies:
                if keep:
                    self.replies.remember(work, core, tail, now)
                if work.envelope.session_id:
                    self.sessions.ended(work, keep)
                self.answer(work, core, tail, now)
        finally:  # whatever goes wrong, the place is free again
            for following in self._lanes.release(work):
                self._start(following)
            if work.cancelled:
                self.owner.beat()
            self._settled()

    def answer(self, work: Work, core: bytes, tail: bytes = b"", now: float = 0.0) -> None:
        """Send one answer, or one item, to everybody who waits. `now` spares the look at the clock."""
        if not work.replies:
            return
        correlation = correlation_field(work.message_id)
        send, ended, unacknowledged = self.owner.send, work.ended, self._unacknowledged
        for waiter in work.waiters:
            item = send(addressed(self.head, correlation, waiter, core, tail), work.lane, now)
            if ended:
                while unacknowledged and unacknowledged[0][1].accepted:
                    unacknowledged.popleft()
                unacknowledged.append((work, item))

    @property
    def told(self) -> bool:
        """True when the node has acknowledged every answer."""
        return all(item.accepted for _, item in self._unacknowledged)

    def _settled(self) -> None:
        if not self._running:
            self._idle.set()

    # ---- time ----

    def tick(self, now: float) -> bool:
        """Tell of handlers that take long, end what is overdue. True while there is anything to look after."""
        for work in self._watch.slow(now):
            if work.started:
                self.tell_started(work)
            else:
                work.tell = True
        for work in self._watch.overdue(now):
            self.stop(work, error_pb2.TIMEOUT, f"its time passed while it waited in {self.agent_id}")
        for work, (percent, text) in self._pace.due(now) if self._pace.waiting else ():
            self._tell(work, False, percent, text)
        return self._watch.watching or self._pace.waiting

    def tell_started(self, work: Work) -> None:
        """Say that a handler is at work."""
        self._tell(work, True, None, "")

    def progress(self, work: Work, percent: float | None, text: str) -> None:
        """A handler says how far it is. Told to each who waits, ten times a second; of more, the last."""
        if not work.ended and self._pace.may_tell(work, boot_time(), (percent, text)):
            self._tell(work, False, percent, text)
            self.owner.tick_on()

    def _tell(self, work: Work, started: bool, percent: float | None, text: str) -> None:
        for waiter in work.waiters if work.replies else ():
            progress = frames.Progress(message_id=work.message_id, entry=waiter[0], started=started, text=text)
            if percent is not None:
                progress.percent = percent
            self.owner.signal(frames.Signal(progress=progress))

    # ---- leaving ----

    async def idle(self) -> None:
        """Wait until nothing is handled here."""
        if self._running:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Give the threads back. A `def` handler that still runs keeps its thread until it ends."""
        self._probes.close()
        self.sessions.close()
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def works(self) -> list[Work]:
        """What runs now."""
        return list(self._running.values())
