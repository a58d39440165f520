"""What the node knows of a request that it owns, of who waits for it, and of the agent that works on it.

One `Request` is one message key in flight. It has one deadline for each `Waiter` (a repeated message joins as one),
and at most one current attempt: the `Attachment` it was given to and the link item that carried it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from agentreach.v1.error_pb2 import Error
from agentreach.wire.limits import STREAM_CREDIT_INITIAL
from agentreach.wire.outbox import Item
from reach.core.moving import UNKNOWN
from reach.core.writing import recipient_fields

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.agents import Agent
    from reach.core.brought import Held
    from reach.core.drains import Drain
    from reach.core.lanes import Lane
    from reach.core.order import Line
    from reach.core.peers import Peer
    from reach.core.quotas import Account
    from reach.core.stats import TypeStats
    from reach.core.trace import Stage as TraceStage
    from reach.core.visiting import NodePort

NO_ANCESTORS: Final[frozenset[str]] = frozenset()
NO_AGENTS: Final[frozenset[str]] = frozenset()
NOTES_MAX: Final = 60  # stages of one message besides the usual ones

MessageKey = tuple[str, str, str, str]
"""(tenant, principal, env, message_id)."""


class Port(Protocol):
    """Where the replies of a request go: a link's outbox, or a unary or streaming call of the gRPC server."""

    @property
    def streaming(self) -> bool:
        """True if it takes a reply item by item; False if it wants one final reply."""
        ...

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Take one RESPONSE, a serialised Envelope; `final` False: an item of a streamed one.

        Returns the link item by which its acknowledgement can be seen, if there is one.
        """
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
    QUEUED = "queued"  # in its session's lane, or for a slot of its selector
    BETWEEN = "between"  # two attempts: one failed, the next has its time
    DELIVERED = "delivered"  # in the outbox of the agent's link or beyond
    SETTLED = "settled"  # answered; the slot waits for the agent to confirm the end


class Request:
    """A request in flight. Times are the node's boot clock, in seconds.

    What most requests never set is a default of the class: making one is on every message's way.
    """

    agent: Agent | None = None
    attachment: Attachment | None = None
    agent_type = ""
    attempt = 0
    data = b""
    """The envelope as delivered, serialised. (The parsed one would keep its whole frame in memory.)"""
    digest = b""
    """Of its content, once `data` was let go."""
    item: Item | None = None
    delivered_at = 0.0
    started = False
    failed = False
    """It ended with an error."""
    items = 0
    """Items of a streamed reply so far."""
    items_at = 0.0
    repeats = 0
    """Items that come once more: the agent begins again with all that it keeps, because it has moved."""
    credit: int
    """Items that all who wait will take: what the agent was told."""
    epoch = 0
    session_event = 0
    strict_session = False
    fenced = False
    """Its session went on without it: what its agent still answers is of a former owner."""
    lane: Lane | None = None
    lane_place = 0
    """Which message of its session it is, from 1, as this node counts."""
    node_made_id = False
    holds_slot = False
    reentrant = False
    ancestors: frozenset[str]
    parent: Lineage | None = None
    """The call this one was made from."""
    parent_message_id = ""
    routed = ""
    """By what policy, from how many."""
    queue_us = 0
    handler_us = 0
    reply: Item | None = None
    """The reply on its caller's link, while a fresh id's outcome is kept for its acknowledgement only."""
    notes: tuple[TraceStage, ...] = ()
    """Stages besides the usual ones, for the trace."""
    type_stats: TypeStats | None = None
    transport_s: float | None = None
    handled_s: float | None = None
    timer: Token | None = None
    lost_at = 0.0
    """When the agent's link was cut under this attempt; 0 while it is up."""
    # What follows is of those that need more than one attempt, or wait for their first.
    retriable = True
    """False where another agent cannot know the answer: the one it is sent to has it."""
    attempt_until = 0.0
    """When the time of the current attempt is over; 0: it has all that is left."""
    retry_at = 0.0
    """When the next attempt may be made, or the excluded ones are thought of again; 0: nothing is planned."""
    excluded: frozenset[str]
    """Agents that failed it."""
    same_at = 0.0
    """From when on one of these may get it again; 0: never."""
    fruitless = 0
    """How often nobody was there for its next attempt."""
    looked_up = False
    """The store was asked for the agent that it names, and has answered."""
    ran = False
    """An earlier attempt may have executed."""
    judged = False
    """The breaker of its current agent has been told."""
    last_error: Error | None = None
    """What the attempt before ended with."""
    budgeted: Attachment | None = None
    """Where the retry budget counts its current attempt."""
    in_queue = False
    """It waits for a slot in `State.queue`."""
    # What follows is of requests that pass two nodes.
    visitor: NodePort | None = None
    """At the agent's home: the entry node that waits for it."""
    verdict = 0
    """At the agent's home: the `AttemptState` that its end is told as; 0: as a reply."""
    forgotten = False
    """At the entry: the home that had accepted it was started anew."""
    tied = False
    """It was sent again to a process that had it already, and may have run it: nobody else can be given it."""
    streams_of: Account | None = None
    """Whose streamed reply it counts as."""
    relayed = False
    """It was given to the node that owns its message; `agent` stands for that node."""
    line: Line | None = None
    """Where it waits, with others of its session, until it is known whether they have run."""
    inquired = False
    """Others were asked whether they have it."""
    refusals = 0
    """At the entry: how often a home refused it."""

    def __init__(
        self,
        number: int,
        key: MessageKey,
        entry: bytes,
        received: float,
        deadline: float,
        waiter: Waiter,
        trace_id: str,
        source: str,
        priority: int,
        fresh: bool,
        idempotent: bool,
    ) -> None:
        self.number = number
        self.key = key
        self.message_id = key[3]
        self.entry = entry
        self.received = received
        self.deadline = deadline
        self.stage = Stage.ADMITTED
        self.waiters = [waiter]
        self.trace_id = trace_id
        self.source = source
        self.priority = priority
        self.fresh = fresh
        self.idempotent = idempotent
        self.credit = STREAM_CREDIT_INITIAL
        self.ancestors = NO_ANCESTORS
        self.excluded = NO_AGENTS

    @property
    def waits_at_home(self) -> bool:
        """It is a session's message for an agent of another node: until it is started it waits for others there."""
        return self.lane is not None and self.attachment is not None and self.attachment.remote

    @property
    def is_settled(self) -> bool:
        """True once its outcome was told."""
        return self.stage is Stage.SETTLED

    def note(self, name: str, at: float, detail: str = "") -> None:
        """Add a stage to its trace; a peer that repeats itself for ever is not heard for ever."""
        if len(self.notes) < NOTES_MAX:
            self.notes += ((name, at, self.attempt, detail),)


