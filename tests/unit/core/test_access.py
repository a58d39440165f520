"""The decision table, against a twin that is too dumb to be wrong."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Target
from reach.core import access
from reach.core.access import NO_RIGHTS, Decision, Patterns, Rights

LETTERS = st.text(alphabet="ab/-", max_size=8)
PATTERNS = st.text(alphabet="ab/-*", min_size=1, max_size=8)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits, one character after another, all ways at once."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(matches(pattern[1:], name[at:]) for at in range(len(name) + 1))
    return bool(name) and pattern[0] == name[0] and matches(pattern[1:], name[1:])


def rights(**said: object) -> Rights:
    made = {
        name: Patterns(value, topics=name in ("publish", "subscribe")) if name not in ("envs", "admin") else value
        for name, value in said.items()
    }
    return Rights(**made)  # type: ignore[arg-type]


def allowed(decision: Decision) -> bool:
    assert decision.why
    return decision.allowed


# ---- patterns ----


@given(PATTERNS, LETTERS)
def test_a_pattern_fits_what_its_dumb_twin_does_and_nothing_else(pattern: str, name: str) -> None:
    assert bool(Patterns([pattern], topics=True).of_name(name)) == matches(pattern, name)


@given(st.lists(PATTERNS, max_size=3), st.sampled_from(["a", "ab", "b-a"]), st.sampled_from(["a", "b", "b-b"]))
def test_an_agent_fits_by_its_type_or_by_its_whole_id(texts: list[str], kind: str, instance: str) -> None:
    agent_id = f"{kind}/{instance}"
    expected = any(matches(text, agent_id if "/" in text else kind) for text in texts)
    assert bool(Patterns(texts).of_agent(agent_id)) == expected


@given(st.lists(PATTERNS.map("cap:".__add__), max_size=3), st.text(alphabet="ab-_", min_size=1, max_size=6))
def test_capabilities_are_compared_in_lower_case_with_one_kind_of_dash(texts: list[str], name: str) -> None:
    plain = [text[4:].replace("-", "_") for text in texts]
    expected = any(matches(text, name.replace("-", "_")) for text in plain)
    assert bool(Patterns(texts).of_capability(name.upper())) == expected


def test_a_pattern_of_many_stars_that_does_not_fit_takes_no_time() -> None:
    """Found by attack: an admin of one tenant could have kept the whole node busy for minutes with one key."""
    pattern = Patterns(["*a" * 40 + "*b"])
    began = time.perf_counter()
    assert not pattern.of_name("a" * 63)
    assert not allowed(access.may_call(rights(call=["*a" * 40 + "b/x"]), Target(agent_type="a" * 63), ""))
    assert time.perf_counter() - began < 0.1


@pytest.mark.parametrize(
    ("text", "topic", "legal"),
    [
        ("extract*", False, True),
        ("extractor/blue-*", False, True),
        ("cap:ner", False, True),
        ("*", False, True),
        ("orders/eu*", True, True),
        ("cap:ner", True, False),
        ("", False, False),
        ("a b", False, False),
        ("a\nb", False, False),
        ("../x", False, False),
        ("a" * 201, False, False),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_named_as_a_fault(text: str, topic: bool, legal: bool) -> None:
    assert (access.pattern_fault(text, topic=topic) == "") == legal


# ---- the table ----


def test_without_authentication_everybody_may_do_anything() -> None:
    assert allowed(access.may_register(None, "x/1", ["c"], "any"))
    assert allowed(access.may_call(None, Target(agent_type="x"), "any"))
    assert allowed(access.may_publish(None, "t", ""))
    assert allowed(access.may_subscribe(None, "t", ""))
    assert allowed(access.may_administer(None))
    assert allowed(access.may_scrape(None))


def test_without_a_right_nothing_is_allowed() -> None:
    for none in (Rights(), NO_RIGHTS):
        assert not allowed(access.may_register(none, "x/1", [], ""))
        assert not allowed(access.may_call(none, Target(agent_id="x/1"), ""))
        assert not allowed(access.may_call(none, Target(capabilities=["c"]), ""))
        assert not allowed(access.may_publish(none, "t", ""))
        assert not allowed(access.may_subscribe(none, "t", ""))
        assert not allowed(access.may_administer(none))
        assert not allowed(access.may_scrape(none))


def test_a_right_holds_in_its_envs_only() -> None:
    staging = rights(envs=frozenset({"staging"}), register=["*"], call=["*"], publish=["*"], subscribe=["*"])
    for env, expected in (("staging", True), ("", False), ("production", False)):
        assert allowed(access.may_register(staging, "x/1", [], env)) == expected
        assert allowed(access.may_call(staging, Target(agent_type="x"), env)) == expected
        assert allowed(access.may_publish(staging, "t", env)) == expected
        assert allowed(access.may_subscribe(staging, "t", env)) == expected


def test_patterns_for_capabilities_must_cover_all_that_an_agent_declares() -> None:
    some = rights(register=["x", "cap:ner"])
    assert allowed(access.may_register(some, "x/1", ["NER"], ""))
    assert not allowed(access.may_register(some, "x/1", ["ner", "payments"], ""))
    assert allowed(access.may_register(rights(register=["x"]), "x/1", ["payments"], ""))


def test_the_capability_that_one_may_call_is_no_right_to_name_an_agent() -> None:
    some = rights(call=["cap:ner"])
    assert allowed(access.may_call(some, Target(capabilities=["ner"]), ""))
    assert not allowed(access.may_call(some, Target(agent_id="x/1"), ""))
    assert not allowed(access.may_call(some, Target(capabilities=["payments"]), ""))
    assert not allowed(access.may_call(some, Target(labels={"a": "b"}), ""))


def test_the_case_of_a_target_opens_nothing() -> None:
    some = rights(call=["b", "c/one"])
    assert allowed(access.may_call(some, Target(agent_type="B"), ""))
    assert allowed(access.may_call(some, Target(agent_id="B/x"), ""))
    assert not allowed(access.may_call(some, Target(agent_id="c/ONE"), ""))
    assert not allowed(access.may_call(some, Target(agent_id="cb/x"), ""))


def test_metrics_are_an_admins_or_a_scrapers() -> None:
    assert allowed(access.may_scrape(Rights(admin=True)))
    assert allowed(access.may_scrape(Rights(scrape=True)))
    assert allowed(access.may_scrape(Rights(scrape=True), owners=False))
    assert not allowed(access.may_scrape(Rights(admin=True), owners=False))  # they tell of all tenants
    assert not allowed(access.may_scrape(Rights(envs=frozenset({"staging"}), admin=True)))  # and of all envs
    assert not allowed(access.may_administer(Rights(scrape=True)))


# ---- a principal with two keys ----


def test_two_keys_do_not_add_up_to_what_neither_allows() -> None:
    """Found by attack: all in staging and one type in production had become all in production, for its actors."""
    both = rights(envs=frozenset({"staging"}), call=["*"], publish=["*"]).with_also(
        rights(envs=frozenset({"production"}), call=["b"], publish=["t"])
    )
    assert allowed(access.may_call(both, Target(agent_type="c"), "staging"))
    assert allowed(access.may_call(both, Target(agent_type="b"), "production"))
    assert not allowed(access.may_call(both, Target(agent_type="c"), "production"))
    assert allowed(access.may_publish(both, "t", "production"))
    assert not allowed(access.may_publish(both, "u", "production"))
    assert both.holds_in("staging") and both.holds_in("") and not both.holds_in("test")


def test_a_key_that_allows_anything_makes_up_for_the_bounds_of_another_only_as_a_whole() -> None:
    both = rights(register=["x", "cap:ner"], call=["x/1"]).with_also(rights(register=["y"], call=["*"]))
    assert allowed(access.may_register(both, "x/1", ["ner"], ""))
    assert allowed(access.may_register(both, "y/1", ["payments"], ""))
    assert not allowed(access.may_register(both, "x/1", ["payments"], ""))
    assert access.may_call(both, Target(agent_type="x"), "").among == ""


def test_who_may_call_some_instances_is_bound_to_them_where_a_session_goes_on_elsewhere_too() -> None:
    some = rights(call=["c/1", "c/2"])
    assert access.may_call(some, Target(agent_id="c/1"), "").among == "c/1 c/2"
    assert access.may_call(rights(call=["c"]), Target(agent_id="c/1"), "").among == ""


TARGETS = st.builds(
    lambda kind, name, capability: Target(
        agent_id=f"{name}/1" if kind == "id" else "",
        agent_type=name if kind == "type" else "",
        capabilities=[capability] if kind != "id" and capability else [],
        labels={"l": "1"} if kind == "labels" else {},
    ),
    st.sampled_from(["id", "type", "capability", "labels"]),
    st.sampled_from(["a", "b", "ab"]),
    st.sampled_from(["", "c", "d"]),
)
CALLS = st.sampled_from(["a", "b", "a*", "*", "a/1", "*/2", "b/*", "cap:c", "cap:*"])
RIGHTS = st.builds(
    lambda envs, call: rights(envs=frozenset(envs), call=call),
    st.lists(st.sampled_from(["*", "production", "staging"]), max_size=2),
    st.lists(CALLS, max_size=3),
)
AGENTS = ("a/1", "a/2", "b/1", "b/2", "ab/1")


def twin_allows(own: Rights, target: Target, env: str, agent_id: str) -> bool:
    """Whether one key lets this target reach this agent."""
    if not {"*", env} & own.envs:
        return False
    for text in own.call.texts:
        if text.startswith("cap:"):
            if not target.agent_id and any(matches(text, f"cap:{name}") for name in target.capabilities):
                return True
        elif matches(text, agent_id if "/" in text else agent_id.partition("/")[0]):
            return True
    return False


@given(st.lists(RIGHTS, min_size=1, max_size=3), TARGETS, st.sampled_from(["production", "staging"]))
def test_a_call_reaches_no_agent_that_none_of_its_keys_allows(keys: list[Rights], target: Target, env: str) -> None:
    together = keys[0]
    for other in keys[1:]:
        together = together.with_also(other)
    decision = access.may_call(together, target, env)
    for agent_id in AGENTS:
        named = target.agent_id or (target.agent_type and f"{target.agent_type}/")
        if named and not agent_id.startswith(named):
            continue
        if decision.allowed and access.fits([decision.among] if decision.among else [], agent_id):
            assert any(twin_allows(key, target, env, agent_id) for key in keys), (agent_id, decision)
