"""reach.core.explain: says the stage that removed each, agrees with the fast answer, shows no other tenant."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import RoutingPolicy, Target
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, Agent
from reach.core.balance import ROUND_ROBIN, choose
from reach.core.directory import Directory
from reach.core.explain import ROWS_MAX, Explanation, explain
from tests.unit.core.mesh_of_agents import ALIASES, agent, agents_drawn, targets_drawn

NOW = 50.0


def told(directory: Directory, target: Target, **rest: object) -> Explanation:
    return explain(directory, target, "t", "", now=NOW, rng=Random(1), **rest)  # type: ignore[arg-type]


def removed(explanation: Explanation) -> dict[str, tuple[str, str]]:
    return {row.agent_id: (row.removed_by, row.why) for row in explanation.candidates}


def test_each_candidate_has_the_first_stage_that_removed_it_and_why():
    directory = Directory(ALIASES)
    wanted = {"capabilities": ["ner"], "labels": {"zone": "a"}, "version": "2.1.0"}
    directory.add(agent("a/good", **wanted))
    directory.add(agent("a/env", env="staging", **wanted))
    directory.add(agent("b/type", **wanted))
    directory.add(agent("a/capability", **{**wanted, "capabilities": ["dates"]}))
    directory.add(agent("a/label", **{**wanted, "labels": {}}))
    directory.add(agent("a/version", **{**wanted, "version": "1.0"}))
    directory.add(agent("a/status", status=DRAINING, **wanted))
    directory.add(agent("a/weak", status=DEGRADED, **wanted))
    directory.add(agent("a/failed", **wanted))
    full = agent("a/full", max_concurrency=2, **wanted)
    full.in_flight, full.leftovers = 1, 1
    directory.add(full)
    saturated = agent("a/saturated", **wanted)
    saturated.saturated = True
    directory.add(saturated)
    avoided = agent("a/avoided", **wanted)
    avoided.avoid_until = NOW + 2.5
    directory.add(avoided)
    target = Target(agent_type="a", capabilities=["NER"], labels={"zone": "a"}, version=">=2")
    explanation = told(directory, target, exclude={"a/failed"})
    assert explanation.chosen == "a/good" and explanation.candidates[0].agent_id == "a/good"
    assert removed(explanation) == {
        "a/good": ("", "chosen: 0 of any number in flight, weight 100, load 0.00"),
        "a/env": ("env", "is in env staging, not production"),
        "b/type": ("selector", "type: is b, not a"),
        "a/capability": ("selector", "capabilities: lacks ner"),
        "a/label": ("selector", "labels: zone is (none), not a"),
        "a/version": ("selector", "version: is 1.0, not >=2"),
        "a/status": ("status", "DRAINING"),
        "a/weak": ("status", "DEGRADED, and a HEALTHY one is left"),
        "a/failed": ("excluded", "failed this message before"),
        "a/full": ("capacity", "full: 1 in flight and 1 left over from cancelled calls, of 2"),
        "a/saturated": ("capacity", "its link takes nothing more for now"),
        "a/avoided": ("choose", "answered OVERLOADED: avoided for another 2.5 s"),
    }


def test_whom_its_sender_may_not_call_is_removed_by_rights():
    directory = Directory()
    directory.add(agent("a/1"))
    directory.add(agent("a/2"))
    explanation = told(directory, Target(agent_type="a", among=["a/1 b", "a"]))
    assert explanation.chosen == "a/1"
    assert removed(explanation)["a/2"] == ("selector", "rights: is none of a/1 b; a")


def test_a_pinned_session_has_its_owner_whatever_the_owners_state():
    directory = Directory()
    directory.add(agent("a/owner", status=DRAINING))
    directory.add(agent("a/other"))
    explanation = told(directory, Target(agent_type="a"), pin="a/owner", exclude={"a/owner"})
    assert explanation.chosen == "a/owner" and explanation.policy == RoutingPolicy.ROUTING_POLICY_UNSPECIFIED
    assert removed(explanation)["a/other"] == ("session pin", "the session is pinned to a/owner")
    assert told(directory, Target(agent_type="a"), pin="a/gone").chosen == ""


def test_an_explanation_becomes_a_reply():
    directory = Directory()
    directory.add(agent("a/1"))
    reply = told(directory, Target(agent_type="a"), policy=RoutingPolicy.SCORE).to_reply(age_ms=7)
    assert (reply.chosen, reply.policy, reply.revision, reply.age_ms) == ("a/1", RoutingPolicy.SCORE, 1, 7)
    assert reply.candidates[0].agent_id == "a/1" and reply.candidates[0].removed_by == ""


def test_no_policy_is_explained_as_least_active():
    assert told(Directory(), Target(agent_type="a")).policy == RoutingPolicy.LEAST_ACTIVE


def test_at_most_a_thousand_rows_with_the_chosen_and_the_related_first():
    directory = Directory()
    for number in range(ROWS_MAX + 200):
        directory.add(agent(f"unrelated/{number}"))
    for number in range(3):
        directory.add(agent(f"a/{number}", status=HEALTHY if number == 2 else DRAINING))
    explanation = told(directory, Target(agent_type="a"))
    assert len(explanation.candidates) == ROWS_MAX
    assert explanation.candidates[0].agent_id == explanation.chosen == "a/2"
    assert {"a/0", "a/1", "a/2"} <= {row.agent_id for row in explanation.candidates}


def test_explaining_uses_up_nobodys_turn():
    directory = Directory()
    for number in range(4):
        directory.add(agent(f"a/{number}"))
    target = Target(agent_type="a")
    pool = directory.pool_for(target, "t", "")
    for _ in range(10):
        foretold = told(directory, target, policy=ROUND_ROBIN).chosen
        assert told(directory, target, policy=ROUND_ROBIN, exclude={foretold}).chosen != foretold
        one = choose(pool, ROUND_ROBIN, now=NOW, rng=Random(1))
        assert one is not None and one.agent_id == foretold


@settings(max_examples=200, deadline=None)
@given(
    st.lists(agents_drawn, max_size=10),
    targets_drawn,
    st.integers(0, 7),
    st.frozensets(st.sampled_from(("extractor/0", "extractor/1", "writer/0", "writer/1"))),
    st.booleans(),
    st.data(),
)
def test_the_slow_walk_agrees_with_the_pools_fast_answer(
    agents: list[Agent],
    target: Target,
    policy: int,
    exclude: frozenset[str],
    readmit: bool,
    data: st.DataObject,
):
    directory = Directory(ALIASES)
    for one in agents:
        one.in_flight = data.draw(st.integers(0, 2))
        one.saturated = data.draw(st.sampled_from((False, False, True)))
        one.avoid_until = data.draw(st.sampled_from((0.0, NOW - 1, NOW, NOW + 1)))
        directory.add(one)
    explanation = told(directory, target, policy=policy, exclude=exclude, readmit=readmit, hash_key="k")
    usable = {row.agent_id for row in explanation.candidates if not row.removed_by}
    pool = directory.pool_for(target, "t", "")
    fast = choose(pool, policy, now=NOW, rng=Random(1), hash_key="k", exclude=exclude, readmit=readmit)
    assert (fast.agent_id if fast else "") == explanation.chosen
    assert explanation.chosen in usable if usable else explanation.chosen == ""
    seen = set()
    for seed in range(30):
        one = choose(pool, 1, now=NOW, rng=Random(seed), hash_key="k", exclude=exclude, readmit=readmit)
        if one is not None:
            seen.add(one.agent_id)
    assert seen <= usable
    if len(usable) <= 3:  # thirty draws reach all of three
        assert seen == usable
    own = {one.agent_id for one in directory if one.tenant == "t"}
    assert {row.agent_id for row in explanation.candidates} <= own
