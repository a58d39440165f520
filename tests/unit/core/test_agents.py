"""reach.core.agents: records in and out, slots, warmth, tiers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.registry_pb2 import HEALTHY, AgentRecord
from reach.core.agents import (
    DEGRADED,
    DRAINING,
    FULL,
    LEAVING,
    LOST,
    NOT_STARTED,
    READY,
    READY_AVOIDED,
    UNREACHABLE,
    WEAK,
    Agent,
)
from tests.unit.core.mesh_of_agents import agent


def full_record() -> AgentRecord:
    record = AgentRecord(
        agent_id="extractor/a",
        agent_type="extractor",
        tenant="t",
        env="staging",
        version="2.1.0",
        capabilities=["ner", "text_summarize"],
        labels={"zone": "a"},
        endpoints=["127.0.0.1:9000"],
        status=HEALTHY,
        weight=70,
        priority=-3,
        max_concurrency=4,
        session_concurrency=2,
        reentrant=True,
        description="finds names",
        node_id="n1",
        incarnation=b"0123456789abcdef",
        generation=1 << 60,
        lease_ttl_s=30.0,
        load=0.5,
        in_flight=3,
        config_version=9,
    )
    record.registered_at.FromMilliseconds(1_795_000_000_123)
    record.heartbeat_at.FromMilliseconds(1_795_000_010_456)
    return record


def test_a_record_survives_the_way_in_and_out_complete():
    assert Agent.from_record(full_record()).to_record() == full_record()


def test_what_a_record_leaves_out_gets_its_default():
    one = Agent.from_record(AgentRecord(agent_id="writer/1", capabilities=["Text-Summarize"]))
    assert (one.agent_type, one.env, one.weight, one.session_concurrency) == ("writer", "production", 100, 1)
    assert one.capabilities == {"text_summarize"}
    assert one.tier_now() == NOT_STARTED
    assert one.free_slots is None and one.has_slot
    assert not one.to_record().HasField("registered_at")


def test_two_agents_with_equal_records_are_still_two():
    assert len({Agent.from_record(full_record()), Agent.from_record(full_record())}) == 2


def test_leftovers_of_cancelled_handlers_take_slots():
    one = agent("a/1", max_concurrency=2)
    one.in_flight, one.leftovers = 1, 1
    assert one.free_slots == 0 and not one.has_slot and one.tier_now() == FULL
    one.leftovers = 5
    assert one.free_slots == 0


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_a_slot_is_free_exactly_when_free_slots_says_so(slots: int, in_flight: int, leftovers: int):
    one = agent("a/1", max_concurrency=slots)
    one.in_flight, one.leftovers = in_flight, leftovers
    assert one.has_slot == (one.free_slots is None or one.free_slots > 0)


@pytest.mark.parametrize(
    ("age_s", "warm_up_s", "share"),
    [(0, 10, 0.1), (5, 10, 0.55), (10, 10, 1), (99, 10, 1), (0, 0, 1), (-5, 10, 0.1)],
)
def test_warmth_grows_linearly_from_a_tenth(age_s: float, warm_up_s: float, share: float):
    one = agent("a/1")
    one.warm_since = 1000.0
    assert one.warmth(1000.0 + age_s, warm_up_s) == pytest.approx(share)


def test_an_agent_that_was_always_there_is_warm():
    assert agent("a/1").warmth(0.0, 10.0) == 1.0


def test_each_state_has_its_tier():
    one = agent("a/1")
    assert one.tier_now() == READY
    one.avoid_until = 5.0
    assert one.tier_now() == READY_AVOIDED
    one.avoid_until, one.saturated = 0.0, True
    assert one.tier_now() == FULL
    one.saturated = False
    for status, tier in ((DEGRADED, WEAK), (DRAINING, LEAVING), (UNREACHABLE, LOST), (0, NOT_STARTED)):
        one.status = status
        assert one.tier_now() == tier
