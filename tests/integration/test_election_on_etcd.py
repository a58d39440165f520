"""The election on real etcd: candidates in this process and as processes; one member, and three whose wires are cut.

What each leader does is one key, and etcd's own history of it shows that no two leaders ever acted together (failures
H3, H9). `tests/component/test_election.py` plays the same with an embedded store and time that is not real.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore
from reach.core.store import Store
from reach.node.election import MARGIN_SHARE, PREFIX
from tests.support.candidates import Acts, Candidate, recorded
from tests.support.dialled import CAN_TELL
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.etcd_cluster import WiredEtcd, etcd_cluster
from tests.support.stores import connected

TTL_S = 2.0
EXPIRES_S = 2.0  # "TTL + 2 s": etcd looks for expired leases twice a second, and the machine is busy
PROMPT_S = 2.0

_prefixes = count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member for all tests that need no more."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture(scope="module")
def shared() -> Iterator[WiredEtcd]:
    etcd = etcd_cluster()
    with etcd:
        yield etcd


@pytest.fixture
async def three(shared: WiredEtcd) -> AsyncIterator[WiredEtcd]:
    """Three members, all up and agreed before the test, and wires that can be cut."""
    await shared.settled()
    yield shared
    shared.heal()


class Bench:
    """Candidates n0, n1, …, each with a connection of its own."""

    def __init__(
        self, store: Store, acts: Acts, stack: contextlib.AsyncExitStack, prefix: str, ttl_s: float = TTL_S
    ) -> None:
        self.ttl_s = ttl_s
        self.store = store
        self.acts = acts
        self.prefix = prefix
        self.them: list[Candidate] = []
        self._stack = stack

    async def stand(self, endpoints: list[str]) -> Candidate:
        """One candidate more."""
        store = await EtcdStore.connect(endpoints, prefix=self.prefix)
        self._stack.push_async_callback(store.close)
        candidate = Candidate(store, f"n{len(self.them)}", ttl_s=self.ttl_s)
        self.them.append(candidate)
        await candidate.start()
        self._stack.push_async_callback(candidate.stand_still)
        return candidate

    async def key_of(self, candidate: Candidate) -> tuple[str, int]:
        """A candidate's key, as etcdctl needs it, and its lease."""
        (item,) = (await self.store.list(f"{PREFIX}{candidate.node_id}/")).items
        return self.prefix + item.key, item.lease


@contextlib.asynccontextmanager
async def bench(etcd: EtcdCluster, number: int, ttl_s: float = TTL_S) -> AsyncIterator[Bench]:
    prefix = f"/test-{next(_prefixes)}/"
    async with connected(etcd, prefix) as store, recorded(store) as acts, contextlib.AsyncExitStack() as stack:
        at = Bench(store, acts, stack, prefix, ttl_s)
        for place in range(number):
            await at.stand(etcd.endpoints_for(f"n{place}") if isinstance(etcd, WiredEtcd) else etcd.endpoints)
        if number:
            await acts.until(bool)
        yield at
        acts.check()


class TestOneMember:
    async def test_the_first_of_several_leads_and_when_it_resigns_the_next_does_at_once(
        self, etcd: EtcdCluster
    ) -> None:
        async with bench(etcd, 3) as at:
            for each in at.them:
                await each.until(lambda election: election.leader_id == "n0")
            began = boot_time()
            await at.them[0].leave()
            await at.them[1].until(lambda election: election.leading is not None)
            assert boot_time() - began < PROMPT_S
            await at.them[2].until(lambda election: election.leader_id == "n1")
            await at.acts.until(lambda acts: acts[-1].node_id == "n1")
            assert at.acts.leaders == ["n0", "n1"]

    async def test_a_dead_leader_is_followed_within_its_lease_and_two_seconds(self, etcd: EtcdCluster) -> None:
        async with bench(etcd, 2) as at:
            died = boot_time()
            await at.them[0].die()
            await at.acts.until(lambda acts: acts[-1].node_id == "n1")
            assert TTL_S / 2 < boot_time() - died < TTL_S + EXPIRES_S

    @pytest.mark.parametrize("by_hand", ["key deleted", "lease revoked"])
    async def test_a_leader_ended_by_hand_steps_down_and_stands_again(self, etcd: EtcdCluster, by_hand: str) -> None:
        async with bench(etcd, 2) as at:
            key, lease = await at.key_of(at.them[0])
            await etcd.ctl(*(("del", key) if by_hand == "key deleted" else ("lease", "revoke", f"{lease:x}")))
            await at.acts.until(lambda acts: acts[-1].node_id == "n1", PROMPT_S)
            await at.them[0].until(lambda election: election.leader_id == "n1", PROMPT_S)
            assert (await at.key_of(at.them[0]))[0] != key
            await at.them[1].die()
            await at.acts.until(lambda acts: acts[-1].node_id == "n0", TTL_S + EXPIRES_S)

    async def test_a_leader_that_hears_nothing_and_whose_clock_stands_is_refused_whatever_it_tries(
        self, etcd: EtcdCluster
    ) -> None:
        async with bench(etcd, 2) as at:
            old, new = at.them
            await old.stand_still()
            _, lease = await at.key_of(old)
            await etcd.ctl("lease", "revoke", f"{lease:x}")
            old.late_s = 1_000.0
            await at.acts.until(lambda acts: acts[-1].node_id == "n1")
            assert old.leads or old.election._standing is not None
            for _ in range(20):
                assert not await old.act()
            assert not old.leads and new.leads

    async def test_etcd_away_and_back(self) -> None:
        with start_etcd() as etcd:
            async with bench(etcd, 3) as at:
                etcd.members[0].stop()
                for each in at.them:
                    await each.until(lambda election: election.leader is None)
                await etcd.members[0].restart()
                back = boot_time()
                await at.acts.until(lambda acts: acts[-1].at > back, TTL_S + EXPIRES_S)
                acting = at.acts.all[-1].node_id
                for each in at.them:
                    await each.until(lambda election: election.leader_id == acting, PROMPT_S)


