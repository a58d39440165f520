"""What is written by a program is what that program would write now."""

from __future__ import annotations

from pathlib import Path

from reach.adapters.metrics import METRICS
from reach.node.config import describe
from tests.tidy.sources import ROOT
from tools import gendocs, genproto, limits_table

METRIC_NAMES = """
reach_agents reach_requests_total reach_requests_in_flight reach_queue_depth reach_queue_oldest_seconds
reach_request_seconds reach_retries_total reach_retries_suppressed_total reach_breaker_state reach_loops_total
reach_duplicates_total reach_forced_releases_total reach_link_resumes_total reach_outbox_envelopes
reach_registry_age_seconds reach_leader
"""
METRIC_LABELS = {
    "reach_agents": ("agent_type", "status"),
    "reach_requests_total": ("agent_type", "outcome"),
    "reach_requests_in_flight": ("agent_type",),
    "reach_request_seconds": ("agent_type", "phase"),
    "reach_breaker_state": ("agent_id",),
    "reach_loops_total": ("kind",),
    "reach_duplicates_total": ("kind",),
    "reach_outbox_envelopes": ("agent_id",),
}
BOUND_PACKAGES = ("reach", "agent_sdk", "agentreach")


def test_the_generated_code_is_current() -> None:
    assert genproto.drift() == []


def test_a_stale_a_missing_and_a_foreign_generated_file_are_found(tmp_path: Path) -> None:
    for name, path in genproto.generated(ROOT).items():
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    folder = tmp_path / "proto/agentreach/v1"
    (folder / "envelope_pb2.py").write_text("# old")
    (folder / "mesh_pb2_grpc.py").unlink()
    (folder / "gone_pb2.py").touch()
    assert genproto.drift(tmp_path) == [
        f"proto/agentreach/v1/{name}" for name in ("envelope_pb2.py", "gone_pb2.py", "mesh_pb2_grpc.py")
    ]


def test_the_reference_pages_are_current() -> None:
    assert gendocs.drift() == [], "run: make docs"


def test_an_option_that_is_refused_is_not_shown() -> None:
    assert "--registry-password-file" in gendocs.PAGES["cli.md"]()
    assert "--registry-password`" not in gendocs.PAGES["cli.md"]()


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    for name, write in gendocs.PAGES.items():
        (tmp_path / name).write_text(write())
    assert gendocs.drift(tmp_path) == []
    (tmp_path / "settings.md").write_text("old")
    (tmp_path / "errors.md").unlink()
    assert gendocs.drift(tmp_path) == ["settings.md", "errors.md"]


def test_every_setting_says_what_goes_wrong_at_both_ends() -> None:
    numbers = [each for each in describe() if each.least is not None]
    assert [each.name for each in numbers if not (each.low and each.high and each.meaning)] == []
    assert all(each.meaning for each in describe())


def test_every_metric_of_the_design_is_there_with_its_labels() -> None:
    there = {metric.name: metric.labels for metric in METRICS}
    assert set(METRIC_NAMES.split()) - set(there) == set()
    assert {name: there[name] for name in METRIC_LABELS} == METRIC_LABELS


def constants() -> set[str]:
    """Full names of all public `…_MAX` constants of the product, where they are defined."""
    from tests.tidy.sources import sources

    found = set()
    for source in sources():
        for node in source.tree.body:
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                names = getattr(target, "elts", [target])
                found |= {f"{source.module}.{name.id}" for name in names if getattr(name, "id", "").endswith("_MAX")}
    return {name for name in found if not name.rpartition(".")[2].startswith("_")}


def test_every_bound_is_in_the_table_of_limits_or_says_why_not() -> None:
    shown = {row.where for rows in limits_table.LIMITS.values() for row in rows}
    settings = {each.name for each in describe() if each.name.endswith("_max")}
    wanted = constants() | settings
    assert wanted - shown - set(limits_table.NOT_SHOWN) == set()


def test_nothing_is_kept_out_of_the_table_that_is_gone_or_in_it() -> None:
    shown = {row.where for rows in limits_table.LIMITS.values() for row in rows}
    assert set(limits_table.NOT_SHOWN) - constants() == set()
    assert set(limits_table.NOT_SHOWN) & shown == set()


def test_every_row_of_the_table_of_limits_has_a_number() -> None:
    for title, rows in limits_table.LIMITS.items():
        for row in rows:
            assert row.value() > 0 or "0: no limit" in title, row.where


def test_a_row_for_a_bound_that_is_gone_is_found() -> None:
    for where in ("agentreach.wire.limits.GONE_MAX", "gone_max", "rules.gone_max"):
        try:
            limits_table.Bound("x", where, "y").value()
        except LookupError:
            continue
        raise AssertionError(where)
