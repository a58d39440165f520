"""What agents brought along when they attached, and the requests that wait for what may still come. Facts only.

What is made of them is decided in `returning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.policy.seen import Seen
from agentreach.v1.envelope_pb2 import Target
from agentreach.wire import limits

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.requests import Attachment, MessageKey, Request

HELD_MAX = 100_000  # messages that agents said to hold; beyond, the oldest are forgotten and their slots given back
HELD_S = limits.TIMEOUT_MS_MAX / 1000  # no request lives longer, and no agent's table of answers


class Held:
    """A message that an agent brought along."""

    __slots__ = ("attachment", "key", "running")

    def __init__(self, key: MessageKey, attachment: Attachment, running: bool) -> None:
        self.key = key
        self.attachment = attachment
        self.running = running
        """It takes a slot. False: it was answered, and the agent has the answer."""


class Parked:
    """A resent request that waits for its agent to be back."""

    __slots__ = ("request", "target", "target_data")

    def __init__(self, request: Request, target: Target) -> None:
        self.request = request
        self.target = Target()
        self.target.CopyFrom(target)
        self.target_data = target.SerializeToString()


class Returning:
    """What was brought along, and what waits."""

    __slots__ = ("ended", "held", "parked", "started_unix_ms", "timer", "until")

    def __init__(self, now: float, unix: float, window_s: float) -> None:
        self.until = now + window_s
        """Up to here resent requests wait."""
        self.started_unix_ms = int(unix * 1000)
        self.ended: list[Held] = []
        """Too old: their slots are still to be given back."""
        self.held: Seen[MessageKey, Held] = Seen(HELD_MAX, HELD_MAX, HELD_S, lambda _, held: self.ended.append(held))
        self.parked: dict[int, Parked] = {}
        self.timer: Token | None = None
