"""What the benchmark makes of the row with TLS and keys, and of the gate."""

from __future__ import annotations

from typing import Any

import pytest

from tools import bench_gate
from tools.benchmark import secured


def found(locked: float, gate_us: float, errors: int = 0) -> dict[str, Any]:
    def rounds(figure: float) -> dict[str, Any]:
        one = {"units": 10, "per_s": figure, "p50_ms": 1.0, "errors": errors}
        return {"alone": [one], "c64": [one]}

    return {"open": rounds(100.0), "locked": rounds(locked), "gate_us": gate_us, "stranger_us": 9.0}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (found(70.0, 30.0), [True, True]),
        (found(69.0, 30.0), [False, True]),
        (found(70.0, 30.1), [True, False]),
        (found(100.0, 1.0, errors=1), [False, True]),
    ],
)
def test_throughput_with_tls_and_keys_and_the_cost_of_the_gate_are_bounded(
    measured: dict[str, Any], expected: list[bool]
) -> None:
    assert [bound.holds for bound in secured.bounds(measured)] == expected


def test_what_is_measured_of_the_gate_is_an_admission_and_a_refusal() -> None:
    costs = bench_gate.measured(40)
    assert set(costs) == {"gate_us", "stranger_us"}
    assert all(cost > 0 for cost in costs.values())


async def test_the_key_of_the_measurement_opens_the_gate() -> None:
    who = await bench_gate.gatekeeper().admit(bench_gate.METHOD, (("authorization", f"Bearer {bench_gate.KEY}"),))
    assert who is not None
    assert who.principal == "bench"
