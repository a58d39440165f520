"""The SDK's own log lines, where it sets up logging: with the trace, and without secrets."""

from __future__ import annotations

import logging

import pytest

from agent_sdk import logs


def test_a_handlers_exception_is_logged_without_the_secret_that_it_quotes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # nobody has configured logging; set back afterwards
    monkeypatch.setattr(root, "level", root.level)
    logs.configure_if_nobody_has()
    try:
        raise RuntimeError("cannot reach postgres://app:hunter2@db")
    except RuntimeError:
        logging.getLogger("agent_sdk").exception("handler failed: password=%s", "hunter2")
    said = capsys.readouterr().err
    assert "hunter2" not in said and "postgres://(withheld)@db" in said and " - agent_sdk handler failed" in said
