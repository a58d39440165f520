"""reach.core.selector: parsing, normal forms, aliases, matching."""

from __future__ import annotations

import pytest
from hypothesis import given

from agentreach.v1.envelope_pb2 import RoutingPolicy, Target
from reach.core.agents import Agent
from reach.core.selector import ANY, Aliases, SelectorError, anchors_of, parse_selector
from tests.unit.core.mesh_of_agents import ALIASES, agent, agents_drawn, targets_drawn


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (Target(), "nothing is given"),
        (Target(hash_key="k", policy=RoutingPolicy.RANDOM), "nothing is given"),
        (Target(agent_id="a/1", topic="x"), "agent_id, topic"),
        (Target(agent_id="a/1", capabilities=["x"]), "agent_id, capabilities"),
        (Target(topic="x", version=">=1"), "topic, version"),
        (Target(topic="x"), "EVENT"),
    ],
)
def test_a_target_of_no_kind_or_of_several_is_refused_naming_its_fields(target: Target, named: str):
    with pytest.raises(SelectorError, match=named):
        parse_selector(target, "t", "", ALIASES)


def test_names_that_mean_the_same_give_one_selector():
    wanted = parse_selector(Target(agent_type="Writer", capabilities=["Summarize"]), "t", "", ALIASES)
    same = Target(agent_type="writer", capabilities=["text-summarize", "TEXT_SUMMARIZE"])
    assert parse_selector(same, "t", "production", ALIASES) == wanted
    assert wanted.capabilities == {"text_summarize"}


def test_how_to_choose_is_no_part_of_a_selector():
    plain = parse_selector(Target(agent_type="a"), "t", "", ALIASES)
    keyed = Target(agent_type="a", hash_key="k", policy=RoutingPolicy.CONSISTENT_HASH, broadcast=True)
    assert parse_selector(keyed, "t", "", ALIASES) == plain


def test_the_type_in_an_agent_id_is_lower_case_and_the_instance_is_kept():
    assert parse_selector(Target(agent_id="Writer/Ab"), "t", "", ALIASES).agent_id == "writer/Ab"


def test_an_alias_of_an_alias_is_resolved_and_a_circle_is_refused():
    aliases = Aliases({"sum": "summarize", "summarize": "text_summarize"})
    assert aliases.canonical("SUM") == "text_summarize"
    assert aliases.of("text_summarize") == ("sum", "summarize")
    for circle in ({"a": "b", "b": "a"}, {"a": "A"}, {"a": "b", "b": "c", "c": "b"}):
        with pytest.raises(ValueError, match="circle"):
            Aliases(circle)


def test_a_selector_says_itself_in_words():
    target = Target(agent_type="a", capabilities=["y", "x"], labels={"k": "v"}, version=">=1")
    said = str(parse_selector(target, "secret", "hidden", ALIASES))
    assert said == "type a and capabilities x, y and labels k=v and version >=1"


@given(agents_drawn, targets_drawn)
def test_whatever_matches_is_found_under_the_selectors_anchor(one: Agent, target: Target):
    one.offers = ALIASES.canonical_all(one.capabilities)
    selector = parse_selector(target, "t", "", ALIASES)
    if selector.matches(one):
        assert selector.anchor in anchors_of(one)


def test_tenant_and_env_are_walls():
    selector = parse_selector(Target(agent_type="a"), "t", "", ALIASES)
    assert selector.matches(agent("a/1"))
    assert not selector.matches(agent("a/1", tenant="other"))
    assert not selector.matches(agent("a/1", env="staging"))


def test_labels_alone_have_the_anchor_of_all():
    assert parse_selector(Target(labels={"zone": "a"}), "t", "", ALIASES).anchor == ANY
