"""Three etcd members, three nodes and a few agents on loopback, shown live: `make cluster`.

Calls are made all the time, so that one sees caller and agent on different nodes, and what becomes of them when a
process is killed. Whatever ends is started again after a while, as a supervisor would. Ctrl-C ends everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from reach.adapters.binding import PortTaken, require_free  # noqa: E402
from tools.cluster_view import View  # noqa: E402

FIRST_PORT = 7070
COUNT = 3
START_LIMIT_S = 40.0
STOP_LIMIT_S = 10.0
START_AGAIN_S = 8.0  # time to look at what is missing
POLL_S = 0.1

_AS_CHILD = "from reach.cli.lifeline import end_with_parent; end_with_parent(); from reach.cli import main; main()"
_AGENTS = (("echo", 0), ("echo", 1), ("memory", 1), ("memory", 2), ("thinker", 2))
"""Each demo agent's role, and the node that it dials first."""


@dataclass(frozen=True)
class Place:
    """The addresses of one node and of the etcd member beside it."""

    number: int
    first_port: int

    def _at(self, offset: int) -> str:
        return f"127.0.0.1:{self.first_port + 100 * (self.number - 1) + offset}"

    @property
    def node_id(self) -> str:
        return f"node-{self.number}"

    @property
    def grpc(self) -> str:
        return self._at(0)

    @property
    def http(self) -> str:
        return self._at(1)

    @property
    def etcd(self) -> str:
        return self._at(5)

    @property
    def etcd_peer(self) -> str:
        return self._at(6)


