"""An SDK agent for tests: it does what the data says; in this process, or in one of its own that can be killed.

    with agent_process(node.grpc, "worker", "--max", "2") as worker:
        worker.process.send_signal(signal.SIGSTOP)
        worker.runs()                                    # what its handler was started for, in order

Data is text (answered as it is) or an object: {"n": 1, "sleep": 0.5} is answered with its n after sleeping; `block`
stops the loop, `die` ends the process, `forever` never ends, `raise` raises, `stream` yields numbers with a pause
between. Each run is written down before anything else, in a file that outlives the process: the external counter of
side effects. `recorded` is another one, for the turns of sessions: see `tests.support.turns`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from agent_sdk import Agent, Context, Mesh, ReachError
from tests.support import evidence, turns
from tests.support.node import NodeProcess

LINK_DEAD_S = 3 * 0.5  # three of QUICK's heartbeats
RESUME_S = 1.0  # QUICK's resume_window_s
SETTLE_S = RESUME_S  # a lost agent's requests are settled within it
BUSY_S = 3.0  # what a loaded machine may add to any of these

_ERRORS_SHOWN = 10
EVENTUALLY_S = 30.0  # likewise; what is promised within a time gives its own


async def eventually(
    holds: Callable[[], Awaitable[bool]],
    what: str,
    limit_s: float = EVENTUALLY_S,
    every_s: float = 0.03,
    why: Callable[[], str] = lambda: "",
) -> float:
    """Wait until it holds; how long that took. There is no event for what another process will do.

    Waited in vain it fails with `why`, and with what there is to see of links and nodes.
    """
    began = time.monotonic()
    while not await holds():
        if time.monotonic() - began >= limit_s:
            found = await asyncio.to_thread(evidence.found)
            raise AssertionError(f"not within {limit_s:g} s: {what}{why()}\n{found}")
        await asyncio.sleep(every_s)
    return time.monotonic() - began


async def usable(mesh: Mesh, limit_s: float = EVENTUALLY_S, **target: Any) -> None:
    """Wait until somebody answers at this target."""
    refused: Counter[str] = Counter()

    async def answers() -> bool:
        try:
            await mesh.request("usable?", timeout=2, **target)
        except ReachError as error:
            refused[str(error).partition(" [trace ")[0]] += 1
            return False
        return True

    def told() -> str:
        return "".join(f"\n{count} times {error}" for error, count in refused.most_common(_ERRORS_SHOWN))

    await eventually(answers, f"{target} is usable", limit_s, why=told)


async def act(data: Any, ctx: Context, name: str) -> Any:
    """What the agents of this module do with a request."""
    if not isinstance(data, dict):
        return data
    if "sleep" in data:
        await asyncio.sleep(data["sleep"])
    if data.get("die"):
        os._exit(3)
    if "block" in data:
        time.sleep(data["block"])  # noqa: ASYNC251  # the fault it is made for
    if data.get("forever"):
        await asyncio.Event().wait()
    if "raise" in data:
        raise RuntimeError(data["raise"])
    return name if data.get("who") else data.get("n")


def make(
    name: str, url: str, written: Path | None = None, topic: str = "", recorded: Path | None = None, **more: Any
) -> Agent:
    """An agent of this kind; `written`: the file of its runs; `topic`: one whose events it takes, and writes down."""
    agent = Agent(name, url=url, **{"drain_timeout": 5.0, **more})

    def write_down(data: Any) -> None:
        if written is not None and isinstance(data, dict):
            with written.open("a") as runs:  # one write at the end of the file: many processes may share it
                runs.write(f"{data.get('n', '')}\n")

    @agent.handler
    async def work(data: Any, ctx: Context) -> Any:
        write_down(data)
        with turns.recorded(recorded, ctx, data):
            return await act(data, ctx, agent.agent_id)

    if topic:

        @agent.on_event(topic)
        async def hear(data: Any, ctx: Context) -> None:
            write_down(data)

    @agent.on("stream")
    async def stream(data: Any, ctx: Context):  # type: ignore[no-untyped-def]  # a generator
        write_down(data)
        for number in range(data["stream"]):
            yield number
            await asyncio.sleep(data.get("pause", 0))

    return agent


def make_pooled(name: str, url: str, written: Path | None = None, **more: Any) -> Agent:
    """One whose handler is a plain `def`, and runs in threads: `block` holds its thread, `gil` the whole process."""
    agent = Agent(name, url=url, **{"drain_timeout": 5.0, **more})

    @agent.handler
    def work(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if written is not None:
            with written.open("a") as runs:
                runs.write(f"{data.get('n', '')}\n")
        time.sleep(data.get("block", 0))
        ctypes.PyDLL(None).usleep(int(data.get("gil", 0) * 1e6))  # like an extension, or a regular expression, can
        return data.get("n")

    return agent


class AgentProcess:
    """One such agent in a process of its own."""

    def __init__(self, url: str, name: str, arguments: tuple[str, ...], written: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.support.agents", url, name, "--written", str(written), *arguments]
        self._written, self._log = written, log
        self.agent_id = name
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip

    def restart(self) -> None:
        """Start it again after it has ended."""
        assert self.process.poll() is not None
        self.process = self._start()

    def runs(self) -> list[str]:
        """The `n` of every run of its handler, over restarts."""
        return self._written.read_text().split()

    @property
    def log(self) -> str:
        """What it wrote to its outputs."""
        return self._log.read_text(errors="replace")

    async def ended(self, limit_s: float = 15.0) -> int:
        """Wait for its end; its exit code."""
        return await asyncio.to_thread(self.process.wait, limit_s)

    def close(self) -> None:
        """Kill it if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def agent_process(url: str, name: str, *arguments: str) -> Iterator[AgentProcess]:
    """Start one; it is gone when the block is left. It is not usable yet: see `usable`."""
    with tempfile.TemporaryDirectory(prefix="reach-agent-") as folder:
        written, log = Path(folder, "runs"), Path(folder, "log")
        written.touch()
        agent = AgentProcess(url, name, arguments, written, log)
        try:
            yield agent
        finally:
            agent.close()


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--written", type=Path)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--max", type=int, default=0)
    parser.add_argument("--drain", type=float, default=5.0)
    parser.add_argument("--capabilities", default="")
    parser.add_argument("--version", default="")
    parser.add_argument("--topic", default="")
    parser.add_argument("--pool", action="store_true", help="handlers that are plain functions")
    parser.add_argument("--collect", action="store_true", help="collect garbage all the time")
    options = parser.parse_args()
    capabilities = [name for name in options.capabilities.split(",") if name]
    more = {
        "max_concurrency": options.max,
        "drain_timeout": options.drain,
        "capabilities": capabilities,
        "version": options.version,
    }
    if options.pool:
        agent = make_pooled(options.name, options.url, options.written, **more)
    else:
        agent = make(options.name, options.url, options.written, options.topic, options.recorded, **more)
    if options.collect:
        gc.set_threshold(1)
    agent.run()


if __name__ == "__main__":
    main()


def name(agent_type: str) -> str:
    """An agent_id that no other test uses."""
    return f"{agent_type}/{secrets.token_hex(4)}"


async def nothing_in_flight(node: NodeProcess) -> None:
    """Wait until every request has ended: the gauge is back to 0."""

    async def none() -> bool:
        return await node.metric("reach_requests_in_flight") == 0

    await eventually(none, "no request is in flight")


async def outcome(mesh: Mesh, data: Any, **how: Any) -> str:
    """ "OK" or the error's code."""
    try:
        await mesh.request(data, **how)
    except ReachError as error:
        return str(error.code)
    return "OK"
