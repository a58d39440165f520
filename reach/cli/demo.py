"""`reach demo`: a node and agents, each a process of its own, and a few calls to watch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

import click

from reach.cli.ending import Ended, Exit
from reach.cli.output import console

_ROLES = ("echo", "thinker", "memory", "memory")
_AGENTS = 5  # echo and reporter share a process
_START_LIMIT_S = 20.0
_AGENT_STOP_LIMIT_S = 5.0
_NODE_STOP_LIMIT_S = 10.0


@click.command()
@click.option(
    "--listen", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="The node's gRPC address."
)
@click.option(
    "--http", default="127.0.0.1:7071", show_default=True, metavar="HOST:PORT", help="The node's HTTP address."
)
@click.option("--once", is_flag=True, help="End after the calls.")
def demo(listen: str, http: str, once: bool) -> None:
    """Start a node with demo agents, make a few calls, print how to call it, and stay until Ctrl-C.

    \b
    Example:
      reach demo
    """
    from reach.adapters.binding import PortTaken, require_free

    try:
        require_free(listen, "gRPC", "listen")
        require_free(http, "HTTP", "http")
    except (PortTaken, ValueError) as error:
        raise Ended(str(error), Exit.USAGE) from error
    code = asyncio.run(_Demo(listen, http).run(once))
    sys.exit(code)


class _Demo:
    """The processes of one demo, and their end."""

    def __init__(self, listen: str, http: str) -> None:
        self.listen = listen
        self.http = http
        self.node: Process | None = None
        self.agents: list[Process] = []
        self.stopped = asyncio.Event()

    async def run(self, once: bool) -> int:
        loop = asyncio.get_running_loop()
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                loop.add_signal_handler(getattr(signal, name), self.stopped.set)
        try:
            work = asyncio.ensure_future(self._show(once))
            stop = asyncio.ensure_future(self.stopped.wait())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
            return 0 if work.cancelled() else work.result()
        finally:
            await self._end()

    async def _show(self, once: bool) -> int:
        from reach.cli import demo_calls

        screen = console()
        screen.print(f"starting a node on {self.listen} and {_AGENTS} agents …")
        self.node = await self._start("reach.cli.demo_node", self.listen, self.http)
        self.agents = [await self._start("reach.cli.demo_agents", role) for role in _ROLES]
        ready = asyncio.ensure_future(demo_calls.wait_for_agents(self.listen, _AGENTS, _START_LIMIT_S))
        died = asyncio.ensure_future(self._first_death())
        try:
            await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return died.result()
            if not ready.result():
                raise Ended(f"not all agents were ready after {_START_LIMIT_S:g} s", Exit.MESH_ERROR)
            if not await demo_calls.make_calls(self.listen, screen):
                return int(Exit.MESH_ERROR)
            if once:
                return 0
            demo_calls.print_how_to(self.listen, self.http, screen)
            return await died
        finally:
            for task in (ready, died):
                task.cancel()

    async def _start(self, module: str, *arguments: str) -> Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        environment["REACH_URL"] = self.listen
        if module == "reach.cli.demo_node":
            del environment["REACH_URL"]
        # A session of its own: Ctrl-C reaches only this process, which then ends the others in order.
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments,
            stdin=PIPE, stdout=DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip

    async def _first_death(self) -> int:
        """Wait until a process ends by itself, which none should; the code to end with."""
        assert self.node is not None
        waits: dict[asyncio.Task[int], Any] = {
            asyncio.ensure_future(process.wait()): process for process in (self.node, *self.agents)
        }
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        process = waits[done.pop()]
        what = "the node" if process is self.node else "an agent"
        click.echo(f"reach: {what} ended by itself (exit code {process.returncode})", err=True)
        return int(Exit.USAGE) if process is self.node and process.returncode == Exit.USAGE else int(Exit.MESH_ERROR)

    async def _end(self) -> None:
        """Agents first, so that they say goodbye to a living node. Each within its limit, then by force."""
        await _stop(self.agents, _AGENT_STOP_LIMIT_S)
        await _stop([self.node] if self.node else [], _NODE_STOP_LIMIT_S)


async def _stop(processes: list[Process], limit_s: float) -> None:
    running = [process for process in processes if process.returncode is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    if not running:
        return
    _, late = await asyncio.wait([asyncio.ensure_future(process.wait()) for process in running], timeout=limit_s)
    if late:
        for process in running:
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
        await asyncio.wait(late)


def _signal(process: Process, number: int) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:  # it was quicker
        pass
