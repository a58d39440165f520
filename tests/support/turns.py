"""Who had a session when: each turn's begin and end, written down by its handler, and what must hold of them.

    with turns.recorded(path, ctx, data): ...            # in the handler
    assert turns.faults(turns.read(path)) == []

At no moment two turns of a session run, be it at two owners or at one, and no later turn has a smaller epoch. The
times are the boot clock's, the same in every process of a machine. A turn that wrote no end ended with its process:
whoever killed that says when (`deaths`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from agent_sdk import Context
from agent_sdk.identity import incarnation
from agentreach.aio.clock import boot_time

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a handler for a message of a session."""

    session: str
    n: str
    owner: tuple[str, str]
    """(agent_id, incarnation)."""
    epoch: int
    began: float
    ended: float


@contextlib.contextmanager
def recorded(path: Path | None, ctx: Context, data: Any) -> Iterator[None]:
    """Write down when this turn begins, and ends; nothing for what belongs to no session."""
    if path is None or not ctx.session_id:
        yield
        return
    turn = secrets.token_hex(6)
    number = data.get("n", "") if isinstance(data, dict) else ""
    begin = {
        "turn": turn, "session": ctx.session_id, "agent": ctx.agent_id, "incarnation": incarnation().hex(),
        "epoch": ctx.session.epoch, "n": str(number), "pid": os.getpid(),
    }  # fmt: skip
    _append(path, {**begin, "began": boot_time()})
    try:
        yield
    finally:
        _append(path, {"turn": turn, "ended": boot_time()})


def _append(path: Path, entry: Mapping[str, object]) -> None:
    with path.open("a") as record:  # one write at the end of the file: many processes share it
        record.write(json.dumps(entry) + "\n")


def read(path: Path, deaths: Mapping[int, float] | None = None) -> list[Turn]:
    """All turns in the order in which they began; `deaths`: when which process was killed."""
    begun: dict[str, dict[str, Any]] = {}
    ended: dict[str, float] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "ended" in entry:
            ended[entry["turn"]] = entry["ended"]
        else:
            begun[entry["turn"]] = entry
    found = [
        Turn(
            each["session"], each["n"], (each["agent"], each["incarnation"]), each["epoch"], each["began"],
            ended.get(name, (deaths or {}).get(each["pid"], NEVER)),
        )
        for name, each in begun.items()
    ]  # fmt: skip
    return sorted(found, key=lambda turn: turn.began)


def by_session(turns: list[Turn]) -> dict[str, list[Turn]]:
    """The turns of each session, in order."""
    found: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        found[turn.session].append(turn)
    return found


def faults(turns: list[Turn]) -> list[str]:
    """Everything that must not be: turns at the same time, epochs that go down, an epoch of two owners."""
    found = []
    for own in by_session(turns).values():
        latest = own[0]
        for turn in own[1:]:
            if turn.began < latest.ended:
                found.append(f"at the same time: {latest} and {turn}")
            if turn.ended > latest.ended:
                latest = turn
        for one, other in pairwise(own):
            if other.epoch < one.epoch:
                found.append(f"the epoch goes down: {one} and {other}")
            if other.epoch == one.epoch and other.owner != one.owner:
                found.append(f"two owners of an epoch: {one} and {other}")
    return found
