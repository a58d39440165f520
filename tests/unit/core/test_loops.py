"""Hop limit, repeat limit and deadlocks, decided on paths as they grow."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import error_pb2
from agentreach.v1.envelope_pb2 import Hop
from reach.core.loops import (
    LoopLimits,
    ancestors,
    check_hop,
    deadlock,
    next_path,
    readable,
    would_deadlock,
)


def hops(*agent_ids: str, key: str = "step") -> list[Hop]:
    path: list[Hop] = []
    for index, agent_id in enumerate(agent_ids):
        path = next_path(path, agent_id, f"m-{index}", "s-1", key)
    return path


def run(agent_ids: list[str], key: str = "step") -> tuple[int, error_pb2.Error | None]:
    """Send a call through these agents one after another; how many it reached, and what cut it."""
    path: list[Hop] = []
    for agent_id in agent_ids:
        error = check_hop(path, len(path), agent_id.split("/")[0], key)
        if error is not None:
            return len(path), error
        path = next_path(path, agent_id, "m", "", key)
    return len(path), None


def test_a_root_message_may_go_anywhere() -> None:
    assert check_hop((), 0, "a", "step") is None


def test_a_chain_of_exactly_max_hops_works_and_one_more_is_cut() -> None:
    chain = [f"t{n}/1" for n in range(11)]
    assert run(chain[:10]) == (10, None)
    reached, error = run(chain)
    assert reached == 10
    assert error is not None
    assert error.code == error_pb2.HOP_LIMIT
    assert "max_hops is 10" in error.message
    assert error.details["path"] == " → ".join([*chain[:10], "t10"])
    assert not error.retryable
    assert not error.may_have_executed


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_cycle_of_up_to_four_agents_is_cut_at_its_third_lap(length: int) -> None:
    laps = list(islice(cycle([f"t{n}/1" for n in range(length)]), 40))
    reached, error = run(laps)
    assert reached == 2 * length
    assert error is not None
    assert error.code == error_pb2.LOOP_DETECTED


@pytest.mark.parametrize("length", [5, 6, 10, 11])
def test_a_longer_cycle_meets_the_hop_limit(length: int) -> None:
    reached, error = run(list(islice(cycle([f"t{n}/1" for n in range(length)]), 40)))
    assert reached == 10
    assert error is not None
    assert error.code == error_pb2.HOP_LIMIT


def test_the_path_of_a_loop_can_be_read() -> None:
    error = check_hop(hops("a/1", "b/2", "a/1", "b/2"), 4, "a", "step")
    assert error is not None
    assert "a/1 → b/2 → a/1 → b/2 → a" in error.message
    assert error.details["path"] == "a/1 → b/2 → a/1 → b/2 → a"
    assert error.details["dedup_key"] == "step"


def test_other_instances_of_the_type_count_as_the_same_step() -> None:
    assert check_hop(hops("a/1", "a/2"), 2, "a", "step") is not None


def test_a_type_whose_name_starts_alike_is_another_type() -> None:
    assert check_hop(hops("ab/1", "ab/1"), 2, "a", "step") is None


def test_the_same_type_with_other_steps_is_no_loop() -> None:
    assert check_hop(hops("a/1", "a/1", "a/1"), 3, "a", "another step") is None


def test_the_same_step_at_other_types_is_no_loop() -> None:
    assert check_hop(hops("a/1", "b/1", "c/1"), 3, "d", "step") is None


def test_without_a_step_only_the_hop_limit_counts() -> None:
    reached, error = run(["a/1"] * 40, key="")
    assert reached == 10
    assert error is not None
    assert error.code == error_pb2.HOP_LIMIT


def test_without_a_type_only_the_hop_limit_counts() -> None:
    assert check_hop(hops("a/1", "a/1"), 2, "", "step") is None
    assert check_hop(hops(*["a/1"] * 10), 10, "", "step", target="capability ner") is not None


def test_a_claimed_hop_count_cannot_be_lowered_by_a_lower_limit() -> None:
    error = check_hop(hops("a/1"), 3, "b", "", LoopLimits(max_hops=3))
    assert error is not None
    assert error.code == error_pb2.HOP_LIMIT


def test_the_parent_path_is_left_alone() -> None:
    parent = hops("a/1")
    child = next_path(parent, "b/2", "m-9", "s-2", "k")
    assert len(parent) == 1
    assert [hop.agent_id for hop in child] == ["a/1", "b/2"]
    assert child[1] == Hop(agent_id="b/2", message_id="m-9", session_id="s-2", dedup_key="k")


@given(agents=st.lists(st.sampled_from(["a/1", "a/2", "b/1", "c/1"]), max_size=30), keys=st.sampled_from(["k", ""]))
def test_no_call_ever_goes_on_beyond_its_hops(agents: list[str], keys: str) -> None:
    reached, error = run(agents, keys)
    assert reached <= 10
    assert (error is None) == (reached == len(agents))


def test_nobody_before_a_detached_hop_waits_for_what_is_sent_from_there() -> None:
    path = list(hops("a/1", "b/1", "c/1"))
    assert ancestors(path) == {"m-0", "m-1", "m-2"}
    path[1].detached = True
    assert ancestors(path) == {"m-1", "m-2"}
    path[2].detached = True
    assert ancestors(path) == {"m-2"}


def test_a_call_to_oneself_deadlocks_when_every_slot_is_an_ancestors() -> None:
    assert would_deadlock(ancestors(hops("a/1")), ["m-0"])
    assert would_deadlock(ancestors(hops("a/1", "b/1")), ["m-0"])


def test_a_free_place_never_deadlocks() -> None:
    assert not would_deadlock({"m-0"}, [])


def test_one_holder_that_can_finish_makes_waiting_safe() -> None:
    assert not would_deadlock({"m-0"}, ["m-0", "stranger"])


def test_two_calls_that_wait_for_each_others_slots_deadlock() -> None:
    # Two slots, held by r1 and r2; each calls the same agent again. The first may wait for r2, the second may not.
    assert not would_deadlock({"r1"}, ["r1", "r2"])
    assert would_deadlock({"r2"}, ["r1", "r2"], waiting=[{"r1"}])


def test_a_root_call_may_deadlock_with_nobody_unless_all_holders_wait_there() -> None:
    assert not would_deadlock(frozenset(), ["r1"])
    assert would_deadlock(frozenset(), ["r1"], waiting=[{"r1"}])


@given(
    own=st.frozensets(st.integers(0, 6)),
    holders=st.lists(st.integers(0, 6), max_size=5),
    waiting=st.lists(st.frozensets(st.integers(0, 6)), max_size=3),
)
def test_deadlock_means_that_every_holder_waits_in_the_queue(
    own: frozenset[int], holders: list[int], waiting: list[frozenset[int]]
) -> None:
    stuck = own.union(*waiting)
    decided = would_deadlock({str(n) for n in own}, map(str, holders), [{str(n) for n in ids} for ids in waiting])
    assert decided == (bool(holders) and set(holders) <= stuck)


def test_the_deadlock_error_names_the_path_and_what_is_held() -> None:
    error = deadlock(hops("a/1", "b/2"), "a/1", "session s-1")
    assert error.code == error_pb2.WOULD_DEADLOCK
    assert "session s-1 is held by calls that wait for this one (a/1 → b/2 → a/1)" in error.message
    assert error.details["path"] == "a/1 → b/2 → a/1"
    assert not error.retryable


def test_a_path_without_a_known_target_ends_with_a_question_mark() -> None:
    assert readable(hops("a/1"), "") == "a/1 → ?"
