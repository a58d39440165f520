"""Our etcd client against three members that are killed, frozen and cut off, while it watches, writes and leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore
from reach.core.store import Compacted, Delete, StoreUnavailable
from tests.support.dialled import CAN_TELL
from tests.support.etcd import EtcdMember
from tests.support.etcd_cluster import WiredEtcd, etcd_cluster
from tests.support.stores import LIMIT_S, Follower, put, put_stubbornly

pytestmark = pytest.mark.skipif(not CAN_TELL, reason="which member dialled cannot be told here")

TTL_S = 5.0
PACE_S = 0.02  # between two writes: others want the processors too


@pytest.fixture(scope="module")
def shared() -> Iterator[WiredEtcd]:
    with etcd_cluster() as etcd:
        yield etcd


@pytest.fixture
async def etcd(shared: WiredEtcd) -> AsyncIterator[WiredEtcd]:
    """The three members, all up and agreed before the test."""
    await shared.settled()
    yield shared
    shared.heal()


@asynccontextmanager
async def store_at(endpoints: list[str], prefix: str) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.connect(endpoints, prefix=prefix)
    try:
        yield store
    finally:
        await store.close()


def first(etcd: WiredEtcd, member: EtcdMember) -> list[str]:
    """The endpoints, this member's first: a store uses that one while it lives."""
    endpoints = etcd.endpoints
    place = etcd.members.index(member)
    return [endpoints[place], *endpoints[:place], *endpoints[place + 1 :]]


def harm(etcd: WiredEtcd, member: EtcdMember, fault: str) -> None:
    if fault == "killed":
        member.kill()
    elif fault == "frozen":
        member.pause()
    else:
        etcd.isolate(member)


async def mend(etcd: WiredEtcd, member: EtcdMember, fault: str) -> None:
    if fault == "killed":
        await member.restart()
    elif fault == "frozen":
        member.resume()
    else:
        etcd.heal()


class TestOneMember:
    @pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
    @pytest.mark.parametrize("role", ["leader", "follower"])
    async def test_losing_the_member_in_use_costs_no_change_no_lease_and_few_seconds(
        self, etcd: WiredEtcd, role: str, fault: str
    ) -> None:
        leader = await etcd.leader()
        member = leader if role == "leader" else (await etcd.followers())[0]
        prefix = f"/{role}/{fault}/"
        async with store_at(first(etcd, member), prefix) as store:
            lease = await store.hold_lease(TTL_S)
            follower = Follower(store.watch("", await put(store, "held", lease=lease.id)))
            await follower.until(1, established=1)
            harm(etcd, member, fault)
            harmed = boot_time()
            written = ["k0"]
            await put_stubbornly(store, "k0")
            assert boot_time() - harmed < 6  # 2 s for one that does not answer, and an election
            while lease.valid_until < harmed + TTL_S + 1:  # until it was kept alive by the others
                assert not lease.lost
                written.append(f"k{len(written)}")
                await put_stubbornly(store, written[-1])
                await asyncio.sleep(PACE_S)
            await mend(etcd, member, fault)
            for _ in range(10):
                written.append(f"k{len(written)}")
                await put_stubbornly(store, written[-1])
            await follower.until(1 + len(written))
            assert follower.keys == ["held", *written]
            item = await store.get("held")
            assert item is not None and item.lease == lease.id
            await follower.close()
            await lease.release()

    async def test_who_is_on_the_smaller_side_of_a_partition_goes_over_to_the_larger_one(self, etcd: WiredEtcd) -> None:
        member = await etcd.leader()
        others = [endpoint for place, endpoint in enumerate(etcd.endpoints) if etcd.members[place] is not member]
        async with (
            store_at([member.endpoint, *others], "/side/") as store,
            store_at([member.endpoint], "/side/") as alone,
            store_at(others, "/side/") as elsewhere,
        ):
            lease = await store.hold_lease(TTL_S)
            follower = Follower(store.watch("", await put(store, "held", lease=lease.id)))
            lonely = Follower(alone.watch("", 1))
            await follower.until(1, established=1)
            await lonely.until(established=1)
            etcd.isolate(member, clients=False)  # it answers as before, and hears nothing
            cut = boot_time()
            with pytest.raises(StoreUnavailable):
                await put(alone, "lost")
            await put_stubbornly(elsewhere, "k0")
            await follower.until(2)
            await put_stubbornly(store, "k1")
            while lease.valid_until < cut + TTL_S + 1:
                assert not lease.lost
                await store.revision()
                await asyncio.sleep(PACE_S)
            assert lonely.keys.count("k0") == 0
            etcd.heal()
            await put_stubbornly(elsewhere, "last")
            await follower.until(4)
            assert follower.keys == ["held", "k0", "k1", "last"]
            while "last" not in lonely.keys:
                await lonely.until(len(lonely.seen) + 1)
            assert [key for key in lonely.keys if key != "lost"] == ["held", "k0", "k1", "last"]
            await follower.close()
            await lonely.close()
            await lease.release()

    async def test_a_keepalive_is_not_believed_from_a_leader_that_has_lost_its_followers(self, etcd: WiredEtcd) -> None:
        member = await etcd.leader()
        async with store_at([member.endpoint], "/stale/") as alone:
            lease = await alone.hold_lease(2)
            etcd.isolate(member, clients=False)
            async with asyncio.timeout(LIMIT_S):
                await lease.wait_lost()
            assert boot_time() < lease.valid_until + 0.5
            with pytest.raises(StoreUnavailable):
                await alone.get("a")


