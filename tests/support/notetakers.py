"""An agent process whose conversations move: it answers each message with all that its conversation has been told.

    with note_taker(node.grpc, "notes/one") as one: one.process.terminate()

Every run of the handler is written to a file that all of them share: "session message_id agent_id begins|ends".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_sdk import Agent, Context, Session


class NoteTaker:
    """One in a process of its own."""

    def __init__(self, url: str, name: str, written: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.notetakers", url, name, str(written), *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        self.agent_id = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, cwd=Path(__file__).parents[2]
        )

    async def ended(self, limit_s: float = 30.0) -> int:
        """Wait for its end; its exit code."""
        return await asyncio.to_thread(self.process.wait, limit_s)


@contextlib.contextmanager
def note_taker(url: str, name: str, written: Path, *arguments: str) -> Iterator[NoteTaker]:
    """Start one; it is gone when the block is left. It is not usable yet: see `tests.support.agents.usable`."""
    one = NoteTaker(url, name, written, *arguments)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(10)


def runs_of(written: Path) -> Counter[str]:
    """How often each message was begun with."""
    return Counter(line.split()[1] for line in _lines(written) if line.endswith("begins"))


def overlaps_of(written: Path) -> list[str]:
    """Turns that began while another one of their session ran."""
    running: dict[str, str] = {}
    found = []
    for line in _lines(written):
        session, message, agent_id, what = line.split()
        if what == "begins":
            if session in running:
                found.append(f"{line} while {running[session]}")
            running[session] = f"{message} {agent_id}"
        else:
            running.pop(session, None)
    return found


def _lines(written: Path) -> list[str]:
    return written.read_text().splitlines()


def make(url: str, name: str, written: Path, *, hooks: bool, checkpoints: bool, pace_s: float) -> Agent:
    """The agent."""
    agent = Agent(name, url=url, capabilities=["notes"], drain_timeout=20)
    memory: dict[str, list[Any]] = {}

    def write(ctx: Context, what: str) -> None:
        with written.open("a") as file:
            file.write(f"{ctx.session_id} {ctx.message_id} {ctx.agent_id} {what}\n")

    @agent.handler
    async def note(data: Any, ctx: Context) -> dict[str, Any]:
        if not ctx.session_id:
            return {}  # somebody looks whether it is there
        write(ctx, "begins")
        try:
            await asyncio.sleep(pace_s)
            notes = memory.setdefault(ctx.session_id, [])
            notes.append(data)
            if checkpoints:
                await ctx.session.checkpoint(notes)
            return {"notes": notes, "turn": ctx.session.turn}
        finally:
            write(ctx, "ends")

    if hooks:

        @agent.on_session_release
        async def release(session: Session) -> Any:
            return memory.pop(session.session_id)

        @agent.on_session_restore
        async def restore(session: Session, notes: Any) -> None:
            memory[session.session_id] = notes

    return agent


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("written", type=Path)
    parser.add_argument("--no-hooks", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0)
    given = parser.parse_args()
    make(
        given.url,
        given.name,
        given.written,
        hooks=not given.no_hooks,
        checkpoints=given.checkpoints,
        pace_s=given.pace,
    ).run()


if __name__ == "__main__":
    main()
