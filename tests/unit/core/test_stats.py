"""The node's counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reach.core.stats import BUCKETS_S, Stats, TypeStats


def record(stats: Stats, agent_type: str) -> TypeStats:
    return dict(stats.types())[agent_type]


def test_a_finished_request_counts_in_its_outcome_and_in_each_phase_it_reached() -> None:
    stats = Stats()
    stats.register("ner")
    stats.finished("ner", "OK", 0.0, 0.002, 1.5, 1.502)
    stats.finished("ner", "TIMEOUT", 0.2, None, None, 0.2)
    ner = record(stats, "ner")
    assert ner.outcomes == {"OK": 1, "TIMEOUT": 1}
    assert {phase: histogram.count for phase, histogram in ner.phases()} == {
        "queue": 2,
        "deliver": 1,
        "handle": 1,
        "total": 2,
    }
    assert ner.total.sum_s == 1.702


@given(st.floats(0, 1e6))
def test_an_observation_falls_into_the_first_bucket_that_holds_it(seconds: float) -> None:
    stats = Stats()
    stats.register("ner")
    stats.finished("ner", "OK", None, None, None, seconds)
    place = record(stats, "ner").total.counts.index(1)
    assert place == sum(bound < seconds for bound in BUCKETS_S)


def test_a_type_that_nobody_registered_counts_as_unknown() -> None:
    stats = Stats()
    for n in range(1_000):
        stats.finished(f"made-up-{n}", "NO_ROUTE", None, None, None, 0.0)
    assert [name for name, _ in stats.types()] == ["unknown"]
    assert record(stats, "unknown").outcomes == {"NO_ROUTE": 1_000}


def test_types_beyond_the_bound_count_as_unknown() -> None:
    stats = Stats(types_max=2)
    for name in ("a", "b", "c"):
        stats.register(name)
        stats.finished(name, "OK", None, None, None, 0.0)
    assert [name for name, _ in stats.types()] == ["a", "b", "unknown"]


def test_an_agent_type_called_unknown_has_no_second_series() -> None:
    stats = Stats()
    stats.register("unknown")
    stats.finished("unknown", "OK", None, None, None, 0.0)
    assert [name for name, _ in stats.types()] == ["unknown"]


def test_registering_again_keeps_the_numbers() -> None:
    stats = Stats()
    stats.register("ner")
    stats.finished("ner", "OK", None, None, None, 0.0)
    stats.register("ner")
    assert record(stats, "ner").outcomes == {"OK": 1}


def test_requests_in_flight_come_back_to_zero_whatever_is_registered_meanwhile() -> None:
    stats = Stats()
    before = stats.began("ner")
    stats.register("ner")
    after = stats.began("ner")
    assert before.in_flight == after.in_flight == 1
    stats.ended(before)
    stats.ended(after)
    assert {name: entry.in_flight for name, entry in stats.types()} == {"ner": 0}
