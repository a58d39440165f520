"""When an agent counts as routable: after the acknowledgement of a heartbeat that was sent after its probe's answer."""

from __future__ import annotations

from typing import Any

from agent_sdk.readiness import Readiness

A: Any = "a"
B: Any = "b"


def test_one_heartbeat_proves_all_that_asked_before_it() -> None:
    readiness = Readiness()
    assert readiness.ask(A)
    assert not readiness.ask(B)
    readiness.sent()
    assert readiness.acknowledged() == [A, B]
    assert readiness.acknowledged() == []


def test_an_earlier_heartbeat_proves_nothing() -> None:
    readiness = Readiness()
    readiness.sent()
    readiness.ask(A)
    assert readiness.acknowledged() == []
    readiness.sent()
    assert readiness.acknowledged() == [A]


def test_a_probe_takes_back_what_was_asked_before_it() -> None:
    readiness = Readiness()
    readiness.ask(A)
    readiness.sent()
    readiness.doubt(A)
    assert readiness.acknowledged() == []
    assert readiness.ask(A)
    readiness.sent()
    assert readiness.acknowledged() == [A]