class TestProcesses:
    async def test_a_leader_killed_or_stopped_is_followed_and_does_nothing_when_it_goes_on(
        self, etcd: EtcdCluster
    ) -> None:
        async with bench(etcd, 0) as at:
            with candidate_process(etcd, at, "p0") as killed:
                await at.acts.until(bool)
                with contextlib.ExitStack() as stack:
                    stopped = stack.enter_context(candidate_process(etcd, at, "p1"))
                    await standing(at, 2)
                    stack.enter_context(candidate_process(etcd, at, "p2"))
                    await standing(at, 3)
                    killed.kill()
                    await at.acts.until(lambda acts: acts[-1].node_id != "p0", TTL_S + EXPIRES_S)
                    leader = at.acts.all[-1].node_id
                    assert leader == "p1", "the next in the queue"
                    stopped.send_signal(signal.SIGSTOP)
                    await asyncio.to_thread(os.waitid, os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
                    await at.acts.until(lambda acts: acts[-1].node_id == "p2", TTL_S + EXPIRES_S)
                    await at.acts.more(20)
                    stopped.send_signal(signal.SIGCONT)
                    await standing(at, 2)
                    await at.acts.more(20)
                    assert at.acts.leaders == ["p0", "p1", "p2"]


@pytest.mark.skipif(not CAN_TELL, reason="which member dialled cannot be told here")
class TestThreeMembers:
    async def test_a_leader_that_is_cut_off_stops_before_another_starts(self, three: WiredEtcd) -> None:
        async with bench(three, 3) as at:
            stops = asyncio.create_task(when(at.them[0], leads=False))
            starts = asyncio.create_task(when(at.them[1], leads=True))
            cut = boot_time()
            three.cut_client("n0")
            stopped, started = await stops, await starts
            assert stopped + TTL_S * MARGIN_SHARE / 2 < started < cut + TTL_S + EXPIRES_S
            three.heal()
            await at.them[0].until(lambda election: election.leader_id == "n1")
            await at.acts.until(lambda acts: acts[-1].node_id == "n1")
            for each in at.them[1:]:
                await each.leave()
            await at.them[0].until(lambda election: election.leading is not None)

    async def test_members_killed_one_after_another_cost_at_most_one_change_of_the_leader(
        self, three: WiredEtcd
    ) -> None:
        async with bench(three, 3, ttl_s=5.0) as at:  # as nodes have it
            for member in three.members:
                member.kill()
                await at.acts.more(20)
                await member.restart()
                await three.settled()
            assert len(at.acts.leaders) <= 2


async def when(candidate: Candidate, *, leads: bool) -> float:
    """The time at which a candidate begins to lead, or ceases to."""
    await candidate.until(lambda election: (election.leading is not None) == leads)
    return boot_time()


async def standing(at: Bench, number: int) -> None:
    """Wait until there are so many candidates."""
    changes = at.store.watch(PREFIX, (await at.store.revision()) + 1)
    async with asyncio.timeout(20), contextlib.aclosing(changes):
        async for _ in changes:
            if len((await at.store.list(PREFIX)).items) == number:
                return


@contextlib.contextmanager
def candidate_process(etcd: EtcdCluster, at: Bench, node_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A candidate in a process of its own."""
    arguments = [etcd.endpoints[0], at.prefix, node_id, str(TTL_S)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.candidates", *arguments],
        cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
