"""reach.core.directory and its pools, beside a dumb twin that scans everything each time."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Target
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, STARTING, UNREACHABLE, Agent
from reach.core.balance import choose
from reach.core.directory import Directory
from reach.core.pool import Pool
from reach.core.selector import Aliases, SelectorError, parse_selector
from tests.unit.core.mesh_of_agents import ALIASES, STATUSES, agent, agents_drawn, targets_drawn


def check_against_the_twin(pool: Pool, directory: Directory) -> None:
    """The pool holds exactly the agents that a scan finds, each in its tier, and its sums are right."""
    matching = {one for one in directory if pool.selector.matches(one)}
    assert set(pool) == matching
    for number, tier in enumerate(pool.tiers):
        assert set(tier.agents) == {one for one in matching if one.tier_now() == number}
        assert tier.at == {one: position for position, one in enumerate(tier.agents)}
    weights, pinned = Counter(), Counter()
    for one in matching:
        weights[one.status] += one.weight
        pinned[one.status] += one.pinned_sessions
    assert {status: pool.weights[status] for status in STATUSES} == {s: weights[s] for s in STATUSES}
    assert {status: pool.pinned[status] for status in STATUSES} == {s: pinned[s] for s in STATUSES}
    assert pool.weight_max >= max((one.weight for one in matching), default=0)
    if matching:
        assert set(pool.ring.walk("k")) == {one.agent_id for one in matching}
        assert pool.ring.weight_total == sum(one.weight for one in matching)


class Play:
    """Random things happening to a directory."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.directory = Directory(ALIASES, pools_max=4)
        self.agents: list[Agent] = []
        self.now = 100.0

    def step(self) -> None:
        """One of them."""
        names = ["add", "add", "look"]
        if self.agents:
            names += ["remove", "status", "slots", "reserve", "release", "avoid", "pin", "wait", "choose"]
        getattr(self, self.data.draw(st.sampled_from(names)))()

    def _one(self) -> Agent:
        return self.data.draw(st.sampled_from(self.agents))

    def add(self) -> None:
        one = self.data.draw(agents_drawn)
        former = self.directory.add(one)
        if former is not None:
            self.agents.remove(former)
            assert not former.pools and not self.directory.remove(former)
        self.agents.append(one)

    def remove(self) -> None:
        one = self._one()
        self.agents.remove(one)
        assert self.directory.remove(one)

    def look(self) -> None:
        self.directory.pool_for(self.data.draw(targets_drawn), "t", "")

    def status(self) -> None:
        one = self._one()
        one.status = self.data.draw(st.sampled_from(STATUSES))
        one.saturated = self.data.draw(st.booleans())
        self.directory.changed(one)

    def slots(self) -> None:
        one = self._one()
        one.max_concurrency = self.data.draw(st.integers(0, 3))
        one.leftovers = self.data.draw(st.integers(0, 1))
        one.weight = self.data.draw(st.sampled_from((1, 100, 500)))
        self.directory.changed(one)

    def reserve(self) -> None:
        self.directory.reserve(self._one())

    def release(self) -> None:
        one = self._one()
        if one.in_flight:
            self.directory.release(one)

    def avoid(self) -> None:
        self.directory.avoid(self._one(), self.now + self.data.draw(st.integers(1, 20)))

    def pin(self) -> None:
        one = self._one()
        if one.pinned_sessions and self.data.draw(st.booleans()):
            self.directory.unpin(one)
        else:
            self.directory.pin(one)

    def wait(self) -> None:
        self.now += self.data.draw(st.integers(1, 10))

    def choose(self) -> None:
        pool = self.directory.pool_for(self.data.draw(targets_drawn), "t", "")
        policy = self.data.draw(st.integers(0, 7))
        exclude = self.data.draw(st.frozensets(st.sampled_from(("extractor/0", "writer/1"))))
        chosen = choose(pool, policy, now=self.now, rng=Random(0), hash_key="k", exclude=exclude)
        if chosen is not None:
            self.directory.reserve(chosen)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pools_kept_step_by_step_equal_a_scan_whatever_happens(data: st.DataObject):
    play = Play(data)
    for _ in range(data.draw(st.integers(1, 40))):
        play.step()
    for _ in range(3):
        target = data.draw(targets_drawn)
        check_against_the_twin(play.directory.pool_for(target, "t", ""), play.directory)
    for pool in play.directory._pools.values():
        check_against_the_twin(pool, play.directory)
    assert set(play.directory) == set(play.agents)
    assert len(play.directory) == len(play.agents)
    for one in play.agents:
        assert all(one.agent_id in pool.members for pool in one.pools)


