"""A node's API keys beside what holds them: what a wrong key costs, what is remembered, what an admin may."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from reach.adapters.key_file import KeyFile
from reach.adapters.memory_store import MemoryStore
from reach.core import keyring
from reach.core.access import Rights
from reach.core.keyring import Kept, KeysUnusable
from reach.core.lineage import LineageKeys
from reach.core.ports import ANYBODY, End, Identity, MeshFailure
from reach.core.rules import Rules
from reach.core.state import State
from reach.core.store import Delete, Put
from reach.node import keys as node_keys
from reach.node.key_desk import NodeDesk, StoreDesk
from reach.node.key_stores import FileOfKeys
from reach.node.keys import ApiKeys
from reach.node.registry_keys import KEYS, RegistryOfKeys
from tests.support.agents import eventually
from tests.support.api_keys import KeysFile, info, key_id
from tests.support.node import config, running

OWNER = Identity("default", "ops", Rights(admin=True))
TENANTS = Identity("acme", "boss", Rights(admin=True))


def a_state() -> State:
    return State(
        Rules(), rng=random.Random(1), nonce=b"12345678", lineage=LineageKeys((1, b"k" * 32)), now=0.0, unix=0.0
    )


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


async def opened(file: KeysFile, unix: Callable[[], float] = time.time) -> ApiKeys:
    keys = ApiKeys(FileOfKeys(str(file.path)), b"s" * 32, unix)
    await keys.start()
    return keys


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by each slow hash."""
    counted: list[str] = []
    slow_hash = keyring.slow_hash

    def counting(key: str, salt: bytes) -> bytes:
        counted.append(key)
        return slow_hash(key, salt)

    monkeypatch.setattr(keyring, "slow_hash", counting)
    return counted


async def test_a_thousand_wrong_keys_cost_no_slow_hash_and_a_right_one_costs_one(
    file: KeysFile, proofs: list[str]
) -> None:
    key = file.add("alice")
    keys = await opened(file)
    proofs.clear()
    for n in range(1_000):
        assert await keys.verified(f"{key[:-6]}{n:06}") is None
    assert proofs == []
    for _ in range(100):
        assert (keys.known(key) or await keys.verified(key)) is not None
    assert proofs == [key]


async def test_many_that_come_with_one_key_at_once_make_two_slow_hashes_at_most(
    file: KeysFile, proofs: list[str]
) -> None:
    key = file.add("alice")
    keys = await opened(file)
    proofs.clear()
    found = await asyncio.gather(*(keys.verified(key) for _ in range(200)))
    assert None not in found and len({who.key_id for who in found if who is not None}) == 1
    assert len(proofs) <= 2


async def test_a_key_that_was_just_written_opens_at_once(file: KeysFile) -> None:
    file.add("alice")
    keys = await opened(file)
    assert await keys.verified(file.add("bob")) is not None, "without waiting for the next look at the file"


async def test_a_key_is_no_use_the_moment_it_expires_before_anybody_has_looked(file: KeysFile) -> None:
    clock = [time.time()]
    key = file.add("alice", expires_in_s=60)
    keys = await opened(file, lambda: clock[0])
    assert await keys.verified(key) is not None
    clock[0] += 61
    assert keys.known(key) is None and await keys.verified(key) is None


async def test_when_a_key_was_used_is_written_beside_the_file_once_a_minute(
    file: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_keys, "USED_TOLD_S", 0.01)
    key = file.add("alice")
    before = file.path.read_bytes()
    keys = await opened(file)

    async def used() -> bool:
        return key_id(key) in file.file.used()

    running = asyncio.create_task(keys.run())
    try:
        assert await keys.verified(key) is not None
        await eventually(used, "it is written")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert abs(file.file.used()[key_id(key)] - time.time()) < 60
    assert file.path.read_bytes() == before


# ---- what admins may ----


async def desk(file: KeysFile) -> tuple[NodeDesk, ApiKeys]:
    keys = await opened(file)
    state = a_state()
    keys.on_change(lambda ended: state.principals.update(keys.principals()))
    state.principals |= keys.principals()
    return NodeDesk(state, keys), keys


async def refused(work: object) -> codes.ErrorCode:
    with pytest.raises(MeshFailure) as failed:
        await work  # type: ignore[misc]
    return failed.value.error.code  # type: ignore[return-value]


