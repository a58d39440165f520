"""Real etcd members for tests: on free loopback ports, in a folder of their own, always gone afterwards.

    async with start_etcd() as etcd:            # one member; start_etcd(3) for a cluster; plain `with` works too
        store = await EtcdStore.connect(etcd.endpoints)
        etcd.members[0].pause()

A member is killed by its own process id only, also when it is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

READY_S = 20.0
POLL_S = 0.03

# Below the ephemeral range of Linux (32768 on): a client that dials a dead port again and again could otherwise be
# given that very port as its own, connect to itself, and keep the member from coming back.
_PORTS = range(20_000, 32_000)
_taken: set[int] = set()


def free_port() -> int:
    """A loopback port that nobody listens on, and that no other call in this process was given."""
    chance = random.SystemRandom()
    for _ in range(1_000):
        port = chance.choice(_PORTS)
        if port in _taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _taken.add(port)
        return port
    raise RuntimeError("no free port")


def binary(name: str) -> str:
    """Path of `etcd` or `etcdctl`: of this environment, else of the system."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on the PATH")
    return found


@dataclass(frozen=True)
class ServerTls:
    """PEM files for members that speak TLS and ask clients for a certificate of the same authority."""

    ca: Path
    cert: Path
    key: Path


class EtcdMember:
    """One etcd process."""

    def __init__(self, name: str, folder: Path, flags: Sequence[str], tls: ServerTls | None) -> None:
        self.name = name
        self.folder = folder
        """Of the cluster; the member's data are below, under its name."""
        self._flags = list(flags)
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.paused = False
        self.pid = 0
        """Of the process as last started, 0 before."""
        self._port, self._peer_port, self._metrics_port = free_port(), free_port(), free_port()
        self.peers_dial = f"127.0.0.1:{self._peer_port}"
        """host:port at which the other members reach it; set before the first start, if that is a relay's."""

    @property
    def endpoint(self) -> str:
        """host:port of the client API."""
        return f"127.0.0.1:{self._port}"

    @property
    def peer_url(self) -> str:
        """What the other members dial."""
        return f"http://{self.peers_dial}"

    @property
    def peer_address(self) -> str:
        """host:port where it listens for other members."""
        return f"127.0.0.1:{self._peer_port}"

    @property
    def running(self) -> bool:
        """True between `start` and `kill` or `stop`, also while paused."""
        return self._process is not None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, while it runs."""
        return self._process

    def start(self, initial_cluster: str | None = None) -> None:
        """Start the process and return at once; started again it goes on with its data."""
        assert self._process is None, f"{self.name} runs already"
        client_url = f"{'https' if self._tls else 'http'}://{self.endpoint}"
        command = [
            binary("etcd"),
            f"--name={self.name}",
            f"--data-dir={self.folder / self.name}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls=http://{self.peer_address}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={initial_cluster or f'{self.name}={self.peer_url}'}",
            f"--listen-metrics-urls=http://127.0.0.1:{self._metrics_port}",
            "--unsafe-no-fsync",  # the page cache outlives the process; only the machine must not die
            "--log-level=warn",
            *self._flags,
        ]
        if self._tls:
            command += [
                "--client-cert-auth",
                f"--trusted-ca-file={self._tls.ca}",
                f"--cert-file={self._tls.cert}",
                f"--key-file={self._tls.key}",
            ]
        self._log = (self.folder / f"{self.name}.log").open("ab")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for the process to be gone. Works on a paused one; nothing if it is not running."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for the process to be gone."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers. Returns when every thread of it stands still."""
        assert self._process is not None
        self.paused = True
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self.paused = False
        self._process.send_signal(signal.SIGCONT)

    def wait_ready(self, limit_s: float = READY_S) -> None:
        """Block until it answers reads; for fixtures. In a test that must go on meanwhile: `ready`."""
        give_up = time.monotonic() + limit_s
        while not self.healthy():
            self._check_alive(give_up)
            time.sleep(POLL_S)

    async def ready(self, limit_s: float = READY_S) -> None:
        """Wait until it answers reads."""
        give_up = time.monotonic() + limit_s
        while not await asyncio.to_thread(self.healthy):
            self._check_alive(give_up)
            await asyncio.sleep(POLL_S)

    def wipe(self) -> None:
        """Remove all its data; it must not be running."""
        assert self._process is None
        shutil.rmtree(self.folder / self.name)

    async def restart(self) -> None:
        """Start it again after `kill` or `stop`, and wait until it answers."""
        self.start()
        await self.ready()

    def healthy(self) -> bool:
        """True if it is up and sees a leader."""
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=2)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return response.status == 200 and b"true" in response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _check_alive(self, give_up: float) -> None:
        assert self._process is not None
        over = time.monotonic() > give_up
        if over or self._process.poll() is not None:
            log = (self.folder / f"{self.name}.log").read_text(errors="replace")[-2_000:]
            raise RuntimeError(f"etcd {self.name} {'is not ready' if over else 'has ended'}:\n{log}")

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self.paused = False
        process.send_signal(signum)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        if self._log is not None:
            self._log.close()
            self._log = None


