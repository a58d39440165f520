"""What the benchmark makes of its measurements."""

from __future__ import annotations

from typing import Any

from tools.benchmark import report
from tools.benchmark.rows import FULL, QUICK, ROWS, scale

ALONE = next(row for row in ROWS if row.name == "alone")
C64 = next(row for row in ROWS if row.name == "c64")


def rounds(*figures: float, errors: int = 0) -> list[dict[str, Any]]:
    return [{"units": 10, "per_s": figure, "p50_ms": figure, "errors": errors} for figure in figures]


def test_a_ratio_is_taken_within_each_round_and_its_median_counts() -> None:
    found = report.ratio(C64, rounds(4000, 6000, 30), rounds(1000, 1000, 10))
    assert found is not None
    assert (found.median, found.low, found.high) == (4.0, 3.0, 6.0)


def test_a_round_that_answered_nothing_has_no_figure_and_no_ratio() -> None:
    nothing = [{"units": 0, "per_s": 0.0, "p50_ms": float("nan"), "errors": 3}]
    assert report.spread(C64, nothing) is None
    assert report.ratio(C64, nothing, rounds(1000)) is None
    assert report.cell(C64, nothing) == "– **3 errors**"


def test_a_bound_on_throughput_is_a_lower_one_and_on_latency_an_upper_one() -> None:
    assert C64.holds(4.0) is True
    assert C64.holds(3.9) is False
    assert ALONE.holds(1.5) is True
    assert ALONE.holds(1.6) is False


def test_a_bound_fails_when_requests_failed_however_fast_the_others_were() -> None:
    clean = report.row_bound(C64, rounds(8000), rounds(1000))
    dirty = report.row_bound(C64, rounds(8000, errors=1), rounds(1000))
    assert clean is not None and clean.holds and clean.aim_met
    assert dirty is not None and dirty.holds is False and "1 errors" in dirty.measured


def test_a_bound_without_its_measurement_neither_holds_nor_fails() -> None:
    bound = report.row_bound(C64, rounds(8000), [])
    assert bound is not None
    assert bound.holds is None
    assert "not measured" in report.bounds_table([bound])


def test_memory_and_decision_are_held_against_fixed_bounds() -> None:
    assert report.memory_bound({"agents": 2000, "bytes_per_agent": 60_000}).holds
    assert not report.memory_bound({"agents": 2000, "bytes_per_agent": 60_001}).holds
    good, bad = report.decision_bounds({"us_100_types_of_100": 20.0, "us_10000_of_a_type": 20.5})
    assert (good.holds, bad.holds) == (True, False)


def test_work_of_other_processes_is_told_and_warned_of_above_a_tenth_of_the_machine() -> None:
    assert report.foreign_note([0.02, 0.10]) == "other processes used 6% of the machine (median; most 10%)"
    warning = report.foreign_note([0.02, 0.03, 0.40])
    assert warning.startswith("WARNING: other processes used 3%")
    assert "1 of 3 measurements" in warning


def test_all_lines_of_a_table_are_equally_wide() -> None:
    lines = report.table(["a", "figure"], [["a long title", "1"], ["b", "1,000,000"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_shorter_measurements_make_fewer_sequential_requests() -> None:
    assert scale(False, None, None) is FULL
    assert scale(True, 3, None).rounds == 3
    assert scale(True, None, QUICK.seconds / 2).alone_requests == QUICK.alone_requests // 2
