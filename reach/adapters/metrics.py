"""The node's metrics in Prometheus' format. Nothing is registered globally: each node has a registry of its own.

The numbers live in `reach.core.stats` and in the node's tables; they are read when somebody scrapes, so counting costs
the message path nothing more, and a series is gone with the agent that it was about. No label is a value that a caller
chose: `agent_type` is one that registered, or "unknown"; `agent_id` is one that is attached here now.

`METRICS` is the reference: the collector takes names, labels and meanings from it, and so does the docs page.
"""

from __future__ import annotations

import heapq
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from reach.core.stats import BUCKETS_S, Histogram, Stats

Kind = Literal["counter", "gauge", "histogram", "info"]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

AGENT_SERIES_MAX = 10_000  # of one metric with an agent_id; above, those with the highest values are shown

BREAKER_STATES = {"CLOSED": 0, "RAMPING": 1, "HALF_OPEN": 1, "OPEN": 2}
"""Values of `reach_breaker_state`, by the names of `ListBreakers`: the less an agent gets, the higher."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the reference: the name as Prometheus shows it, its kind, its labels, and what it tells."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("reach_agents", "gauge", ("agent_type", "status"), "Agents attached to this node, by type and status."),
    Metric(
        "reach_requests_total",
        "counter",
        ("agent_type", "outcome"),
        "Requests that ended; the outcome is OK or the name of the ErrorCode.",
    ),
    Metric("reach_requests_in_flight", "gauge", ("agent_type",), "Requests that have no outcome yet."),
    Metric(
        "reach_queue_depth", "gauge", (), "Requests that wait at this node for a free agent or their session's turn."
    ),
    Metric("reach_queue_oldest_seconds", "gauge", (), "How long the oldest of these has waited; 0 when none waits."),
    Metric(
        "reach_request_seconds",
        "histogram",
        ("agent_type", "phase"),
        "Where the time of requests went: queue (waiting at this node), deliver (the way to the agent and back), "
        "handle (in the handler, by the agent's own clock), total (with the wait inside the agent).",
    ),
    Metric("reach_retries_total", "counter", (), "Attempts after the first."),
    Metric("reach_retries_suppressed_total", "counter", (), "Retries not made because the retry budget was used up."),
    Metric(
        "reach_version_fallbacks_total",
        "counter",
        ("agent_type",),
        "Requests that got another version than the one the version policy wants, which had nobody usable.",
    ),
    Metric(
        "reach_breaker_state",
        "gauge",
        ("agent_id",),
        "Breaker of an agent that had requests: 0 closed, 1 half-open or ramping (it gets a part), 2 open (nothing).",
    ),
    Metric(
        "reach_loops_total",
        "counter",
        ("kind",),
        "Calls refused because they went in a circle: hop_limit, loop_detected, would_deadlock.",
    ),
    Metric(
        "reach_duplicates_total",
        "counter",
        ("kind",),
        "Messages seen before: joined a running one, replayed a stored outcome, conflict (other content), "
        "late (an answer after the outcome), fenced (what a former owner of a session said).",
    ),
    Metric(
        "reach_session_moves_total",
        "counter",
        ("kind",),
        "Sessions that changed hands: moved with their state (restored here), handed on to another node, lost (their "
        "state), kept by their owner because a step failed, parked (stored for whoever comes next); dropped: "
        "checkpoints that there was no room for.",
    ),
    Metric(
        "reach_forced_releases_total",
        "counter",
        (),
        "Slots taken back because an agent did not confirm the end of a cancelled handler in time.",
    ),
    Metric(
        "reach_home_refusals_total",
        "counter",
        (),
        "Requests that another node did not give to its agent: this node's picture of it was old. No failed attempts.",
    ),
    Metric("reach_link_resumes_total", "counter", (), "Links that went on after their stream was cut."),
    Metric("reach_outbox_envelopes", "gauge", ("agent_id",), "Envelopes that wait for an agent's link to take them."),
    Metric(
        "reach_events_total",
        "counter",
        ("kind",),
        "Events: published here, delivered to a subscriber, dropped for one that is too slow.",
    ),
    Metric(
        "reach_callbacks_total",
        "counter",
        ("kind",),
        "Requests with a reply_topic: accepted; and their outcomes: published to at least one subscriber, or unheard.",
    ),
    Metric("reach_dead_letters_kept", "gauge", (), "Requests that were given up and are kept now: see `reach dead`."),
    Metric(
        "reach_dead_letters_total",
        "counter",
        ("kind",),
        "Requests that were given up: kept, dropped for want of room, expired, redriven.",
    ),
    Metric(
        "reach_quota_refusals_total",
        "counter",
        ("kind",),
        "What was refused because a principal or tenant is at its limit; the kind is the limit's name without "
        "principal_ or tenant_.",
    ),
    Metric(
        "reach_audit_lines_total",
        "counter",
        ("kind",),
        "Lines of the audit log: written; summed up, because there were too many of a kind; lost, because the file "
        "could not be written.",
    ),
    Metric("reach_slow_consumers_total", "counter", (), "Links ended because their peer took nothing for too long."),
    Metric("reach_registry_age_seconds", "gauge", (), "How old this node's view of the registry may be; 0 in memory."),
    Metric("reach_leader", "gauge", (), "1 on the node that is the leader, else 0."),
    Metric("reach_nodes", "gauge", ("state",), "Other nodes: linked with this one, or not_linked."),
    Metric(
        "reach_insecure",
        "gauge",
        (),
        "1 if the node was started with --insecure and without TLS or auth: whoever reaches it may do anything.",
    ),
    Metric(
        "reach_tls_certificate_expiry_timestamp_seconds",
        "gauge",
        (),
        "When the node's certificate expires, in Unix time; 0 without TLS.",
    ),
    Metric(
        "reach_tls_reloads_failed_total",
        "counter",
        (),
        "Times that new certificate files or principals could not be used (the log says why); the former ones went on.",
    ),
    Metric("reach_keys", "gauge", (), "API keys that hold now; 0 where auth is not keys."),
    Metric(
        "reach_keys_stale",
        "gauge",
        (),
        "1 while the API keys cannot be read (the log says why); those that were known go on. Else 0.",
    ),
    Metric("reach_build_info", "info", ("python", "version"), "Version of Agent-Reach and of Python; always 1."),
)

_BOUNDS = (*map(str, BUCKETS_S), "+Inf")
_BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the node's tables say at the moment of a scrape."""

    agents: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Count by (agent_type, status)."""
    dead_letters: int = 0
    queue_depth: int = 0
    queue_oldest_s: float = 0.0
    outbox_envelopes: Mapping[str, int] = field(default_factory=dict)
    """By agent_id, of the agents attached here now."""
    breakers: Mapping[str, str] = field(default_factory=dict)
    """State by agent_id, of agents attached to whichever node: a key of `BREAKER_STATES`."""
    registry_age_s: float = 0.0
    leader: bool = False
    nodes_linked: int = 0
    nodes_not_linked: int = 0
    insecure: bool = False
    certificate_expires_at: float = 0.0
    """Unix time; 0 without TLS."""
    tls_reloads_failed: int = 0
    keys: int = 0
    keys_stale: bool = False


class Source(Protocol):
    """Where the numbers come from: the node, asked at each scrape on the thread that scrapes."""

    @property
    def stats(self) -> Stats: ...

    def gauges(self) -> Gauges: ...


class NodeRegistry(CollectorRegistry):
    """A registry with the node's metrics."""

    def __init__(self, source: Source, version: str) -> None:
        super().__init__(auto_describe=False)
        self.node = _NodeCollector(source, version)
        self.register(self.node)


