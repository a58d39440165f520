"""A mesh of several real nodes on a real etcd, agents and callers, under load while somebody breaks it; and its books.

    async with ordeal.under_load() as load:              # requests, own ids, streams and conversations, at every node
        ordeal.nodes[1].kill()
        await load.more(100)
    await ordeal.check()                                 # what it was told is true, no two owners, no two leaders

The books are outside of the mesh: every run of a handler (`tests.support.chaos`), every turn of a session with its
owner (`tests.support.turns`), and which node said when that it leads (`tests.support.reigns`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from agent_sdk import Mesh, connect
from agentreach.aio.clock import boot_time
from agentreach.v1.admin_pb2 import ResetBreakerRequest
from reach.adapters.admin_client import AdminClient
from reach.core.ports import MeshFailure
from tests.support import turns
from tests.support.agents import AgentProcess, agent_process, eventually, usable
from tests.support.chaos import GAUGES, Book, Outcome, judge
from tests.support.cluster import ClusterNode
from tests.support.etcd_cluster import WiredEtcd
from tests.support.node_wires import WiredNodes
from tests.support.reigns import Watchers, overlaps, watched
from tests.support.second_run import Untrue

TIMEOUT_S = 20.0
BACK_S = 60.0  # no promise: until all is up again on a busy machine
PACE_S = 0.03
CONVERSATIONS = 6
SETTLED_S = 30.0

LEASE_S = 10.0
PREFIX = "/agentreach/v1/"

TIMES: dict[str, Any] = {
    "lease_ttl_s": 20.0, "heartbeat_interval_s": 2.0, "resume_window_s": 6.0, "settle_min_s": 1.0,
    "node_lease_ttl_s": LEASE_S, "election_ttl_s": 3.0, "drain_timeout_s": 20.0, "registry_grace_s": 60.0,
    "accept_timeout_s": 2.0, "trace_recent_max": 5_000,
}  # fmt: skip
"""As with the defaults a node's lease outlives the 8 s in which it is noticed that a node stands still."""


class Ordeal:
    """The nodes, their agents, and the books of what happened."""

    def __init__(self, etcd: WiredEtcd, nodes: WiredNodes, folder: Path) -> None:
        self.etcd, self.nodes = etcd, nodes
        self.kind = f"worker{secrets.token_hex(3)}"
        self.book = Book(folder)
        self.record = folder / "turns"
        self.record.touch()
        self.where = ("--written", str(self.book.ledger), "--recorded", str(self.record))
        """An agent's arguments, for it to write into the books."""
        self.workers: list[AgentProcess] = []
        self.deaths: dict[int, float] = {}
        """When which agent's process was killed, by the boot clock."""
        self._reigns: Watchers | None = None
        self._checked = 0

    @contextlib.contextmanager
    def agents(self, count: int = 4) -> Iterator[None]:
        """Start agents, each in a process of its own, spread over the nodes."""
        with contextlib.ExitStack() as processes:
            for n in range(count):
                url = self.nodes.url_from(n % len(self.nodes))
                self.workers.append(processes.enter_context(agent_process(url, f"{self.kind}/{n}", *self.where)))
            yield

    async def ready(self) -> None:
        """Everything that was broken is mended, and every agent is reachable from every node."""
        await self.etcd.settled()
        self.nodes.heal()
        await self.nodes.ready(BACK_S)
        await self._all_reached()
        while sum([await node.metric("reach_agents") > 0 for node in self.nodes]) < min(2, len(self.workers)):
            await self._spread()
            await self._all_reached()

    async def let_in(self) -> None:
        """What an operator does when the faults are over: breakers that they opened would stay open for a while."""
        for node in self.nodes:
            async with AdminClient([node.grpc]) as client:
                for worker in self.workers:
                    with contextlib.suppress(MeshFailure):  # it is not back yet
                        await client.reset_breaker(ResetBreakerRequest(agent_id=worker.agent_id))

    async def _spread(self) -> None:
        """After a few nodes were lost all agents may be at one, and nothing brings them back by itself."""
        for worker in self.workers:
            worker.process.terminate()
            await worker.ended(BACK_S)
            worker.restart()

    async def _all_reached(self) -> None:
        await asyncio.gather(*(self._reached_from(node) for node in self.nodes))

    async def _reached_from(self, node: ClusterNode) -> None:
        async with connect(node.grpc, own_link=True, timeout=BACK_S) as mesh:
            for worker in self.workers:
                await usable(mesh, BACK_S, agent_id=worker.agent_id)

    def kill(self, worker: AgentProcess) -> None:
        """End an agent's process: its turns end with it."""
        self.deaths[worker.process.pid] = boot_time()
        worker.process.kill()
        worker.process.wait(10)

    @contextlib.asynccontextmanager
    async def callers(self, *nodes: ClusterNode) -> AsyncIterator[list[Mesh]]:
        """One linked with each of these nodes (with every one, if none is named) that knows the others too."""
        places = [self.nodes.nodes.index(node) for node in nodes or self.nodes]
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(connect(self.nodes.url_from(place), own_link=True, timeout=BACK_S))
                for place in places
            ]

    @contextlib.asynccontextmanager
    async def under_load(self, *, sessions: bool = True) -> AsyncIterator[Load]:
        """Callers at every node that ask all the time; afterwards each of them has been told something."""
        async with self.callers() as meshes, watched(self.nodes) as self._reigns:
            async with asyncio.TaskGroup() as group:
                load = Load(self, meshes)
                load.begin(group, sessions=sessions)
                try:
                    await load.more(20)
                    yield load
                finally:
                    load.over.set()
            await self.book.answered()

    async def keys(self) -> dict[str, int]:
        """The agents' keys in etcd, each with its lease."""
        found = await self.etcd.leases_of(f"{PREFIX}agents/")
        return {key: lease for key, lease in found.items() if f"/{self.kind}/" in key}

    def agents_logs(self) -> str:
        """The end of each agent's log, and its exit code if it has ended, for a failure's message."""
        return "\n".join(f"-- {each.agent_id} {each.process.poll()}\n{each.log[-1_500:]}" for each in self.workers)

    async def leader(self) -> ClusterNode:
        """Wait until somebody leads; while it is under load."""

        async def leads() -> bool:
            return self._reigns is not None and self._reigns.leader() != ""

        await eventually(leads, "somebody leads", BACK_S)
        assert self._reigns is not None
        return self.nodes.by_id(self._reigns.leader())

    def told(self) -> list[Outcome]:
        """What was told since the last check."""
        return [outcome for number, outcome in self.book.outcomes.items() if number >= self._checked]

    async def check(self, **told: set[str]) -> None:
        """All is well: nobody was told anything but OK, or what is named (`stream={"AGENT_LOST"}`); all settles."""
        mine, self._checked = self.told(), max(self.book.outcomes, default=-1) + 1
        found = Counter((outcome.what, outcome.code) for outcome in mine)
        others = [each for each in mine if each.code != "OK" and each.code not in told.get(each.what, ())]
        faults = self.book.faults() + turns.faults(turns.read(self.record, self.deaths))
        wrong = [each for each in mine if each.faults(self.book.runs()[each.number])]
        text = f"{len(faults)} faults, told {found}: " + "\n".join(faults[:10])
        judge(faults, text + (await self._traces(wrong[:3]) if faults else ""))
        assert not others, f"told {found}: " + "\n".join(map(str, others[:10])) + await self._traces(others[:3])
        if self._reigns is not None and (both := overlaps(self._reigns.reigns())):
            raise Untrue(f"two nodes led: {both}")
        await self.ready()
        await self.settled()

    async def _traces(self, outcomes: list[Outcome]) -> str:
        """What every node knows of these, for a failure's message."""
        found = ""
        for outcome, node in itertools.product(outcomes, self.nodes):
            trace_id = outcome.told.partition("[trace ")[2].partition("]")[0]
            command = [sys.executable, "-m", "reach.cli", "trace", trace_id, "--url", node.grpc]
            told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
            found += f"\n-- {node.node_id}\n{told.stdout}{told.stderr}"
        return found

    async def settled(self) -> None:
        """Wait until every gauge of every node is 0."""
        found: dict[str, float] = {}

        async def none() -> bool:
            found.clear()
            for node in self.nodes:
                for gauge in GAUGES:
                    if value := await node.metric(gauge):
                        found[f"{gauge} of {node.node_id}"] = value
            return not found

        try:
            await eventually(none, "every gauge is 0", SETTLED_S, every_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"left over: {found}") from error


