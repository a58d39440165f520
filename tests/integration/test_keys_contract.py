"""One suite for every place where API keys are kept: a file, the registry in memory, and real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentreach.v1.admin_pb2 import CreateKeyRequest, RotateKeyRequest
from reach.adapters.etcd import EtcdStore
from reach.adapters.memory_store import MemoryStore
from reach.core.keyring import KeyRefused, KeysUnusable
from reach.core.ports import Change
from reach.node.key_desk import StoreDesk
from reach.node.key_stores import FileOfKeys
from reach.node.keys import ApiKeys, KeyStore
from reach.node.registry_keys import RegistryOfKeys
from tests.support.api_keys import info
from tests.support.etcd import EtcdCluster, start_etcd

SEEN_S = 5.0
"""Within which a change is in force wherever keys are followed."""

Opener = Callable[[], KeyStore]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member for all tests; each has a prefix of its own."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture(params=["file", "registry in memory", "etcd"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the place once more, as another process would."""
    if request.param == "file":
        yield lambda: FileOfKeys(str(tmp_path / "keys.json"))
        return
    if request.param == "etcd":
        etcd: EtcdCluster = request.getfixturevalue("etcd")
        store: Any = await EtcdStore.connect(etcd.endpoints, prefix=f"/keys/{os.urandom(4).hex()}/")
    else:
        store = MemoryStore()
    yield lambda: RegistryOfKeys(store)
    await store.close()


class Node:
    """What one node knows of the keys, and has been told to end."""

    def __init__(self, store: KeyStore) -> None:
        self.keys = ApiKeys(store, os.urandom(32), time.time)
        self.ended: set[str] = set()
        self.changed = asyncio.Event()
        self.keys.on_change(self._told)

    def _told(self, change: Change) -> None:
        self.ended |= {who.key_id for who, _ in change.ended}
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SEEN_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def node(store: KeyStore) -> AsyncIterator[Node]:
    made = Node(store)
    await made.keys.start()
    running = asyncio.create_task(made.keys.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def make(desk: StoreDesk, principal: str = "alice", **fields: Any) -> tuple[str, str]:
    """(id, key) of a new one."""
    reply = await desk.create(CreateKeyRequest(key=info(principal, **fields)))
    return reply.key.key_id, reply.secret


async def test_a_key_made_at_one_place_opens_at_another(opener: Opener) -> None:
    _, key = await make(StoreDesk(opener()), may_call=["x"])
    async with node(opener()) as here:
        assert here.keys.known(key) is None
        who = await here.keys.verified(key)
        assert who is not None and who.principal == "alice" and here.keys.known(key) is who


async def test_without_a_key_that_holds_nothing_starts(opener: Opener) -> None:
    desk = StoreDesk(opener())
    with pytest.raises(KeysUnusable):
        await Node(opener()).keys.start()
    key_id, _ = await make(desk)
    await desk.revoke(key_id)
    with pytest.raises(KeysUnusable, match="all 1 have ended"):
        await Node(opener()).keys.start()


async def test_a_revoked_key_ends_wherever_keys_are_followed(opener: Opener) -> None:
    desk = StoreDesk(opener())
    key_id, key = await make(desk)
    await make(desk, "bob")
    async with node(opener()) as here, node(opener()) as there:
        holders = [await each.keys.verified(key) for each in (here, there)]
        await desk.revoke(key_id)
        for each, who in zip((here, there), holders, strict=True):
            assert who is not None
            await each.until(lambda each=each: bool(each.ended))  # type: ignore[misc]
            assert each.ended == {who.key_id}
            assert each.keys.known(key) is None and await each.keys.verified(key) is None
            assert set(each.keys.principals()) == {("default", "bob")}


async def test_a_key_made_while_a_node_runs_opens_within_seconds(opener: Opener) -> None:
    desk = StoreDesk(opener())
    await make(desk)
    async with node(opener()) as here:
        _, key = await make(desk, "bob")
        await here.until(lambda: here.keys.usable == 2)
        assert await here.keys.verified(key) is not None


async def test_an_expired_key_ends_by_itself(opener: Opener) -> None:
    desk = StoreDesk(opener())
    await make(desk, "bob")
    _, key = await make(desk, expires_in_s=1.0)
    async with node(opener()) as here:
        who = await here.keys.verified(key)
        assert who is not None
        await here.until(lambda: bool(here.ended))
        assert here.ended == {who.key_id} and here.keys.known(key) is None


async def test_during_the_overlap_both_keys_open_and_then_the_new_one_only(opener: Opener) -> None:
    desk = StoreDesk(opener())
    key_id, old = await make(desk)
    async with node(opener()) as here:
        assert await here.keys.verified(old) is not None
        reply = await desk.rotate(RotateKeyRequest(key_id=key_id, overlap_s=1.5))
        await here.until(lambda: here.keys.usable == 2)
        assert here.keys.known(old) is not None and await here.keys.verified(reply.secret) is not None
        await here.until(lambda: bool(here.ended))
        assert here.keys.known(old) is None and here.keys.known(reply.secret) is not None


async def test_what_many_change_at_once_is_all_there(opener: Opener) -> None:
    made = await asyncio.gather(*(make(StoreDesk(opener()), f"p{n}") for n in range(8)))
    listed = (await StoreDesk(opener()).list()).keys
    assert {each.key_id for each in listed} == {key_id for key_id, _ in made}
    await asyncio.gather(*(StoreDesk(opener()).revoke(key_id) for key_id, _ in made))
    assert all(each.revoked for each in (await StoreDesk(opener()).list()).keys)


async def test_a_revocation_is_not_undone_by_what_others_change_at_the_same_time(opener: Opener) -> None:
    first, second = StoreDesk(opener()), StoreDesk(opener())
    keys = [(await make(first))[0] for _ in range(8)]
    for number, key_id in enumerate(keys):
        changes = [second.rotate(RotateKeyRequest(key_id=key_id, overlap_s=3600)), first.revoke(key_id)]
        done = await asyncio.gather(*changes[:: 1 if number % 2 else -1], return_exceptions=True)
        assert all(not isinstance(each, BaseException) or isinstance(each, KeyRefused) for each in done)
    revoked = {each.key_id for each in (await first.list()).keys if each.revoked}
    assert revoked == set(keys)


async def test_what_is_not_there_is_refused_and_changes_nothing(opener: Opener) -> None:
    desk = StoreDesk(opener())
    await make(desk)
    before = await opener().read()
    with pytest.raises(KeyRefused):
        await desk.revoke("12345678")
    assert await opener().read() == before


async def test_when_a_key_was_used_is_listed(opener: Opener) -> None:
    desk, store = StoreDesk(opener()), opener()
    key_id, _ = await make(desk)
    assert not (await desk.list()).keys[0].HasField("last_used_at")
    await store.put_used({key_id: 1_000.0})
    assert (await desk.list()).keys[0].last_used_at.seconds == 1_000


async def test_a_wrong_key_is_nobodys(opener: Opener) -> None:
    desk = StoreDesk(opener())
    _, key = await make(desk)
    async with node(opener()) as here:
        for wrong in ("", " ", "Bearer", key[:-1], key + "A", key.upper(), f"reach_{key[6:14]}_{'A' * 43}"):
            assert here.keys.known(wrong) is None and await here.keys.verified(wrong) is None
