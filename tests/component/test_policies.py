"""reach.node.policies alone: the watch that missed something, the leader that is not there, the bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.frame_pb2 import Forward, Forwarded
from reach.adapters.memory_store import MemoryStore
from reach.core.ports import MeshFailure
from reach.core.state import State
from reach.core.store import Change, Compacted, Delete, Put, StoreUnavailable
from reach.node import policies
from reach.node.election import Election
from reach.node.policies import Policies
from tests.support.agents import eventually
from tests.support.core import CoreMesh


class DeafStore(MemoryStore):
    """A store whose watches of policies tell nothing, and end with an error when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: asyncio.Queue[Exception] = asyncio.Queue()

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        if prefix != policies.VERSIONS:
            async for changes in super().watch(prefix, from_revision, deletes_only=deletes_only):
                yield changes
        else:
            raise await self.ends.get()


def value(preferred: str, agent_type: str = "echo") -> bytes:
    return registry.VersionPolicy(agent_type=agent_type, env="production", preferred=preferred).SerializeToString()


@contextlib.asynccontextmanager
async def following(store: MemoryStore, *, leads: bool = True) -> AsyncIterator[tuple[Policies, State]]:
    """Policies that run on a store, at a node that leads or does not."""
    core = CoreMesh()

    @contextlib.contextmanager
    def step() -> Iterator[State]:
        with core.step() as state:
            yield state

    election = Election(store, "node")
    one = Policies(store, election, core.state, step=step)
    await one.start()
    if leads:
        await election.start()
    duty = asyncio.create_task(one.run(), name="policies")
    try:
        yield one, core.state
    finally:
        duty.cancel()
        await asyncio.gather(duty, return_exceptions=True)
        await election.stop()
        await store.close()


async def prefers(state: State, versions: dict[str, str]) -> None:
    """Wait until these types prefer these versions, and no other type has a policy."""

    async def so() -> bool:
        found = {agent_type: policy.shares[0][0] for (_, agent_type), policy in state.version_policies.items()}
        return found == versions

    await eventually(so, f"{versions} is in force")


async def test_after_a_compaction_what_changed_and_what_is_gone_is_found_by_listing() -> None:
    store = DeafStore()
    await store.txn([], [Put("versions/production/a", value("1", "a")), Put("versions/production/b", value("1", "b"))])
    async with following(store) as (_, state):
        await prefers(state, {"a": "1", "b": "1"})
        await store.txn([], [Put("versions/production/a", value("2", "a")), Delete("versions/production/b")])
        store.ends.put_nowait(Compacted(1))
        await prefers(state, {"a": "2"})
        await store.txn([], [Put("versions/production/a", value("3", "a"))])
        store.ends.put_nowait(StoreUnavailable("away"))
        await prefers(state, {"a": "3"})


async def test_a_watch_that_tells_nothing_is_not_believed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "LIST_EVERY_S", 0.05)
    store = DeafStore()
    async with following(store) as (_, state):
        await store.txn([], [Put("versions/production/a", value("2", "a"))])
        await prefers(state, {"a": "2"})


async def test_without_a_leader_it_is_refused_after_a_while_and_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "LEADER_WAIT_S", 0.05)
    async with following(MemoryStore(), leads=False) as (one, state):
        request = registry.SetVersionPolicyRequest(policy=registry.VersionPolicy(agent_type="a", preferred="1"))
        with pytest.raises(MeshFailure) as failed:
            await one.set_version_policy(request)
        assert failed.value.error.code == codes.REGISTRY_UNAVAILABLE and failed.value.error.retry_after_ms
        assert not state.version_policies
        answer = await one.answer(Forward(nonce=7, set_version_policy=request.SerializeToString()))
        assert answer.nonce == 7 and answer.error.code == codes.REGISTRY_UNAVAILABLE and not answer.election


async def test_a_leader_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "LEADER_WAIT_S", 0.05)
    monkeypatch.setattr(policies, "FORWARD_S", 0.05)

    class Silent:
        async def forward(self, forward: Forward) -> Forwarded:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

    async with following(MemoryStore(), leads=False) as (one, _):
        one.connect(Silent())
        with pytest.raises(MeshFailure) as failed:
            await one.set_version_policy(
                registry.SetVersionPolicyRequest(policy=registry.VersionPolicy(agent_type="a", preferred="1"))
            )
        assert failed.value.error.may_have_executed and "does not answer" in failed.value.error.message


async def test_there_is_a_bound_and_what_is_there_can_still_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES_MAX", 1)
    async with following(MemoryStore()) as (one, state):

        async def set_(agent_type: str, version: int = 0) -> registry.VersionPolicy:
            policy = registry.VersionPolicy(agent_type=agent_type, preferred="1", version=version)
            return (await one.set_version_policy(registry.SetVersionPolicyRequest(policy=policy))).policy

        made = await set_("a")
        await prefers(state, {"a": "1"})
        with pytest.raises(MeshFailure) as failed:
            await set_("b")
        assert failed.value.error.code == codes.OVERLOADED
        assert (await set_("a", made.version)).version > made.version


async def test_what_a_node_forwards_is_checked_again_and_rubbish_is_answered() -> None:
    async with following(MemoryStore()) as (one, _):
        for forward in (
            Forward(set_version_policy=b"\xff\xff"),
            Forward(set_version_policy=registry.SetVersionPolicyRequest().SerializeToString()),
            Forward(set_config=b"\xff\xff"),
        ):
            assert (await one.answer(forward)).error.code == codes.INVALID_ENVELOPE
