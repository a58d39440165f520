"""Runs the core: gives it the time and what arrives, and carries out what it asks for.

Everything that touches the state happens inside `step()`, synchronously on the event loop; so a step never sees
another one's half. After each step links are woken, calls answered, effects started, the timer set.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator

import structlog

from agentreach.aio.clock import boot_time
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Goodbye
from agentreach.v1.mesh_pb2 import PublishReply
from agentreach.wire import limits
from agentreach.wire.payload import Form
from reach.core import arrivals, credit, departures, drains, events, gathered, links, mesh, nodes, takeover
from reach.core.agents import Agent
from reach.core.calls import Call
from reach.core.effects import (
    AuditLine,
    CutStream,
    DeregisterAgent,
    DialNodes,
    Effect,
    EndStream,
    Forwarding,
    LogLine,
    LookUpAgent,
    RegisterAgents,
)
from reach.core.peers import Peer
from reach.core.ports import Identity, MeshFailure
from reach.core.profiles import whole_timeout_ms
from reach.core.requests import Attachment
from reach.core.state import State
from reach.node.forwarding import Forwarding as Wishes
from reach.node.lookup import look_up
from reach.node.nodelinks import AcceptedNode, NodeLinks
from reach.node.pins import PinBook
from reach.node.registrar import Registrar
from reach.node.session_work import SessionWork
from reach.node.standstill import Standstill
from reach.node.steering import Steering
from reach.node.streams import Carrier, Stream
from reach.node.telling import tell

log = structlog.get_logger("reach")

_RPC_MARGIN_S = 0.05  # our precise answer must be there before the RPC's own deadline ends the call without one
_INSTEAD = "use InvokeStream"
_READ_S = 0.1  # after a stall; a loop that stands still again and again puts off every second tick only


class Engine(Steering):
    """One node at work; implements `reach.core.ports.Switchboard`. Make it inside a running event loop."""

    def __init__(self, state: State, *, hello_timeout_s: float = limits.HELLO_TIMEOUT_S) -> None:
        super().__init__(state)
        self._loop = asyncio.get_running_loop()
        self.standstill = Standstill(self._loop, self.step)
        self._hello_timeout_s = hello_timeout_s
        self._registrar: Registrar | None = None
        self._session_work: SessionWork | None = None
        self.node_links: NodeLinks | None = None
        """Where there may be other nodes."""
        self.forwarding: Wishes | None = None
        """To the leading node, and from others to this one."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._put_off = False
        """The next tick waits until what came during a stall is read."""
        self._depth = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._moved = asyncio.Event()

    def use(self, registrar: Registrar, pins: PinBook) -> None:
        """Connect the registry; before this nothing can attach."""
        self._registrar, self._session_work = registrar, SessionWork(pins, self.step)

    @property
    def state(self) -> State:
        """The core's memory; it is changed in steps only."""
        return self._state

    @property
    def node_id(self) -> str:
        """This node's name."""
        return self._state.rules.node_id

    # ---- steps ----

    @contextlib.contextmanager
    def step(self) -> Iterator[State]:
        """Change the state; what it asks for is carried out at the end of the outermost step."""
        state = self._state
        if self._depth == 0:
            state.now = boot_time()
        self._depth += 1
        try:
            yield state
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._finish_step(state)

    def _finish_step(self, state: State) -> None:
        mesh.finish_step(state)
        while state.effects:
            self._carry_out(state.effects.popleft())
            mesh.finish_step(state)
        if state.woken:
            for peer in state.woken:
                if isinstance(peer.stream, Carrier):
                    peer.stream.wake()
            state.woken.clear()
        if state.calls:
            for call in state.calls:
                if isinstance(call.waiter, asyncio.Event):
                    call.waiter.set()
            state.calls.clear()
        if self._watchers:
            self._wake_watchers()
        if state.draining:
            self._has_left(state)
        self._arm(state)

    def _has_left(self, state: State) -> None:
        if drains.moved(state):
            self._moved.set()
        if not state.unsettled:
            self._settled.set()

    def _arm(self, state: State) -> None:
        at = mesh.next_tick_at(state)
        if at is not None and at < self._timer_at and not self._put_off:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._loop.call_later(max(0.0, at - state.now), self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        if not self._put_off and not self.standstill.may_judge:
            self._put_off = True
            self._timer = self._loop.call_later(_READ_S, self._tick)
            return
        self._put_off = False
        try:
            with self.step() as state:
                mesh.tick(state)
        except Exception:
            log.exception("a tick failed", reference=self.reference())

    def reference(self) -> str:
        """A word by which an INTERNAL error is found in the log."""
        return f"{self._state.rng.getrandbits(32):08x}"

    # ---- effects ----

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case LogLine():
                tell(effect)
            case AuditLine():
                self.audit(effect)
            case EndStream(peer):
                if isinstance(peer.stream, Carrier):
                    peer.stream.finish(flush=not peer.link.overrun and peer.connected)
            case CutStream(peer):
                if isinstance(peer.stream, Carrier):
                    peer.stream.sever()
            case RegisterAgents(peer, arrival):
                self._registry.register(
                    arrival,
                    lambda: self._registered(peer, arrival),
                    peer.link_id,
                    lambda: arrivals.is_there(self._state, peer, arrival),
                )
            case DeregisterAgent():
                self._registry.deregister(effect)
            case Forwarding():
                self._forwarded(effect)
            case DialNodes():
                if self.node_links is not None:
                    self.node_links.changed()
            case LookUpAgent():
                self._spawn(look_up(effect, self.look_up, self.step), "look-up-agent")
            case _:
                self._spawn(self._sessions.carry_out(effect), type(effect).__name__)

    def _forwarded(self, effect: Forwarding) -> None:
        if self.forwarding is None:
            return
        if effect.forward is not None:
            self.forwarding.asked(effect.node, effect.forward)
        elif effect.forwarded is not None:
            self.forwarding.answered(effect.node, effect.forwarded)
        else:
            self.forwarding.cut(effect.node)

    @property
    def _registry(self) -> Registrar:
        assert self._registrar is not None, "use() comes before the first stream"
        return self._registrar

    @property
    def _sessions(self) -> SessionWork:
        assert self._session_work is not None, "use() comes before the first stream"
        return self._session_work

    def _registered(self, peer: Peer, arrival: arrivals.Arrival) -> None:
        with self.step() as state:
            arrivals.registered(state, peer, arrival)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the node failed", task=task.get_name(), exc_info=error)

    def replaced(self, agent: Agent, by: bytes) -> None:
        """The registry says that another process, of this incarnation, has the agent; it may have been seen already."""
        with self.step() as state:
            here = state.directory.get(agent.tenant, agent.env, agent.agent_id) is agent
            if here and isinstance(agent.link, Attachment):
                takeover.replaced(state, agent.link, by)

    # ---- the switchboard ----

    def open_stream(self, who: Identity, peer: str) -> Stream:
        """See `Switchboard.open_stream`."""
        return Stream(self, who, peer, self._hello_timeout_s)

    def open_node_stream(self, peer: str) -> AcceptedNode:
        """See `Switchboard.open_node_stream`."""
        return AcceptedNode(self, peer, self._hello_timeout_s)

    async def invoke(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> Envelope:
        """See `Switchboard.invoke`."""
        json_form = envelope.payload.WhichOneof("content") in ("json", "text")
        items: list[Envelope] = []
        async with contextlib.aclosing(self._replies(envelope, who, deadline_s, streaming=False)) as replies:
            size = 0
            async for reply in replies:
                if not reply.more and not items:
                    return _clean(reply)
                if reply.more or reply.HasField("payload"):
                    items.append(reply)
                size += reply.ByteSize()
                if size > self._state.rules.payload_bytes_max:
                    bound = self._state.rules.payload_bytes_max
                    raise MeshFailure(gathered.too_large(len(items), bound, _INSTEAD), reply.trace_id)
        return _as_list(items, reply, Form.JSON if json_form else Form.BODY)

    async def invoke_stream(
        self, envelope: Envelope, who: Identity, deadline_s: float | None
    ) -> AsyncGenerator[Envelope, None]:
        """See `Switchboard.invoke_stream`."""
        async with contextlib.aclosing(self._replies(envelope, who, deadline_s, streaming=True)) as replies:
            async for reply in replies:
                if reply.more or reply.HasField("payload") or not reply.sequence:
                    yield _clean(reply)

    async def _replies(
        self, envelope: Envelope, who: Identity, deadline_s: float | None, *, streaming: bool
    ) -> AsyncGenerator[Envelope, None]:
        """Every RESPONSE, the final one last; a `MeshFailure` if that is an error. Closing it cancels the request."""
        state = self._state
        _bound(envelope, deadline_s)
        call = Call(state, streaming=streaming)
        arrived = call.waiter = asyncio.Event()
        items = 0
        entry = b""
        with self.step():
            mesh.invoke(state, call, who, envelope)
        let_go = self.holders.call(who, lambda _: self._hang_up(call, who))  # also while its client takes no item
        try:
            while True:
                while call.replies:
                    self.holders.check(who, begun=True)
                    reply = call.replies.popleft()
                    if reply.HasField("error"):
                        raise MeshFailure(reply.error, reply.trace_id, items or None)
                    entry = reply.entry
                    items += 1
                    yield reply
                    if not reply.more:
                        return
                if streaming and items and not items % 16:
                    with self.step():
                        credit.grant(state, call, entry, items + limits.STREAM_CREDIT_INITIAL)
                arrived.clear()
                self.holders.check(who, begun=True)
                with self.holders.hold(who, arrived):
                    await arrived.wait()
        finally:
            let_go()
            self._hang_up(call, who)

    def _hang_up(self, call: Call, who: Identity) -> None:
        """Nobody wants what is still to come."""
        if not call.done:
            with self.step() as state:
                mesh.hang_up(state, call, who)

    async def publish(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> PublishReply:
        """See `Switchboard.publish`."""
        state = self._state
        call = Call(state, streaming=False)
        arrived = call.waiter = asyncio.Event()
        if deadline_s is not None and not envelope.timeout_ms and deadline_s < state.rules.publish_timeout_s:
            envelope.timeout_ms = max(limits.TIMEOUT_MS_MIN, int((deadline_s - _RPC_MARGIN_S) * 1000))
        with self.step():
            mesh.publish(state, call, who, envelope)
        while not call.replies:
            await arrived.wait()
        reply = call.replies.popleft()
        if reply.HasField("error"):
            raise MeshFailure(reply.error, reply.trace_id)
        return events.counts_of(reply)

    # ---- ending ----

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, let agents go elsewhere and what runs end, then say goodbye to every link."""
        with self.step() as state:
            drains.node(state, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, state.moved_by - boot_time())):
                await self._moved.wait()
        while not self._dismissed_all(boot_time() >= state.leaves_at):
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, state.leaves_at - boot_time())):
                    await self._settled.wait()
        with self.step() as state:
            for peer in list(state.peers.values()):
                links.farewell(state, peer, Goodbye.SHUTDOWN, f"node {state.rules.node_id} is leaving")
            nodes.farewell(state)

    def _dismissed_all(self, at_once: bool) -> bool:
        """Let every agent go, if nothing is under way: other nodes may have sent more since that was last seen."""
        with self.step() as state:
            if state.unsettled and not at_once:
                return False
            # First every agent, so that whoever still waits is told; a caller's link that ended first would have its
            # requests cancelled, and the caller, who never wanted that, would send them again: a second run.
            for attachment in [each for peer in state.peers.values() for each in peer.attachments.values()]:
                departures.dismiss(state, attachment, f"node {state.rules.node_id} is leaving")
        return True

    async def close(self) -> None:
        """Stop the timers and tasks."""
        self.standstill.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _bound(envelope: Envelope, deadline_s: float | None) -> None:
    """Let the RPC's own deadline bound the request's time, unless the request outlives the RPC on purpose."""
    if deadline_s is None or envelope.reply_topic or not (envelope.timeout_ms or envelope.profile in range(1, 6)):
        return
    left_ms = max(limits.TIMEOUT_MS_MIN, int((deadline_s - min(_RPC_MARGIN_S, deadline_s / 10)) * 1000))
    if left_ms < whole_timeout_ms(envelope.timeout_ms, envelope.profile):
        envelope.timeout_ms = left_ms


def _clean(reply: Envelope) -> Envelope:
    reply.ClearField("entry")
    reply.ClearField("attempt")
    return reply


def _as_list(items: list[Envelope], last: Envelope, form: Form) -> Envelope:
    """A streamed reply as one: its items as a JSON list."""
    fault = gathered.as_list(items, last, form, _INSTEAD)
    if fault is not None:
        raise MeshFailure(fault, last.trace_id)
    return _clean(last)
