"""The process's link to the mesh, until it is closed. Everything the SDK does goes through it.

What is put on the link survives broken streams; `dialler` sees that there is one, `linkstream` runs it. The link knows
who takes what arrives: the pending calls, the hosted agents, the subscriptions. It must be used from the event loop it
was made on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from typing import TYPE_CHECKING

from agent_sdk.calls import Calls
from agent_sdk.dialler import Dialler
from agent_sdk.errors import AgentReplaced, ConnectFailed, ReachError, ShuttingDown
from agent_sdk.greeting import WELCOME_TIMEOUT_S
from agent_sdk.stalls import stall_watch
from agent_sdk.topics import Topics
from agentreach.aio.clock import boot_time
from agentreach.aio.outlet import Outlet
from agentreach.aio.transport import Transport
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire import limits
from agentreach.wire.addresses import is_address
from agentreach.wire.link import Link
from agentreach.wire.outbox import NORMAL, Item

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agent_sdk.signer import Signer
    from agentreach.v1.error_pb2 import Error

log = logging.getLogger("agent_sdk")

CLOSE_TIMEOUT_S = 2.0  # each, for the outbox to be acknowledged and for the node's half of the goodbye
TICK_S = 0.05  # coarseness of deadlines and of progress
ATTACH_AGAIN_S = 0.5  # at least, after the node said that it cannot register an agent now


class MeshLink:
    """One link. `start` it, await `connected`, `close` it."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        transport: Transport,
        metadata: tuple[tuple[str, str], ...] = (),
        *,
        name: str = "",
        env: str = "",
        signer: Signer | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.addresses = addresses
        self.name = name
        self.env = env
        self.pid = os.getpid()
        self.signer = signer
        self.link = Link()
        self.outlet: Outlet | None = None
        self.limits = frames.Limits(payload_bytes_max=limits.PAYLOAD_BYTES_MAX)
        self.caller_id = ""
        self.node_id = ""
        self.resume_token = b""
        self.resumes_at = ""
        """The address of the node that knows the token; it is no other's business."""
        self.hosts: dict[str, Host] = {}
        self.attaching: deque[Host] = deque()
        """Whose registration the node has still to answer, in the order in which it was asked for."""
        self.calls = Calls(self)
        self.topics = Topics(self)
        self.stalls = stall_watch(self.loop)
        self.failure: ReachError | None = None
        """Why the link will never work (again); None while it may."""
        self.closing = False
        self.leaving = False
        """The node is leaving: it takes no new requests. They wait for the next one."""
        self.dialler = Dialler(self, addresses, transport, metadata)
        self.redial = self.dialler.redial
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._emptied: asyncio.Future[None] | None = None
        self._room: deque[asyncio.Future[None]] = deque()
        self._ticker: asyncio.TimerHandle | None = None

    # ---- sending ----

    def send(self, data: bytes, priority: int = NORMAL, now: float = 0.0) -> Item:
        """Queue a serialised envelope. Bounds are kept by `room`; `now` spares the look at the clock."""
        item = self.link.put_bytes(data, now or boot_time(), priority)
        outlet = self.outlet
        if outlet is not None:
            outlet.wake()
        return item

    def signal(self, signal: frames.Signal) -> int:
        """Queue a signal; returns its frame's number, 0 for one without (which is lost while there is no stream)."""
        number = self.link.signal(signal)
        if self.outlet is not None:
            self.outlet.wake()
        return number

    async def room(self) -> None:
        """Wait until the outbox takes another envelope; first come, first served."""
        while self.link.full:
            waiter = self.loop.create_future()
            self._room.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._give_room()
                raise

    def _give_room(self) -> None:
        free = limits.OUTBOX_ENVELOPES_MAX - self.link.waiting
        while self._room and free > 0 and not self.link.full:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def frame_taken(self) -> None:
        """The writer took a frame: the outbox may have room again, or be empty."""
        self._look_whether_empty()
        if self._room:
            self._give_room()

    async def flushed(self, number: int) -> None:
        """Wait until the node has acknowledged the frame of that number, or a restart declared its state anew."""
        if self.link.acknowledged >= number:
            return
        waiter = self.loop.create_future()
        self._flushes.append((number, waiter))
        await waiter

    async def emptied(self) -> None:
        """Wait until nothing waits and nothing is unacknowledged, or the stream has ended."""
        while self.up and not self.link.idle:
            self._emptied = self.loop.create_future()
            await self._emptied

    def _look_whether_empty(self) -> None:
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def acknowledged(self) -> None:
        """An ack came in."""
        self._look_whether_empty()
        acknowledged = self.link.acknowledged
        while self._flushes and self._flushes[0][0] <= acknowledged:
            waiter = self._flushes.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)
        if self._room:
            self._give_room()

    # ---- life ----

    def start(self) -> None:
        """Begin dialling."""
        if self._task is None:
            self._task = self.loop.create_task(self.dialler.run(), name="agent_sdk link")

    async def connected(self, timeout_s: float | None) -> None:
        """Wait until a node has welcomed this process. Raises `ConnectFailed`, or what the node refused it with.

        `timeout_s` is for a node to be reached; one that is may take its time: new agents wait for a leader.
        """
        try:
            try:
                await self._welcomed(timeout_s)
            except TimeoutError:
                if self.dialler.stream is None:
                    raise
                await self._welcomed(WELCOME_TIMEOUT_S)
        except TimeoutError:
            raise ConnectFailed(
                f"no node reached at {', '.join(self.addresses)} ({self.dialler.trouble or 'no answer'}); "
                "start one with: reach serve",
                retryable=True,
            ) from None
        if self.failure is not None:
            raise self.failure

    async def _welcomed(self, within_s: float | None) -> None:
        async with asyncio.timeout(within_s):
            while self.failure is None and not self._up.is_set():
                await self._up.wait()

    @property
    def up(self) -> bool:
        """True while a node's welcome stands."""
        return self.outlet is not None

    async def close(self) -> None:
        """Leave politely: what waits is sent and acknowledged, then goodbye. Bounded; afterwards nothing is pending."""
        self.closing = True
        self.dialler.stop()
        self.failure = self.failure or ShuttingDown("this client is closed")
        if self._task is not None:
            if self.dialler.stream is not None and self.up:
                await self.dialler.stream.leave(frames.Goodbye.NORMAL, "", CLOSE_TIMEOUT_S)
            else:
                self._task.cancel()
            await asyncio.wait([self._task], timeout=2 * CLOSE_TIMEOUT_S)
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task])
        self._give_up(self.failure)

    def welcomed(self, welcome: frames.Welcome, outlet: Outlet) -> None:
        """A stream's hello was answered; called before anything else of that stream is sent."""
        self.outlet = outlet
        self.caller_id, self.node_id = welcome.caller_id, welcome.node_id
        self.resume_token, self.resumes_at = welcome.resume_token, self.redial.address
        if welcome.HasField("limits"):
            self.limits = welcome.limits
        peers = [peer for peer in welcome.peers if is_address(peer)]
        self.redial.connected(boot_time(), peers, resumed=welcome.resumed)
        self.dialler.welcomed()
        self._up.set()

    def restarted(self) -> None:
        """The node has forgotten this link: number from 1, and send what is still wanted, in order."""
        self.leaving = False
        self.calls.before_restart()
        self.link.restart()
        self.calls.after_restart(was_up=bool(self.node_id))
        self.topics.declare()
        for host in self.hosts.values():
            host.registered.clear()
            host.ready.clear()
        flushes, self._flushes = self._flushes, deque()
        for _, waiter in flushes:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def elsewhere(self) -> bool:
        """True when there is another node to go to."""
        return self.redial.elsewhere

    @property
    def homeless(self) -> bool:
        """True when there is another node to go to, and this one has registered none of our agents."""
        return self.elsewhere and not any(host.registered.is_set() for host in self.hosts.values())

    def down(self) -> None:
        """The stream has ended."""
        if self.outlet is not None:
            self.outlet.abandon()
            self.outlet = None
        self._look_whether_empty()
        self.link.cut()
        if self.failure is None:
            self._up.clear()

    def fail(self, failure: ReachError) -> None:
        """The link will never work (again): everybody who waits is told."""
        self.dialler.stop()
        self._give_up(failure)

    def _give_up(self, failure: ReachError) -> None:
        self.failure = self.failure or failure
        self.calls.fail_all(failure)
        self.topics.fail_all(failure)
        for host in list(self.hosts.values()):
            host.ended(failure)
        for _, waiter in self._flushes:
            if not waiter.done():
                waiter.set_result(None)
        self._flushes.clear()
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._up.set()

    @property
    def busy(self) -> bool:
        """True while an agent of this process handles something."""
        return any(host.busy for host in self.hosts.values())

    # ---- agents ----

    def attach(self, host: Host) -> None:
        """Host an agent from now on. Its id must be free in this process."""
        if host.agent_id in self.hosts:
            raise ValueError(f"this process already serves {host.agent_id}")
        self.hosts[host.agent_id] = host
        if self.up and self.dialler.stream is not None:
            self.dialler.stream.attach(host)

    def attach_again(self, host: Host) -> None:
        """Register an agent anew that the node has let go of."""
        if self.up and self.dialler.stream is not None:
            self.dialler.stream.attach(host)

    def attach_later(self, host: Host, error: Error) -> None:
        """The node cannot register an agent now: ask again, for as long as it takes."""
        wait_s = max(error.retry_after_ms / 1000, ATTACH_AGAIN_S) * (1 + random.random())
        log.warning("%s is not registered yet, trying again in %.1f s: %s", host.agent_id, wait_s, error.message)
        self.loop.call_later(wait_s, self._attach_if_wanted, host)

    def _attach_if_wanted(self, host: Host) -> None:
        waits = self.hosts.get(host.agent_id) is host and not host.registered.is_set()
        if waits and host not in self.attaching:  # it may have been declared to another node meanwhile
            self.attach_again(host)

    def beat(self) -> None:
        """Send a heartbeat soon if the last one told of more leftovers than there are."""
        if self.up and self.dialler.stream is not None:
            self.dialler.stream.beats.soon()

    def probed(self, host: Host) -> None:
        """An agent's answer to a probe was put on the link."""
        if not host.ready.is_set() and self.up and self.dialler.stream is not None:
            self.dialler.stream.beats.prove(host)

    def detach(self, host: Host, reason: str) -> int:
        """Take an agent off the mesh; returns the number of the frame that says so, 0 if none goes out now."""
        if self.hosts.get(host.agent_id) is not host:
            return 0
        del self.hosts[host.agent_id]
        detach = frames.Detach(agent_id=host.agent_id, reason=reason, env=host.env)
        number = self.signal(frames.Signal(detach=detach))  # without a stream: after the resume, or never needed
        return number if self.up else 0

    def replaced(self, agent_id: str, reason: str) -> None:
        """Another process has taken an agent's place."""
        host = self.hosts.pop(agent_id, None)
        if host is not None:
            host.ended(AgentReplaced(agent_id, reason))

    # ---- time ----

    def tick_on(self) -> None:
        """See that deadlines and progress are looked after while there are any."""
        if self._ticker is None and not self.closing:
            self._ticker = self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        now = boot_time()
        again = self.calls.tick(now)
        for host in list(self.hosts.values()):
            again |= host.tick(now)
        if again:
            self.tick_on()
