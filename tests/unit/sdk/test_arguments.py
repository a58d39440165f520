"""Arguments of a wrong type or size are told where they are given, by their name."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sdk import Agent, connect


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"name_or_type": 5}, TypeError, "name_or_type must be text, got 5"),
        ({"labels": {"a": 1}}, TypeError, r"labels\['a'\] must be text, got 1"),
        ({"labels": {1: "a"}}, TypeError, "label's name must be text"),
        ({"labels": ["a"]}, TypeError, "labels must be a mapping"),
        ({"max_concurrency": "5"}, TypeError, "max_concurrency must be a whole number, got '5'"),
        ({"max_concurrency": -1}, ValueError, "max_concurrency must be 0 to 1000000, got -1"),
        ({"max_concurrency": True}, TypeError, "max_concurrency"),
        ({"weight": 10**12}, ValueError, "weight must be 1 to 1000000, got 1000000000000"),
        ({"weight": 0.5}, TypeError, "weight must be a whole number"),
        ({"priority": 2**40}, ValueError, "priority"),
        ({"session_concurrency": 0}, ValueError, "session_concurrency must be 1"),
        ({"capabilities": "ner"}, TypeError, "capabilities is a list of names"),
        ({"capabilities": 5}, TypeError, "capabilities must be a list of names, got 5"),
        ({"capabilities": [5]}, TypeError, "each of capabilities must be text"),
        ({"version": 2.1}, TypeError, "version must be text, got 2.1"),
        ({"env": 1}, TypeError, "env must be text"),
        ({"drain_timeout": "soon"}, TypeError, "drain_timeout must be a number of seconds"),
        ({"drain_timeout": float("nan")}, ValueError, "drain_timeout"),
    ],
)
def test_an_agent_names_the_argument_that_is_wrong(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Agent(**{"name_or_type": "worker", **given})


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"url": 5}, TypeError, "url must be text, got 5"),
        ({"env": 5}, TypeError, "env must be text"),
        ({"name": 5}, TypeError, "name must be text"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds, 0 or more"),
    ],
)
def test_connect_names_the_argument_that_is_wrong(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        connect(**given)


def test_capabilities_may_come_from_anything_that_gives_them() -> None:
    agent = Agent("worker", capabilities=(name for name in ("ner", "qa")))  # type: ignore[arg-type]  # as people do
    assert agent._capabilities == ["ner", "qa"]
