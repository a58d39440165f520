"""The doorkeeper with keys in memory: who gets in where, as whom, and what is told of those who do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from random import Random

import pytest

from agentreach.v1 import error_pb2 as codes
from reach.core import doors
from reach.core.access import Rights
from reach.core.lineage import LineageKeys
from reach.core.ports import ASKED_ALONE, ASKED_FOR, Change, End, Identity, MeshFailure
from reach.core.rules import Rules
from reach.core.state import State
from reach.node.gate import REFUSALS_LOGGED_PER_S, Gatekeeper, introduction
from reach.node.holders import Holders
from tests.support.node import config

SECRET, ADDRESS = b"s" * 32, "127.0.0.1:7070"
MESH, ADMIN, PEER = "/agentreach.v1.MeshService/Invoke", "/agentreach.v1.AdminService/GetTrace", (
    "/agentreach.v1.PeerService/Link"
)  # fmt: skip
OWNERS = "/agentreach.v1.AdminService/GetNode"
HEALTH, REFLECTION = "/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


class KeysInMemory:
    """Implements `reach.node.gate.Keys`."""

    def __init__(self, **holders: Identity) -> None:
        self.holders = holders
        self.told: Callable[[Change], None] = lambda change: None
        self.looked_up = 0

    def known(self, key: str) -> Identity | None:
        return None

    async def verified(self, key: str) -> Identity | None:
        self.looked_up += 1
        await asyncio.sleep(0)
        return self.holders.get(key)

    def principals(self) -> dict[tuple[str, str], Rights]:
        return {(who.tenant, who.principal): who.rights for who in self.holders.values() if who.rights is not None}

    def on_change(self, told: Callable[[Change], None]) -> None:
        self.told = told


class Scene:
    """A doorkeeper, and the state that it writes to."""

    def __init__(self, **settings: object) -> None:
        self.keys = KeysInMemory(
            plain=Identity("default", "alice", Rights(), "k1"),
            admin=Identity("default", "root", Rights(admin=True), "k2"),
            theirs=Identity("elsewhere", "root", Rights(admin=True), "k3"),
            scrape=Identity("default", "prometheus", Rights(scrape=True), "k4"),
            staging=Identity("default", "root", Rights(envs=frozenset({"staging"}), admin=True), "k6"),
            nameless=Identity("", "node/n9", Rights(admin=True), "k5"),
        )
        self.state = State(
            Rules(), rng=Random(1), nonce=b"n" * 8, lineage=LineageKeys((1, b"k" * 32)), now=0.0, unix=0.0
        )
        self.holders = Holders()
        self.gate = Gatekeeper(
            config(auth="keys", keys_file="unused.json", **settings), self.step, self.keys, None,
            secret=SECRET, address=lambda: ADDRESS, holders=self.holders,
        )  # fmt: skip

    @contextlib.contextmanager
    def step(self) -> Iterator[State]:
        yield self.state

    async def admit(self, method: str, *headers: tuple[str, str]) -> Identity | str:
        """Who gets in, or the code of the refusal."""
        try:
            who = await self.gate.admit(method, headers)
        except MeshFailure as refused:
            return codes.ErrorCode.Name(refused.error.code)
        assert who is not None
        return who

    async def by_key(self, method: str, key: str) -> Identity | str:
        return await self.admit(method, ("authorization", f"Bearer {key}"))


async def test_who_is_known_gets_in_where_its_rights_let_it() -> None:
    scene = Scene()
    expected = {
        "plain": ("alice", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        "admin": ("root", "root", "root", "PERMISSION_DENIED"),
        "theirs": ("root", "root", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        "staging": ("root", "root", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        "wrong": ("UNAUTHENTICATED",) * 4,
        "nameless": ("UNAUTHENTICATED",) * 4,
    }
    for key, outcomes in expected.items():
        for method, outcome in zip((MESH, ADMIN, OWNERS, PEER), outcomes, strict=True):
            got = await scene.by_key(method, key)
            assert (got.principal if isinstance(got, Identity) else got) == outcome, (key, method)
    assert scene.state.stats.denied == 8 and scene.state.stats.strangers == 8


async def test_what_is_open_is_open_to_anybody_and_asks_nobody() -> None:
    scene = Scene()
    for method in (HEALTH, REFLECTION):
        who = await scene.by_key(method, "wrong")
        assert isinstance(who, Identity) and who.rights is None
    assert not scene.keys.looked_up
    closed = Scene(health_access="closed", reflection_access="closed")
    assert await closed.admit(HEALTH) == "UNAUTHENTICATED"
    assert isinstance(await closed.by_key(HEALTH, "plain"), Identity)
    assert await closed.by_key(REFLECTION, "plain") == "PERMISSION_DENIED"
    assert isinstance(await closed.by_key(REFLECTION, "admin"), Identity)


async def test_a_node_gets_in_where_nodes_do_and_for_an_admin_where_that_is_asked_of_it() -> None:
    scene = Scene()
    shown = introduction(SECRET, "n1")
    node = await scene.admit(PEER, *shown(ADDRESS, None))
    assert isinstance(node, Identity) and (node.tenant, node.principal) == ("", "node/n1")
    assert await scene.admit(MESH, *shown(ADDRESS, None)) == "PERMISSION_DENIED"
    assert await scene.admit(PEER, *shown("127.0.0.1:9", None)) == "UNAUTHENTICATED"
    limited = Identity("elsewhere", "root", Rights(envs=frozenset({"staging", "test"}), admin=True))
    half = await scene.admit(ADMIN, ASKED_ALONE, *shown(ADDRESS, limited))
    assert isinstance(half, Identity) and half.rights is not None
    assert half.rights.within == {"staging", "test"}  # no more is asked for it than it may know
    admin = Identity("elsewhere", "root", Rights(admin=True))
    asked = await scene.admit(ADMIN, ASKED_ALONE, *shown(ADDRESS, admin))
    assert isinstance(asked, Identity) and (asked.tenant, asked.principal) == ("elsewhere", "root")
    assert await scene.admit(OWNERS, ASKED_ALONE, *shown(ADDRESS, admin)) == "PERMISSION_DENIED"
    assert await scene.admit(PEER, ASKED_ALONE, *shown(ADDRESS, admin)) == "PERMISSION_DENIED"
    assert await scene.admit(ADMIN, *shown(ADDRESS, admin)) == "PERMISSION_DENIED"  # it must be asked for itself


async def test_what_a_node_may_say_about_others_counts_for_nothing_from_anybody_else() -> None:
    scene = Scene()
    forged = (ASKED_ALONE, (ASKED_FOR, "default/*/root"))
    assert await scene.admit(OWNERS, *forged) == "UNAUTHENTICATED"
    assert await scene.admit(ADMIN, ("authorization", "Bearer plain"), *forged) == "PERMISSION_DENIED"
    theirs = await scene.admit(ADMIN, ("authorization", "Bearer theirs"), *forged)
    assert isinstance(theirs, Identity) and theirs.tenant == "elsewhere"


async def test_metrics_are_for_admins_and_for_who_may_scrape() -> None:
    scene = Scene()

    async def code(*shown: str) -> str:
        try:
            await scene.gate.may_scrape(shown, b"")
        except MeshFailure as refused:
            return codes.ErrorCode.Name(refused.error.code)
        return "OK"

    assert await code() == await code("Bearer wrong") == await code("scrape") == "UNAUTHENTICATED"
    assert await code("Bearer scrape", "Bearer scrape") == "UNAUTHENTICATED"
    assert await code(doors.node_proof(SECRET, "n1", ADDRESS)) == "UNAUTHENTICATED"
    assert await code("Bearer plain") == await code("Bearer theirs") == "PERMISSION_DENIED"
    assert await code("Bearer scrape") == await code("Bearer admin") == "OK"


async def test_a_refusal_repeats_nothing_of_what_was_shown() -> None:
    scene = Scene()
    for shown in ("Bearer secret-word", "Basic secret-word", "secret-word", "Node secret-word 00"):
        with pytest.raises(MeshFailure) as refused:
            await scene.gate.admit(MESH, (("authorization", shown),))
        assert "secret-word" not in refused.value.error.message


async def test_who_knocks_a_thousand_times_fills_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    lines: list[str] = []
    monkeypatch.setattr("reach.node.gate.boot_time", lambda: 1.0)
    monkeypatch.setattr("reach.node.gate.log.warning", lambda event, **more: lines.append(event))
    for _ in range(1_000):
        await scene.by_key(MESH, "wrong")
    assert len(lines) == REFUSALS_LOGGED_PER_S and scene.state.stats.strangers == 1_000


async def test_a_change_of_keys_changes_principals_and_wakes_who_waits_on_one_that_ended() -> None:
    scene = Scene()
    assert scene.state.principals["default", "alice"] == Rights()
    alice, root = scene.keys.holders["plain"], scene.keys.holders["admin"]
    waits, stays = asyncio.Event(), asyncio.Event()
    with scene.holders.hold(alice, waits), scene.holders.hold(root, stays):
        del scene.keys.holders["plain"]
        scene.keys.told(Change(((alice, End.KEY),)))
        assert waits.is_set() and not stays.is_set()
    assert ("default", "alice") not in scene.state.principals
    scene.holders.check(root)
    with pytest.raises(MeshFailure) as ended:
        scene.holders.check(alice)
    assert ended.value.error.code == codes.UNAUTHENTICATED


def test_keys_that_have_ended_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: of ten thousand processes with a new certificate each hour a node remembered every one."""
    monkeypatch.setattr("reach.node.holders.ENDED_MAX", 3)
    holders = Holders()
    for number in range(5):
        holders.wake({f"k{number}": End.KEY})
    for number, ended in enumerate((False, False, True, True, True)):
        with pytest.raises(MeshFailure) if ended else contextlib.nullcontext():
            holders.check(Identity("default", "alice", Rights(), f"k{number}"))
