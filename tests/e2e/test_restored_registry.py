"""An etcd that is restored from a backup, or comes back empty, under two nodes at work."""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest

from agent_sdk import connect
from tests.support.agents import BUSY_S, agent_process, eventually, outcome, usable
from tests.support.cluster import node_cluster
from tests.support.etcd import EtcdCluster, binary, start_etcd

BACK_S = 5.0
AGENTS = ("worker/1", "worker/2", "worker/3")


async def go_back(etcd: EtcdCluster, backup: str) -> None:
    """Put the one member's data back to what the backup holds; to nothing, without one."""
    (member,) = etcd.members
    member.kill()
    if not backup:
        member.wipe()
    else:
        folder = member.folder / member.name
        shutil.rmtree(folder)
        done = await asyncio.create_subprocess_exec(
            binary("etcdctl"), "snapshot", "restore", backup, "--data-dir", str(folder), "--name", member.name,
            "--initial-cluster", f"{member.name}={member.peer_url}", "--initial-advertise-peer-urls", member.peer_url,
            env={"ETCDCTL_API": "3"}, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert await done.wait() == 0
    await member.restart()


@pytest.mark.parametrize("to", ["a backup", "nothing"])
async def test_nodes_register_again_elect_and_route_on_after_the_registry_went_back_in_time(to: str) -> None:
    async with start_etcd() as etcd, node_cluster(etcd, 2, election_ttl_s=2) as nodes:
        with agent_process(nodes[0].grpc, "worker/1"), agent_process(nodes[1].grpc, "worker/2"):
            async with connect(nodes[0].grpc, own_link=True) as one, connect(nodes[1].grpc, own_link=True) as other:
                for mesh in (one, other):
                    await usable(mesh, agent_id="worker/1")
                    await usable(mesh, agent_id="worker/2")
                backup = ""
                if to == "a backup":
                    backup = str(etcd.members[0].folder / "backup.db")
                    await etcd.ctl("snapshot", "save", backup)
                for number in range(20):  # so that revisions run backwards by a good deal
                    await etcd.ctl("put", "/elsewhere/key", str(number))
                with agent_process(nodes[1].grpc, "worker/3"), agent_process(nodes[0].grpc, "leaves/1") as leaves:
                    for mesh in (one, other):
                        await usable(mesh, agent_id="worker/3")
                        await usable(mesh, agent_id="leaves/1")
                    await go_back(etcd, backup)
                    began = time.monotonic()
                    for agent_id in AGENTS:  # nothing that the nodes know is given up for what the store forgot
                        for mesh in (one, other):
                            assert await outcome(mesh, "x", agent_id=agent_id, timeout=5) == "OK"

                    async def registered() -> bool:
                        keys = await etcd.ctl("get", "--prefix", "--keys-only", "/agentreach/v1/")
                        wanted = [*(f"/{agent_id}\n" for agent_id in AGENTS), "/nodes/node-1\n", "/nodes/node-2\n"]
                        return all(name in keys for name in wanted) and keys.count("/election/leader/") == 2

                    await eventually(registered, "all stands in the store again", BACK_S + BUSY_S)
                    with agent_process(nodes[1].grpc, "worker/4"):  # a first registration: somebody leads
                        for mesh in (one, other):
                            await usable(mesh, agent_id="worker/4")
                    assert time.monotonic() - began < 2 * BACK_S + 2 * BUSY_S
                    leaves.process.terminate()
                    assert await leaves.ended() == 0

                    async def gone() -> bool:
                        return await outcome(other, "x", agent_id="leaves/1", timeout=2) == "NO_ROUTE"

                    await eventually(gone, "changes after it are followed", BACK_S)
                    for agent_id in AGENTS:
                        for mesh in (one, other):
                            assert await outcome(mesh, "x", agent_id=agent_id, timeout=5) == "OK"
