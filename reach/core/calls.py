"""A request that came by Invoke, InvokeStream or Publish: a `Port` whose other end is a coroutine of the server."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.outbox import Item
from reach.core.quotas import STREAMS

if TYPE_CHECKING:
    from reach.core.quotas import Account
    from reach.core.state import State


class Call:
    """Replies of one call, in order; `done` once the final one is among them."""

    __slots__ = ("account", "done", "env", "message_id", "replies", "state", "streaming", "waiter")

    def __init__(self, state: State, *, streaming: bool) -> None:
        self.state = state
        self.streaming = streaming
        self.account: Account | None = None
        """Whose stream it counts as, until it is over."""
        self.message_id = ""
        self.env = ""
        self.replies: deque[Envelope] = deque()
        self.done = False
        self.waiter: object = None
        """What the engine wakes when a reply comes; opaque to the core."""

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Keep a reply for the coroutine."""
        self.replies.append(Envelope.FromString(reply))
        self.done = self.done or final
        if final:
            self.let_go()
        self.state.calls.append(self)
        return None

    def let_go(self) -> None:
        """It counts as nobody's stream any more."""
        if self.account is not None:
            self.account.give_back(STREAMS)
            self.account = None
