"""What the node knows of a request that it owns, of who waits for it, and of the agent that works on it.

One `Request` is one message key in flight. It has one deadline for each `Waiter` (a repeated message joins as one),
and at most one current attempt: the `Attachment` it was given to and the link item that carried it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.limits import STREAM_CREDIT_INITIAL
from agentreach.wire.link import Item

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.agents import Agent
    from reach.core.peers import Peer
    from reach.core.sessions import Lane
    from reach.core.stats import TypeStats
    from reach.core.trace import Traced

MessageKey = tuple[str, str, str, str]
"""(tenant, principal, env, message_id)."""


class Port(Protocol):
    """Where the replies of a request go: a link's outbox, or a unary or streaming call of the gRPC server."""

    @property
    def streaming(self) -> bool:
        """True if it takes a reply item by item; False if it wants one final reply."""
        ...

    def deliver(self, reply: Envelope, priority: int) -> Item | None:
        """Take one RESPONSE. Returns the link item by which its acknowledgement can be seen, if there is one."""
        ...


class Waiter:
    """One who waits for a request's outcome."""

    __slots__ = ("credit", "deadline", "message_id", "port")

    def __init__(self, port: Port, message_id: str, deadline: float) -> None:
        self.port = port
        self.message_id = message_id
        self.deadline = deadline
        self.credit = STREAM_CREDIT_INITIAL
        """Items of a streamed reply this one will take, counted from the first."""


class Stage(Enum):
    """How far a request is; decides what an error says and whether it may have executed."""

    ADMITTED = "admitted"
    QUEUED = "queued"  # in its session's lane
    DELIVERED = "delivered"  # in the outbox of the agent's link or beyond
    SETTLED = "settled"  # answered; the slot waits for the agent to confirm the end


class Request:
    """A request in flight. Times are the node's boot clock, in seconds."""

    __slots__ = (
        "agent",
        "agent_type",
        "ancestors",
        "attachment",
        "attempt",
        "credit",
        "data",
        "deadline",
        "delivered_at",
        "entry",
        "epoch",
        "fresh",
        "handled_s",
        "holds_slot",
        "idempotent",
        "item",
        "items",
        "items_at",
        "key",
        "lane",
        "lost_at",
        "message_id",
        "node_made_id",
        "number",
        "parent",
        "priority",
        "received",
        "reentrant",
        "session_event",
        "stage",
        "started",
        "strict_session",
        "timer",
        "trace_id",
        "traced",
        "transport_s",
        "type_stats",
        "waiters",
    )

    def __init__(self, number: int, key: MessageKey, entry: bytes, received: float, deadline: float) -> None:
        self.number = number
        self.key = key
        self.message_id = key[3]
        self.entry = entry
        self.received = received
        self.deadline = deadline
        self.stage = Stage.ADMITTED
        self.waiters: list[Waiter] = []
        self.agent: Agent | None = None
        self.attachment: Attachment | None = None
        self.agent_type = ""
        self.attempt = 0
        self.data = b""
        """The envelope as delivered, serialised. (The parsed one would keep its whole frame in memory.)"""
        self.item: Item | None = None
        self.delivered_at = 0.0
        self.started = False
        self.items = 0
        """Items of a streamed reply so far."""
        self.items_at = 0.0
        self.credit = STREAM_CREDIT_INITIAL
        """Items that all who wait will take: what the agent was told."""
        self.epoch = 0
        self.session_event = 0
        self.strict_session = False
        self.lane: Lane | None = None
        self.fresh = False
        self.node_made_id = False
        self.idempotent = False
        self.priority = 1
        self.holds_slot = False
        self.reentrant = False
        self.ancestors: frozenset[str] = frozenset()
        self.parent: Lineage | None = None
        """The call this one was made from."""
        self.trace_id = ""
        self.traced: Traced | None = None
        self.type_stats: TypeStats | None = None
        self.transport_s: float | None = None
        self.handled_s: float | None = None
        self.timer: Token | None = None
        self.lost_at = 0.0
        """When the agent's link was cut under this attempt; 0 while it is up."""


class Attachment:
    """An agent on a link: what the node must know to deliver to it and to judge it."""

    __slots__ = (
        "agent",
        "attached_at",
        "attempts",
        "lanes_waiting",
        "missed_probes",
        "overdue",
        "peer",
        "pinned",
        "probe_nonce",
        "probe_sent_at",
        "probed_at",
        "said_status",
        "timer",
        "unreachable_since",
    )

    def __init__(self, agent: Agent, peer: Peer, now: float) -> None:
        self.agent = agent
        self.peer = peer
        self.attached_at = now
        self.attempts: dict[int, Request] = {}
        self.lanes_waiting: deque[Lane] = deque()
        """Lanes of this owner's sessions that wait for a slot, served in turn."""
        self.pinned: set[Lane] = set()
        self.overdue = False
        """A delivery was not acknowledged in time: no new work until it is."""
        self.said_status = 0
        """The status the process itself reported last; 0 while it has said none."""
        self.probe_nonce = 0
        self.probe_sent_at = 0.0
        """When the unanswered probe was sent; 0 when none is under way."""
        self.probed_at = 0.0
        self.missed_probes = 0
        self.unreachable_since = 0.0
        self.timer: Token | None = None