class Load:
    """What is asked all the time, and how much of it was answered."""

    def __init__(self, ordeal: Ordeal, meshes: list[Mesh]) -> None:
        self.ordeal, self.meshes = ordeal, meshes
        self.over = asyncio.Event()
        self._name = secrets.token_hex(3)
        self._asked = 0
        self._said: Counter[int] = Counter()

    def begin(self, group: asyncio.TaskGroup, *, sessions: bool) -> None:
        """Ask from now on until it is over."""
        group.create_task(self._ask_on(), name="load: requests")
        if sessions:
            for number in range(CONVERSATIONS):
                group.create_task(self._converse(number), name=f"load: conversation {number}")

    async def more(self, count: int, limit_s: float = BACK_S) -> None:
        """Wait until so many more were told OK."""
        book = self.ordeal.book
        before = book.codes()["OK"]

        async def so_many() -> bool:
            return book.codes()["OK"] - before >= count

        await eventually(so_many, f"{count} more are answered", limit_s)

    async def conversations_go_on(self) -> None:
        """Wait until each of them was answered once more."""
        before = self._said.copy()

        async def answered() -> bool:
            return all(self._said[number] > before[number] for number in range(CONVERSATIONS))

        await eventually(answered, "every conversation goes on", BACK_S)

    async def lasts(self, seconds: float) -> None:
        """Let a fault last, under load: what it does to others shows only with time."""
        await asyncio.sleep(seconds)

    async def _ask_on(self) -> None:
        book, kind = self.ordeal.book, self.ordeal.kind
        while not self.over.is_set():
            n, self._asked = self._asked, self._asked + 1
            mesh = self.meshes[n % len(self.meshes)]
            how: dict[str, Any] = {"timeout": TIMEOUT_S, "sleep": 0.1 if n % 7 else 0.8}
            match n // len(self.meshes) % 4:
                case 0:
                    book.begin(mesh, kind, **how)
                case 1:
                    book.begin(mesh, kind, idempotent=True, **how)
                case 2:
                    book.begin(mesh, kind, message_id=f"{self._name}-{n}", **how)
                case _:
                    book.begin(mesh, kind, stream=5, **how)
            await asyncio.sleep(PACE_S)

    async def _converse(self, number: int) -> None:
        mesh = self.meshes[number % len(self.meshes)]
        session = f"{self._name}-{number}"
        while not self.over.is_set():
            told = await self.ordeal.book.one(mesh, self.ordeal.kind, session=session, timeout=TIMEOUT_S, sleep=0.1)
            self._said[number] += told.code == "OK"
            await asyncio.sleep(PACE_S)
