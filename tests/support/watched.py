"""`reach` as its users run it; but SIGUSR2 makes it tell which tasks its loop has: a test sees none left over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter

TASKS = "tasks of the loop: "


def tell_tasks(*_: object) -> None:
    """Write one line: how often each coroutine is running as a task."""
    found = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    os.write(2, f"\n{TASKS}{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, tell_tasks)
    sys.argv[0] = "reach"
    from reach.cli import main

    main()
