"""The etcd store at the door: wrong places, a full database, TLS, passwords. Against real members."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme

from agentreach.aio.clock import boot_time
from agentreach.aio.tls import TlsFileError, TlsFiles
from reach.adapters.etcd import EtcdStore
from reach.core.store import StoreUnavailable
from tests.support.etcd import EtcdCluster, ServerTls, free_port, start_etcd
from tests.support.stores import LIMIT_S, Follower, connected, put, put_stubbornly

CALL_S = 6.5  # what the store promises, and a little for the machine
TTL_S = 3.0


@pytest.fixture(scope="module")
def plain() -> Iterator[EtcdCluster]:
    """A member without TLS and users."""
    with start_etcd() as etcd:
        yield etcd


class TestWrongPlace:
    async def test_whoever_is_there_instead_of_etcd_is_said_in_time(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        nobody, no_etcd = f"127.0.0.1:{free_port()}", f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started = boot_time()
        failures = await asyncio.gather(
            EtcdStore.connect([nobody]), EtcdStore.connect([no_etcd]), return_exceptions=True
        )
        assert boot_time() - started < CALL_S
        assert all(isinstance(failure, StoreUnavailable) for failure in failures), failures
        assert re.search(rf"{nobody}.*[Cc]onnection refused", str(failures[0]))
        assert no_etcd in str(failures[1])
        server.close()
        await server.wait_closed()

    async def test_one_wrong_endpoint_among_good_ones_is_passed_over(self, plain: EtcdCluster) -> None:
        store = await EtcdStore.connect([f"127.0.0.1:{free_port()}", *plain.endpoints], prefix="/wrong/")
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
                for i in range(200):  # the size is what was committed, and etcd commits ten times a second
                    await put(store, f"big{i}", bytes(500_000))
            assert await store.get("known") is not None
            valid_until = lease.valid_until
            async with asyncio.timeout(TTL_S):
                while lease.valid_until == valid_until:  # keepalives are no writes
                    await store.revision()
            await lease.release()  # deletions through a lease are allowed
            assert await store.get("known") is None


def make_keys(folder: Path) -> TlsFiles:
    """An authority and one certificate of it, for both ends."""
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost", common_name="reach")
    authority.cert_pem.write_to_path(folder / "ca")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    return TlsFiles(str(folder / "ca"), str(folder / "cert"), str(folder / "key"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdCluster, TlsFiles, TlsFiles]]:
    """A member that asks for certificates, keys that it knows, and keys of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = make_keys(folder / "ours"), make_keys(folder / "theirs")
    with start_etcd(tls=ServerTls(folder / "ours/ca", folder / "ours/cert", folder / "ours/key")) as etcd:
        yield etcd, ours, theirs


class TestTls:
    async def test_mutual_tls_works_by_address_and_by_name(
        self, secure: tuple[EtcdCluster, TlsFiles, TlsFiles]
    ) -> None:
        etcd, ours, _ = secure
        for host in ("127.0.0.1", "localhost"):
            store = await EtcdStore.connect([etcd.endpoints[0].replace("127.0.0.1", host)], tls=ours.read)
            follower = Follower(store.watch("", await put(store, host)))
            await follower.until(1)
            await follower.close()
            await store.close()

    async def test_mistakes_in_the_keys_are_said_in_time(self, secure: tuple[EtcdCluster, TlsFiles, TlsFiles]) -> None:
        etcd, ours, theirs = secure
        mistakes = [theirs.read, TlsFiles(ca=ours.ca).read, None]  # another authority, no certificate of ours, no TLS
        started = boot_time()
        failures = await asyncio.gather(
            *(EtcdStore.connect(etcd.endpoints, tls=tls) for tls in mistakes), return_exceptions=True
        )
        assert boot_time() - started < CALL_S
        for failure in failures:
            assert isinstance(failure, StoreUnavailable)
            assert etcd.endpoints[0] in str(failure)
        assert "etcd's certificate is not signed by the CA that was given" in str(failures[0])
        assert "may ask for a client's certificate, and none was given" in str(failures[1])
        assert "etcd speaks TLS and this connection does not" in str(failures[2])

    async def test_a_missing_key_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TlsFileError, match="nowhere"):
            await EtcdStore.connect(["127.0.0.1:1"], tls=TlsFiles(ca=str(tmp_path / "nowhere")).read)


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

    async def test_a_user_for_an_etcd_without_authentication_is_said(self, plain: EtcdCluster) -> None:
        with pytest.raises(StoreUnavailable, match="authentication is not enabled"):
            await EtcdStore.connect(plain.endpoints, user="reach", password="secret")
