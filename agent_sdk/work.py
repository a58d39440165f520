"""One delivered message while it is handled."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import TYPE_CHECKING

from agent_sdk.handlers import Handler
from agent_sdk.responses import Waiter
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.frame_pb2 import MessageKey
from agentreach.wire.names import DEFAULT_ENV

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agentreach.v1.frame_pb2 import SessionState

Key = tuple[str, str, str, str]
"""tenant, principal, env, message_id: what makes two copies the same message."""


def key_of(named: pb.Envelope | MessageKey) -> Key:
    """The key of a message, or of one that a node names: an env that is left out is the default one."""
    return named.tenant, named.principal, named.env or DEFAULT_ENV, named.message_id


class Work:
    """A message, who waits for its answer, and how far it came."""

    __slots__ = (
        "__weakref__",
        "admitted",
        "body",
        "cancelled",
        "checkpoint",
        "credit",
        "credit_waiter",
        "deadline",
        "ended",
        "envelope",
        "fresh",
        "handler",
        "host",
        "items",
        "items_bytes",
        "key",
        "lane",
        "message_id",
        "place",
        "received",
        "replies",
        "session",
        "started",
        "task",
        "tell",
        "waiters",
    )

    def __init__(
        self,
        host: Host,
        key: Key,
        envelope: pb.Envelope,
        handler: Handler,
        received: float,
        deadline: float,
        fresh: bool = False,
    ) -> None:
        self.host = host
        self.key = key
        self.message_id = key[3]
        self.envelope = envelope
        self.fresh = fresh
        self.body: bytes | None = None
        """The payload's body once it was read: each reading of it is a copy."""
        self.handler = handler
        self.received = received
        self.deadline = deadline
        self.waiters: list[Waiter] = []
        self.replies = True
        """False for an event: nobody waits."""
        self.session: Hashable | None = None
        self.lane = 1
        self.admitted = False
        self.place = 0
        self.started = 0.0
        self.ended = False
        self.cancelled = False
        self.tell = False
        """True once it has waited so long that its start is news."""
        self.task: asyncio.Task[None] | None = None
        self.items: list[bytes] | None = None
        """Items of a streamed reply so far, for a waiter that joins; None once they were too many to keep."""
        self.items_bytes = 0
        self.checkpoint: SessionState | None = None
        """The state of its session that is to be kept with its answer."""
        self.credit = 0
        self.credit_waiter: asyncio.Future[None] | None = None

    @property
    def trace_id(self) -> str:
        """The trace the message belongs to."""
        return self.envelope.trace_id

    @property
    def lineage(self) -> bytes:
        """What is echoed on everything sent while handling it."""
        return self.envelope.lineage