async def test_an_order_is_in_force_at_the_node_that_answers_it(file: KeysFile) -> None:
    file.add("ops", admin=True)
    node, keys = await desk(file)
    made = await node.create_key(admin.CreateKeyRequest(key=info("alice", may_call=["x"])), OWNER)
    assert keys.known(made.secret) is None and await keys.verified(made.secret) is not None
    await node.revoke_key(admin.RevokeKeyRequest(key_id=made.key.key_id), OWNER)
    assert keys.known(made.secret) is None and await keys.verified(made.secret) is None


async def test_a_tenants_admin_has_a_say_about_its_own_tenants_keys_only(file: KeysFile) -> None:
    ours = file.add("ops", admin=True)
    node, _ = await desk(file)
    made = await node.create_key(admin.CreateKeyRequest(key=info("worker")), TENANTS)
    assert made.key.tenant == "acme"
    assert [each.key_id for each in (await node.list_keys(admin.ListKeysRequest(), TENANTS)).keys] == [made.key.key_id]
    assert len((await node.list_keys(admin.ListKeysRequest(), OWNER)).keys) == 2
    theirs = key_id(ours)
    assert await refused(node.revoke_key(admin.RevokeKeyRequest(key_id=theirs), TENANTS)) == codes.NO_ROUTE
    assert await refused(node.rotate_key(admin.RotateKeyRequest(key_id=theirs), TENANTS)) == codes.NO_ROUTE
    foreign = admin.CreateKeyRequest(key=info("x", tenant="default", admin=True))
    assert await refused(node.create_key(foreign, TENANTS)) == codes.PERMISSION_DENIED
    with pytest.raises(MeshFailure) as failed:
        node.explain_access(admin.ExplainAccessRequest(principal="ops", action="admin", tenant="default"), TENANTS)
    assert failed.value.error.code == codes.PERMISSION_DENIED
    with pytest.raises(MeshFailure, match="there is no key") as failed:
        node.explain_access(admin.ExplainAccessRequest(key_id=theirs, action="admin"), TENANTS)
    assert failed.value.error.code == codes.NO_ROUTE
    assert node.explain_access(admin.ExplainAccessRequest(key_id=theirs, action="admin"), OWNER).allowed


@pytest.mark.parametrize("key", [info(""), info("a", may_call=["x y"]), info("a", expires_in_s=-1)])
async def test_a_key_that_cannot_be_is_refused_by_the_node_too(file: KeysFile, key: admin.KeyInfo) -> None:
    file.add("ops", admin=True)
    node, _ = await desk(file)
    assert await refused(node.create_key(admin.CreateKeyRequest(key=key), OWNER)) == codes.INVALID_ENVELOPE


