"""What every test run needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.support import second_run

# pytest-asyncio asks for "the current loop" before the first asynchronous test; on Python 3.11 that makes one that
# nobody closes, and some later test fails for it when it is collected (warnings are errors). Say that there is none.
asyncio.set_event_loop(None)

_FIRST = ("e2e", "integration", "component")
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take long come first, so that no worker is still busy with one when the others have nothing left.

    For xdist's `--no-loadscope-reorder`: by itself it begins with the files of many tests, which are the quick ones.
    """
    folders = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: folders.get(_folder(item), len(_FIRST)))
    for item in items:
        if second_run.may_have_one(_folder(item), item.config):
            item.add_marker(second_run.mark())


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(_HERE).parts[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing that was run again goes unseen."""
    second_run.show(terminalreporter)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session in which many tests needed a second run has failed."""
    if exitstatus == pytest.ExitCode.OK and second_run.too_many(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def logs_go_where_they_went() -> Iterator[None]:
    """A command that runs in the test's own process says where all its logs go: for that test only."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers[:] = before
        root.setLevel(level)
        for name in ("asyncio", "grpc", "aiohttp"):
            logging.getLogger(name).setLevel(logging.NOTSET)
