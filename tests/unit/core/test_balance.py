"""reach.core.balance: each policy beside its dumb twin, the order of tiers, exclusion, and that nothing scans."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Target
from reach.core import balance
from reach.core.agents import DEGRADED, HEALTHY, UNREACHABLE, Agent
from reach.core.balance import choose, choose_owner
from reach.core.directory import Directory
from reach.core.pool import Pool
from tests.unit.core.mesh_of_agents import CountingChance, agent

POLICIES = range(8)
NOW = 1000.0


def mesh(*agents: Agent) -> tuple[Directory, Pool]:
    """A directory of these agents of type a, and the pool of all."""
    directory = Directory()
    for one in agents:
        directory.add(one)
    return directory, directory.pool_for(Target(agent_type="a"), "t", "")


def many(count: int, **settings_of: int) -> list[Agent]:
    return [agent(f"a/{number}", **settings_of) for number in range(count)]


def spread(pool: Pool, policy: int, times: int = 2000, seed: int = 3, **rest: object) -> Counter[str]:
    rng = Random(seed)
    chosen = (choose(pool, policy, now=NOW, rng=rng, **rest) for _ in range(times))  # type: ignore[arg-type]
    return Counter(one.agent_id for one in chosen if one is not None)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_pool_and_one_of_unusable_agents_give_nobody(policy: int):
    _, pool = mesh(agent("a/1", status=UNREACHABLE))
    assert choose(pool, policy, now=NOW, rng=Random(1), hash_key="k") is None
    empty = Directory().pool_for(Target(agent_type="a"), "t", "")
    assert choose(empty, policy, now=NOW, rng=Random(1), hash_key="k") is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 5, 60])
def test_degraded_agents_are_chosen_only_when_no_healthy_one_is_left(policy: int, count: int):
    weak = [agent(f"a/weak{number}", status=DEGRADED) for number in range(count)]
    well = many(2, max_concurrency=1)
    directory, pool = mesh(*weak, *well)
    rng = Random(5)
    for _ in range(2):
        one = choose(pool, policy, now=NOW, rng=rng, hash_key="k")
        assert one in well
        directory.reserve(one)
    assert choose(pool, policy, now=NOW, rng=rng, hash_key="k") in weak


@pytest.mark.parametrize("policy", POLICIES)
def test_an_agent_that_answered_overloaded_is_avoided_for_its_time_and_chosen_if_there_is_no_other(policy: int):
    directory, pool = mesh(*many(2))
    avoided, other = pool.members["a/0"], pool.members["a/1"]
    directory.avoid(avoided, NOW + 5)
    directory.avoid(avoided, NOW + 1)  # does not shorten
    assert set(spread(pool, policy, 20, hash_key="k")) == {"a/1"}
    other.status = UNREACHABLE
    directory.changed(other)
    assert set(spread(pool, policy, 20, hash_key="k")) == {"a/0"}
    other.status = HEALTHY
    directory.changed(other)
    choose(pool, policy, now=NOW + 4.9, rng=Random(1), hash_key="k")
    assert avoided.avoid_until > 0
    choose(pool, policy, now=NOW + 5, rng=Random(1), hash_key="k")
    assert avoided.avoid_until == 0 and len(pool.tiers[0].agents) == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [3, 60])
def test_an_instance_that_failed_is_passed_over_while_another_is_usable(policy: int, count: int):
    _, pool = mesh(*many(count))
    failed = {f"a/{number}" for number in range(count - 1)}
    rng = Random(2)
    for _ in range(10):
        one = choose(pool, policy, now=NOW, rng=rng, hash_key="k", exclude=failed)
        assert one is not None and one.agent_id == f"a/{count - 1}"
    everybody = failed | {f"a/{count - 1}", "a/unknown"}
    assert choose(pool, policy, now=NOW, rng=rng, hash_key="k", exclude=everybody) is not None
    assert choose(pool, policy, now=NOW, rng=rng, hash_key="k", exclude=everybody, readmit=False) is None
    assert len(pool.tiers[0].agents) == count


def test_a_degraded_one_is_better_than_the_healthy_one_that_failed():
    _, pool = mesh(agent("a/failed"), agent("a/weak", status=DEGRADED))
    one = choose(pool, 0, now=NOW, rng=Random(1), exclude={"a/failed"})
    assert one is not None and one.agent_id == "a/weak"


def test_random_gives_everybody_an_equal_part():
    _, pool = mesh(*many(5))
    counts = spread(pool, balance.RANDOM)
    assert len(counts) == 5 and all(330 < count < 470 for count in counts.values())


@pytest.mark.parametrize("weights", [(100, 300), (1, 3), (10, 30_000)])
def test_weighted_random_shares_by_weight_even_where_weights_are_far_apart(weights: tuple[int, int]):
    _, pool = mesh(agent("a/light", weight=weights[0]), agent("a/heavy", weight=weights[1]))
    counts = spread(pool, balance.WEIGHTED_RANDOM, 4000)
    assert counts["a/light"] / 4000 == pytest.approx(weights[0] / sum(weights), abs=0.03)


def test_weighted_random_adds_up_the_weights_where_drawing_finds_nobody():
    _, pool = mesh(*many(200, weight=1))
    pool.weight_max = 10**9  # somebody heavy was here
    assert len(spread(pool, balance.WEIGHTED_RANDOM, 300)) > 100


def test_a_cold_instance_gets_a_tenth_of_its_weight_at_first():
    _, pool = mesh(agent("a/warm"), agent("a/cold"))
    pool.members["a/cold"].warm_since = NOW
    counts = spread(pool, balance.WEIGHTED_RANDOM, 4000)
    assert counts["a/cold"] / 4000 == pytest.approx(0.1 / 1.1, abs=0.03)
    assert spread(pool, balance.WEIGHTED_RANDOM, 4000, warm_up_s=0)["a/cold"] > 1800


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_round_robin_chooses_everybody_once_before_anybody_twice_while_others_come_go_and_fill_up(
    data: st.DataObject,
):
    directory, pool = mesh(*many(5, max_concurrency=1))
    turn = {one: number for number, one in enumerate(pool)}
    clock = len(turn)
    new = 0
    pool.turns  # noqa: B018  built now, so that the twin's newcomers queue up as its own
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(("take", "take", "take", "free", "leave", "come", "status")))
        if step == "take":
            tier = next((tier.agents for tier in pool.tiers[:4] if tier.agents), [])
            expected = min(tier, key=turn.__getitem__) if tier else None
            one = choose(pool, balance.ROUND_ROBIN, now=NOW, rng=Random(1))
            assert one is expected
            if one is not None:
                turn[one] = clock = clock + 1
                if data.draw(st.booleans()):
                    directory.reserve(one)
        elif step == "come":
            new += 1
            one = agent(f"a/new{new}", max_concurrency=1)
            turn[one] = clock = clock + 1
            directory.add(one)
        elif pool.members:
            one = data.draw(st.sampled_from(list(pool)))
            if step == "leave":
                directory.remove(one)
            elif step == "free" and one.in_flight:
                directory.release(one)
            elif step == "status":
                one.status = data.draw(st.sampled_from((HEALTHY, DEGRADED)))
                directory.changed(one)


def test_round_robin_forgets_agents_that_went():
    directory, pool = mesh(*many(2))
    pool.turns  # noqa: B018
    for number in range(2000):
        one = agent(f"a/new{number}")
        directory.add(one)
        directory.remove(one)
    assert sum(map(len, pool.turns._heaps)) < 100 and len(pool.turns._last) == 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from((50, 100, 200)), st.floats(0, 20)), min_size=1, max_size=32),
    st.integers(),
)
def test_least_active_takes_one_with_the_fewest_in_flight_per_weight(states: list[tuple[int, int, float]], seed: int):
    _, pool = mesh(*many(len(states)))
    for one, (in_flight, weight, age_s) in zip(pool, states, strict=True):
        one.in_flight, one.weight, one.warm_since = in_flight, weight, NOW - age_s
    one = choose(pool, balance.LEAST_ACTIVE, now=NOW, rng=Random(seed))
    assert one is not None

    def active(agent: Agent) -> float:
        return agent.in_flight / (agent.weight * agent.warmth(NOW, 10.0))

    assert active(one) == pytest.approx(min(map(active, pool)))


def test_ties_of_least_active_are_broken_by_chance_evenly():
    _, pool = mesh(*many(8))
    for number in range(5):
        pool.members[f"a/{number}"].in_flight = 1
    counts = spread(pool, balance.LEAST_ACTIVE, 3000)
    assert set(counts) == {"a/5", "a/6", "a/7"}
    assert all(880 < count < 1120 for count in counts.values())


def test_least_active_evens_out_a_large_pool_though_it_looks_at_four():
    directory, pool = mesh(*many(200))
    rng = Random(4)
    for _ in range(2000):
        one = choose(pool, balance.LEAST_ACTIVE, now=NOW, rng=rng)
        assert one is not None
        directory.reserve(one)
    loads = [one.in_flight for one in pool]
    assert max(loads) <= 12 and min(loads) >= 6


def test_least_load_takes_the_lowest_report_clamped():
    _, pool = mesh(*many(5))
    for one, load in zip(pool, (0.4, 7.0, -3.0, float("nan"), 0.0), strict=True):
        one.load = load
    assert set(spread(pool, balance.LEAST_LOAD, 200)) == {"a/2", "a/4"}
    assert [balance.reported_load(one) for one in pool] == [0.4, 1.0, 0.0, 1.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=60))
def test_score_takes_the_best_and_never_misses_a_higher_priority(states: list[tuple[int, int, int]]):
    agents = [agent(f"a/{number}", priority=state[0]) for number, state in enumerate(states)]
    for one, (_, in_flight, failures) in zip(agents, states, strict=True):
        one.in_flight, one.recent_failures = in_flight, failures
    _, pool = mesh(*agents)
    one = choose(pool, balance.SCORE, now=NOW, rng=Random(1))
    assert one is not None
    best = max(map(balance.score, agents))
    if len(agents) <= balance.SCAN_MAX:
        assert balance.score(one) > best - 1
    highest = [one for one in agents if one.priority == max(one.priority for one in agents)]
    if len(highest) <= balance.DRAWS:
        assert balance.score(one) > max(map(balance.score, highest)) - 1


def test_score_follows_agents_as_they_fill_up_and_go():
    directory, pool = mesh(*many(40, max_concurrency=1), agent("a/star", priority=5, max_concurrency=1))
    rng = Random(1)
    star = choose(pool, balance.SCORE, now=NOW, rng=rng)
    assert star is pool.members["a/star"]
    directory.reserve(star)
    assert choose(pool, balance.SCORE, now=NOW, rng=rng) is not star
    directory.release(star)
    assert choose(pool, balance.SCORE, now=NOW, rng=rng) is star
    directory.remove(star)
    assert choose(pool, balance.SCORE, now=NOW, rng=rng) is not star


@pytest.mark.parametrize("key", ["user-7", "ü", b"user-7"])
def test_consistent_hash_stays_and_moves_only_while_its_agent_cannot(key: str | bytes):
    directory, pool = mesh(*many(6, max_concurrency=1))
    rng = Random(1)

    def pick() -> Agent | None:
        return choose(pool, balance.CONSISTENT_HASH, now=NOW, rng=rng, hash_key=key)

    order = [pool.members[name] for name in pool.ring.walk(key)]
    for one in order:
        assert pick() is one
        directory.reserve(one)
    assert pick() is None
    for one in reversed(order):
        directory.release(one)
        assert pick() is one


def test_consistent_hash_moves_only_a_newcomers_share():
    directory, pool = mesh(*many(9))
    rng = Random(1)

    def owners() -> dict[str, str]:
        keys = [f"k{number}" for number in range(500)]
        picks = {key: choose(pool, balance.CONSISTENT_HASH, now=NOW, rng=rng, hash_key=key) for key in keys}
        return {key: one.agent_id for key, one in picks.items() if one is not None}

    before = owners()
    directory.add(agent("a/new"))
    after = owners()
    moved = [key for key in before if before[key] != after[key]]
    assert 10 < len(moved) < 120 and {after[key] for key in moved} == {"a/new"}


def test_consistent_hash_finds_the_last_usable_agent_of_a_large_pool_and_always_the_same():
    _, pool = mesh(*many(600, status=UNREACHABLE), agent("a/x"), agent("a/y"))
    picks = [spread(pool, balance.CONSISTENT_HASH, 3, hash_key=f"k{number}") for number in range(20)]
    assert all(len(pick) == 1 for pick in picks)
    assert set().union(*picks) == {"a/x", "a/y"}


def test_without_a_key_consistent_hash_takes_the_least_active():
    _, pool = mesh(*many(2))
    pool.members["a/0"].in_flight = 1
    assert set(spread(pool, balance.CONSISTENT_HASH, 50)) == {"a/1"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_draws_as_often_with_ten_thousand_agents_as_with_a_hundred(policy: int):
    draws = []
    for count in (100, 2000):
        _, pool = mesh(*many(count))
        for one in pool:
            one.in_flight = 1
        chance = CountingChance(1)
        choose(pool, policy, now=NOW, rng=chance, hash_key="k")
        draws.append(chance.draws)
    assert draws[0] == draws[1] <= 9


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(1, 150), st.integers(0, 5))
def test_new_sessions_go_to_healthy_members_within_their_bound(healthy: int, sessions: int, sick: int):
    agents = many(healthy) + [agent(f"a/sick{number}", status=DEGRADED) for number in range(sick)]
    directory, pool = mesh(*agents, agent("a/gone", status=UNREACHABLE))
    for number in range(sessions):
        owner = choose_owner(pool, f"s{number}")
        assert owner is not None and owner.status == HEALTHY
        directory.pin(owner)
        assert owner.pinned_sessions <= 1.25 * (number + 1) / healthy + 1
    for one in agents[:healthy]:
        one.status = UNREACHABLE
        directory.changed(one)
    owner = choose_owner(pool, "s")
    assert (owner is None) == (sick == 0) and (owner is None or owner.status == DEGRADED)


def test_a_full_agent_still_becomes_owner_and_a_rare_healthy_one_is_found():
    directory, pool = mesh(*many(600, status=UNREACHABLE), agent("a/x", max_concurrency=1))
    directory.reserve(pool.members["a/x"])
    assert {choose_owner(pool, f"s{number}") for number in range(10)} == {pool.members["a/x"]}
