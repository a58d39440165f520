"""The rows of several nodes while nothing breaks: what it costs to be at another node, and what agents cost etcd."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cluster
from .processes import Child
from .rows import ACROSS, ALONE, Row, Scale
from .systems import Running, System, measure

IDLE_AGENTS = 200
NEW_AGENTS, LINK_AGENTS = 500, 50
"""Agents attached at once for the rate of registrations, and how many of them share a link."""
_IDLE_S = 20.0  # for which writes are counted; told for a minute
_SETTLE_S = 5.0  # after the last of them is attached
_ATTACH_S = 300.0


@dataclass(slots=True)
class _AtNodes(Running):
    """A caller and an agent, each at one of the nodes."""

    entry: Child | None = None

    def measured(self, row: Row) -> dict[str, int]:
        """The processes whose CPU seconds count, by their part."""
        assert self.middle is not None
        found = {"requester": self.requester.pid}
        if self.entry is not None:
            found["entry"] = self.entry.pid
        return found | {"home": self.middle.pid, "responder": self.responder.pid}


async def nodes(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """One agent at the first of two nodes, asked in turn by a caller there and by one at the other. Raises `Failed`."""
    found: dict[str, Any] = {where: {row.name: [] for row in ACROSS} for where in ("same", "other")}
    async with cluster.running(2, tree) as mesh:
        home, entry = mesh.nodes
        settings = [{"system": "reach", "url": url} for url in mesh.addresses]
        responder, near, far = await asyncio.gather(
            mesh.worker("responder", "responder", settings[0]),
            mesh.worker("requester", "requester", settings[0]),
            mesh.worker("requester at the other node", "requester", settings[1]),
        )
        system = System("reach", "Agent-Reach", "reach", tree)
        ways = {
            "same": _AtNodes(system, near, home, responder, None),
            "other": _AtNodes(system, far, home, responder, None, entry=entry),
        }
        everybody = [child.pid for child in (home, entry, responder, near, far)]
        for number in range(plan.rounds):
            for row in ACROSS:
                for where in list(ways) if number % 2 else reversed(ways):
                    found[where][row.name].append(await measure(ways[where], row, plan, everybody))
    return found


def figure(row: Row) -> str:
    """Which of a measurement's figures is compared."""
    return "p50_ms" if row.kind == ALONE else "per_s"


async def etcd(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """What idle agents have etcd write, and how fast new ones are registered. Raises `Failed`."""
    share = 1.0 if plan.fresh else 0.2
    idle, new, over_s = round(IDLE_AGENTS * share), round(NEW_AGENTS * share), _IDLE_S * (1.0 if plan.fresh else 0.25)
    async with cluster.running(2, tree) as mesh:
        urls = [mesh.urls_from(0), mesh.urls_from(1)]
        await mesh.worker("idle agents", "idle", {"urls": urls, "first": 0, "count": idle}, _ATTACH_S)
        await asyncio.sleep(_SETTLE_S)
        before = await mesh.revision()
        await asyncio.sleep(over_s)
        writes = await mesh.revision() - before

        links = max(1, new // LINK_AGENTS // 2)
        workers = [await mesh.worker("new agents", "agents", cluster.spread([], [url], links=links)) for url in urls]
        before = await mesh.revision()
        asked = []
        for number, worker in enumerate(workers):
            names = [f"new-{number}/{place}" for place in range(new // 2)]
            asked.append(worker.ask({"do": "attach", "names": names}, _ATTACH_S))
        told = await asyncio.gather(*asked)
        registered = await mesh.revision() - before
    took_s = max(max(each["attached"]) for each in told) - min(each["begun"] for each in told)
    return {
        "idle_agents": idle,
        "writes": writes,
        "seconds": over_s,
        "writes_per_agent_minute": writes / idle * 60 / over_s,
        "new_agents": new // 2 * 2,
        "registered_s": took_s,
        "registrations_per_s": new // 2 * 2 / took_s,
        "writes_per_registration": registered / (new // 2 * 2),
    }
