"""The two rows that measure the node without any traffic: memory of idle agents, and the routing decision."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from .processes import Child, Children, Failed, connections_of, python_path, raise_file_limit, resident_bytes
from .systems import start_node

_HOLDERS = 2  # processes that hold the idle agents
_FIRST = 10  # agents before the first look, so that what is loaded once is not counted as theirs
_ATTACH_S = 300.0
_STILL_S, _STILL_LIMIT_S = 1.0, 20.0
_DECISION_S = 120.0


async def idle_bytes(agents: int, tree: Path | None) -> dict[str, Any]:
    """Memory that each of so many agents costs a fresh node, every one on a connection of its own. Raises `Failed`."""
    files = raise_file_limit()
    agents = min(agents, files - 200)
    async with Children() as children:
        node, url, port = await start_node(tree, children)

        async def hold(first: int, count: int) -> None:
            settings = {"urls": [url], "first": first, "count": count}
            holder = await Child.worker("idle agents", "idle", settings, python_path(tree))
            await children.add(holder).answer(_ATTACH_S)

        await hold(0, _FIRST)
        before = await _settled(node.pid)
        share = agents // _HOLDERS
        for number in range(_HOLDERS):
            await hold(_FIRST + number * share, share)
        after = await _settled(node.pid)
        connections = connections_of(node.pid, port)
    held = share * _HOLDERS
    if connections != held + _FIRST:
        raise Failed(f"{connections} connections for {held + _FIRST} agents")
    return {"agents": held, "bytes_per_agent": (after - before) / held, "start_bytes": before}


async def _settled(pid: int) -> int:
    """The process's memory once it moved less than 1 % within a second."""
    last = resident_bytes(pid)
    for _ in range(int(_STILL_LIMIT_S / _STILL_S)):
        await asyncio.sleep(_STILL_S)
        now = resident_bytes(pid)
        if abs(now - last) < last / 100:
            return now
        last = now
    return last


_DECISION = """
import json, random, sys
import bench_decision as decision
from agentreach.v1.envelope_pb2 import Target
decision.ROUNDS = int(sys.argv[1])
one = [Target(agent_type="type0", capabilities=["ner"], version=">=2.1,<3")]
each = [Target(agent_type=f"type{n}", capabilities=["ner"]) for n in range(100)]
print(json.dumps({
    "us_10000_of_a_type": decision.decision_us(decision.population(1, 10_000), one, 0),
    "us_100_types_of_100": decision.decision_us(decision.population(100, 100), each, 0),
}))
"""


async def decision_us(rounds: int, tree: Path | None) -> dict[str, Any]:
    """Microseconds of one routing decision by the default policy (tools/bench_decision.py). Raises `Failed`."""
    async with Children() as children:
        arguments = [sys.executable, "-c", _DECISION, str(rounds)]
        child = children.add(await Child.start("routing decision", arguments, python_path(tree)))
        found = await child.answer(_DECISION_S)
    return {name: float(value) for name, value in found.items()} | {"rounds": rounds}
