from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.core.latency import Latency


def test_nothing_is_known_at_first() -> None:
    assert Latency().p95_s == 0.0


@given(st.lists(st.floats(0.001, 600), min_size=1, max_size=60))
def test_the_estimate_is_at_most_a_quarter_octave_above_the_truth(times: list[float]) -> None:
    latency = Latency()
    for seconds in times:
        latency.observe(seconds)
    true = sorted(times)[-(-95 * len(times) // 100) - 1]
    assert true <= latency.p95_s * (1 + 1e-9)
    assert latency.p95_s <= true * 2**0.25 * (1 + 1e-9)


@pytest.mark.parametrize("median_s", [0.005, 0.2, 15.0])
def test_a_long_run_is_followed_within_a_third(median_s: float) -> None:
    rng, latency = Random(1), Latency()
    times = [median_s * rng.lognormvariate(0, 0.5) for _ in range(20_000)]
    for seconds in times:
        latency.observe(seconds)
    true = sorted(times)[int(0.95 * len(times))]
    assert 0.8 * true < latency.p95_s < 1.4 * true


def test_an_agent_that_became_slow_is_seen_in_some_dozens_of_replies_and_one_that_recovered_in_hundreds() -> None:
    latency = Latency()
    for _ in range(10_000):
        latency.observe(0.1)
    for _ in range(10):
        latency.observe(10.0)
    assert latency.p95_s > 9
    for _ in range(600):
        latency.observe(0.1)
    assert latency.p95_s < 0.13


@given(st.lists(st.floats(allow_nan=False), max_size=300))
def test_no_number_harms_it(times: list[float]) -> None:
    latency = Latency()
    for seconds in times:
        latency.observe(seconds)
    assert 0 <= latency.p95_s < 800
