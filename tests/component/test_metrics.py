"""What Prometheus would read from a node's metrics."""

from __future__ import annotations

import sys

import pytest
from prometheus_client import REGISTRY, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from reach.adapters import metrics
from reach.adapters.metrics import METRICS, Gauges, make_registry, render
from reach.core.stats import BUCKETS_S, Stats


class Node:
    """A source of numbers as the node is one."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.now = Gauges()

    def gauges(self) -> Gauges:
        return self.now


def scrape(node: Node) -> dict[str, Metric]:
    content, content_type = render(make_registry(node, "0.1.0"))
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(content.decode())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return found


def busy_node() -> Node:
    node = Node()
    node.stats.register("ner")
    node.stats.began("ner")
    node.stats.finished("ner", "OK", 0.0, 0.0015, 1.2, 1.2015)
    node.stats.finished("ner", "TIMEOUT", 301.0, None, None, 301.0)
    node.stats.version_fell_back("ner")
    node.stats.retries = 3
    node.stats.loops["loop_detected"] += 1
    node.stats.duplicates["joined"] += 2
    node.stats.events_dropped += 5
    node.now = Gauges(
        agents={("ner", "HEALTHY"): 2, ("ner", "DRAINING"): 1},
        queue_depth=4,
        queue_oldest_s=1.5,
        outbox_envelopes={"ner/1": 7},
        breakers={"ner/1": "HALF_OPEN"},
        registry_age_s=0.25,
        leader=True,
        nodes_linked=2,
        nodes_not_linked=1,
    )
    return node


def test_every_documented_metric_is_exported_with_its_kind_its_labels_and_its_meaning() -> None:
    families = scrape(busy_node())
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert family.type == ("gauge" if metric.kind == "info" else metric.kind), metric.name
        assert family.documentation == metric.meaning
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name


def test_nothing_is_exported_that_is_not_documented() -> None:
    ours = {name for name in scrape(busy_node()) if name.startswith("reach_")}
    documented = {metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name for metric in METRICS}
    assert ours == documented


def test_the_numbers_are_those_of_the_node() -> None:
    families = scrape(busy_node())
    assert value(families, "reach_requests_total", agent_type="ner", outcome="OK") == 1
    assert value(families, "reach_requests_total", agent_type="ner", outcome="TIMEOUT") == 1
    assert value(families, "reach_requests_in_flight", agent_type="ner") == 1
    assert value(families, "reach_retries_total") == 3
    assert value(families, "reach_retries_suppressed_total") == 0
    assert value(families, "reach_loops_total", kind="loop_detected") == 1
    assert value(families, "reach_loops_total", kind="hop_limit") == 0
    assert value(families, "reach_duplicates_total", kind="joined") == 2
    assert value(families, "reach_events_total", kind="dropped") == 5
    assert value(families, "reach_agents", agent_type="ner", status="HEALTHY") == 2
    assert value(families, "reach_queue_depth") == 4
    assert value(families, "reach_queue_oldest_seconds") == 1.5
    assert value(families, "reach_outbox_envelopes", agent_id="ner/1") == 7
    assert value(families, "reach_breaker_state", agent_id="ner/1") == 1
    assert value(families, "reach_registry_age_seconds") == 0.25
    assert value(families, "reach_leader") == 1
    assert value(families, "reach_nodes", state="linked") == 2
    assert value(families, "reach_nodes", state="not_linked") == 1
    python = ".".join(map(str, sys.version_info[:3]))
    assert value(families, "reach_build_info", version="0.1.0", python=python) == 1


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    families = scrape(busy_node())
    buckets = [
        (sample.labels["le"], sample.value)
        for sample in families["reach_request_seconds"].samples
        if sample.name.endswith("_bucket") and sample.labels["phase"] == "total"
    ]
    assert [float(bound) for bound, _ in buckets] == [*BUCKETS_S, float("inf")]
    assert [count for _, count in buckets] == [0.0] * 10 + [1.0] * 7 + [2.0]
    assert value(families, "reach_request_seconds_count", agent_type="ner", phase="total") == 2
    assert value(families, "reach_request_seconds_sum", agent_type="ner", phase="total") == 302.2015
    assert value(families, "reach_request_seconds_count", agent_type="ner", phase="handle") == 1


def test_series_of_an_agent_are_gone_with_it() -> None:
    node = busy_node()
    node.now = Gauges()
    families = scrape(node)
    assert not families["reach_outbox_envelopes"].samples
    assert not families["reach_breaker_state"].samples
    assert not families["reach_agents"].samples


def test_callers_cannot_add_series() -> None:
    node = Node()
    for number in range(1_000):
        node.stats.finished(f'made "up"\n{number}', "NO_ROUTE", None, None, None, 0.0)
    (sample,) = scrape(node)["reach_requests"].samples
    assert sample.labels == {"agent_type": "unknown", "outcome": "NO_ROUTE"}


def test_series_of_agents_are_bounded_and_the_fullest_are_shown() -> None:
    node = Node()
    count = metrics.AGENT_SERIES_MAX + 10
    node.now = Gauges(outbox_envelopes={f"ner/{number}": number for number in range(count)})
    samples = scrape(node)["reach_outbox_envelopes"].samples
    assert len(samples) == metrics.AGENT_SERIES_MAX
    assert min(sample.value for sample in samples) == 10


def test_series_of_agents_are_not_left_to_the_library_which_holds_the_loop_up_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0

    def counting(family: GaugeMetricFamily, labels: list[str], value: float) -> None:
        nonlocal made
        made += 1

    node = Node()
    names = [f"ner/{number}" for number in range(1_000)]
    node.now = Gauges(outbox_envelopes=dict.fromkeys(names, 2), breakers=dict.fromkeys(names, "OPEN"))
    monkeypatch.setattr(GaugeMetricFamily, "add_metric", counting)
    families = scrape(node)
    assert made < 100
    for name in ("reach_outbox_envelopes", "reach_breaker_state"):
        family = families[name]
        assert (family.type, family.documentation) == ("gauge", meaning(name))
        assert [sample.labels for sample in family.samples] == [{"agent_id": each} for each in names]
        assert {sample.value for sample in family.samples} == {2}


def meaning(name: str) -> str:
    (found,) = [metric.meaning for metric in METRICS if metric.name == name]
    return found


def test_process_and_collector_metrics_are_there() -> None:
    families = scrape(Node())
    assert families["python_info"].samples
    assert families["python_gc_objects_collected"].samples
    if sys.platform == "linux":
        assert families["process_resident_memory_bytes"].samples


def test_two_nodes_in_one_process_do_not_share_and_nothing_is_global() -> None:
    one, other = Node(), Node()
    one.stats.retries = 1
    assert value(scrape(one), "reach_retries_total") == 1
    assert value(scrape(other), "reach_retries_total") == 0
    assert not [family for family in REGISTRY.collect() if family.name.startswith("reach_")]
