"""One stream of a link, from hello to its end: a reader, a writer, heartbeats.

The reader is the coroutine `run`; the writer is its only child. Neither is ever cancelled while it reads or writes:
ending the stream ends both (house.md, traps 1 and 2).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from agent_sdk import configuring, draining, ending, intake, moving, sessions
from agent_sdk.beats import Beats
from agent_sdk.ending import Ended
from agent_sdk.greeting import Greeting
from agent_sdk.identity import incarnation
from agent_sdk.standing import found
from agentreach.aio.clock import boot_time
from agentreach.aio.outlet import Outlet
from agentreach.aio.transport import StreamBroken
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.error_pb2 import Error
from agentreach.wire.addresses import is_address
from agentreach.wire.link import LinkError

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agent_sdk.link import MeshLink

log = logging.getLogger("agent_sdk")

GOODBYE_TIMEOUT_S = 2.0  # for the other half of a stream after goodbye


class LinkStream:
    """The life of one stream."""

    def __init__(self, owner: MeshLink, greeting: Greeting) -> None:
        self._owner = owner
        self._link = owner.link
        self._greeting = greeting
        self._stream = greeting.stream
        self._address = greeting.address
        self._outlet: Outlet | None = None
        self._attaching = owner.attaching
        self.beats = Beats(owner, self.attach, self._silent)
        self._ended = Ended.CUT
        self._limit: asyncio.TimerHandle | None = None
        self._move: asyncio.Task[None] | None = None
        self._refused_since = 0.0
        self.reason = ""
        self.peers: list[str] = []
        """Where a node that leaves sends us."""
        self.leaves_s = 0.0
        """How long it takes to."""

    async def run(self) -> Ended:
        """Speak until the stream ends; returns what that means for the next one. Cancelling it ends the stream."""
        writer: asyncio.Task[None] | None = None
        try:
            greeting = self._greeting
            if not await greeting.greet():
                return self._unwelcome()
            first = greeting.first
            assert first is not None
            self._outlet = outlet = Outlet(self._link)
            if not self._settle(greeting.welcome, outlet):
                return Ended.SCRATCH
            writer = asyncio.get_running_loop().create_task(self._write(outlet), name="agent_sdk writer")
            self.beats.begin()
            self._signals(first)
            while (data := await self._stream.read()) is not None:
                self.beats.heard = boot_time()
                if not self._frame(data):
                    break
                # What it has brought about is written before the next is asked for: both take a while. The first turn
                # of the loop is the handler's, or the caller's, the second one the writer's.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            self.reason = self.reason or self._stream.why_ended
            return self._ended
        except StreamBroken as broken:
            self.reason = self.reason or str(broken)
            return self._ended
        finally:
            self._end_limit()
            self.beats.stop()
            self._stream.cancel()
            if writer is not None and self._outlet is not None:
                self._outlet.abandon()
                await asyncio.wait([writer])
            if self._move is not None:
                self._move.cancel()

    # ---- the welcome ----

    def _unwelcome(self) -> Ended:
        greeting = self._greeting
        self.reason, self._ended = greeting.why, greeting.ended
        if greeting.goodbye is not None:
            self._goodbye(greeting.goodbye)
        return self._ended

    def _settle(self, welcome: frames.Welcome, outlet: Outlet) -> bool:
        """Take the welcome: resume or restart the link. False if the node's numbers do not fit ours."""
        if self._owner.signer is not None:
            self._owner.signer.audience = welcome.link_id or welcome.node_id
        if welcome.resumed:
            if not self._link.resume(welcome.last_seq):
                self.reason = "the node resumed from a frame that is not kept here"
                return False
        else:
            self._owner.restarted()
            self._attaching.clear()
            self._attaching.extend(self._greeting.declared)
        self._owner.welcomed(welcome, outlet)
        self.beats.every(welcome.heartbeat_interval_ms)
        for attached in welcome.agents:
            self._attached(attached)
        self._attach_the_rest(welcome.resumed)
        return True

    def _attach_the_rest(self, resumed: bool) -> None:
        """What the hello declared counts only where the link began anew; on a resumed one the attaches before it do."""
        known = set(self._attaching)
        if not resumed:
            known.update(self._greeting.declared)
        for host in list(self._owner.hosts.values()):
            if host in known or (resumed and host.registered.is_set()):
                if not host.ready.is_set() and host not in self._attaching:
                    self.beats.prove(host)
            else:
                self.attach(host)
        for host in () if resumed else self._greeting.declared:
            if self._owner.hosts.get(host.agent_id) is not host:  # it left while the node let it in
                detach = frames.Detach(agent_id=host.agent_id, reason="left", env=host.env)
                self._owner.signal(frames.Signal(detach=detach))

    # ---- writing ----

    async def _write(self, outlet: Outlet) -> None:
        owner, stream = self._owner, self._stream
        try:
            while (frame := await outlet.next_frame()) is not None:
                await stream.write(frame)
                owner.frame_taken()
            await stream.half_close()
        except StreamBroken:
            return  # the reader sees the end as well
        except Exception:  # without a writer the stream is deaf and dumb: end it, so that it is dialled anew
            log.exception("the writer of the link to %s failed", self._address)
            stream.cancel()

    def attach(self, host: Host) -> None:
        """Register an agent on the running stream."""
        self._attaching.append(host)
        self._owner.signal(frames.Signal(attach=host.attach()))

    async def leave(self, code: frames.Goodbye.Code.ValueType, reason: str, limit_s: float) -> None:
        """Flush, say goodbye, half-close. The reader goes on until the node has done the same, within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._owner.emptied()
        except TimeoutError:
            log.info("leaving with %d envelopes unacknowledged", self._link.waiting + self._link.unacked)
        self._say_goodbye(code, reason)

    def _say_goodbye(self, code: frames.Goodbye.Code.ValueType, reason: str) -> None:
        if self._outlet is None:
            self._stream.cancel()
            return
        self.reason = self.reason or reason or "goodbye"
        self._link.signal(frames.Signal(goodbye=frames.Goodbye(code=code, reason=reason)))
        self._outlet.close()
        self._end_within(GOODBYE_TIMEOUT_S)

    # ---- reading ----

    def _frame(self, data: bytes) -> bool:
        """Act on one stream message. False when the stream makes no sense any more."""
        owner = self._owner
        try:
            frame = frames.Frame.FromString(data)
            news = self._link.receive(frame)
        except (DecodeError, LinkError) as error:
            log.warning("the node at %s broke the protocol: %s", self._address, error)
            self._ended = Ended.SCRATCH
            self._say_goodbye(frames.Goodbye.PROTOCOL_ERROR, str(error)[:200])
            return True
        if frame.ack:
            owner.acknowledged()
        if news:
            if frame.signals:
                self._signals(frame)
            envelopes = frame.envelopes
            if envelopes:
                intake.take(owner, envelopes, frame.age_ms)
        outlet = self._outlet
        if outlet is not None:
            outlet.received()
        return True

    def _signals(self, frame: frames.Frame) -> None:
        for signal in frame.signals:
            try:
                self._signal(signal)
            except Exception:  # one signal must not end the link
                log.exception("a signal could not be handled")

    def _signal(self, signal: frames.Signal) -> None:
        owner = self._owner
        match signal.WhichOneof("kind"):
            case "heartbeat_ack":
                self.beats.acknowledged(signal.heartbeat_ack)
            case "stream_credit":
                for host in owner.hosts.values():
                    host.credit(signal.stream_credit)
            case "probe":
                probed = owner.hosts.get(signal.probe.agent_id)
                if probed is not None:
                    self.beats.doubt(probed)
                    probed.probe(signal.probe)
            case "progress":
                owner.calls.on_progress(signal.progress)
            case "attached":
                self._attached(signal.attached)
            case "detached":
                self._detached(signal.detached)
            case "gap":
                owner.topics.on_gap(signal.gap)
            case "unsubscribed":
                owner.topics.on_unsubscribed(signal.unsubscribed)
            case "session_release" | "session_restore":
                sessions.take(owner.hosts, signal)
            case "peers":
                owner.redial.told([peer for peer in signal.peers.addresses if is_address(peer)])
            case "drain":
                self._draining(signal.drain)
            case "goodbye":
                self._goodbye(signal.goodbye)
            case "lookup":
                owner.signal(frames.Signal(found=found(signal.lookup, owner.hosts.values())))
            case "config_update":
                configuring.take(owner.hosts, signal.config_update)

    def _attached(self, attached: frames.Attached) -> None:
        if not self._attaching:
            return
        host = self._attaching.popleft()
        host.attached(attached)
        if attached.HasField("error"):
            self._refused(attached.error)
        if not host.ready.is_set():
            self.beats.prove(host)

    def _detached(self, detached: frames.Detached) -> None:
        if detached.incarnation == incarnation():
            return  # our own newer attachment: nobody else has taken the place
        if detached.code == frames.Goodbye.REPLACED:
            self._owner.replaced(detached.agent_id, detached.reason)
            return
        host = self._owner.hosts.get(detached.agent_id)
        if host is None:
            return
        if detached.code == frames.Goodbye.DRAINED:
            draining.dismissed(host, detached.reason)
        elif host.let_go is not None:
            host.let_go.set()
        else:
            host.lost(detached.reason)

    # ---- ends ----

    def _goodbye(self, goodbye: frames.Goodbye) -> None:
        codes = frames.Goodbye
        name = codes.Code.Name(goodbye.code) if goodbye.code in codes.Code.values() else f"code {goodbye.code}"
        self.reason = f"the node says goodbye: {name} {goodbye.reason}".rstrip()
        if self._outlet is not None:  # else nothing was sent on this stream, and this goodbye acknowledges nothing
            self._owner.calls.not_taken()
        self._ended = ending.by_goodbye(goodbye, self._owner.elsewhere, incarnation()) or self._ended
        if goodbye.code == codes.PROTOCOL_ERROR:
            log.error("%s", self.reason)
        elif goodbye.code == codes.REPLACED and goodbye.incarnation != incarnation():
            for agent_id in list(self._owner.hosts):
                self._owner.replaced(agent_id, goodbye.reason)
        if self._outlet is not None:
            self._outlet.close()
        self._end_within(GOODBYE_TIMEOUT_S)

    def _draining(self, order: frames.Drain) -> None:
        owner = self._owner
        if order.agent_id:
            host = owner.hosts.get(order.agent_id)
            if host is not None:
                draining.ordered(host, order)
            return
        self.peers = [peer for peer in order.peers if is_address(peer)]
        self.leaves_s = order.deadline_ms / 1000
        owner.leaving = True
        log.info("the node at %s is leaving", self._address)
        if moving.goes(owner, self.peers):
            self._go()

    def _refused(self, error: Error) -> None:
        self._refused_since = self._refused_since or boot_time()
        if moving.turned_away(self._owner, error, boot_time() - self._refused_since):
            log.info("the node at %s lets no agent in: trying another", self._address)
            self._go()

    def _go(self) -> None:
        if self._move is None:
            self._move = self._owner.loop.create_task(self._follow(), name="agent_sdk move")

    async def _follow(self) -> None:
        """Go to another node: this one is left only when that one has let us in."""
        owner = self._owner
        await moving.free(owner, self.leaves_s if self.peers else None)
        await owner.dialler.enter_another(self._address, self.peers, self.leaves_s)
        if not owner.homeless:
            await asyncio.sleep(moving.SEEN_S)
        self._ended = Ended.MOVED
        if owner.calls.under_way or not owner.homeless:  # a goodbye would cancel the ones and count the others as gone
            self.reason = "moved to another node"
            self._stream.cancel()
        else:
            await self.leave(frames.Goodbye.NORMAL, "moving to another node", GOODBYE_TIMEOUT_S)

    def _end_within(self, limit_s: float) -> None:
        if self._limit is None:
            self._limit = self._owner.loop.call_later(limit_s, self._stream.cancel)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _silent(self) -> None:
        self.reason = "nothing heard of the node for 3 heartbeats"
        self._stream.cancel()
