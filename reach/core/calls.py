"""A request that came by Invoke, InvokeStream or Publish: a `Port` whose other end is a coroutine of the server."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.link import Item

if TYPE_CHECKING:
    from reach.core.state import State


class Call:
    """Replies of one call, in order; `done` once the final one is among them."""

    __slots__ = ("done", "env", "message_id", "replies", "state", "streaming", "waiter")

    def __init__(self, state: State, *, streaming: bool) -> None:
        self.state = state
        self.streaming = streaming
        self.message_id = ""
        self.env = ""
        self.replies: deque[Envelope] = deque()
        self.done = False
        self.waiter: object = None
        """What the engine wakes when a reply comes; opaque to the core."""

    def deliver(self, reply: Envelope, priority: int) -> Item | None:
        """Keep a reply for the coroutine."""
        copy = Envelope()
        copy.CopyFrom(reply)  # the frame it came in would stay in memory with it, and others may get the same object
        self.replies.append(copy)
        self.done = self.done or not reply.more
        self.state.calls.append(self)
        return None