def test_the_same_target_gives_the_same_pool_and_an_equal_one_too():
    directory = Directory(ALIASES)
    directory.add(agent("writer/1", capabilities=["summarize"]))
    pool = directory.pool_for(Target(capabilities=["text-summarize"]), "t", "")
    assert directory.pool_for(Target(capabilities=["text-summarize"]), "t", "") is pool
    assert directory.pool_for(Target(capabilities=["SUMMARIZE"]), "t", "production") is pool
    assert directory.pool_for(Target(capabilities=["summarize"], hash_key="k"), "t", "") is pool
    assert len(pool) == 1
    assert directory.pool_for(Target(capabilities=["summarize"]), "other", "") is not pool


def test_an_agent_that_offers_only_the_alias_is_found_by_the_canonical_name_and_keeps_what_it_declared():
    directory = Directory(ALIASES)
    one = agent("writer/1", capabilities=["Summarize"])
    directory.add(one)
    assert list(directory.pool_for(Target(capabilities=["text_summarize"]), "t", "")) == [one]
    assert one.to_record().capabilities == ["summarize"]


def test_a_selector_that_matched_nobody_finds_the_agent_that_comes_later():
    directory = Directory()
    target = Target(agent_type="late")
    assert len(directory.pool_for(target, "t", "")) == 0
    directory.add(agent("late/1"))
    assert len(directory.pool_for(target, "t", "")) == 1
    assert directory._raw and all(not pool.evicted for pool in directory._raw.values())


def test_selectors_without_end_leave_the_memory_bounded_and_used_pools_alone():
    directory = Directory(pools_max=10)
    one = agent("a/1", labels={"n": "1"}, version="1.0")
    directory.add(one)
    hot = directory.pool_for(Target(agent_type="a"), "t", "")
    for number in range(200):
        directory.pool_for(Target(version=f"<{number + 2}"), "t", "")
        directory.pool_for(Target(labels={"n": str(number)}), "t", "")
        assert directory.pool_for(Target(agent_type="a"), "t", "") is hot
    assert len(directory._pools) == 10 and len(one.pools) == 10
    for number in range(6000):
        directory.pool_for(Target(agent_type="a", hash_key=str(number)), "t", "")
    assert len(directory._raw) < 500


def test_an_evicted_pool_is_not_served_again_from_the_raw_cache():
    directory = Directory(pools_max=1)
    directory.add(agent("a/1"))
    first = directory.pool_for(Target(agent_type="a"), "t", "")
    directory.pool_for(Target(version="1.0"), "t", "")
    assert first.evicted
    directory.add(agent("a/2"))
    assert len(directory.pool_for(Target(agent_type="a"), "t", "")) == 2


def test_a_successor_under_the_same_id_is_not_removed_by_its_predecessors_cleanup():
    directory = Directory()
    old, new = agent("a/1"), agent("a/1")
    directory.add(old)
    assert directory.add(new) is old
    assert directory.remove(old) is False
    assert directory.get("t", "", "a/1") is new
    with pytest.raises(ValueError, match="already"):
        directory.add(new)


