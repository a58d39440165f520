"""The heartbeats of one stream: when the next is due, what it tells, what its acknowledgement means."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_sdk.readiness import Readiness
from agentreach.aio.clock import boot_time
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire.addresses import is_address

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agent_sdk.link import MeshLink

log = logging.getLogger("agent_sdk")

_SILENT_HEARTBEATS = 3  # nothing heard for so many intervals: the link is dead
_INTERVAL_S = 10.0  # until the node says


class Beats:
    """`begin` it with the welcome, `stop` it with the stream."""

    def __init__(self, owner: MeshLink, attach: Callable[[Host], None], silent: Callable[[], None]) -> None:
        """`attach` registers an agent that the node does not know; `silent` is told of a node that is not heard of."""
        self.heard = boot_time()
        """When the last frame came."""
        self._owner = owner
        self._attach = attach
        self._silent = silent
        self._readiness = Readiness()
        self._interval_s = _INTERVAL_S
        self._timer: asyncio.TimerHandle | None = None
        self._leftovers_told = False

    def every(self, interval_ms: int) -> None:
        """The node says how often; 0: it says nothing."""
        if interval_ms:
            self._interval_s = max(interval_ms, 10) / 1000

    def begin(self) -> None:
        """Send one, and see to the next."""
        owner = self._owner
        now = boot_time()
        if now - self.heard > _SILENT_HEARTBEATS * self._interval_s and not owner.stalls.stall_s(now):
            self._silent()
            return
        loads = [host.load(now) for host in owner.hosts.values()]
        self._leftovers_told = any(load.leftovers for load in loads)
        self._readiness.sent()
        owner.signal(frames.Signal(heartbeat=frames.Heartbeat(agents=loads)))
        self._timer = owner.loop.call_later(self._interval_s, self.begin)

    def stop(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def soon(self) -> None:
        """A handler that outlived its cancel has ended: if the node was told of it, it counts a slot too many."""
        if self._timer is not None and self._leftovers_told:
            self._leftovers_told = False
            self._timer.cancel()
            self._timer = self._owner.loop.call_later(0, self.begin)

    def doubt(self, host: Host) -> None:
        """A probe of the agent came: heartbeats that were sent before its answer prove nothing."""
        self._readiness.doubt(host)

    def prove(self, host: Host) -> None:
        """See that `host.ready` is set once the node would route to the agent."""
        if self._readiness.ask(host):
            self._owner.loop.call_soon(self._ask, self._owner.outlet)

    def _ask(self, outlet: object) -> None:
        if outlet is not None and self._owner.outlet is outlet:
            self._readiness.sent()
            self._owner.signal(frames.Signal(heartbeat=frames.Heartbeat()))

    def acknowledged(self, ack: frames.HeartbeatAck) -> None:
        """The node answers: how often, which agents it does not know, which other nodes there are."""
        owner = self._owner
        self.every(ack.heartbeat_interval_ms)
        owner.redial.told([peer for peer in ack.peers if is_address(peer)])
        for proven in self._readiness.acknowledged():
            proven.ready.set()
        for agent_id in ack.unknown:
            host = owner.hosts.get(agent_id)
            moved = owner.dialler.entered  # it is registered there, and this node has noticed
            if host is not None and host not in owner.attaching and not moved:
                log.warning("the node does not know %s: attaching it again", agent_id)
                self._attach(host)