class Attachment:
    """An agent on a link: what the node must know to deliver to it and to judge it."""

    __slots__ = (
        "agent",
        "attached_at",
        "attempts",
        "departs",
        "drain",
        "going_on",
        "held",
        "hooks",
        "keeps_sessions",
        "lanes_waiting",
        "look_at",
        "missed_probes",
        "moving",
        "overdue",
        "peer",
        "pinned",
        "probe_nonce",
        "probe_sent_at",
        "probed_at",
        "proven",
        "recipient",
        "remote",
        "said_status",
        "timer",
        "to_move",
        "unreachable_since",
    )

    def __init__(self, agent: Agent, peer: Peer, now: float, *, remote: bool = False) -> None:
        self.agent = agent
        self.peer = peer
        self.remote = remote
        """It is attached to another node, and `peer` is the link to that."""
        self.recipient = recipient_fields(agent.agent_id, agent.principal)
        self.attached_at = now
        self.attempts: dict[int, Request] = {}
        self.held: dict[str, Held] = {}
        """By message_id: what it runs for another life of this node, or of this link."""
        self.lanes_waiting: deque[Lane] = deque()
        """Lanes of this owner's sessions that wait for a slot, served in turn."""
        self.pinned: dict[Lane, None] = {}
        """Its sessions, in the order in which they came."""
        self.hooks = UNKNOWN
        """Whether it can hand its sessions over, as far as that is known."""
        self.moving: dict[Lane, None] = {}
        """Sessions on their way from it to others."""
        self.to_move: OrderedDict[Lane, None] = OrderedDict()
        """It leaves: those that are to go, in that order."""
        self.going_on = False
        self.keeps_sessions = False
        """It is DRAINING because its process goes to another node, with them."""
        self.departs = ""
        """Why it goes as soon as its sessions have."""
        self.overdue: Item | None = None
        """A delivery that was not acknowledged in time: no new work until it is."""
        self.proven = False
        """A probe was answered: it is no longer starting."""
        self.said_status = 0
        """The status the process itself reported last; 0 while it has said none."""
        self.probe_nonce = 0
        self.probe_sent_at = 0.0
        """When the unanswered probe was sent; 0 when none is under way."""
        self.probed_at = 0.0
        self.missed_probes = 0
        self.unreachable_since = 0.0
        self.drain: Drain | None = None
        """An operator's order to leave."""
        self.timer: Token | None = None
        self.look_at = 0.0
        """When it is looked after next."""
