"""Three real nodes on three real etcd members, and what goes wrong between them (group H of the failures seen)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from agent_sdk import Mesh, ReachError, connect
from tests.support.agents import BUSY_S, agent_process, eventually, outcome, usable
from tests.support.cluster import ClusterNode, NodeCluster, node_cluster
from tests.support.dialled import CAN_TELL
from tests.support.etcd_cluster import WiredEtcd, etcd_cluster
from tests.support.stores import connected, put

pytestmark = pytest.mark.skipif(not CAN_TELL, reason="which member dialled cannot be told here")

TTL_S = 2.0  # of nodes' leases and of the election
PATIENT_TTL_S = 8.0
BACK_S = 5.0  # after etcd, or a node, is there again
PACE_S = 0.05
PREFIX = "/mesh/"


@pytest.fixture(scope="module")
def shared() -> Iterator[WiredEtcd]:
    with etcd_cluster() as etcd:
        yield etcd


@pytest.fixture
async def etcd(shared: WiredEtcd) -> AsyncIterator[WiredEtcd]:
    """The members, all up and agreed before the test."""
    await shared.settled()
    yield shared
    shared.heal()
    for member in shared.members:
        if member.paused:
            member.resume()


@pytest.fixture
async def patient(etcd: WiredEtcd) -> AsyncIterator[Place]:
    """Nodes whose leases outlive the election of a new etcd leader, as those of production do."""
    nodes = node_cluster(
        etcd, registry_prefix="/patient/", node_lease_ttl_s=PATIENT_TTL_S, election_ttl_s=PATIENT_TTL_S
    )
    async with nodes:
        yield Place(etcd, nodes, "/patient/", f"worker{secrets.token_hex(3)}")


@dataclass(frozen=True)
class Place:
    """Nodes of one mesh on the shared etcd."""

    etcd: WiredEtcd
    nodes: NodeCluster
    prefix: str
    kind: str
    """A type of agents that no other test uses."""

    async def keys(self, below: str = "") -> dict[str, int]:
        """What stands in etcd, without the prefix, each with its lease."""
        found = await self.etcd.leases_of(self.prefix + below)
        return {key.removeprefix(self.prefix): lease for key, lease in found.items()}


@pytest.fixture(scope="module")
def running(shared: WiredEtcd) -> Iterator[NodeCluster]:
    nodes = node_cluster(shared, registry_prefix=PREFIX, node_lease_ttl_s=TTL_S, election_ttl_s=TTL_S)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
async def place(etcd: WiredEtcd, running: NodeCluster) -> AsyncIterator[Place]:
    """Three nodes, all ready before the test; if it fails, the ends of their logs are shown."""
    await running.ready()
    yield Place(etcd, running, PREFIX, f"worker{secrets.token_hex(3)}")
    print(running.logs())


def key_of(agent_id: str) -> str:
    return f"agents/default/production/{agent_id}"


async def asks(url: str, agent_id: str) -> str:
    """ "OK" or the code of one request by a caller of its own."""
    async with connect(url, own_link=True) as mesh:
        return await outcome(mesh, "x", agent_id=agent_id, timeout=2)


async def reached_from(nodes: list[ClusterNode], agent_id: str) -> None:
    """Wait until a caller at each of these nodes reaches the agent."""
    for node in nodes:
        async with connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent_id)


class Stream:
    """A caller that asks one agent all the time; what did not work is kept."""

    def __init__(self, mesh: Mesh, **target: str) -> None:
        self.failed: list[str] = []
        self.good = 0
        self._mesh, self._target = mesh, target
        self._task = asyncio.create_task(self._run(), name="stream")

    async def _run(self) -> None:
        while True:
            try:
                await self._mesh.request("x", timeout=5, **self._target)
                self.good += 1
            except ReachError as error:
                self.failed.append(str(error))
            await asyncio.sleep(PACE_S)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def streaming(url: str, agent_id: str) -> AsyncIterator[Stream]:
    async with connect(url, own_link=True) as mesh:
        await usable(mesh, agent_id=agent_id)
        stream = Stream(mesh, agent_id=agent_id)
        try:
            yield stream
        finally:
            await stream.close()


class TestLeasesAndKeys:
    """H1, H5."""

    @pytest.mark.parametrize(
        "what", ["etcd is down", "the node stands still", "the lease is revoked", "the key is deleted"]
    )
    async def test_a_lost_registration_is_back_in_time_and_traffic_flows(self, place: Place, what: str) -> None:
        home, other = place.nodes[0], place.nodes[1]
        with agent_process(home.grpc, f"{place.kind}/1"):
            await reached_from([home, other], f"{place.kind}/1")
            before = (await place.keys("agents/"))[key_of(f"{place.kind}/1")]
            assert before
            if what == "etcd is down":
                async with (
                    streaming(home.grpc, f"{place.kind}/1") as near,
                    streaming(other.grpc, f"{place.kind}/1") as far,
                ):
                    for member in place.etcd.members:
                        member.pause()
                    await asyncio.sleep(3 * TTL_S)  # the outage itself
                    assert (near.failed, far.failed) == ([], [])
                    for member in place.etcd.members:
                        member.resume()
                    assert near.good and far.good
                await place.etcd.settled()
            elif what == "the node stands still":
                home.pause()
                await asyncio.sleep(3 * TTL_S)  # the stall itself
                home.resume()
            elif what == "the lease is revoked":
                await place.etcd.revoke_lease(before)
            else:
                await place.etcd.delete(place.prefix + key_of(f"{place.kind}/1"))
            mended = time.monotonic()

            async def back() -> bool:
                with contextlib.suppress(RuntimeError):
                    now = (await place.keys("agents/")).get(key_of(f"{place.kind}/1"), 0)
                    return now != 0 and (now != before or what == "the key is deleted")
                return False

            await eventually(back, "the key is back under a lease that lives", BACK_S + BUSY_S)
            await reached_from([home, other], f"{place.kind}/1")
            assert time.monotonic() - mended < BACK_S + 2 * BUSY_S

    async def test_a_killed_node_leaves_nothing_after_its_lease_and_one_that_leaves_nothing_at_once(
        self, place: Place
    ) -> None:
        killed, leaving, stays = place.nodes
        with (
            agent_process(killed.grpc, f"{place.kind}/1"), agent_process(leaving.grpc, f"{place.kind}/2"),
            agent_process(stays.grpc, f"{place.kind}/3"),
        ):  # fmt: skip
            for agent_id in (f"{place.kind}/1", f"{place.kind}/2", f"{place.kind}/3"):
                await reached_from([stays], agent_id)
            unleased = {key for key, lease in (await place.keys()).items() if not lease}
            assert {key.partition("/")[0] for key in unleased} <= {"keys", "config", "versions"}

            leases = {
                node.node_id: {lease for key, lease in (await place.keys()).items() if key in own}
                for node, own in (
                    (leaving, {"nodes/node-2", key_of(f"{place.kind}/2")}),
                    (killed, {"nodes/node-1", key_of(f"{place.kind}/1")}),
                )
            }

            async def gone(node: ClusterNode) -> bool:
                """Its agents may have keys of other nodes by now."""
                found = await place.keys()
                named = any(f"/{node.node_id}/" in f"/{key}/" for key in found)
                return not named and not leases[node.node_id] & set(found.values())

            assert await leaving.term() == 0
            assert await gone(leaving)
            assert "it said goodbye: SHUTDOWN" in killed.log and "it said goodbye: SHUTDOWN" in stays.log
            killed.kill()
            # etcd grants a lease its time anew when its own leader changes; none did here.
            await eventually(lambda: gone(killed), "the killed node's keys are gone", TTL_S + 2 + BUSY_S)
            assert await asks(stays.grpc, f"{place.kind}/3") == "OK"


class TestCompaction:
    @pytest.mark.parametrize("compacted", [True, False], ids=["compacted", "not compacted"])
    async def test_a_node_that_missed_a_departure_and_an_arrival_routes_right_after_the_partition(
        self, place: Place, compacted: bool
    ) -> None:
        """H2."""
        cut, second, third = place.nodes
        with agent_process(second.grpc, f"{place.kind}/1") as leaves:
            await reached_from([cut], f"{place.kind}/1")
            place.etcd.cut_client(cut.node_id, reset=True)
            leaves.process.send_signal(signal.SIGTERM)
            assert await leaves.ended() == 0
            with agent_process(third.grpc, f"{place.kind}/2"):
                await reached_from([second], f"{place.kind}/2")
                async with connected(place.etcd, place.prefix) as store:
                    for number in range(300):
                        await put(store, f"churn/{number % 7}")
                if compacted:
                    await place.etcd.compact()
                place.etcd.heal()
                healed = time.monotonic()
                async with connect(cut.grpc) as mesh:
                    await usable(mesh, agent_type=place.kind)
                    assert time.monotonic() - healed < BACK_S + BUSY_S
                    for _ in range(20):
                        reply = await mesh.request("x", agent_type=place.kind, timeout=5)
                        assert reply.source == f"{place.kind}/2"
                    assert await outcome(mesh, "x", agent_id=f"{place.kind}/1", timeout=2) == "NO_ROUTE"


@dataclass(frozen=True)
class Look:
    """What a node said of its leading, and when it was asked and had answered."""

    asked: float
    answered: float
    leads: bool


class Watchers:
    """Asks every node all the time whether it leads."""

    def __init__(self, nodes: NodeCluster) -> None:
        self.looks: dict[str, list[Look]] = {node.node_id: [] for node in nodes}
        self._tasks = [asyncio.create_task(self._watch(node), name=f"watch {node.node_id}") for node in nodes]

    async def _watch(self, node: ClusterNode) -> None:
        while True:
            asked = time.monotonic()
            status, text = await asyncio.to_thread(node.get, "/metrics")
            if status == 200:
                leads = "\nreach_leader 1" in text
                self.looks[node.node_id].append(Look(asked, time.monotonic(), leads))
            await asyncio.sleep(PACE_S)

    def reigns(self) -> list[tuple[float, float, str]]:
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
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


@asynccontextmanager
async def watched(nodes: NodeCluster) -> AsyncIterator[Watchers]:
    watchers = Watchers(nodes)
    try:
        yield watchers
    finally:
        await watchers.close()


class TestLeading:
    """H3."""

    @pytest.mark.parametrize("fault", ["cut off from etcd", "stands still", "killed"])
    async def test_another_node_leads_in_time_and_never_two_at_once(self, place: Place, fault: str) -> None:
        async with watched(place.nodes) as watchers:

            async def leads() -> bool:
                return watchers.leader() != ""

            await eventually(leads, "somebody leads")
            former = place.nodes.by_id(watchers.leader())
            if fault == "cut off from etcd":
                place.etcd.cut_client(former.node_id)
            elif fault == "stands still":
                former.pause()
            else:
                former.kill()
            began = time.monotonic()

            async def another_leads() -> bool:
                return any(
                    looks and looks[-1].leads and looks[-1].asked > began
                    for node_id, looks in watchers.looks.items()
                    if node_id != former.node_id
                )

            await eventually(another_leads, "another node leads", TTL_S + 2 + BUSY_S)
            with agent_process(place.nodes.others(former)[0].grpc, f"{place.kind}/1"):
                await reached_from(place.nodes.others(former), f"{place.kind}/1")
            place.etcd.heal()
            if fault == "stands still":
                former.resume()
            elif fault == "killed":
                await former.restart()
            resumed = time.monotonic()

            async def former_answers() -> bool:
                return sum(look.asked > resumed for look in watchers.looks[former.node_id]) > 3

            await eventually(former_answers, "the former leader answers again")
            reigns = watchers.reigns()  # on a busy machine it may have been elected again by now: that is a new one
            overlaps = [(one, other) for one, other in itertools.pairwise(reigns) if other[0] < one[1]]
            assert overlaps == []

    async def test_a_candidate_that_lost_its_lease_stands_again_and_can_win(self, place: Place) -> None:
        async with watched(place.nodes) as watchers:

            async def leads() -> bool:
                return watchers.leader() != ""

            await eventually(leads, "somebody leads")
            leader = place.nodes.by_id(watchers.leader())
            candidate, bystander = place.nodes.others(leader)
            place.etcd.cut_client(candidate.node_id)

            async def stands_no_more() -> bool:
                return not any(f"/{candidate.node_id}/" in key for key in await place.keys("election/"))

            await eventually(stands_no_more, "its candidacy has ended", TTL_S + 2 + BUSY_S)
            place.etcd.heal()

            async def stands() -> bool:
                return any(f"/{candidate.node_id}/" in key for key in await place.keys("election/"))

            await eventually(stands, "it stands again", BACK_S + BUSY_S)
            bystander.kill()
            leader.kill()

            async def won() -> bool:
                return watchers.leader() == candidate.node_id

            await eventually(won, "the healed candidate leads", 2 * TTL_S + 2 + BUSY_S)
            candidate.kill()

            async def nobody() -> bool:
                return not await place.keys("election/")

            await eventually(nobody, "nobody leads where nobody is", TTL_S + 2 + BUSY_S)


class TestMembers:
    async def test_restarting_each_member_in_turn_costs_no_call_and_no_registration(self, patient: Place) -> None:
        """H9."""
        async with watched(patient.nodes) as watchers:
            with (
                agent_process(patient.nodes[0].grpc, f"{patient.kind}/1"),
                agent_process(patient.nodes[1].grpc, f"{patient.kind}/2"),
            ):
                await reached_from(list(patient.nodes), f"{patient.kind}/1")
                await reached_from(list(patient.nodes), f"{patient.kind}/2")
                async with (
                    streaming(patient.nodes[2].grpc, f"{patient.kind}/1") as one,
                    streaming(patient.nodes[0].grpc, f"{patient.kind}/2") as two,
                ):
                    before = await patient.keys("agents/")
                    for member in patient.etcd.members:
                        member.stop()
                        await patient.etcd.leader_other_than(member)
                        await member.restart()
                        await patient.etcd.settled()
                    assert (one.failed, two.failed) == ([], [])
                    assert await patient.keys("agents/") == before  # the same keys under the same leases
                    changes = len({node_id for _, _, node_id in watchers.reigns()}) - 1
                    assert changes <= 1

    async def test_idle_agents_cost_etcd_nothing(self, patient: Place) -> None:
        """H8."""
        async with contextlib.AsyncExitStack() as stack:
            for number, node in enumerate(patient.nodes):
                stack.enter_context(agent_process(node.grpc, f"{patient.kind}/{number}"))
            for number, node in enumerate(patient.nodes):
                await reached_from([node], f"{patient.kind}/{number}")
            leases = set((await patient.keys()).values()) - {0}
            assert len(leases) <= 3 * 3  # a node's own, one for its agents, its candidacy's
            before = await patient.etcd.revisions_of(patient.prefix)
            await asyncio.sleep(5)  # in which nothing shall be written
            after = await patient.etcd.revisions_of(patient.prefix)
            ours = [key for key in before if f"/{patient.kind}/" in key]
            assert len(ours) == 3
            assert after.items() <= before.items()  # nothing was written; agents of other tests leave when they like
            assert set(ours) <= set(after)
