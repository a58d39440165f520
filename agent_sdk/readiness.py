"""Which agents of a stream the node would route to by now. No I/O, no clock.

A node lets an agent in, probes it, and routes to it once the answer came. It never says so; but signals without a
number are handled in their order, so the acknowledgement of a heartbeat that was sent after the answer proves it. One
heartbeat does for all agents that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sdk.host import Host


class Readiness:
    """The agents of one stream that were let in and are not proven ready, and the heartbeats under way."""

    __slots__ = ("_acknowledged", "_asked", "_sent", "_unproven")

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0
        self._asked = False
        self._unproven: dict[Host, int] = {}
        """By agent: the number of the heartbeat whose acknowledgement proves it."""

    def ask(self, host: Host) -> bool:
        """The next heartbeat shall prove this agent. True if nobody has asked for one yet: see that one is sent."""
        self._unproven[host] = self._sent + 1
        first, self._asked = not self._asked, True
        return first

    def doubt(self, host: Host) -> None:
        """A probe of the agent came: heartbeats that were sent before its answer prove nothing."""
        self._unproven.pop(host, None)

    def sent(self) -> None:
        """A heartbeat was put on the link."""
        self._sent += 1
        self._asked = False

    def acknowledged(self) -> list[Host]:
        """A heartbeat was acknowledged; returns the agents which that proves ready."""
        self._acknowledged += 1
        if not self._unproven:
            return []
        proven = [host for host, number in self._unproven.items() if number <= self._acknowledged]
        for host in proven:
            del self._unproven[host]
        return proven