class Part:
    """One process of the cluster, and how to start it."""

    def __init__(self, kind: str, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.kind, self.name = kind, name
        self.log = log
        self._command, self._environment = list(command), environment
        self.process: Process | None = None
        self.ended = ""
        """How it ended; empty while it runs."""

    @property
    def pid(self) -> int:
        """Of the process as last started; 0: never."""
        return self.process.pid if self.process is not None else 0

    async def start(self) -> None:
        """Start it, in a session of its own: Ctrl-C reaches only the tool, which ends the others in order."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=log, stderr=log, env=self._environment, cwd=self.log.parent,
                start_new_session=True, preexec_fn=_end_with_parent if self.kind == "etcd" else None,
            )  # fmt: skip
        self.ended = ""

    async def wait(self) -> None:
        """Wait for its end, and note how it was."""
        assert self.process is not None
        code = await self.process.wait()
        self.ended = f"killed by signal {-code}" if code < 0 else f"ended with {code}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                self.process.send_signal(number)

    def tail(self) -> str:
        """The end of what it has written."""
        return self.log.read_text(errors="replace")[-1_500:] if self.log.exists() else ""


def _end_with_parent() -> None:
    """Linux: SIGKILL for this process when its parent is gone. Elsewhere a killed tool leaves it behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Cluster:
    """All parts, started and kept running until `stop`."""

    def __init__(self, first_port: int, folder: Path) -> None:
        self.places = [Place(number, first_port) for number in range(1, COUNT + 1)]
        self._folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        self._environment["PYTHONPATH"] = os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(ROOT / "proto")]
        )
        self.etcds = [self._etcd(place) for place in self.places]
        self.nodes = [self._node(place) for place in self.places]
        self.agents = [self._agent(role, at) for role, at in _AGENTS]
        self._keepers: list[asyncio.Task[None]] = []
        self._started = False
        self.broken: asyncio.Future[Part] = asyncio.get_running_loop().create_future()
        """Done with a part that ended before everything ran."""

    # ---- what there is ----

    def urls_from(self, place: int) -> str:
        """The addresses of all nodes, this one's first."""
        return ",".join(each.grpc for each in [*self.places[place:], *self.places[:place]])

    def _etcd(self, place: Place) -> Part:
        name = f"etcd-{place.number}"
        members = ",".join(f"etcd-{each.number}=http://{each.etcd_peer}" for each in self.places)
        return self._part("etcd", name, [
            _etcd_binary(), f"--name={name}", f"--data-dir={self._folder / name}",
            f"--listen-client-urls=http://{place.etcd}", f"--advertise-client-urls=http://{place.etcd}",
            f"--listen-peer-urls=http://{place.etcd_peer}", f"--initial-advertise-peer-urls=http://{place.etcd_peer}",
            f"--initial-cluster={members}", "--log-level=error",
        ])  # fmt: skip

    def _node(self, place: Place) -> Part:
        registry = "etcd://" + ",".join(each.etcd for each in self.places)
        return self._part("node", place.node_id, [
            sys.executable, "-c", _AS_CHILD, "serve", "--node-id", place.node_id, "--listen", place.grpc,
            "--http", place.http, "--registry", registry, "--log-level", "warning", "--drain-timeout-s", "10",
        ])  # fmt: skip

    def _agent(self, role: str, at: int) -> Part:
        part = self._part("agent", f"{role} at {self.places[at].node_id}",
                          [sys.executable, "-m", "reach.cli.demo_agents", role])  # fmt: skip
        part._environment["REACH_URL"] = self.urls_from(at)
        return part

    def _part(self, kind: str, name: str, command: Sequence[str]) -> Part:
        return Part(kind, name, command, dict(self._environment), self._folder / f"{name.replace(' ', '-')}.log")

    def require_ports(self) -> None:
        """Raise `PortTaken` unless every port is free."""
        for place in self.places:
            for address, what in ((place.grpc, "a node"), (place.http, "a node's HTTP side"),
                                  (place.etcd, "an etcd member"), (place.etcd_peer, "an etcd member")):  # fmt: skip
                require_free(address, what, "--first-port")

    # ---- its life ----

    async def start(self) -> None:
        """Start everything and wait until it can be used. Raises `TimeoutError`."""
        async with asyncio.timeout(START_LIMIT_S):
            for parts, addresses in (
                (self.etcds, [place.etcd for place in self.places]),
                (self.nodes, [place.grpc for place in self.places]),
                (self.agents, []),
            ):
                self._keepers += [asyncio.create_task(self._keep(part), name=part.name) for part in parts]
                for address in addresses:
                    await _listening(address)
        self._started = True

    async def _keep(self, part: Part) -> None:
        while True:
            await part.start()
            await part.wait()
            if not self._started and not self.broken.done():
                self.broken.set_result(part)
            await asyncio.sleep(START_AGAIN_S)

    async def stop(self) -> None:
        """End all: agents, so that they say goodbye to living nodes; nodes, to a living registry; then that."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await _end(self.agents, signal.SIGTERM, signal.SIGKILL)
        await _end(self.nodes, signal.SIGTERM, signal.SIGKILL)
        await _end(self.etcds, signal.SIGKILL)  # their data goes too; a gentle end takes a leader 7 s


async def _end(parts: Sequence[Part], *signals: signal.Signals) -> None:
    processes = [part.process for part in parts if part.process is not None and part.process.returncode is None]
    for number in signals:
        for part in parts:
            part.send(number)
        waiting = [asyncio.ensure_future(process.wait()) for process in processes]
        if not waiting:
            return
        _, late = await asyncio.wait(waiting, timeout=STOP_LIMIT_S)
        if not late:
            return


async def _listening(address: str) -> None:
    """Wait until somebody listens there."""
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        await asyncio.sleep(POLL_S)


def _etcd_binary() -> str:
    beside = Path(sys.executable).with_name("etcd")
    found = str(beside) if beside.exists() else shutil.which("etcd")
    if found is None:
        raise SystemExit("cluster: there is no etcd beside this Python or on the PATH; make setup installs one")
    return found


# ---- the command ----


@contextlib.asynccontextmanager
async def _stop_asked() -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    yield stop


async def _run(first_port: int, *, once: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="reach-cluster-") as folder:
        cluster = Cluster(first_port, Path(folder))
        cluster.require_ports()
        view = View(cluster)
        view.say(f"starting {COUNT} etcd members, {COUNT} nodes and {len(_AGENTS)} processes with agents …")
        began = time.monotonic()
        async with _stop_asked() as stop:
            try:
                if not await _until(cluster.start(), stop, cluster.broken):
                    return _broken(cluster, view)
                if not await _until(view.ready(START_LIMIT_S), stop, cluster.broken):
                    return _broken(cluster, view)
                view.say(f"all is up, after {time.monotonic() - began:.1f} s\n")
                await _until(view.show(once=once), stop, cluster.broken)
            except TimeoutError:
                view.say(f"cluster: not all is up after {START_LIMIT_S:g} s")
                return 1
            finally:
                view.say("ending all that was started …")
                await cluster.stop()
    return 0


def _broken(cluster: Cluster, view: View) -> int:
    """What ended before all was up, with its last words; 0 if it was a person who ended it."""
    if not cluster.broken.done():
        return 0
    part = cluster.broken.result()
    view.say(f"cluster: {part.name} {part.ended}:\n{part.tail()}")
    return 1


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event, broken: asyncio.Future[Part]) -> bool:
    """Work until it is done, `stop` is set or something broke; True if it is done. Its own error is raised."""
    task = asyncio.create_task(work, name="cluster")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([task, stopping, broken], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cluster until Ctrl-C."""
    parser = argparse.ArgumentParser("cluster", description="Three etcd members, three nodes and agents, shown live.")
    ports = "of node-1; HTTP one above, its etcd five and six above, the next node 100 above"
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, metavar="N", help=ports)
    parser.add_argument("--once", action="store_true", help="make a few calls and end")
    options = parser.parse_args(arguments)
    try:
        return asyncio.run(_run(options.first_port, once=options.once))
    except PortTaken as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
