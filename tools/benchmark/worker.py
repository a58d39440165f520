"""One process of the benchmark: `python -m benchmark.worker ROLE JSON`.

ROLE is node, responder, requester, idle, agents or caller. Commands come on standard input and answers go to standard
output, a JSON object a line. The end of the input ends the process: whoever started it has ended, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TextIO

import uvloop

from . import ends, load, trouble
from .rows import ITEMS


def main() -> None:
    """Take the role; standard output is for answers alone, whatever libraries print goes to standard error."""
    role, text = sys.argv[1:3]
    settings: dict[str, Any] = json.loads(text)
    if role == "node":
        node(settings["arguments"])
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        run((trouble_work if role in ("agents", "caller") else work)(role, settings, answers))


def run(main_coroutine: Coroutine[Any, Any, None]) -> None:
    """Run as `reach serve` and `agent.run()` do (agentreach/aio/loop.py), whatever system it is for."""
    gc.freeze()
    gc.set_threshold(2_000, 200, 20)
    uvloop.run(main_coroutine)


def node(arguments: list[str]) -> None:
    """`reach …` as the command line starts it."""

    def end_with_parent() -> None:
        while os.read(0, 1 << 16):  # not sys.stdin: the interpreter cannot end while a thread holds its lock
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    from reach.cli import main as reach

    sys.argv = ["reach", *arguments]
    reach()


async def commands() -> asyncio.StreamReader:
    """The standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def trouble_work(role: str, settings: dict[str, Any], answers: TextIO) -> None:
    """The same for the rows with faults."""
    from agent_sdk import connect

    reader = await commands()
    async with AsyncExitStack() as stack:
        fleet, mesh = trouble.Fleet(settings, stack), None
        if role == "agents":
            await fleet.attach(settings["names"])
        else:
            mesh = await stack.enter_async_context(connect(settings["url"]))
        answers.write("{}\n")
        while line := await reader.readline():
            command = json.loads(line)
            if command["do"] == "steady":
                found = await trouble.steady(mesh, command)
            elif command["do"] == "attach":
                found = await fleet.attach(command["names"])
            else:
                found = fleet.count()
            answers.write(json.dumps(found) + "\n")


async def work(role: str, settings: dict[str, Any], answers: TextIO) -> None:
    """Get ready, say so, and do what is asked until the input ends."""
    os.environ.update(settings.get("environment", {}))
    reader = await commands()
    url, count = settings.get("url", ""), settings.get("count", 1)
    async with AsyncExitStack() as stack:
        asking: ends.Asking | None = None
        ready: dict[str, Any] = {}
        if role == "responder":
            ready["addresses"] = await ends.RESPONDERS[settings["system"]](url, count, stack)
        elif role == "idle":
            if settings.get("gives_way"):
                give_way()
            await ends.reach_idle(settings["urls"], settings["first"], count, stack)
        else:
            asking = await ends.REQUESTERS[settings["system"]](url, settings.get("crowd", []), stack)
        answers.write(json.dumps(ready) + "\n")
        while line := await reader.readline():
            if asking is not None:
                answers.write(json.dumps(await measured(asking, json.loads(line))) + "\n")
        if role == "idle":
            os._exit(0)  # two thousand goodbyes are no part of any measurement


def give_way() -> None:
    """Run only while nobody else wants the processor.

    The last nice value is not enough: a process that woke up waits until the other one's slice, some ms, is over.
    """
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


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
