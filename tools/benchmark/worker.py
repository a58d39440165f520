"""One process of the benchmark: `python -m benchmark.worker ROLE LOOP JSON`.

ROLE is node, responder, requester or idle. Commands come on standard input and answers go to standard output, a JSON
object a line. The end of the input ends the process: whoever started it has ended, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TextIO

from . import ends, load
from .rows import ITEMS


def main() -> None:
    """Take the role; standard output is for answers alone, whatever libraries print goes to standard error."""
    role, loop, text = sys.argv[1:4]
    settings: dict[str, Any] = json.loads(text)
    if role == "node":
        node(loop, settings["arguments"])
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        run(work(role, settings, answers), loop)


def run(main_coroutine: Coroutine[Any, Any, None], loop: str) -> None:
    """Run on the event loop that all systems of this benchmark have."""
    if loop == "uvloop":
        import uvloop

        uvloop.run(main_coroutine)
    else:
        asyncio.run(main_coroutine)


def node(loop: str, arguments: list[str]) -> None:
    """`reach …` as the command line starts it, on the chosen event loop."""
    if loop == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

    def end_with_parent() -> None:
        while os.read(0, 1 << 16):  # not sys.stdin: the interpreter cannot end while a thread holds its lock
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    from reach.cli import main as reach

    sys.argv = ["reach", *arguments]
    reach()


async def work(role: str, settings: dict[str, Any], answers: TextIO) -> None:
    """Get ready, say so, and do what is asked until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    url, count = settings["url"], settings.get("count", 1)
    async with AsyncExitStack() as stack:
        asking: ends.Asking | None = None
        ready: dict[str, Any] = {}
        if role == "responder":
            ready["addresses"] = await ends.RESPONDERS[settings["system"]](url, count, stack)
        elif role == "idle":
            await ends.reach_idle(url, settings["first"], count, stack)
        else:
            asking = await ends.REQUESTERS[settings["system"]](url, settings.get("crowd", []), stack)
        answers.write(json.dumps(ready) + "\n")
        while line := await reader.readline():
            if asking is not None:
                answers.write(json.dumps(await measured(asking, json.loads(line))) + "\n")
        if role == "idle":
            os._exit(0)  # two thousand goodbyes are no part of any measurement


async def measured(asking: ends.Asking, command: dict[str, Any]) -> dict[str, Any]:
    """One measurement of the requester."""
    if command["kind"] == "stream":
        return await load.streams(
            asking.stream, command["payload_bytes"], command["in_flight"], ITEMS, command["seconds"]
        )
    return await load.requests(
        asking.call_crowd if command["crowd"] else asking.call,
        command["payload_bytes"],
        command["in_flight"],
        command["seconds"],
        command["limit"],
    )


if __name__ == "__main__":
    main()
