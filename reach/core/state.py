"""All that a node's decisions read and write, in one place, and the effects they ask for.

The modules beside this one are functions over a `State`: admission, routing, settlement, sessions, events, attaching,
health. They run synchronously, a whole frame at a time, and leave what must happen outside in `woken`, `calls` and
`effects`, which the engine carries out after each step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from agentreach.policy.wheel import TimerWheel
from agentreach.wire.outbox import Shared
from agentreach.wire.redaction import Redaction, names_of
from reach.core import quotas
from reach.core.answered import AnsweredBook
from reach.core.breaker import Breaker
from reach.core.brought import Parked, Returning
from reach.core.budget import RetryBudget
from reach.core.callback_book import CallbackBook
from reach.core.configs import Configs
from reach.core.dead_letter_book import DeadLetterBook
from reach.core.directory import Directory
from reach.core.effects import Effect, LogLine
from reach.core.fence import Fence
from reach.core.interest import Interests
from reach.core.lineage import LineageKeys
from reach.core.loads import LoadsDue
from reach.core.loops import LoopLimits
from reach.core.rebalance import Balance
from reach.core.replay import Replay
from reach.core.rules import Rules
from reach.core.selector import Aliases
from reach.core.stats import Stats
from reach.core.topics import Topics
from reach.core.trace import TraceBook
from reach.core.unstored import Unstored
from reach.core.vanished import VanishedBook
from reach.core.waitqueue import WaitQueues
from reach.core.wants import Granted, Wants
from reach.core.writing import origin_fields

if TYPE_CHECKING:
    from reach.core.access import Rights
    from reach.core.calls import Call
    from reach.core.claims import Asking, Inquiry
    from reach.core.drains import Drain
    from reach.core.lanes import Lane, LaneKey
    from reach.core.nodes import NodePeer
    from reach.core.order import Line
    from reach.core.peers import Peer
    from reach.core.ports import Identity
    from reach.core.requests import Attachment, MessageKey, Request
    from reach.core.signed import Nonces
    from reach.core.topics import Publishing
    from reach.core.version_policy import VersionPolicy

    Checked = (
        Peer
        | Attachment
        | Lane
        | Publishing
        | Drain
        | Returning
        | LoadsDue
        | Inquiry
        | Asking
        | Fence
        | Granted
        | Balance
        | Unstored
    )
    """What has a timer besides requests."""


MESH_FAULTS = frozenset({"AGENT_LOST", "TIMEOUT", "AGENT_ERROR", "CONNECT_FAILED", "INTERNAL", "REGISTRY_UNAVAILABLE"})
FAILURES_LOGGED_PER_S = 50  # at info; beyond, a flood of failures would cost more than the failures

ORIGINS_MAX = 10_000  # prepared fields of so many principals; beyond, all are prepared anew


class Rng(Protocol):
    """The part of `random.Random` that decisions use."""

    def random(self) -> float: ...

    def getrandbits(self, bits: int, /) -> int: ...

    def randrange(self, stop: int, /) -> int: ...


class State:
    """One node's memory. `now` is the boot clock in seconds, set by the engine before each step."""

    met_nodes = False
    """There has been another node: a message that this one does not know may have run all the same."""

    def __init__(
        self,
        rules: Rules,
        *,
        rng: Rng,
        nonce: bytes,
        lineage: LineageKeys,
        now: float,
        unix: float,
        secrets: Rng | None = None,
    ) -> None:
        self.rules = rules
        self.rng = rng
        self.secrets = secrets or rng
        """Where resume tokens come from. What `rng` draws is shown to everybody (trace_ids), and its state can be told
        from that; a node gives the system's randomness here."""
        self.incarnation = nonce + nonce
        """16 bytes: this start of the node, for other nodes; the app sets it, with the nonce as its first half."""
        self.nonce = nonce  # 8 random bytes of this start of the node: entries of another start are nobody's
        self.lineage = lineage
        self.loop_limits = LoopLimits(rules.max_hops, rules.max_repeats)
        self.now = now
        self.unix_offset = unix - now
        """Added to `now`: a wall clock that does not jump while the node runs."""
        self.directory = Directory(Aliases(rules.aliases))
        self.stats = Stats()
        self.traces = _traces(rules)
        self.replay = _replay(rules, self.unix_offset)
        self.callbacks = CallbackBook(age_s=rules.replay_s, entries_max=rules.replay_entries_max)
        self.dead_letters = _dead_letters(rules, self.stats)
        self.origins: dict[tuple[str, str, str], tuple[bytes, bytes]] = {}
        """By (tenant, principal, env): what `writing` puts into every delivery of theirs."""
        self.wheel: TimerWheel[Request] = TimerWheel()
        self.checks: TimerWheel[Checked] = TimerWheel(tick_s=0.05)
        self.requests: dict[int, Request] = {}
        self.by_key: dict[MessageKey, Request] = {}
        self.unsettled = 0  # requests in flight: those in `requests` that are not settled
        self.next_number = 1
        self.outboxes = Shared(rules.outboxes_bytes_max)
        """What all links hold together."""
        self.peers: dict[str, Peer] = {}
        self.tokens: dict[bytes, Peer] = {}
        self._know_nobody(rules)
        self._know_no_session()
        self.topics = Topics()
        self.budget = RetryBudget()
        self.queue = _queue(rules)
        self.breakers_left: OrderedDict[tuple[str, str, str, bytes], Breaker] = OrderedDict()
        """By (tenant, env, agent_id, incarnation): of agents that left while theirs was not at rest."""
        self.returning = Returning(now, unix, rules.resume_window_s)
        self._have_told_nothing()
        self.draining = False
        self.leaves_at = 0.0
        """When a draining node ends what then still runs."""
        self.moved_by = 0.0
        """Until then a draining node gives work to agents that have not gone elsewhere yet."""
        self.arriving: dict[tuple[str, str, str], tuple[Identity, int]] = {}
        """By (tenant, env, agent_id): whose registrations the store has not answered yet, and how many."""
        self._know_no_node()
        self._ask_for_nothing()

    def _know_nobody(self, rules: Rules) -> None:
        self.quotas = quotas.of_rules(rules)
        """What principals and tenants have and do; None: no limit is set."""
        self.silent: dict[tuple[str, str], int] = {}
        """By (tenant, principal): its streams that have not said hello."""
        self.silent_count = 0
        """Of all of them together."""

    def _know_no_session(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self.pins: dict[str, Lane] = {}
        """Sessions whose owner is attached here, by the key of their pin."""
        self.lanes_ready: deque[Lane] = deque()
        self.snapshots_held = 0
        """Bytes of sessions' states that are being stored, or to be stored as soon as that can be done."""
        self.unstored = Unstored()
        self.lines: dict[tuple[str, str, str, str], Line] = {}
        """By (tenant, principal, env, session_id): messages of which it is not known yet whether they have run."""
        self.lines_ready: list[Line] = []

    def _have_told_nothing(self) -> None:
        """What may be said to people, and how much of it."""
        self.redaction = Redaction(names_of(self.rules.redact))
        """What no text that leaves the node may hold."""
        self._failures_in = self._failures = 0

    def _ask_for_nothing(self) -> None:
        """What a step leaves for its end."""
        self.overrun: set[Peer] = set()
        """Links whose outbox holds more replies than it may: they end with this step."""
        self.woken: set[Peer] = set()
        self.calls: list[Call] = []
        self.effects: deque[Effect] = deque()

    def _know_no_node(self) -> None:
        """What is known of other nodes and of the registry, at the start."""
        self.began_unix_ms = int(self.unix * 1000)
        self.nonces: dict[tuple[str, str], Nonces] = {}
        """By (tenant, principal): what those who must sign have signed lately."""
        self.principals: dict[tuple[str, str], Rights] = {}
        """By (tenant, principal): what all its keys allow together. Empty while authentication is off."""
        self.named: Callable[[str, str], Rights | None] | None = None
        """Tells the same of principals that nobody can count: those with a certificate's own name."""
        self.version_policies: dict[tuple[str, str], VersionPolicy] = {}
        """By (env, agent type). While it is empty no decision costs anything for it."""
        self.configs = Configs()
        self.nodes: dict[str, NodePeer] = {}
        """The other nodes, by node_id."""
        self.remote_agents = 0
        """How many of the directory are attached to other nodes."""
        self.orphans: dict[tuple[str, str, str], Attachment] = {}
        """By (tenant, env, agent_id): remote agents that are registered nowhere now, and have requests of ours."""
        self.vanished = VanishedBook()
        self.loads = LoadsDue()
        self.fence = Fence()
        self.wants = Wants()
        self.balance = Balance()
        self.relayed: dict[MessageKey, Request] = {}
        """Requests that were given to the node that owns their message. (What this node owns is in `by_key`.)"""
        self.answered = AnsweredBook(self.rules.replay_s)
        """Who answered what other nodes asked for, and have acknowledged."""
        self.inquiries: dict[int, Inquiry] = {}
        """By number: requests that wait here, at their owner, until others have said whether they have them."""
        self.asking: dict[int, Asking] = {}
        """By nonce: questions of other nodes for which this one asks its processes."""
        self.interests = Interests()
        """The topics that other nodes want."""
        self.crossings: dict[int, tuple[Publishing, NodePeer]] = {}
        """Events that crossed to other nodes, by number, whose counts have not come."""
        self.peer_addresses: tuple[str, ...] = ()
        """Where the other nodes of the mesh are reached."""
        self.node_addresses: dict[str, str] = {}
        """By node_id: where each live node, this one too, takes processes in."""
        self.view_complete_at = float("inf")
        """When what is known of the registry was last all there is in it; infinity: it always is."""
        self.registry_away = False
        """The store did not answer when it was asked last."""
        self.lookups: dict[tuple[str, str, str], list[Parked]] = {}
        """By (tenant, env, agent_id) of an agent that the store is asked for: the requests that wait for the answer."""

    @property
    def unix(self) -> float:
        """Seconds since 1970 by the wall clock as it was at start."""
        return self.now + self.unix_offset

    def origin(self, key: MessageKey) -> tuple[bytes, bytes]:
        """Prepare a principal's entry of `origins`."""
        if len(self.origins) >= ORIGINS_MAX:
            self.origins.clear()
        origin = self.origins[key[:3]] = origin_fields(key)
        return origin

    def failure_level(self, outcome: str) -> str:
        """The log level of a failed request: info where somebody of the mesh failed, unless that is a flood."""
        if outcome not in MESH_FAULTS:
            return "debug"
        second = int(self.now)
        if second != self._failures_in:
            self._failures_in, self._failures = second, 0
        self._failures += 1
        return "info" if self._failures <= FAILURES_LOGGED_PER_S else "debug"

    def log(self, level: str, event: str, trace_id: str = "", **fields: object) -> None:
        """Ask for a log line."""
        self.effects.append(LogLine(level, event, trace_id, fields))


def _traces(rules: Rules) -> TraceBook:
    return TraceBook(
        recent_max=rules.trace_recent_max,
        kept_max=rules.trace_kept_max,
        kept_s=rules.trace_kept_s,
        slow_s=rules.slow_request_s,
    )


def _replay(rules: Rules, unix_offset_s: float) -> Replay:
    return Replay(
        age_s=rules.replay_s,
        entries_max=rules.replay_entries_max,
        bytes_max=rules.replay_bytes_max,
        unix_offset_s=unix_offset_s,
    )


def _dead_letters(rules: Rules, stats: Stats) -> DeadLetterBook:
    return DeadLetterBook(
        entries_max=rules.dead_letters_max,
        bytes_max=rules.dead_letters_bytes_max,
        age_s=rules.dead_letters_s,
        counts=stats.dead_letters,
    )


def _queue(rules: Rules) -> WaitQueues[Request]:
    return WaitQueues(
        entries_max=rules.queue_max, selector_max=rules.queue_selector_max, bytes_max=rules.queue_bytes_max
    )
