"""Real nodes for tests: `reach serve` in a process of its own, or a node in this process; on free loopback ports.

    async with start_node(registry="etcd://127.0.0.1:2379", node_lease_ttl_s=2) as node:   # plain `with` works too
        async with connect(node.grpc) as mesh: ...
        node.process.send_signal(signal.SIGTERM)

    async with default_node() as node: ...                                                 # as users start it

    async with running(config(resume_window_s=0.5)) as node:                               # in this process
        async with connect(node.grpc_address) as mesh: ...

Every setting of `reach.node.settings` is a keyword. Times are shrunk (`QUICK`), so that a test sees in a second what
takes half a minute with the defaults. A process is ended by its own id only, and always gone afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar

from reach.node.app import Node, running
from reach.node.config import Config, load
from tests.support.etcd import free_port
from tests.support.watched import TASKS

__all__ = ["QUICK", "Node", "NodeProcess", "config", "default_node", "running", "start_node"]

READY_S = 60.0  # of a machine that starts many processes at once; no promise
POLL_S = 0.03

QUICK: Mapping[str, object] = MappingProxyType(
    {
        "lease_ttl_s": 3.0,
        "heartbeat_interval_s": 0.5,
        "resume_window_s": 1.0,
        "settle_min_s": 0.2,
        "cancel_grace_s": 0.5,
        "warm_up_s": 0.0,
        "drain_timeout_s": 10.0,
        "node_lease_ttl_s": 2.0,
        "election_ttl_s": 2.0,
        "log_format": "json",
    }
)
"""The settings of a test's node unless it gives its own."""


def config(**settings: object) -> Config:
    """A node's configuration: `QUICK` and these, on free ports, nothing from the environment."""
    return load(environment={}, flags={"listen": "127.0.0.1:0", "http": "127.0.0.1:0", **QUICK, **settings})


class NodeProcess:
    """One `reach serve`. Entering the context starts it and waits until it is ready; leaving kills it."""

    open: ClassVar[set[NodeProcess]] = set()
    """All that were started in this process and not closed."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.grpc = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        chosen = {"listen": self.grpc, "http": self.http, **settings}
        self.grpc, self.http = str(chosen["listen"]), str(chosen["http"])
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        self._environment |= {f"REACH_{name.upper()}": str(value) for name, value in chosen.items()}
        self._process: subprocess.Popen[bytes] | None = None
        handle, name = tempfile.mkstemp(prefix="reach-node-", suffix=".log")
        os.close(handle)
        self._log = Path(name)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process as last started, running or not."""
        assert self._process is not None, "the node was never started"
        return self._process

    @property
    def log(self) -> str:
        """Everything it has written to its outputs, over restarts."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start the process and return at once; again after it has ended: the same settings, the same addresses."""
        assert self._process is None or self._process.poll() is not None, "the node runs already"
        self.open.add(self)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.watched", "serve"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
            )  # fmt: skip

    def wait_ready(self, limit_s: float = READY_S) -> None:
        """Block until GET /readyz answers 200; `RuntimeError` with the log if it does not. In a test: `ready`."""
        give_up = time.monotonic() + limit_s
        while self.get("/readyz")[0] != 200:
            self._check_alive(give_up)
            time.sleep(POLL_S)

    async def ready(self, limit_s: float = READY_S) -> None:
        """Wait until GET /readyz answers 200."""
        give_up = time.monotonic() + limit_s
        while (await asyncio.to_thread(self.get, "/readyz"))[0] != 200:
            self._check_alive(give_up)
            await asyncio.sleep(POLL_S)

    async def unready(self, limit_s: float = READY_S) -> None:
        """Wait until GET /readyz answers something else than 200, or nobody answers any more."""
        give_up = time.monotonic() + limit_s
        while (await asyncio.to_thread(self.get, "/readyz"))[0] == 200:
            if time.monotonic() > give_up:
                raise RuntimeError(f"the node is still ready:\n{self.log[-3_000:]}")
            await asyncio.sleep(POLL_S)

    async def restart(self) -> None:
        """Start it again after it has ended, and wait until it is ready."""
        self.start()
        await self.ready()

    def get(self, page: str) -> tuple[int, str]:
        """GET a page of its HTTP side: (status, text); (0, why) if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{page}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that carry these labels; 0 if there is none."""
        _, text = await asyncio.to_thread(self.get, "/metrics")
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = all(f"{label}={json.dumps(text)}" in series for label, text in labels.items())
            if series.partition("{")[0] == name and wanted:
                total += float(value)
        return total

    def rss_bytes(self) -> int:
        """The memory that it has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def open_files(self) -> int:
        """How many files, sockets included, it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def tasks(self, limit_s: float = 10.0) -> Counter[str]:
        """The tasks of its loop by what they run, but for its HTTP side's; see `tests.support.watched`."""
        told = self.log.count(TASKS)
        self.process.send_signal(signal.SIGUSR2)
        give_up = time.monotonic() + limit_s
        while self.log.count(TASKS) == told or not self.log.endswith("\n"):
            self._check_alive(give_up)
            await asyncio.sleep(POLL_S)
        last = next(line for line in reversed(self.log.splitlines()) if line.startswith(TASKS))
        found: dict[str, int] = json.loads(last.removeprefix(TASKS))
        return Counter({name: count for name, count in found.items() if not name.startswith("RequestHandler.")})

    async def end(self, number: signal.Signals = signal.SIGTERM, limit_s: float = 15.0) -> int:
        """Send a signal and wait for the process to be gone; its exit code (negative: the signal that killed it)."""
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, limit_s)

    def close(self) -> None:
        """Kill it if it still runs (also if it is paused), and remove its log."""
        self.open.discard(self)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        self._log.unlink(missing_ok=True)

    def _check_alive(self, give_up: float) -> None:
        code = self.process.poll()
        if code is not None or time.monotonic() > give_up:
            state = "is not ready" if code is None else f"has ended with {code}"
            raise RuntimeError(f"the node {state}:\n{self.log[-3_000:]}")

    def __enter__(self) -> NodeProcess:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> NodeProcess:
        try:
            self.start()
            await self.ready()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_node(**settings: Any) -> NodeProcess:
    """A node as a real process, to use in a `with` or `async with`; settings as in the configuration."""
    return NodeProcess({**QUICK, **settings})


def default_node(**settings: Any) -> NodeProcess:
    """The same with the defaults that users get, but for these."""
    return NodeProcess(settings)
