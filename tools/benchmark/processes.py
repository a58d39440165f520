"""Processes of the benchmark: started here, asked here, ended here by their own process id; and what they used."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

psutil: ModuleType | None = None
"""None when the group `bench` is not installed: then there are no CPU and memory figures."""
with contextlib.suppress(ImportError):
    psutil = importlib.import_module("psutil")

TOOLS = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
_READY_S = 60.0
_END_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20  # one line: each request of a steady load
_FILES = 16_384  # two thousand connections in one process
_LEFT_OUT = ("REACH_", "GRPC_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that would make one machine's run unlike another's."""


class Failed(Exception):
    """A process of the benchmark did not do what it should; the text has the end of its log."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def raise_file_limit() -> int:
    """Allow this process and its children the files they may have; returns how many."""
    try:
        import resource
    except ImportError:
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _FILES if soft == resource.RLIM_INFINITY else soft


def python_path(tree: Path | None) -> str:
    """Where a worker imports from: the benchmark, and the tree to measure (None: what is installed)."""
    found = [str(TOOLS)] + ([str(tree), str(tree / "proto")] if tree else [])
    return os.pathsep.join(found)


def _environment(path: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_LEFT_OUT)}
    return kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


class Child:
    """One process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self.process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @classmethod
    async def start(cls, name: str, arguments: list[str], path: str = "") -> Child:
        """Start it; what it prints to standard error goes to a file that is gone with it."""
        log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in stop()
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(path),
                limit=_ANSWER_BYTES_MAX,
                cwd=tempfile.gettempdir(),
            )
        except BaseException:
            log.close()
            raise
        return cls(name, process, log)

    @classmethod
    async def worker(cls, name: str, role: str, settings: dict[str, Any], path: str) -> Child:
        """Start a worker of ours."""
        return await cls.start(name, [sys.executable, "-m", "benchmark.worker", role, json.dumps(settings)], path)

    async def answer(self, timeout_s: float = _READY_S) -> dict[str, Any]:
        """The worker's next answer. Raises `Failed`."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise Failed(f"{self.name} did not answer within {timeout_s:.0f} s{self.last_words()}") from None
        if not line:
            raise Failed(f"{self.name} ended{self.last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Give a command and wait for its answer. Raises `Failed`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answer(timeout_s)

    async def listens(self, port: int) -> None:
        """Wait until something listens on the port. Raises `Failed` if the process ends before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                while self.process.returncode is None:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(HOST, port)
                        writer.close()
                        await writer.wait_closed()
                        return
                    await asyncio.sleep(0.02)
        raise Failed(f"{self.name} does not listen on {port}{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, for an error's text."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2_000))
        text = self._log.read().decode(errors="replace").strip()
        return f":\n{text}" if text else ""

    async def stop(self) -> None:
        """End it: by the end of its input, by SIGTERM, at last by SIGKILL."""
        try:
            with contextlib.suppress(ProcessLookupError):
                if self.process.returncode is None:
                    self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), _END_S)
            except BaseException as late:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
                if not isinstance(late, TimeoutError):
                    raise
        finally:
            self._log.close()


class Children:
    """Processes that end together, whatever happens."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def add(self, child: Child) -> Child:
        """Have it ended with the others."""
        self._all.append(child)
        return child

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [child.pid for child in self._all]

    def kill(self) -> None:
        """SIGKILL for all that still run; leaving the context waits for their end."""
        for child in self._all:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(child.stop() for child in reversed(self._all)), return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Used:
    """CPU seconds at one moment: of each process, of this one, of the whole machine. Differences mean something."""

    processes: dict[str, float]
    own: float
    machine: float

    def foreign(self, before: Used, seconds: float) -> float:
        """Share of the machine that processes which are not ours have used since then."""
        spent = sum(self.processes[name] - before.processes[name] for name in self.processes)
        ours = spent + self.own - before.own
        return max(0.0, self.machine - before.machine - ours) / (seconds * (os.cpu_count() or 1))

    @classmethod
    def now(cls, pids: dict[str, int], others: Iterable[int] = ()) -> Used | None:
        """Read the counters; None without psutil. `others` are processes of ours that are not measured."""
        if psutil is None:
            return None
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return cls(
            {name: _cpu_s(pid) for name, pid in pids.items()},
            _cpu_s(os.getpid()) + sum(_cpu_s(pid) for pid in others),
            sum(times) - idle - getattr(times, "guest_nice", 0.0),
        )


def _cpu_s(pid: int) -> float:
    assert psutil is not None
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not swapped out."""
    assert psutil is not None
    return int(psutil.Process(pid).memory_info().rss)


def connections_of(pid: int, port: int) -> int:
    """How many established connections a process has on its port."""
    assert psutil is not None
    found = psutil.Process(pid).net_connections("tcp")
    return sum(1 for one in found if one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port)
