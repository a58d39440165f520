"""Serving agents until told to stop: signals, exit codes, several agents on one link."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from agent_sdk import connection
from agent_sdk.agent import Agent
from agent_sdk.errors import AgentReplaced, ReachError
from agent_sdk.logs import configure_if_nobody_has
from agent_sdk.loopwatch import LoopWatch
from agent_sdk.work import Work
from agentreach.aio import loop

log = logging.getLogger("agent_sdk")

EXIT_REFUSED = 2
EXIT_REPLACED = 4


async def serve(*agents: Agent) -> None:
    """Attach the agents, over one link where they share their address and credentials, and serve until cancelled.

    Waits for a node for ever. Cancelling it drains. Raises `AgentReplaced`, or what a node refused an agent with.
    """
    await _serve(agents, asyncio.Event())


async def _serve(agents: tuple[Agent, ...], stop: asyncio.Event) -> None:
    if not agents:
        raise ValueError("serve() needs at least one agent")
    leases: dict[object, connection.Lease] = {}
    starts: list[asyncio.Task[None]] = []
    watch = LoopWatch(lambda: _works(agents))
    try:
        for agent in agents:
            key = object() if agent._own_link else (agent._access(), agent._record.env, id(agent._transport))
            if key not in leases:
                leases[key] = connection.take(
                    agent._access(), env=agent._record.env, own_link=agent._own_link, transport=agent._transport
                )
            starts.append(asyncio.create_task(agent.start(lease=leases[key]), name=f"{agent.agent_id} starts"))
        await _unless(stop, _all(starts))
        if not stop.is_set():
            log.info("serving %s", ", ".join(agent.agent_id for agent in agents))
            await _unless(stop, _until_ended(agents))
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        try:
            await asyncio.gather(*(agent.drain() for agent in agents))
        finally:
            watch.stop()
            for lease in leases.values():
                await connection.release(lease)


async def _all(starts: list[asyncio.Task[None]]) -> None:
    """Await all; the first failure is raised."""
    await asyncio.gather(*starts)


async def _until_ended(agents: tuple[Agent, ...]) -> None:
    waits = [asyncio.create_task(agent.ended(), name=f"{agent.agent_id} ends") for agent in agents]
    try:
        pending = set(waits)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _unless(stop: asyncio.Event, wait: Coroutine[Any, Any, None]) -> None:
    """Await something, or give it up when told to stop."""
    work = asyncio.create_task(wait, name="agent_sdk serve")
    stopping = asyncio.create_task(stop.wait(), name="agent_sdk stop")
    try:
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.gather(stopping, work, return_exceptions=True)


def _works(agents: tuple[Agent, ...]) -> list[Work]:
    return [work for agent in agents if (host := agent._host) is not None for work in host.works()]


def run(*agents: Agent) -> None:
    """Serve agents in this process until SIGTERM or Ctrl-C: several agents, one link.

        agent_sdk.run(a, b)

    What is under way is finished first; a second signal exits at once.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("an event loop is running here: use `await agent.serve()` instead of `agent.run()`")
    configure_if_nobody_has()
    connection.import_grpc()
    try:
        loop.run(_main(agents))
    except AgentReplaced as replaced:
        print(str(replaced), file=sys.stderr)  # noqa: T201  # one line for whoever supervises the process
        _leave_stuck(agents, EXIT_REPLACED)
        raise SystemExit(EXIT_REPLACED) from None
    except ReachError as refused:
        print(f"cannot serve: {refused.code.value}: {refused}", file=sys.stderr)  # noqa: T201
        _leave_stuck(agents, EXIT_REFUSED)
        raise SystemExit(EXIT_REFUSED) from None
    _leave_stuck(agents, 0)


def _leave_stuck(agents: tuple[Agent, ...], code: int) -> None:
    """End the process now if a `def` handler has not ended: Python would wait for its thread, perhaps for ever."""
    if any(agent.stuck for agent in agents):
        log.warning("a `def` handler does not end; exiting without it")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


async def _main(agents: tuple[Agent, ...]) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        await _serve(agents, stop)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; the second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        log.info("stopping: finishing what is under way (again to exit at once)")
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
