from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentreach.wire import names

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")

near_names = st.text(alphabet="aZ09._-/ \n\x00é٣ſK", max_size=70)


@given(near_names | st.text(max_size=70))
@example("a" * 63)
@example("a" * 64)
@example("a\n")
@example("a b")
def test_a_name_is_what_the_written_grammar_says(text: str) -> None:
    assert names.is_name(text) == (NAME.fullmatch(text) is not None)


@given(near_names | st.text(max_size=300))
@example("a/b/c")
@example("/a")
@example("a" * 255)
@example("a" * 256)
def test_a_topic_is_a_longer_name_that_may_hold_slashes(text: str) -> None:
    assert names.is_topic(text) == (TOPIC.fullmatch(text) is not None)
    assert (names.topic_fault(text) is None) == names.is_topic(text)


def test_what_is_no_topic_is_told_what_one_is() -> None:
    assert names.topic_fault("reports/☃") == f"'reports/☃' is not a topic: {names.TOPIC_RULE}"
    assert str(names.TOPIC_CHARS_MAX - 1) in names.TOPIC_RULE


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True), st.from_regex(NAME, fullmatch=True))
def test_an_agent_id_is_split_into_what_it_was_made_of(agent_type: str, instance: str) -> None:
    assert names.split_agent_id(f"{agent_type}/{instance}") == (agent_type, instance)


@pytest.mark.parametrize(
    ("agent_id", "reason"),
    [
        ("extractor", "has no '/'"),
        ("", "has no '/'"),
        ("/7f9c", "agent type '' is not a name"),
        ("extractor/", "instance '' is not a name"),
        ("a/b/c", "instance 'b/c' is not a name"),
        ("Extractor/1", "not in lower case"),
        ("ex tractor/1", "is not a name"),
        ("extractor/1\n", "is not a name"),
        ("extractor/" + "x" * 64, "is not a name"),
    ],
)
def test_an_illegal_agent_id_is_refused_with_the_reason(agent_id: str, reason: str) -> None:
    fault = names.agent_id_fault(agent_id)
    assert fault is not None and reason in fault
    with pytest.raises(ValueError, match=re.escape(fault)):
        names.split_agent_id(agent_id)


def test_a_callers_id_is_a_legal_agent_id() -> None:
    assert names.agent_id_fault("caller/cli-7f") is None


def test_the_reason_for_a_huge_agent_id_stays_short() -> None:
    assert len(names.agent_id_fault("x" * 100_000) or "") < 300


@given(st.text(max_size=100))
def test_capabilities_are_compared_without_case_and_with_one_kind_of_dash(text: str) -> None:
    once = names.normalise_capability(text)
    assert once == text.lower().replace("-", "_")
    assert names.normalise_capability(text.replace("-", "_")) == once


def test_long_text_does_not_sit_in_the_cache_of_capabilities() -> None:
    before = names._normalised.cache_info().currsize
    names.normalise_capability("x" * 1000)
    assert names._normalised.cache_info().currsize == before


def test_no_environment_means_production() -> None:
    assert names.normalise_env("") == "production"
    assert names.normalise_env("Staging") == "Staging"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("extractor", "extractor"),
        ("spiffe://acme.org/ns/prod/extractor", "spiffe---acme.org-ns-prod-extractor"),
        ("жук", "unnamed"),
        ("", "unnamed"),
        ("-" * 80 + "x", "x"),
        ("a/" * 60, ("a-" * 59 + "a")[-63:]),
    ],
)
def test_what_is_no_name_becomes_one(text: str, name: str) -> None:
    assert names.as_name(text) == name.lstrip("-._")
    assert names.is_name(names.as_name(text))
