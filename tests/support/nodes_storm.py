"""A storm over several nodes: faults drawn by a seed, on nodes, etcd, agents and the ways between, under load.

    await NodesStorm(ordeal, seed=1).rage(30)           # seconds; every fault ends by itself, what was done: `.log`

At most one node, and one member or all of etcd, is down, frozen or cut off at a time: what a mesh of three promises to
survive. Agents are killed, not frozen: a handler that stood still goes on with its turn when it thaws, whoever has the
session by then, and only its answer can be refused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from tests.support.cluster import ClusterNode
from tests.support.ordeal import BACK_S, Ordeal

STRIKE_EVERY_S = (0.2, 1.5)

Fault = tuple[str, str, Callable[[], Awaitable[None]]]
"""What is stricken (one fault at a time each), what is done to it, and the deed."""


class NodesStorm:
    """What befalls a mesh."""

    def __init__(self, ordeal: Ordeal, seed: int) -> None:
        self.ordeal = ordeal
        self.log = [f"seed {seed}"]
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self._stricken: set[str] = set()

    async def rage(self, for_s: float) -> None:
        """Strike for so long; ends when every fault has ended."""
        over_at = time.monotonic() + for_s
        async with asyncio.TaskGroup() as faults:
            while time.monotonic() < over_at:
                target, what, deed = self._next()
                if target not in self._stricken:
                    self._stricken.add(target)
                    faults.create_task(self._strike(target, what, deed), name=f"storm: {what}")
                await asyncio.sleep(self._rng.uniform(*STRIKE_EVERY_S))

    async def _strike(self, target: str, what: str, deed: Callable[[], Awaitable[None]]) -> None:
        self.log.append(f"{time.monotonic() - self._began:6.2f} {what}")
        await deed()
        self.log.append(f"{time.monotonic() - self._began:6.2f} {what} ended")
        self._stricken.discard(target)

    def _next(self) -> Fault:
        """Every fault draws alike, whether it can happen now or not: what happens depends on the seed alone."""
        rng = self._rng
        kind = rng.choice(("node", "node", "etcd", "etcd", "agent", "key"))
        draws = rng.randrange(6), rng.random(), rng.uniform(0.3, 6.0)
        return {"node": self._node, "etcd": self._etcd, "agent": self._agent, "key": self._key}[kind](*draws)

    def _node(self, place: int, draw: float, for_s: float) -> Fault:
        nodes = self.ordeal.nodes
        node = nodes[place % len(nodes)]

        async def killed() -> None:
            node.kill()
            await asyncio.sleep(for_s / 3)
            await up(node)

        async def replaced() -> None:
            await node.term()
            await up(node)

        async def frozen() -> None:
            node.pause()
            await asyncio.sleep(for_s)
            node.resume()

        async def cut_off() -> None:
            nodes.isolate(node)
            await asyncio.sleep(for_s)
            nodes.rejoin(node)

        async def parted() -> None:
            other = nodes.others(node)[0]
            nodes.cut(node, other)
            await asyncio.sleep(for_s)
            nodes.rejoin(node)

        deeds = {"kill": killed, "replace": replaced, "freeze": frozen, "cut off": cut_off, "part from another": parted}
        what = list(deeds)[int(draw * len(deeds))]
        return "a node", f"{what} {node.node_id} ({for_s:.1f} s)", deeds[what]

    def _etcd(self, place: int, draw: float, for_s: float) -> Fault:
        etcd, nodes = self.ordeal.etcd, self.ordeal.nodes
        member = etcd.members[place % len(etcd.members)]
        node = nodes[place % len(nodes)]

        async def killed() -> None:
            member.kill()
            await asyncio.sleep(for_s / 3)
            await member.restart()

        async def frozen() -> None:
            member.pause()
            await asyncio.sleep(for_s)
            member.resume()

        async def unseen() -> None:
            etcd.cut_client(node.node_id, reset=draw > 0.9)
            await asyncio.sleep(for_s)
            etcd.heal_client(node.node_id)

        async def away() -> None:
            for each in etcd.members:
                each.pause()
            await asyncio.sleep(for_s)
            for each in etcd.members:
                each.resume()

        if draw < 0.6:
            deed, what = (killed, f"kill {member.name}") if draw < 0.3 else (frozen, f"freeze {member.name}")
            return "etcd", f"{what} ({for_s:.1f} s)", deed
        if draw < 0.8:
            return "etcd", f"freeze all of etcd ({for_s:.1f} s)", away
        return "a node", f"cut {node.node_id} off from etcd ({for_s:.1f} s)", unseen

    def _agent(self, place: int, draw: float, for_s: float) -> Fault:
        ordeal = self.ordeal
        worker = ordeal.workers[place % len(ordeal.workers)]

        async def killed() -> None:
            ordeal.kill(worker)
            await asyncio.sleep(for_s / 6)
            worker.restart()

        async def replaced() -> None:
            worker.process.terminate()
            await worker.ended(60)
            worker.restart()

        deed, what = (killed, "kill") if draw < 0.5 else (replaced, "replace")
        return worker.agent_id, f"{what} {worker.agent_id}", deed

    def _key(self, place: int, draw: float, for_s: float) -> Fault:
        ordeal = self.ordeal

        async def deed() -> None:
            try:
                keys = await ordeal.keys()
                if keys and draw < 0.5:
                    await ordeal.etcd.revoke_lease(list(keys.values())[place % len(keys)])
                elif keys:
                    await ordeal.etcd.delete(list(keys)[place % len(keys)])
            except RuntimeError:  # etcd is away, or was quicker
                return

        what = "revoke the lease of" if draw < 0.5 else "delete"
        return "a key", f"{what} a key", deed


async def up(node: ClusterNode) -> None:
    """Start a node like a supervisor does: again and again, while it ends because etcd is away."""
    while True:
        if not node.running:
            node.start()
        try:
            await node.ready(BACK_S)
        except RuntimeError:
            if node.running:
                raise
        else:
            return
