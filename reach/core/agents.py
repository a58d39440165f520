"""One attached agent as the node knows it: its registration, its live state, and which tier of choice it is in.

An `Agent` is mutable and compared by identity: one object is one attachment. What selectors look at (type, env,
capabilities, labels, version) and the priority do not change during an attachment; a new registration is a new
`Agent`. After changing anything else that a decision looks at, the owner calls `Directory.changed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.v1.registry_pb2 import AgentRecord, AgentStatus
from reach.core.breaker import Breaker
from reach.core.latency import Latency

if TYPE_CHECKING:
    from reach.core.pool import Pool

STARTING: Final = int(AgentStatus.STARTING)
HEALTHY: Final = int(AgentStatus.HEALTHY)
DEGRADED: Final = int(AgentStatus.DEGRADED)
DRAINING: Final = int(AgentStatus.DRAINING)
UNREACHABLE: Final = int(AgentStatus.UNREACHABLE)
STATUSES: Final = UNREACHABLE + 1

DEFAULT_ENV: Final = "production"
DEFAULT_WEIGHT: Final = 100
WARMTH_MIN: Final = 0.1  # a new instance starts with a tenth of its weight

# Tiers, in the order in which a decision looks at them. Only the first four can be given work.
READY: Final = 0  # healthy, a slot free
READY_AVOIDED: Final = 1  # the same, but it answered OVERLOADED and its retry_after has not passed
WEAK: Final = 2  # degraded, a slot free
WEAK_AVOIDED: Final = 3
FULL: Final = 4  # usable, but no slot free, or its link is saturated
NOT_STARTED: Final = 5
LEAVING: Final = 6
LOST: Final = 7
BROKEN: Final = 8  # its breaker is open, or its one probe is under way
TIERS: Final = 9
USABLE_TIERS: Final = 4

_NEVER_FULL: Final = -1
_WORKING: Final = (HEALTHY, DEGRADED)


def normal_capability(name: str) -> str:
    """The form in which capabilities are compared: lower case, `-` = `_`."""
    return name.strip().lower().replace("-", "_")


class Agent:
    """One attached instance. Times are seconds; `*_at` by the wall clock, `warm_since` and `avoid_until` monotonic."""

    __slots__ = (
        "agent_id",
        "agent_type",
        "avoid_until",
        "breaker",
        "capabilities",
        "config_version",
        "description",
        "endpoints",
        "env",
        "full_at",
        "generation",
        "heartbeat_at",
        "in_flight",
        "incarnation",
        "labels",
        "latency",
        "lease_ttl_s",
        "leftovers",
        "link",
        "load",
        "max_concurrency",
        "node_id",
        "offers",
        "pinned_sessions",
        "pools",
        "principal",
        "priority",
        "recent_failures",
        "reentrant",
        "registered_at",
        "saturated",
        "session_concurrency",
        "shut",
        "status",
        "status_placed",
        "suspect",
        "tenant",
        "tier",
        "version",
        "warm_since",
        "weight",
        "weight_placed",
    )

    def __init__(self, agent_id: str, *, tenant: str = "", env: str = DEFAULT_ENV) -> None:
        self.agent_id = agent_id
        self.agent_type = agent_id.partition("/")[0]
        self.tenant = tenant
        self.principal = ""
        """Who registered it."""
        self.env = env
        self.version = ""
        self.capabilities: frozenset[str] = frozenset()
        """As the agent declared them, normalised."""
        self.offers: frozenset[str] = frozenset()
        """The same with the configured aliases applied; set by the directory, looked at by selectors."""
        self.labels: dict[str, str] = {}
        self.weight = DEFAULT_WEIGHT
        self.priority = 0
        self.max_concurrency = 0
        """Slots; 0 = unlimited."""
        self.session_concurrency = 1
        self.reentrant = False
        self.description = ""
        self.endpoints: tuple[str, ...] = ()
        self.incarnation = b""
        self.generation = 0
        self.node_id = ""
        self.lease_ttl_s = 0.0
        self.registered_at = 0.0
        self.heartbeat_at = 0.0
        self.config_version = 0
        self.status = STARTING
        self.in_flight = 0
        self.load = 0.0
        self.recent_failures = 0
        self.leftovers = 0
        """Handlers that outlived their cancel and still take a slot inside the agent."""
        self.warm_since = float("-inf")
        """When it became usable for the first time; minus infinity = long ago."""
        self.avoid_until = 0.0
        """Chosen only when there is no other before this time (it answered OVERLOADED); 0 = not avoided."""
        self.saturated = False
        """Its link takes nothing more (outbox full, a delivery unacknowledged): requests see it as full."""
        self.breaker: Breaker | None = None
        """From its first outcome on; asked and told by `breakers`, which keeps the two flags below."""
        self.latency: Latency | None = None
        self.suspect = False
        """Its breaker is not closed."""
        self.shut = False
        """Its breaker admits nothing now."""
        self.pinned_sessions = 0
        self.link: object = None
        # Kept by the directory and its pools; nobody else writes these.
        self.pools: list[Pool] = []
        self.tier = NOT_STARTED
        self.full_at = _NEVER_FULL
        self.status_placed = STARTING
        self.weight_placed = DEFAULT_WEIGHT

    def __repr__(self) -> str:
        return (
            f"<Agent {self.agent_id} {AgentStatus.Name(AgentStatus.ValueType(self.status))} {self.in_flight} in flight>"
        )

    @classmethod
    def from_record(cls, record: AgentRecord) -> Agent:
        """Take over a registration. Missing values get their defaults; a weight of 0 counts as 1."""
        agent = cls(record.agent_id, tenant=record.tenant, env=record.env or DEFAULT_ENV)
        agent.principal = record.principal
        agent.agent_type = (record.agent_type or agent.agent_type).lower()
        agent.version = record.version
        agent.capabilities = frozenset(map(normal_capability, record.capabilities))
        agent.offers = agent.capabilities
        agent.labels = dict(record.labels)
        agent.weight = max(1, record.weight) if record.HasField("weight") else DEFAULT_WEIGHT
        agent.priority = record.priority
        agent.max_concurrency = record.max_concurrency
        agent.session_concurrency = max(1, record.session_concurrency)
        agent.reentrant = record.reentrant
        agent.description = record.description
        agent.endpoints = tuple(record.endpoints)
        agent.incarnation = record.incarnation
        agent.generation = record.generation
        agent.node_id = record.node_id
        agent.lease_ttl_s = record.lease_ttl_s
        agent.registered_at = _seconds(record.registered_at)
        agent.heartbeat_at = _seconds(record.heartbeat_at)
        agent.config_version = record.config_version
        agent.status = int(record.status) or STARTING
        agent.in_flight = record.in_flight
        agent.load = record.load
        return agent

    def to_record(self) -> AgentRecord:
        """The complete record, live state included."""
        return AgentRecord(
            agent_id=self.agent_id,
            agent_type=self.agent_type,
            tenant=self.tenant,
            principal=self.principal,
            env=self.env,
            version=self.version,
            capabilities=sorted(self.capabilities),
            labels=self.labels,
            endpoints=self.endpoints,
            status=AgentStatus.ValueType(self.status),
            weight=self.weight,
            priority=self.priority,
            max_concurrency=self.max_concurrency,
            session_concurrency=self.session_concurrency,
            reentrant=self.reentrant,
            description=self.description,
            node_id=self.node_id,
            incarnation=self.incarnation,
            generation=self.generation,
            lease_ttl_s=self.lease_ttl_s,
            registered_at=_timestamp(self.registered_at),
            heartbeat_at=_timestamp(self.heartbeat_at),
            load=self.load,
            in_flight=self.in_flight,
            config_version=self.config_version,
        )

    @property
    def free_slots(self) -> int | None:
        """Slots that are free now; None = unlimited. Leftovers take a slot each."""
        if not self.max_concurrency:
            return None
        return max(0, self.max_concurrency - self.leftovers - self.in_flight)

    @property
    def has_slot(self) -> bool:
        """Whether one more request may be given to it, as far as its slots go."""
        return not self.max_concurrency or self.in_flight + self.leftovers < self.max_concurrency

    def warmth(self, now: float, warm_up_s: float) -> float:
        """Its share of its weight: from 0.1 when it became usable, linearly to 1.0 after `warm_up_s` (0 = off)."""
        age_s = now - self.warm_since
        if warm_up_s <= 0 or age_s >= warm_up_s:
            return 1.0
        return max(WARMTH_MIN, WARMTH_MIN + (1.0 - WARMTH_MIN) * age_s / warm_up_s)

    def tier_now(self) -> int:
        """The tier that its present state puts it in."""
        status = self.status
        if status in _WORKING:
            if self.shut:
                return BROKEN
            if self.saturated or not self.has_slot:
                return FULL
            tier = READY if status == HEALTHY else WEAK
            return tier + 1 if self.avoid_until > 0 else tier
        if status == DRAINING:
            return LEAVING
        return LOST if status == UNREACHABLE else NOT_STARTED

    def full_at_now(self) -> int:
        """The number in flight at which its last slot is taken; -1 = never."""
        return max(0, self.max_concurrency - self.leftovers) if self.max_concurrency else _NEVER_FULL


def _seconds(stamp: Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9


def _timestamp(seconds: float) -> Timestamp | None:
    if seconds <= 0:
        return None
    micros = round(seconds * 1e6)  # a double holds today's seconds to a fraction of a microsecond
    return Timestamp(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)
