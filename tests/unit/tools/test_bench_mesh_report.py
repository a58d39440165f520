"""What the benchmark makes of the rows of several nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tools.benchmark import losses, mesh_report, rows
from tools.benchmark.processes import Failed

KILL: dict[str, Any] = {"reachable_s": 5.0, "registered_s": 7.0, "twice": 0}
ETCD: dict[str, Any] = {"writes_per_agent_minute": 1.0}
CROWD: dict[str, Any] = {"lost": 667, "agents": 2000, "back_s": 15.0, "ratio": 2.0, "failed": 0}


def nodes(same: float, other: float, errors: int = 0) -> dict[str, Any]:
    def round_of(figure: float) -> dict[str, Any]:
        return {"units": 10, "per_s": figure, "p50_ms": figure, "errors": errors}

    return {
        where: {"alone": [round_of(figure)], "c64": [round_of(figure)]} for where, figure in
        (("same", same), ("other", other))
    }  # fmt: skip


def holds(row: str, **found: Any) -> list[bool | None]:
    return [bound.holds for bound in mesh_report.bounds({row: found})]


def test_what_is_at_its_bound_holds() -> None:
    assert holds("node_killed", **KILL) == [True]
    assert holds("leader", **KILL) == [True, True]
    assert holds("etcd", **ETCD) == [True]
    assert holds("crowd", **CROWD) == [True, True]


@pytest.mark.parametrize(
    ("row", "found", "expected"),
    [
        ("node_killed", KILL | {"reachable_s": 5.01}, [False]),
        ("node_killed", KILL | {"twice": 1}, [False]),
        ("leader", KILL | {"registered_s": 7.1}, [False, True]),
        ("leader", KILL | {"reachable_s": 5.1}, [True, False]),
        ("etcd", {"writes_per_agent_minute": 1.1}, [False]),
        ("crowd", CROWD | {"back_s": 15.1}, [False, True]),
        ("crowd", CROWD | {"ratio": 2.1}, [True, False]),
        ("crowd", CROWD | {"failed": 1}, [True, False]),
    ],
)
def test_what_is_beyond_its_bound_fails(row: str, found: dict[str, Any], expected: list[bool]) -> None:
    assert holds(row, **found) == expected


def test_latency_at_another_node_is_bounded_above_and_throughput_below() -> None:
    assert holds("nodes", **nodes(same=10, other=20)) == [True, True]
    assert holds("nodes", **nodes(same=10, other=21)) == [False, True]
    assert holds("nodes", **nodes(same=10, other=4.4)) == [True, False]


def test_requests_that_failed_fail_the_bound() -> None:
    assert holds("nodes", **nodes(same=10, other=10, errors=1)) == [False, False]


def test_an_agent_is_reachable_when_it_answers_what_was_asked_after_the_kill() -> None:
    named = [[2.0, 3.0 + agent, "OK", 2 * agent] for agent in range(losses.AGENTS)]
    before, refused, by_type = [0.5, 1.5, "OK", 0], [1.1, 1.1, "NO_AGENT_AVAILABLE", 0], [1.2, 1.3, "OK", 1]
    assert losses.reachable([before, refused, by_type, *named], since=1.0) == 3.0 + losses.AGENTS - 1
    with pytest.raises(Failed, match="1 of 10 agents"):
        losses.reachable(named[1:], since=1.0)


def test_a_quick_run_has_the_rows_of_several_nodes_only_if_they_are_named() -> None:
    assert "crowd" in rows.wanted(None, quick=False)
    assert set(rows.SEVERAL).isdisjoint(rows.wanted(None, quick=True))
    assert rows.wanted(("crowd",), quick=True) == ("crowd",)