def make_registry(source: Source, version: str) -> NodeRegistry:
    """A registry with the node's metrics and those of its process, platform and garbage collector."""
    registry = NodeRegistry(source, version)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: NodeRegistry) -> tuple[bytes, str]:
    """One scrape: the content and its content type.

    What there is a series of for each agent is written here: the library takes 5 µs a series, and a thousand agents
    held the node's loop up for 7 ms at each scrape.
    """
    text = generate_latest(registry)
    return text + registry.node.by_agent().encode(), CONTENT_TYPE


class _NodeCollector(Collector):
    """Turns the source's numbers into families, at each scrape."""

    def __init__(self, source: Source, version: str) -> None:
        self._source = source
        self._version = version
        self._gauges = Gauges()

    def describe(self) -> Iterable[Family]:
        """The families without samples, so that registering does not need a node that runs already."""
        for metric in METRICS:
            if metric.kind == "counter":
                yield _counter(metric.name)
            elif metric.kind == "histogram":
                yield _histogram(metric.name)
            elif metric.kind == "info":
                yield _info(metric.name)
            else:
                yield _gauge(metric.name)

    def collect(self) -> Iterable[Family]:
        stats = self._source.stats
        gauges = self._gauges = self._source.gauges()
        yield from _requests(stats)
        yield from _events_of_the_node(stats)
        yield from _tables(gauges)
        build = _info("reach_build_info")
        build.add_metric([], {"python": platform.python_version(), "version": self._version})
        yield build

    def by_agent(self) -> str:
        """The families with a series for each agent, as text, of the same moment as what was collected last."""
        gauges, self._gauges = self._gauges, Gauges()
        breakers = {agent_id: BREAKER_STATES[state] for agent_id, state in gauges.breakers.items()}
        return _by_agent("reach_outbox_envelopes", gauges.outbox_envelopes) + _by_agent("reach_breaker_state", breakers)


