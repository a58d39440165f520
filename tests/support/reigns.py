"""Who led when, as every node says all the time on its page of metrics: never two at the same time.

async with watched(nodes) as watchers:
    ...
assert overlaps(watchers.reigns()) == []
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from tests.support.cluster import ClusterNode, NodeCluster

PACE_S = 0.1

Reign = tuple[float, float, str]
"""From, until, node_id."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a node said of its leading, and when it was asked and had answered."""

    asked: float
    answered: float
    leads: bool


class Watchers:
    """Asks every node all the time whether it leads."""

    def __init__(self, nodes: NodeCluster, pace_s: float = PACE_S) -> None:
        self.looks: dict[str, list[Look]] = {node.node_id: [] for node in nodes}
        self._pace_s = pace_s
        self._tasks = [asyncio.create_task(self._watch(node), name=f"watch {node.node_id}") for node in nodes]

    async def _watch(self, node: ClusterNode) -> None:
        while True:
            asked = time.monotonic()
            status, text = await asyncio.to_thread(node.get, "/metrics")
            if status == 200:
                leads = "\nreach_leader 1" in text
                self.looks[node.node_id].append(Look(asked, time.monotonic(), leads))
            await asyncio.sleep(self._pace_s)

    def reigns(self) -> list[Reign]:
        """Times in which a node surely led: from an answer to the asking of the last one in a row that said so."""
        found = []
        for node_id, looks in self.looks.items():
            begun: Look | None = None
            last: Look | None = None
            for look in [*looks, Look(0, 0, leads=False)]:
                if look.leads:
                    begun, last = begun or look, look
                elif begun is not None and last is not None:
                    if last.asked > begun.answered:
                        found.append((begun.answered, last.asked, node_id))
                    begun = last = None
        return sorted(found)

    def leader(self) -> str:
        """Who said last that it leads, if nobody did after it."""
        now = [(looks[-1].answered, node_id) for node_id, looks in self.looks.items() if looks and looks[-1].leads]
        return max(now, default=(0.0, ""))[1]

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def overlaps(reigns: Iterable[Reign]) -> list[tuple[Reign, Reign]]:
    """Reigns of two nodes at the same time."""
    return [(one, other) for one, other in itertools.pairwise(sorted(reigns)) if other[0] < one[1]]


@contextlib.asynccontextmanager
async def watched(nodes: NodeCluster) -> AsyncIterator[Watchers]:
    """Ask as long as the block runs."""
    watchers = Watchers(nodes)
    try:
        yield watchers
    finally:
        await watchers.close()
