"""Three etcd members, each in a network namespace of its own, whose cable is pulled: packets vanish, nobody is told.

    unshare --user --map-root-user --net --mount --pid --kill-child --fork python -m tests.support.etcd_netns

It is run in namespaces of its own (see `command`), which the kernel ends with it: nothing is left, or seen outside.
Each member hangs by a veth pair on a bridge; this process, as the client, is on the bridge itself. `allowed` says
whether the machine lets us. It exits with 0 if all held, and prints how long what took.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore
from tests.support.etcd import binary
from tests.support.stores import Follower, put, put_stubbornly

MEMBERS = ("m1", "m2", "m3")
TTL_S = 8.0  # a silent member is left by a call after 2 s, or by the transport after 8 s
READY_S = 20.0
POLL_S = 0.05
PACE_S = 0.02

_IN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--kill-child", "--fork")
_BRIDGE = (
    "mount -t tmpfs tmpfs /run && ip link set lo up && ip link add br0 type bridge && "
    "ip addr add 10.213.0.254/24 dev br0 && ip link set br0 up"
)


def command() -> list[str]:
    """What runs this module where it can do no harm."""
    return [*_IN_NAMESPACES, sys.executable, "-m", "tests.support.etcd_netns"]


@functools.cache
def allowed() -> bool:
    """Whether this machine lets us make namespaces, a bridge, and pull its cables."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    probe = f"{_BRIDGE} && ip netns add probe && ip link add v0 type veth peer name eth0 netns probe"
    done = subprocess.run([*_IN_NAMESPACES, "sh", "-c", probe], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def run(*words: str) -> str:
    """A command that must work; what it prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


class Member:
    """One member in its namespace."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"10.213.0.{number}"
        self._cable = f"v{number}"
        self._folder = folder
        run("ip", "netns", "add", name)
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", self._cable, "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", name, "link", "set", device, "up")

    @property
    def endpoint(self) -> str:
        """host:port of the client API."""
        return f"{self.address}:2379"

    def pull(self) -> None:
        """No packet comes or goes any more."""
        run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """They do again."""
        run("ip", "link", "set", self._cable, "up")

    @contextmanager
    def running(self, cluster: str) -> Iterator[None]:
        """Its etcd."""
        client, peer = f"http://{self.endpoint}", f"http://{self.address}:2380"
        with (self._folder / f"{self.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "ip", "netns", "exec", self.name, binary("etcd"), f"--name={self.name}",
                    f"--data-dir={self._folder / self.name}", f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={cluster}",
                    "--heartbeat-interval=50", "--election-timeout=500", "--unsafe-no-fsync", "--log-level=error",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield
        finally:
            process.kill()
            process.wait(10)


def statuses(members: list[Member]) -> list[tuple[int, bool, Member]]:
    """(term, whether it leads, member) of each that answers."""
    found = []
    for member in members:
        asked = [binary("etcdctl"), f"--endpoints={member.endpoint}", "endpoint", "status", "-w", "json",
                 "--command-timeout=1s", "--dial-timeout=1s"]  # fmt: skip
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False, env={"ETCDCTL_API": "3"})
        if done.returncode == 0:
            status = json.loads(done.stdout)[0]["Status"]
            leads = status.get("leader") == status["header"]["member_id"]
            found.append((int(status.get("raftTerm", 0)), leads, member))
    return found


async def leader(members: list[Member]) -> Member:
    """Wait until all answer and one leads."""
    give_up = time.monotonic() + READY_S
    while True:
        found = await asyncio.to_thread(statuses, members)
        leading = [each for each in found if each[1]]
        if len(found) == len(members) and leading:
            return max(leading, key=lambda each: each[0])[2]
        assert time.monotonic() < give_up, "the members do not agree"
        await asyncio.sleep(POLL_S)


async def lose(members: list[Member], pulled: Member, prefix: str) -> float:
    """Pull the cable of the member in use: no change is lost or told twice, no lease; how long a write took."""
    others = [member for member in members if member is not pulled]
    store = await EtcdStore.connect([member.endpoint for member in (pulled, *others)], prefix=prefix)
    lease = await store.hold_lease(TTL_S)
    follower = Follower(store.watch("", await put(store, "held", lease=lease.id)))
    await follower.until(1, established=1)
    pulled.pull()
    began = boot_time()
    written = ["k0"]
    await put_stubbornly(store, "k0")
    took_s = boot_time() - began
    while lease.valid_until < began + TTL_S + 1:  # until it was kept alive by the others
        assert not lease.lost, "the lease was lost"
        written.append(f"k{len(written)}")
        await put_stubbornly(store, written[-1])
        await asyncio.sleep(PACE_S)
    pulled.plug()
    written.append("last")
    await put_stubbornly(store, "last")
    await follower.until(1 + len(written))
    assert follower.keys == ["held", *written], "the watch told something else than was written"
    assert not lease.lost
    await follower.close()
    await lease.release()
    await store.close()
    return took_s


async def main() -> None:
    """The play."""
    run("sh", "-c", _BRIDGE)
    with tempfile.TemporaryDirectory(prefix="reach-netns-") as folder, ExitStack() as stack:
        members = [Member(name, number, Path(folder)) for number, name in enumerate(MEMBERS, 1)]
        cluster = ",".join(f"{member.name}=http://{member.address}:2380" for member in members)
        for member in members:
            stack.enter_context(member.running(cluster))
        for role in ("leader", "follower"):
            leading = await leader(members)
            pulled = leading if role == "leader" else next(each for each in members if each is not leading)
            took_s = await lose(members, pulled, f"/{role}/")
            print(f"{role} lost: the next write took {took_s:.2f} s")
            assert took_s < 6


if __name__ == "__main__":
    asyncio.run(main())
