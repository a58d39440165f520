"""`reach demo`: a node and agents, each a process of its own, and a few calls to watch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import click

from reach.cli import ending
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
    sys.exit(ending.run(_run(listen, http, once)))


async def _run(listen: str, http: str, once: bool) -> int:
    return await _Demo(listen, http).run(once)


class _Demo:
    """The processes of one demo, and their end."""

    def __init__(self, listen: str, http: str) -> None:
        self.listen = listen
        self.http = http
        self.node: Process | None = None
        self.agents: list[Process] = []
        self.watches: list[asyncio.Task[None]] = []
        self.died: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()
        self.shown = False
        """The calls were made: from now on the visitor may do with the agents what they like."""

    async def run(self, once: bool) -> int:
        """Show the demo until it is over, stopped by a signal, or one of its processes dies; the exit code."""
        loop = asyncio.get_running_loop()
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            with contextlib.suppress(AttributeError, NotImplementedError):  # not on every platform
                loop.add_signal_handler(getattr(signal, name), self.stopped.set)
        show = asyncio.create_task(self._show(once), name="demo")
        stop = asyncio.create_task(self.stopped.wait(), name="demo-stop")
        try:
            await asyncio.wait((show, stop, self.died), return_when=asyncio.FIRST_COMPLETED)
            if show.done():
                return show.result()
            return self._death(self.died.result()) if self.died.done() else int(Exit.OK)
        finally:
            for task in (show, stop, *self.watches):
                task.cancel()
            await asyncio.wait((show, stop, *self.watches))
            # Agents first, so that they say goodbye to a living node. Each within its limit, then by force.
            await _stop(self.agents, _AGENT_STOP_LIMIT_S)
            await _stop([self.node] if self.node else [], _NODE_STOP_LIMIT_S)

    async def _show(self, once: bool) -> int:
        from reach.cli import demo_calls

        screen = console()
        screen.print(f"starting a node on {self.listen} and {_AGENTS} agents …")
        self.node = await self._start("reach.cli.demo_node", self.listen, self.http)
        if not await demo_calls.wait_for_agents(self.listen, 0, _START_LIMIT_S):
            raise Ended(f"the node was not ready after {_START_LIMIT_S:g} s", Exit.MESH_ERROR)
        for role in _ROLES:
            self.agents.append(await self._start("reach.cli.demo_agents", role))
        if not await demo_calls.wait_for_agents(self.listen, _AGENTS, _START_LIMIT_S):
            raise Ended(f"not all agents were ready after {_START_LIMIT_S:g} s", Exit.MESH_ERROR)
        if not await demo_calls.make_calls(self.listen, screen):
            return int(Exit.MESH_ERROR)
        self.shown = not once
        if not once:
            demo_calls.print_how_to(self.listen, self.http, screen)
            await self.stopped.wait()
        return int(Exit.OK)

    async def _start(self, module: str, *arguments: str) -> Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        if module == "reach.cli.demo_agents":
            environment["REACH_URL"] = self.listen
        # A session of its own: Ctrl-C reaches only this process, which then ends the others in order.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments,
            stdin=PIPE, stdout=DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        self.watches.append(asyncio.create_task(self._watch(process), name=f"demo-watch {process.pid}"))
        return process

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        if self.shown and process is not self.node:
            click.echo(f"reach: a demo agent ended (exit code {code}); the node and the other agents go on", err=True)
        elif not self.died.done():
            self.died.set_result(process)

    def _death(self, process: Process) -> int:
        """Say which process ended by itself; the exit code."""
        if process is self.node and process.returncode == Exit.USAGE:
            return int(Exit.USAGE)  # it has said why
        what = "the node" if process is self.node else "an agent"
        click.echo(f"reach: {what} ended by itself (exit code {process.returncode})", err=True)
        return int(Exit.MESH_ERROR)


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