def test_two_hundred_reservations_never_exceed_the_slots():
    directory = Directory()
    for number in range(10):
        directory.add(agent(f"a/{number}", max_concurrency=4))
    rng = Random(1)
    pool = directory.pool_for(Target(agent_type="a"), "t", "")
    chosen = []
    for _ in range(200):
        one = choose(pool, 0, now=0.0, rng=rng)
        if one is not None:
            directory.reserve(one)
            chosen.append(one)
    assert Counter(one.agent_id for one in chosen) == {f"a/{number}": 4 for number in range(10)}
    assert pool.is_full and pool.why_unusable() == "10 full"
    for one in chosen:
        directory.release(one)
    assert pool.counts() == {"ready": 10}
    with pytest.raises(ValueError, match="no slot"):
        directory.release(chosen[0])


def test_a_slot_given_back_after_the_agent_went_harms_nobody():
    directory = Directory()
    one = agent("a/1", max_concurrency=1)
    directory.add(one)
    directory.reserve(one)
    directory.remove(one)
    directory.release(one)
    assert one.in_flight == 0 and len(directory) == 0


def test_the_reasons_why_nobody_can_take_it_are_counted():
    directory = Directory()
    for number, status in enumerate([DRAINING] * 3 + [STARTING] * 2 + [UNREACHABLE]):
        directory.add(agent(f"a/{number}", status=status))
    pool = directory.pool_for(Target(agent_type="a"), "t", "")
    assert not pool.has_usable and not pool.is_full
    assert pool.why_unusable() == "3 draining, 2 starting, 1 unreachable"
    saturated = agent("a/9")
    saturated.saturated = True
    directory.add(saturated)
    assert pool.is_full


def test_the_revision_grows_with_who_is_there_and_how_they_are_but_not_with_slots():
    directory = Directory()
    one = agent("a/1", max_concurrency=1)
    seen = [directory.revision]
    directory.add(one)
    seen.append(directory.revision)
    one.status = DEGRADED
    directory.changed(one)
    seen.append(directory.revision)
    directory.reserve(one)
    directory.release(one)
    assert directory.revision == seen[-1]
    directory.remove(one)
    seen.append(directory.revision)
    assert sorted(set(seen)) == seen


def test_a_listing_goes_page_by_page_in_order_and_stays_in_its_tenant():
    directory = Directory()
    for env in ("production", "staging"):
        for number in range(5):
            directory.add(agent(f"a/{number}", env=env, status=HEALTHY if number % 2 else DRAINING))
    directory.add(agent("a/9", tenant="other"))
    pages, after = [], ("", "")
    while page := directory.listing("t", after=after, limit=3):
        pages.append([(one.env, one.agent_id) for one in page])
        after = pages[-1][-1]
    assert [len(page) for page in pages] == [3, 3, 3, 1]
    listed = [key for page in pages for key in page]
    assert listed == sorted(listed)
    assert len(directory.listing("t", env="staging", status=DRAINING)) == 3
    assert len(directory.listing("t", target=Target(agent_type="a", agent_id=""), env="staging")) == 5
    assert directory.listing("t", target=Target(agent_type="nobody")) == []
    with pytest.raises(SelectorError):
        directory.listing("t", target=Target(topic="x"))


def test_the_inventory_counts_each_capability_once_under_its_canonical_name():
    directory = Directory(ALIASES)
    directory.add(agent("a/1", capabilities=["summarize", "text-summarize", "NER"]))
    directory.add(agent("a/2", capabilities=["text_summarize"]))
    directory.add(agent("a/3", env="staging", capabilities=["ner"]))
    directory.add(agent("a/4", tenant="other", capabilities=["secret"]))
    told = [(line.name, line.aliases, line.agents) for line in directory.capabilities("t")]
    assert told == [("ner", (), 2), ("text_summarize", ("summarize",), 2)]
    assert [line.agents for line in directory.capabilities("t", "production")] == [1, 2]