class EtcdCluster:
    """One or more members; started on entering the context (sync or async), killed and removed on leaving it."""

    def __init__(self, members: int = 1, flags: Sequence[str] = (), tls: ServerTls | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="reach-etcd-"))
        self._tls = tls
        # Alone it need not wait a second to elect itself; several share a busy machine and keep etcd's own times.
        quick = ["--heartbeat-interval=50", "--election-timeout=500"] if members == 1 else []
        self.members = [EtcdMember(f"m{i}", self._folder, [*quick, *flags], tls) for i in range(members)]

    @property
    def endpoints(self) -> list[str]:
        """host:port of each member, in order."""
        return [member.endpoint for member in self.members]

    def start(self) -> None:
        """Start all members and return at once."""
        initial = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.start(initial)

    def close(self) -> None:
        """Kill all members and remove their data."""
        for member in self.members:
            member.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ctl(self, *arguments: str, endpoints: Sequence[str] | None = None, user: str | None = None) -> str:
        """Run etcdctl and return what it prints; `RuntimeError` with its message if it fails or takes 10 s."""
        command = [binary("etcdctl"), f"--endpoints={','.join(endpoints or self.endpoints)}", *arguments]
        if user is not None:
            command.append(f"--user={user}")
        if self._tls:
            command += [f"--cacert={self._tls.ca}", f"--cert={self._tls.cert}", f"--key={self._tls.key}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"ETCDCTL_API": "3"}
        )
        try:
            async with asyncio.timeout(10):
                out, err = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                process.kill()
            await process.wait()
            raise RuntimeError(f"etcdctl {arguments} takes too long") from None
        if process.returncode != 0:
            raise RuntimeError(f"etcdctl {arguments}: {err.decode()}")
        return out.decode()

    async def leader(self) -> EtcdMember:
        """The member that leads now."""
        rows: list[dict[str, Any]] = json.loads(await self.ctl("endpoint", "status", "-w", "json"))
        for row in rows:
            if row["Status"]["leader"] == row["Status"]["header"]["member_id"]:
                return next(member for member in self.members if member.endpoint == row["Endpoint"])
        raise RuntimeError("no leader")

    async def compact(self, revision: int) -> None:
        """Compact to `revision`."""
        await self.ctl("compaction", str(revision))

    def __enter__(self) -> EtcdCluster:
        try:
            self.start()
            for member in self.members:
                member.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> EtcdCluster:
        try:
            self.start()
            for member in self.members:
                await member.ready()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_etcd(members: int = 1, *, flags: Sequence[str] = (), tls: ServerTls | None = None) -> EtcdCluster:
    """A cluster to use in a `with` or `async with`; `flags` go to every member's command line."""
    return EtcdCluster(members, flags, tls)