class TestAllMembers:
    @pytest.mark.parametrize("fault", ["killed", "frozen"])
    async def test_after_an_outage_longer_than_every_lease_all_goes_on(self, etcd: WiredEtcd, fault: str) -> None:
        prefix = f"/outage/{fault}/"
        async with store_at(etcd.endpoints, prefix) as store:
            lease = await store.hold_lease(2)
            follower = Follower(store.watch("", await put(store, "agent", lease=lease.id)))
            await follower.until(1)
            for member in etcd.members:
                harm(etcd, member, fault)
            async with asyncio.timeout(LIMIT_S):
                await lease.wait_lost()
            with pytest.raises(StoreUnavailable):
                await store.get("agent")
            await etcd.settled()
            back = boot_time()
            again = await store.hold_lease(2)
            await put(store, "agent", lease=again.id)
            assert boot_time() - back < 5
            await store.revoke(lease.id)  # whether or not it still is: the key is the new one's
            item = await store.get("agent")
            assert item is not None and item.lease == again.id
            await put_stubbornly(store, "last")
            while "last" not in follower.keys:
                await follower.until(len(follower.seen) + 1)
            revisions = [change.revision for change in follower.seen]
            assert revisions == sorted(set(revisions))
            assert follower.keys[-2:] == ["agent", "last"]
            await follower.close()
            await again.release()


class TestCompaction:
    async def test_one_that_happens_behind_a_partition_is_raised_and_a_new_list_goes_on(self, etcd: WiredEtcd) -> None:
        async with (
            store_at(etcd.endpoints, "/compacted/") as writer,
            store_at(etcd.endpoints_for("reader"), "/compacted/") as reader,
        ):
            await put_stubbornly(writer, "gone")
            follower = Follower(reader.watch("", (await reader.list("")).revision))
            await follower.until(1)
            etcd.cut_client("reader", reset=True)
            await writer.txn([], [Delete("gone")])
            await put(writer, "new")
            for _ in range(100):
                await put(writer, "churned")
            await etcd.compact()
            etcd.heal()
            with pytest.raises(Compacted):
                await follower.until(2)
            assert follower.keys == ["gone"]
            listing = await reader.list("")
            assert [item.key for item in listing.items] == ["churned", "new"]
            following = Follower(reader.watch("", listing.revision + 1))
            await put(writer, "after")
            await following.until(1)
            assert following.keys == ["after"]
            await following.close()

    async def test_a_partition_without_one_costs_no_change(self, etcd: WiredEtcd) -> None:
        async with (
            store_at(etcd.endpoints, "/kept/") as writer,
            store_at(etcd.endpoints_for("reader"), "/kept/") as reader,
        ):
            follower = Follower(reader.watch("", await put(writer, "start")))
            await follower.until(1, established=1)
            etcd.cut_client("reader", reset=True)
            for number in range(50):
                await put(writer, f"k{number:02}")
            etcd.heal()
            await follower.until(51)
            assert follower.keys == ["start", *(f"k{number:02}" for number in range(50))]
            await follower.close()


class TestByHand:
    async def test_a_lease_revoked_and_a_key_deleted_are_seen_by_the_watch_and_the_holder(
        self, etcd: WiredEtcd
    ) -> None:
        async with store_at(etcd.endpoints, "/hand/") as store:
            lease = await store.hold_lease(TTL_S)
            follower = Follower(store.watch("", await put(store, "a", lease=lease.id)))
            await put(store, "b", lease=lease.id)
            await etcd.delete("/hand/a")
            await follower.until(3)
            assert not lease.lost
            assert await etcd.leases_of("/hand/") == {"/hand/b": lease.id}
            await etcd.revoke_lease(lease.id)
            async with asyncio.timeout(TTL_S):
                await lease.wait_lost()
            await follower.until(4)
            assert follower.keys == ["a", "b", "a", "b"]
            await follower.close()
