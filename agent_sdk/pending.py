"""One request under way: what is known of it, who else waits for it, and where its items go.

Nothing here decides anything; the table of these, and how each ends, is `calls`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from agent_sdk.errors import ReachError
from agent_sdk.messages import Reply
from agentreach.policy.wheel import Token
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire.limits import STREAM_CREDIT_INITIAL
from agentreach.wire.outbox import Item


class Call:
    """One message_id under way."""

    __slots__ = (
        "collected",
        "content",
        "data",
        "deadline",
        "entry",
        "error",
        "expected",
        "future",
        "granted",
        "item",
        "joined",
        "message_id",
        "priority",
        "reader",
        "session",
        "target",
        "token",
        "trace_id",
    )

    def __init__(
        self, message_id: str, trace_id: str, data: bytes, deadline: float, target: str, future: asyncio.Future[Reply]
    ) -> None:
        self.message_id = message_id
        self.trace_id = trace_id
        self.data = data
        self.deadline = deadline
        self.target = target
        self.future = future
        self.item: Item | None = None
        self.token: Token | None = None
        self.priority = 1
        self.content: tuple[bytes, bytes] | None = None
        """Target and payload, kept where the application chose the id."""
        self.joined: list[Joiner] | None = None
        self.collected: list[Any] | None = None
        """Items of a streamed reply that a plain request gathers."""
        self.expected = 0
        self.granted = STREAM_CREDIT_INITIAL
        self.entry = b""
        self.reader: StreamReader | None = None
        self.session: tuple[bytes, str] | None = None

    @property
    def may_have_executed(self) -> bool:
        """True once the request was given to the transport."""
        item = self.item
        return item is not None and (item.seq != 0 or item.accepted or item.doubtful)


class Joiner:
    """Another waiter for a call of the same message_id, with a deadline of its own."""

    __slots__ = ("deadline", "future")

    def __init__(self, deadline: float, future: asyncio.Future[Reply]) -> None:
        self.deadline = deadline
        self.future = future


class StreamReader:
    """The receiving half of a streamed reply. The table holds this, never the iterator its user holds."""

    __slots__ = ("ended", "error", "items", "last", "waiter")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.error: ReachError | None = None
        self.last: pb.Envelope | None = None

    def wake(self) -> None:
        """Something came, or the stream ended."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self, error: ReachError | None) -> None:
        """No more items; `error` if that is not how it should end."""
        self.ended, self.error = True, error
        self.wake()
