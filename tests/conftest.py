"""What every test run needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
import structlog

# pytest-asyncio asks for "the current loop" before the first asynchronous test; on Python 3.11 that makes one that
# nobody closes, and some later test fails for it when it is collected (warnings are errors). Say that there is none.
asyncio.set_event_loop(None)


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
