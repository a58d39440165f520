"""reach.core.version_policy: who gets a request under a policy, what falls back, what it costs, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Target
from agentreach.v1.registry_pb2 import VersionPolicy as Message
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, Agent
from reach.core.balance import LEAST_ACTIVE, choose, choose_owner
from reach.core.directory import Directory
from reach.core.explain import VERSION_POLICY, explain
from reach.core.pool import Pool
from reach.core.selector import ANY, Anchor
from reach.core.version_policy import (
    VERSION_WEIGHT_MAX,
    VERSIONS_MAX,
    Picked,
    Policies,
    VersionPolicy,
    fault,
    from_proto,
    key_of,
    pick,
    point_of,
)
from tests.unit.core.mesh_of_agents import ALIASES, agent, agents_drawn, targets_drawn

NOW = 50.0


def policy(preferred: str = "", **weights: int) -> VersionPolicy:
    """Of the type `a`; underscores in names stand for dots: `v2_0=5`."""
    named = {name[1:].replace("_", "."): weight for name, weight in weights.items()}
    return from_proto(Message(agent_type="a", preferred=preferred, weights=named), 1)


def directory_of(*versions: str, **rest: object) -> Directory:
    """Agents a/0, a/1, … of these versions."""
    directory = Directory(ALIASES)
    for number, version in enumerate(versions):
        directory.add(agent(f"a/{number}", version=version, capabilities=["ner"], **rest))  # type: ignore[arg-type]
    return directory


def picked(
    directory: Directory, policies: Policies, target: Target | None = None, point: float = 0.0, seed: int = 1
) -> Picked:
    pool = directory.pool_for(target or Target(agent_type="a"), "t", "")
    rng = Random(seed)
    return pick(
        policies, directory, pool, point, lambda one, last: choose(one, LEAST_ACTIVE, now=NOW, rng=rng, readmit=last)
    )


def of(one: VersionPolicy) -> Policies:
    return {("production", "a"): one}


class TestWhoGetsIt:
    """The version, and one of its agents."""

    def test_the_preferred_version_gets_all(self) -> None:
        directory = directory_of("1.0", "1.0", "2.0")
        got = Counter(picked(directory, of(policy("2.0")), seed=seed).version for seed in range(50))
        assert got == {"2.0": 50}

    def test_weights_are_shares(self) -> None:
        directory = directory_of("2.1.0", *["2.0.3"] * 5)
        rules, rng = of(policy(v2_1_0=5, v2_0_3=95)), Random(7)
        got = Counter(picked(directory, rules, point=rng.random()).version for _ in range(4_000))
        assert 120 < got["2.1.0"] < 290  # 200 ± 5 standard deviations
        assert sum(got.values()) == 4_000

    def test_a_point_draws_the_same_version_each_time_and_growing_a_share_moves_few(self) -> None:
        few, more = policy(v1_0=95, v2_0=5), policy(v1_0=50, v2_0=50)
        points = [point_of(f"session-{number}") for number in range(2_000)]
        before = [few.drawn(point) for point in points]
        after = [more.drawn(point) for point in points]
        assert before == [few.drawn(point_of(f"session-{number}")) for number in range(2_000)]
        assert 50 < before.count("2.0") < 160
        assert all(late == "2.0" for early, late in zip(before, after, strict=True) if early == "2.0")

    def test_versions_are_compared_as_targets_compare_them(self) -> None:
        directory = directory_of("1.0", "2.0")
        assert picked(directory, of(policy("2"))).version == "2.0"
        directory.add(agent("a/n", version="nightly-7"))
        assert picked(directory, of(policy("nightly-7"))).version == "nightly-7"

    def test_a_target_that_asks_for_a_version_gets_it(self) -> None:
        directory = directory_of("1.0", "1.5", "2.0")
        asked = picked(directory, of(policy("2.0")), Target(agent_type="a", version="1.0"))
        assert asked == Picked(directory.get("t", "", "a/0")) and not asked.fell_back
        within = picked(directory, of(policy(v1_5=1, v2_0=99)), Target(agent_type="a", version="<2"), point=0.9)
        assert within.version == "1.5" and not within.fell_back

    def test_a_target_without_a_type_is_under_the_policy_of_who_would_get_it(self) -> None:
        directory = directory_of("1.0", "2.0")
        by_capability = Target(capabilities=["ner"])
        assert {picked(directory, of(policy("2.0")), by_capability, seed=seed).version for seed in range(20)} == {"2.0"}
        directory.add(agent("b/0", version="1.0", capabilities=["ner"]))
        got = {picked(directory, of(policy("2.0")), by_capability, seed=seed).agent for seed in range(40)}
        assert {one.agent_id for one in got if one} == {"a/1", "b/0"}

    def test_an_agent_that_is_named_gets_it_whatever_its_version(self) -> None:
        directory = directory_of("1.0", "2.0")
        assert picked(directory, of(policy("2.0")), Target(agent_id="a/0")) == Picked(directory.get("t", "", "a/0"))

    def test_another_env_and_another_type_have_their_own_policy(self) -> None:
        directory = directory_of("1.0", "2.0")
        for key in (("staging", "a"), ("production", "b")):
            assert picked(directory, {key: policy("2.0")}).wanted == ""


class TestFallingBack:
    """A policy never makes a request fail."""

    def test_a_version_with_nobody_usable_gives_way_to_the_others_named_first(self) -> None:
        directory = directory_of("1.0", "2.0", "3.0", status=HEALTHY)
        rules = of(policy(v2_0=5, v3_0=1))
        one = picked(directory, rules, point=0.99)
        assert (one.wanted, one.got, one.fell_back) == ("3.0", "3.0", False)
        leaving = directory.get("t", "", "a/2")
        assert leaving is not None
        leaving.status = DRAINING
        directory.changed(leaving)
        other = picked(directory, rules, point=0.99)
        assert (other.wanted, other.got, other.fell_back) == ("3.0", "2.0", True)
        assert other.told == "version 3.0 has nobody usable: 2.0 instead"
        gone = directory.get("t", "", "a/1")
        assert gone is not None
        directory.remove(gone)
        last = picked(directory, rules, point=0.99)
        assert (last.version, last.got, last.fell_back) == ("1.0", "", True)

    def test_a_full_version_falls_back_and_comes_again(self) -> None:
        directory = directory_of("1.0", "2.0", max_concurrency=1)
        first = picked(directory, of(policy("2.0"))).agent
        assert first is not None and first.version == "2.0"
        directory.reserve(first)
        assert picked(directory, of(policy("2.0"))).fell_back
        directory.release(first)
        assert not picked(directory, of(policy("2.0"))).fell_back

    def test_nobody_at_all_is_no_fallback(self) -> None:
        directory = directory_of("1.0", status=DRAINING)
        assert picked(directory, of(policy("2.0"))) == Picked(None, "2.0")
        assert not picked(directory, of(policy("2.0"))).fell_back

    def test_a_degraded_agent_of_the_wanted_version_gives_way_to_a_healthy_one_of_another(self) -> None:
        directory = directory_of("1.0", "2.0")
        weak = directory.get("t", "", "a/1")
        assert weak is not None
        weak.status = DEGRADED
        directory.changed(weak)
        assert picked(directory, of(policy("2.0"))).version == "1.0"
        other = directory.get("t", "", "a/0")
        assert other is not None
        other.status = DEGRADED
        directory.changed(other)
        assert picked(directory, of(policy("2.0"))).version == "2.0"

    def test_a_weight_of_0_is_for_fallbacks_only(self) -> None:
        directory = directory_of("1.0", "2.0", "3.0", max_concurrency=1)
        rules = of(policy(v1_0=0, v2_0=1))
        assert {picked(directory, rules, point=point / 20).version for point in range(20)} == {"2.0"}
        full = directory.get("t", "", "a/1")
        assert full is not None
        directory.reserve(full)
        assert picked(directory, rules, point=0.5).version == "1.0"


class TestWhatItCosts:
    """A decision looks at no agent that it does not need."""

    def test_ten_thousand_agents_are_looked_at_once_a_version_present_or_not(self) -> None:
        class Counting(Directory):
            walks = 0

            def agents_in(self, tenant: str, env: str, anchor: Anchor = ANY) -> Collection[Agent]:
                Counting.walks += 1
                return super().agents_in(tenant, env, anchor)

        directory = Counting(ALIASES)
        for number in range(10_000):
            directory.add(agent(f"a/{number}", version="1.0"))
        rules = of(policy(v1_0=1, v2_0=1))
        for number in range(100):
            assert picked(directory, rules, point=number / 100).version == "1.0"
        assert Counting.walks <= 3  # the type's, and one for each version
        directory.add(agent("a/new", version="2.0"))  # also the version that had nobody is kept up to date
        assert picked(directory, rules, point=0.9).version == "2.0"
        assert Counting.walks <= 3

    def test_pools_of_former_policies_do_not_pile_up(self) -> None:
        directory = directory_of("1.0")
        pool = directory.pool_for(Target(agent_type="a"), "t", "")
        for number in range(3 * VERSIONS_MAX):
            picked(directory, of(policy(f"{number}.9")))
        assert len(pool.narrowed) <= VERSIONS_MAX


class TestWhatIsRefused:
    """`fault` says what is wrong with a policy, by field."""

    @pytest.mark.parametrize(
        ("message", "says"),
        [
            (Message(), "policy.agent_type"),
            (Message(agent_type="caller", preferred="1"), "callers have no versions"),
            (Message(agent_type="a b", preferred="1"), "policy.agent_type"),
            (Message(agent_type="a", env="x y", preferred="1"), "policy.env"),
            (Message(agent_type="a", preferred="1", weights={"2": 1}), "either preferred or weights"),
            (Message(agent_type="a", preferred=">=2"), "is a range; name one version"),
            (Message(agent_type="a", preferred=" 2"), "is no version"),
            (Message(agent_type="a", preferred="2\n"), "is no version"),
            (Message(agent_type="a", preferred="2" * 129), "at most 128"),
            (Message(agent_type="a", weights={"": 1}), "is no version"),
            (Message(agent_type="a", weights={"2.1": 1, "2.1.0": 3}), "are the same version"),
            (Message(agent_type="a", weights={"1": 0, "2": 0}), "all are 0"),
            (Message(agent_type="a", weights={"1": VERSION_WEIGHT_MAX + 1}), "the limit is 1000000"),
            (Message(agent_type="a", weights={str(n): 1 for n in range(VERSIONS_MAX + 1)}), "the limit is 16"),
        ],
    )
    def test_by_field(self, message: Message, says: str) -> None:
        assert says in (fault(message) or "")

    def test_what_can_be_set(self) -> None:
        for message in (
            Message(agent_type="A", preferred="2.1.0"),
            Message(agent_type="a", weights={"nightly-7": 1, "2.0": 0}),
            Message(agent_type="a"),
        ):
            assert fault(message) is None
            assert key_of(message) == ("production", "a")


@given(
    agents=st.lists(agents_drawn, max_size=12, unique_by=lambda one: (one.tenant, one.env, one.agent_id)),
    target=targets_drawn,
    point=st.floats(0, 1, exclude_max=True),
    session=st.sampled_from(("", "s1", "s2")),
    key=st.sampled_from(("k1", "k2", "k3")),
    preferred=st.sampled_from(("", "2.1.0", "9.9")),
    data=st.data(),
)
def test_explain_agrees_with_the_choice(
    agents: list[Agent], target: Target, point: float, session: str, key: str, preferred: str, data: st.DataObject
) -> None:
    directory = Directory(ALIASES)
    for one in agents:
        one.in_flight = data.draw(st.integers(0, 2))
        one.avoid_until = data.draw(st.sampled_from((0.0, NOW + 1)))
        directory.add(one)
    weights = {} if preferred else {"1.0": 1, "2.1.0": 2, "nightly-7": 0}
    rule = from_proto(Message(agent_type="extractor", preferred=preferred, weights=weights), 1)
    policies = {("production", kind): rule for kind in ("extractor", "writer")}
    told = explain(
        directory,
        target,
        "t",
        "",
        now=NOW,
        rng=Random(1),
        session_id=session,
        hash_key=key,
        version_policies=policies,
    )
    pool: Pool = directory.pool_for(target, "t", "")
    rng = Random(1)
    fast = pick(
        policies,
        directory,
        pool,
        point_of(session or key),
        lambda one, last: (
            choose_owner(one, session) if session else choose(one, LEAST_ACTIVE, now=NOW, rng=rng, readmit=last)
        ),
    )
    assert told.chosen == (fast.agent.agent_id if fast.agent else "")
    usable = {row.agent_id for row in told.candidates if not row.removed_by}
    assert told.chosen in usable if usable else told.chosen == ""
    for row in told.candidates:
        if row.removed_by == VERSION_POLICY:
            assert fast.got and fast.got in row.why
    if fast.fell_back:
        assert fast.told in told.candidates[0].why