def _requests(stats: Stats) -> Iterator[Family]:
    requests = _counter("reach_requests_total")
    in_flight = _gauge("reach_requests_in_flight")
    seconds = _histogram("reach_request_seconds")
    fallbacks = _counter("reach_version_fallbacks_total")
    for agent_type, record in stats.types():
        for outcome, count in list(record.outcomes.items()):
            requests.add_metric([agent_type, outcome], count)
        in_flight.add_metric([agent_type], record.in_flight)
        if record.version_fallbacks:
            fallbacks.add_metric([agent_type], record.version_fallbacks)
        for phase, histogram in record.phases():
            if histogram.count:
                seconds.add_metric([agent_type, phase], _cumulative(histogram), histogram.sum_s)
    yield requests
    yield in_flight
    yield fallbacks
    yield seconds


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: each with all that is below it."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip(_BOUNDS, histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _events_of_the_node(stats: Stats) -> Iterator[Family]:
    yield _counter("reach_retries_total", stats.retries)
    yield _counter("reach_retries_suppressed_total", stats.retries_suppressed)
    yield _counter("reach_forced_releases_total", stats.forced_releases)
    yield _counter("reach_home_refusals_total", stats.home_refusals)
    yield _counter("reach_link_resumes_total", stats.link_resumes)
    yield _counter("reach_slow_consumers_total", stats.slow_consumers)
    events = {
        "published": stats.events_published,
        "delivered": stats.events_delivered,
        "dropped": stats.events_dropped,
    }
    for name, counts in (
        ("reach_loops_total", stats.loops),
        ("reach_duplicates_total", stats.duplicates),
        ("reach_session_moves_total", stats.moves),
        ("reach_events_total", events),
        ("reach_callbacks_total", stats.callbacks),
        ("reach_dead_letters_total", stats.dead_letters),
        ("reach_audit_lines_total", stats.audit),
        ("reach_quota_refusals_total", stats.quota_refusals),
    ):
        family = _counter(name)
        for kind, count in counts.items():
            family.add_metric([kind], count)
        yield family


def _tables(gauges: Gauges) -> Iterator[Family]:
    agents = _gauge("reach_agents")
    for (agent_type, status), count in gauges.agents.items():
        agents.add_metric([agent_type, status], count)
    yield agents
    yield _gauge("reach_dead_letters_kept", gauges.dead_letters)
    yield _gauge("reach_queue_depth", gauges.queue_depth)
    yield _gauge("reach_queue_oldest_seconds", gauges.queue_oldest_s)
    yield _gauge("reach_registry_age_seconds", gauges.registry_age_s)
    yield _gauge("reach_leader", int(gauges.leader))
    yield _gauge("reach_insecure", int(gauges.insecure))
    yield _gauge("reach_tls_certificate_expiry_timestamp_seconds", gauges.certificate_expires_at)
    yield _counter("reach_tls_reloads_failed_total", gauges.tls_reloads_failed)
    yield _gauge("reach_keys", gauges.keys)
    yield _gauge("reach_keys_stale", int(gauges.keys_stale))
    nodes = _gauge("reach_nodes")
    nodes.add_metric(["linked"], gauges.nodes_linked)
    nodes.add_metric(["not_linked"], gauges.nodes_not_linked)
    yield nodes


def _by_agent(name: str, values: Mapping[str, int]) -> str:
    shown: Iterable[tuple[str, int]] = values.items()
    if len(values) > AGENT_SERIES_MAX:
        shown = heapq.nlargest(AGENT_SERIES_MAX, shown, key=_value)
    head = f"# HELP {name} {_BY_NAME[name].meaning}\n# TYPE {name} gauge\n"
    # Nothing to escape: agent_ids keep to the grammar of names.
    return head + "".join([f'{name}{{agent_id="{agent_id}"}} {value}\n' for agent_id, value in shown])


def _value(series: tuple[str, int]) -> int:
    return series[1]


def _counter(name: str, value: float | None = None) -> CounterMetricFamily:
    metric = _BY_NAME[name]
    return CounterMetricFamily(name, metric.meaning, value=value, labels=metric.labels or None)


def _gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    metric = _BY_NAME[name]
    return GaugeMetricFamily(name, metric.meaning, value=value, labels=metric.labels or None)


def _histogram(name: str) -> HistogramMetricFamily:
    metric = _BY_NAME[name]
    return HistogramMetricFamily(name, metric.meaning, labels=metric.labels)


def _info(name: str) -> InfoMetricFamily:
    return InfoMetricFamily(name.removesuffix("_info"), _BY_NAME[name].meaning, labels=())
