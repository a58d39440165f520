"""What every test run needs."""

from __future__ import annotations

import asyncio

# pytest-asyncio asks for "the current loop" before the first asynchronous test; on Python 3.11 that makes one that
# nobody closes, and some later test fails for it when it is collected (warnings are errors). Say that there is none.
asyncio.set_event_loop(None)
