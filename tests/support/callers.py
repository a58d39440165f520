"""An SDK caller in a process of its own, which can be killed or frozen in the midst of its requests.

    with caller_process(node.grpc, "worker", "--count", "20", "--sleep", "0.5") as caller:
        caller.process.kill()
        caller.told()                                    # {0: "OK", 1: "AGENT_LOST", …}: as far as it came

It asks all at once, writes each outcome to its standard output the moment it has it, and exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agent_sdk import Mesh, connect
from tests.support.agents import outcome


class CallerProcess:
    """One such caller."""

    def __init__(self, arguments: tuple[str, ...], out: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        self._out = out
        with out.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.callers", *arguments], cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip

    def told(self) -> dict[int, str]:
        """By number, the outcome it was told; fails for one that was told two."""
        found: dict[int, str] = {}
        for line in self._out.read_text(errors="replace").splitlines():
            number, _, code = line.partition(" ")
            if number.isdecimal():
                assert int(number) not in found, f"{number} was answered twice"
                found[int(number)] = code
        return found

    async def ended(self, limit_s: float = 30.0) -> int:
        """Wait for its end; its exit code."""
        return await asyncio.to_thread(self.process.wait, limit_s)

    def close(self) -> None:
        """Kill it if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def caller_process(url: str, agent_type: str, *arguments: str) -> Iterator[CallerProcess]:
    """Start one; it is gone when the block is left."""
    with tempfile.TemporaryDirectory(prefix="reach-caller-") as folder:
        caller = CallerProcess((url, agent_type, *arguments), Path(folder, "out"))
        try:
            yield caller
        finally:
            caller.close()


async def ask_all(options: argparse.Namespace) -> None:
    """Everything at once."""

    async def one(mesh: Mesh, number: int) -> None:
        data = {"n": number, "sleep": options.sleep}
        code = await outcome(mesh, data, agent_type=options.agent_type, timeout=options.timeout)
        print(number, code, flush=True)

    async with connect(options.url, timeout=20) as mesh, asyncio.TaskGroup() as asked:
        for number in range(options.first, options.first + options.count):
            asked.create_task(one(mesh, number))


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("agent_type")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=0.5)
    parser.add_argument("--timeout", type=float, default=20.0)
    asyncio.run(ask_all(parser.parse_args()))


if __name__ == "__main__":
    main()