def hint(directory: Directory, target: Target, env: str = "") -> str:
    return directory.hint(parse_selector(target, "t", env, directory.aliases))


@pytest.fixture
def populated() -> Directory:
    directory = Directory(Aliases({"summarize": "text_summarize"}))
    directory.add(agent("extractor/a1", capabilities=["ner", "dates"], version="1.9", labels={"zone": "a"}))
    directory.add(agent("extractor/b2", capabilities=["ner"], version="1.10"))
    directory.add(agent("writer/1", capabilities=["summarize"]))
    directory.add(agent("planner/1", env="staging", capabilities=["planning"]))
    directory.add(agent("secretive/1", tenant="other", capabilities=["secret_ner"]))
    return directory


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Target(agent_type="planner"), "It matches in env staging, but env production was asked for."),
        (Target(capabilities=["planning"]), "It matches in env staging"),
        (Target(agent_id="planner/1"), "It matches in env staging"),
        (Target(agent_type="extracter"), "did you mean extractor?"),
        (Target(capabilities=["sumarize"]), "did you mean summarize or text_summarize?"),
        (Target(agent_type="extractor", version=">=2"), "Registered versions: 1.9, 1.10; >=2 was asked for."),
        (Target(agent_id="extractor/a2"), "Registered of type extractor: extractor/"),
        (Target(agent_id="extracter/a2"), "did you mean extractor?"),
        (Target(agent_type="writer", capabilities=["ner"]), "Type writer offers text_summarize."),
        (Target(capabilities=["ner", "summarize"]), "by no agent all of them together"),
        (Target(agent_type="extractor", labels={"zone": "b"}), "No match has label zone=b: zone is a."),
        (Target(agent_type="writer", labels={"zone": "b"}), "no such agent has a label zone"),
        (Target(agent_type="zzz", version="1"), "No type zzz is registered here."),
        (Target(agent_id="zzz/1"), "No type zzz is registered here."),
    ],
)
def test_no_route_says_what_would_have_been_near(populated: Directory, target: Target, said: str):
    assert said in hint(populated, target)


@pytest.mark.parametrize(
    ("target", "env", "said"),
    [
        (Target(agent_type="zzz"), "", ""),
        (Target(capabilities=["zzz"]), "", ""),
        (Target(agent_type="extracter"), "", "did you mean extractor?"),
        (Target(capabilities=["sumarize"]), "", "did you mean summarize or text_summarize?"),
        (Target(agent_type="planner"), "test", "It matches in env staging, but env test was asked for."),
    ],
)
def test_a_hint_says_nothing_that_was_said_before_it(populated: Directory, target: Target, env: str, said: str):
    """It follows "no agent matches type zzz", and went on with "No type zzz is registered here."."""
    assert hint(populated, target, env) == said


def test_a_hint_never_names_what_belongs_to_another_tenant(populated: Directory):
    for target in (
        Target(agent_type="secretive"),
        Target(agent_type="secretiv"),
        Target(capabilities=["secret_nerr"]),
        Target(agent_id="secretive/2"),
    ):
        said = hint(populated, target)
        assert "secret_ner" not in said.replace("secret_nerr", "")
        assert "secretive/1" not in said and "other" not in said and "did you mean sec" not in said


def test_an_empty_mesh_says_so_and_a_hint_follows_what_is_there():
    directory = Directory()
    assert hint(directory, Target(capabilities=["ner"]), "staging") != ""
    assert "No agent at all" in hint(directory, Target(labels={"zone": "a"}), "staging")
    directory.add(agent("a/1", capabilities=["ners"]))
    assert "did you mean ners?" in hint(directory, Target(capabilities=["ner"]))


@given(st.lists(agents_drawn, max_size=8), targets_drawn)
def test_any_selector_gets_a_hint_without_an_error(agents: list[Agent], target: Target):
    directory = Directory(ALIASES)
    for one in agents:
        directory.add(one)
    said = hint(directory, target)
    assert len(said) < 600