async def test_a_file_that_could_not_be_read_once_is_read_again_though_nobody_changes_it(
    file: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key that was revoked at that moment would go on."""
    key = file.add("alice")
    file.add("bob")
    keys = await opened(file)
    ended, failed = asyncio.Event(), asyncio.Event()
    keys.on_change(lambda ends: ended.set())
    assert await keys.verified(key) is not None
    read = KeyFile.read

    def once(self: KeyFile) -> Kept:
        monkeypatch.setattr(KeyFile, "read", read)
        failed.set()
        raise KeysUnusable("out of memory")

    file.revoke(key)
    monkeypatch.setattr(KeyFile, "read", once)
    following = asyncio.create_task(keys.run())
    try:
        async with asyncio.timeout(5.0):
            await ended.wait()
        assert failed.is_set() and keys.known(key) is None
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_record_that_stands_in_the_registry_under_another_keys_name_is_left_out() -> None:
    """Two records of one id would take turns."""
    store = MemoryStore()
    place = RegistryOfKeys(store)
    made = await StoreDesk(place).create(admin.CreateKeyRequest(key=info("alice")))
    (record,) = (await place.read()).records
    await store.txn((), [Put(f"{KEYS}00000000", record.SerializeToString()), Delete(KEYS + made.key.key_id)])
    assert (await place.read()).records == ()
    await store.close()


async def test_where_the_keys_are_kept_is_no_business_of_who_asks(file: KeysFile) -> None:
    file.add("ops", admin=True)
    node, _ = await desk(file)
    file.path.write_bytes(b"")
    with pytest.raises(MeshFailure) as failed:
        await node.create_key(admin.CreateKeyRequest(key=info("a")), OWNER)
    assert failed.value.error.code == codes.REGISTRY_UNAVAILABLE
    assert str(file.path.parent) not in failed.value.error.message


async def test_explain_answers_by_the_keys_in_force(file: KeysFile) -> None:
    file.add("shop", may_call=["extractor"])
    node, _ = await desk(file)

    def ask(who: Identity, **target: str) -> admin.ExplainAccessReply:
        request = admin.ExplainAccessRequest(principal="shop", action="call", target=Target(**target))  # type: ignore[arg-type]
        return node.explain_access(request, who)

    assert ask(OWNER, agent_type="extractor").allowed
    assert not ask(OWNER, agent_type="planner").allowed
    assert ask(TENANTS, agent_type="extractor").rule == "unknown", "another tenant's shop is somebody else"


async def test_explain_and_list_end_at_the_envs_of_the_admin_who_asks(file: KeysFile) -> None:
    """Found by reading: an admin of staging could ask what anybody may in production, and list all its keys."""
    boss = Identity("default", "boss", Rights(envs=frozenset({"staging", "test"}), admin=True))
    theirs = file.add("deploy", envs=["production"], may_call=["*"], admin=True)
    both = file.add("shop", envs=["production", "staging"], may_call=["extractor"])
    file.add("anywhere", may_call=["x"])
    file.add("chained", envs=["production"], may_call=["*"])
    node, _ = await desk(file)

    def ask(**fields: Any) -> admin.ExplainAccessReply:
        wanted = {"action": "call", "env": "staging", "target": Target(agent_type="extractor"), **fields}
        return node.explain_access(admin.ExplainAccessRequest(**wanted), boss)

    assert ask(principal="shop").allowed and ask(key_id=key_id(both)).allowed
    elsewhere = ask(principal="shop", env="test")
    assert not elsewhere.allowed and "production" not in elsewhere.why
    for action in ("call", "admin"):
        assert ask(principal="deploy", action=action).rule == "unknown", "it has no key there"
    assert "in staging, test" in ask(principal="deploy").why and "in staging, test" in ask(principal="nobody").why
    assert ask(principal="shop", actors=["chained"]).rule == "unknown"
    assert ask(principal="anywhere", target=Target(agent_type="x")).allowed
    for env in ("production", ""):  # the default one
        with pytest.raises(MeshFailure) as failed:
            ask(principal="shop", env=env)
        assert failed.value.error.code == codes.PERMISSION_DENIED
    with pytest.raises(MeshFailure) as failed:
        ask(key_id=key_id(theirs), action="admin")
    assert failed.value.error.code == codes.NO_ROUTE
    listed = (await node.list_keys(admin.ListKeysRequest(), boss)).keys
    assert {info.principal: list(info.envs) for info in listed} == {"shop": ["staging"], "anywhere": []}
    assert len((await node.list_keys(admin.ListKeysRequest(), OWNER)).keys) == 4


async def test_without_keys_nothing_is_made_and_everybody_may_everything() -> None:
    node = NodeDesk(a_state())
    assert await refused(node.create_key(admin.CreateKeyRequest(key=info("a")), ANYBODY)) == codes.INVALID_ENVELOPE
    assert node.explain_access(admin.ExplainAccessRequest(principal="x", action="admin"), ANYBODY).allowed


async def test_a_streamed_reply_that_is_not_read_ends_with_its_key_down_to_the_handler() -> None:
    """Found by reading: its call stood in a write, and only looked at its key once that was done."""
    over = asyncio.Event()
    who = Identity("default", "alice", key_id="k1#1")
    async with running(config()) as node, asyncio.timeout(10.0):
        agent = Agent("numbers", url=node.grpc_address, own_link=True)

        @agent.handler
        async def numbers(data: object) -> AsyncIterator[int]:
            try:
                for number in itertools.count():
                    yield number
            finally:
                over.set()

        async with agent:
            envelope = Envelope(target=Target(agent_type="numbers"), timeout_ms=60_000)
            async with contextlib.aclosing(node.engine.invoke_stream(envelope, who, None)) as replies:
                await anext(replies)
                node.engine.holders.wake({"k2#1": End.KEY})
                assert node.engine.state.unsettled == 1
                node.engine.holders.wake({"k1#1": End.KEY})
                await over.wait()
                with pytest.raises(MeshFailure) as refused:
                    await anext(replies)
                assert refused.value.error.code == codes.UNAUTHENTICATED
            assert not node.engine.holders._calls
