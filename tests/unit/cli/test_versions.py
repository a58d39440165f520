"""reach.cli.versions: what state a version is in, and how much it gets."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from agentreach.v1.registry_pb2 import DRAINING, HEALTHY, UNREACHABLE, AgentRecord, AgentStatus, VersionPolicy
from reach.cli.versions import Row, rows_of


def record(version: str, status: AgentStatus.ValueType = HEALTHY, in_flight: int = 0, number: int = 1) -> AgentRecord:
    return AgentRecord(
        agent_id=f"a/{version}-{number}",
        agent_type="a",
        env="production",
        version=version,
        status=status,
        in_flight=in_flight,
    )


def seen(policy: VersionPolicy, *records: AgentRecord, sessions: Mapping[str, int] | None = None) -> dict[str, Row]:
    policy.agent_type, policy.env = "a", "production"
    held = {("production", agent_id): count for agent_id, count in (sessions or {}).items()}
    return {row.version: row for row in rows_of(policy, records, held)}


def test_without_a_policy_all_that_work_are_active_and_have_no_share():
    rows = seen(VersionPolicy(), record("1.0"), record("1.0", DRAINING, number=2), record("2.0", DRAINING))
    assert rows["1.0"].instances == {"HEALTHY": 1, "DRAINING": 1}
    assert [(row.share, row.state) for row in rows.values()] == [(None, "active"), (None, "draining")]


def test_a_small_share_is_a_canary():
    rows = seen(VersionPolicy(weights={"2.1.0": 5, "2.0.3": 95}), record("2.1.0"), record("2.0.3"))
    assert [(row.version, row.share, row.state) for row in rows.values()] == [
        ("2.0.3", 0.95, "active"),
        ("2.1.0", 0.05, "canary"),
    ]


@pytest.mark.parametrize(
    ("old", "sessions", "state"),
    [
        (record("1.0"), {"a/1.0-1": 2}, "draining"),
        (record("1.0", in_flight=1), {}, "draining"),
        (record("1.0", DRAINING), {}, "draining"),
        (record("1.0"), {}, "drained"),
        (record("1.0", UNREACHABLE), {}, "drained"),
    ],
)
def test_a_version_without_a_share_drains_as_long_as_it_has_something_to_do(
    old: AgentRecord, sessions: Mapping[str, int], state: str
):
    rows = seen(VersionPolicy(preferred="2.0"), old, record("2.0"), sessions=sessions)
    assert rows["2.0"].state == "active" and rows["2.0"].share == 1
    assert rows["1.0"].state == state and rows["1.0"].share == 0
    assert rows["1.0"].sessions == sum(sessions.values())


def test_a_version_that_shall_get_requests_and_is_not_there_is_absent():
    rows = seen(VersionPolicy(preferred="3.0"), record("2.0"))
    assert rows["3.0"].state == "absent" and rows["3.0"].instances == {}


def test_versions_are_matched_as_the_node_matches_them_and_other_types_are_left_out():
    other = AgentRecord(agent_id="b/1", agent_type="b", env="production", version="2.0")
    staged = AgentRecord(agent_id="a/1", agent_type="a", env="staging", version="2.0")
    rows = seen(VersionPolicy(preferred="2"), record("2.0"), other, staged)
    assert set(rows) == {"2"} and rows["2"].instances == {"HEALTHY": 1}
