"""S4: a fault in a background duty of the node is seen: it goes on, or the node ends and says so. Nothing just stops.

The faults are exceptions that no code of ours expects, put into what the duty uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from agent_sdk import Agent, RegistryUnavailable, Timeout, connect
from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd import lease as etcd_lease
from reach.adapters.etcd.lease import LeaseKeeper
from reach.adapters.memory_store import MemoryStore
from reach.core import deadlines, health
from reach.core.requests import Attachment, Request
from reach.core.state import State
from reach.core.store import Change, Compare, Operation, Put, StoreUnavailable, Summary, TxnResult
from reach.node.config import Config
from reach.node.engine import Engine
from tests.support.agents import eventually, make
from tests.support.node import config, running

LIMIT_S = 20.0


class Bug(Exception):
    """What nobody expects."""


class FaultyStore(MemoryStore):
    """A store in which one call has a fault, from some moment on."""

    faulty = ""

    async def summary(self, prefix: str) -> Summary:
        if self.faulty == "contact":
            raise Bug("contact")
        return await super().summary(prefix)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        if self.faulty in ("writer", "pin"):
            raise Bug(self.faulty)
        return await super().txn(compares, then, otherwise)

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        async for changes in super().watch(prefix, from_revision, deletes_only=deletes_only):
            if self.faulty == prefix:
                raise Bug(prefix)
            yield changes


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    store = FaultyStore()

    async def make(config: Config) -> FaultyStore:
        return store

    monkeypatch.setattr("reach.node.app.make_store", make)
    return store


@pytest.mark.parametrize("duty", ["writer", "agents/", "nodes/", "contact"])
async def test_a_fault_in_a_duty_of_the_registry_ends_the_node_and_is_logged(
    store: FaultyStore, duty: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reach.node.contact.LOOK_EVERY_S", 0.05)
    async with running(config()) as node, connect(node.grpc_address, own_link=True):
        store.faulty = duty
        starting: asyncio.Task[None] | None = None
        if duty == "writer":
            agent = Agent("one", url=node.grpc_address, own_link=True, drain_timeout=0.1)
            starting = asyncio.create_task(agent.start(wait_s=5.0))
        elif duty != "contact":
            await store.txn([], [Put(f"{duty}somebody's", b"x")])
        async with asyncio.timeout(LIMIT_S):
            await node.broken.wait()
        store.faulty = ""
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    assert "a duty of the node failed" in capsys.readouterr().out


async def test_a_fault_while_a_pin_is_made_is_told_to_who_waits_and_the_next_one_is_made(
    store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(config()) as node, connect(node.grpc_address, own_link=True) as mesh:
        agent = make("pinned", node.grpc_address, own_link=True)
        async with agent:
            store.faulty = "pin"
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(RegistryUnavailable):
                    await mesh.request("x", agent_type="pinned", session="s", timeout=60)
            store.faulty = ""
            assert (await mesh.request("y", agent_type="pinned", session="s", timeout=20)).data == "y"
    assert "a task of the node failed" in capsys.readouterr().out


async def test_a_fault_in_one_timer_is_logged_and_costs_no_other_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = 0
    real = deadlines.on_timer
    books: list[State] = []

    def faulty(state: State, request: Request) -> None:
        nonlocal faults
        books.append(state)
        if not faults:
            faults += 1
            raise Bug
        real(state, request)

    monkeypatch.setattr("reach.core.deadlines.on_timer", faulty)
    async with running(config()) as node, connect(node.grpc_address, own_link=True) as mesh:
        agent = make("sleeper", node.grpc_address, own_link=True)
        async with agent:
            asked = [mesh.request({"forever": 1}, agent_type="sleeper", timeout=1) for _ in range(20)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, Timeout) for each in found)
            told_by_the_node = [each for each in found if isinstance(each, Timeout) and each.agent_id]
            assert len(told_by_the_node) == len(asked) - 1  # of the one the SDK's own guard takes care

            async def ended() -> bool:
                return not books[0].requests

            await eventually(ended, "and the node itself, a second later")
    assert faults == 1 and "a tick failed" in capsys.readouterr().out


async def test_a_fault_in_the_watch_over_one_agent_leaves_the_others_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: dict[str, int] = {}
    real = health.on_timer

    def faulty(state: State, attachment: Attachment) -> None:
        name = attachment.agent.agent_type
        looked[name] = looked.get(name, 0) + 1
        if name == "cursed":
            raise Bug
        real(state, attachment)

    monkeypatch.setattr("reach.core.health.on_timer", faulty)
    async with running(config(probe_interval_busy_s=0.2, probe_timeout_s=0.2)) as node:
        cursed, other = (make(name, node.grpc_address, own_link=True) for name in ("cursed", "other"))
        async with cursed, other:

            async def watched() -> bool:
                return looked.get("cursed", 0) > 0 and looked.get("other", 0) > 3

            await eventually(watched, "the other one is looked after")
    assert "a tick failed" in capsys.readouterr().out


async def test_a_fault_in_telling_the_nodes_readiness_is_logged_and_health_says_not_serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(config()) as node, grpc.aio.insecure_channel(node.grpc_address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")

        async def says(status: int) -> bool:
            return int(health_pb2.HealthCheckResponse.FromString(await check(b"", timeout=5)).status) == status

        async def serving() -> bool:
            return await says(health_pb2.HealthCheckResponse.SERVING)

        async def not_serving() -> bool:
            return await says(health_pb2.HealthCheckResponse.NOT_SERVING)

        def faulty(self: Engine) -> bool:
            raise Bug

        await eventually(serving, "it serves")
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "ready", property(faulty))
            await eventually(not_serving, "it says that it does not")
        await eventually(serving, "the duty goes on")
    assert "readiness cannot be told" in caplog.text


class _Endpoints:
    async def pause(self, failures: int) -> None:
        await asyncio.sleep(0)


class _Calls:
    """What a keeper of leases uses; its first look at the token has a fault."""

    def __init__(self) -> None:
        self.endpoints = _Endpoints()
        self.looks = 0
        self.went_on = asyncio.Event()

    async def again(self, method: object, request: object) -> pb.LeaseGrantResponse:
        return pb.LeaseGrantResponse(ID=7, TTL=60)

    async def token(self) -> str:
        self.looks += 1
        if self.looks == 1:
            raise Bug
        self.went_on.set()
        raise StoreUnavailable("away")


async def test_a_fault_in_the_keeper_of_leases_is_logged_and_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(etcd_lease, "AGAIN_S", 0.01)
    calls = _Calls()
    keeper = LeaseKeeper(calls)  # type: ignore[arg-type]  # as much of it as the keeper uses
    await keeper.grant(60)
    await asyncio.wait_for(calls.went_on.wait(), LIMIT_S)
    await keeper.close()
    assert "the keeper of the leases failed" in capsys.readouterr().out
