"""The keeper of pins beside a store that forgets: each pin of a session owned here stands again, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from agentreach.v1.peer_pb2 import Pin
from reach.adapters.memory_store import MemoryStore
from reach.core import owners
from reach.core.effects import CreatePin
from reach.core.lanes import Lane
from reach.core.requests import Attachment
from reach.core.state import State
from reach.core.store import Delete, Put
from reach.node.pin_keeper import PinKeeper
from reach.node.pins import PinBook
from tests.support.agents import eventually
from tests.support.core import CoreMesh

COUNT = 150  # more than are written at once


class Home:
    """A node with sessions whose owner it has."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.core = CoreMesh(node_id="n1")
        self.core.agent("chat/1")
        agent = self.core.state.directory.get("default", "production", "chat/1")
        assert agent is not None and isinstance(agent.link, Attachment)
        self.owner = agent.link
        self.pins = PinBook(store, "n1", 1800.0, lambda: "")
        self.lanes: list[Lane] = []

    @contextmanager
    def step(self) -> Iterator[State]:
        with self.core.step() as state:
            yield state

    async def begin(self, count: int = COUNT) -> None:
        for number in range(count):
            lane = Lane(("default", "production", "chat", f"s{number}"), 0.0)
            holder = await self.pins.create(CreatePin(lane, self.owner, 0))
            self.core.state.lanes[lane.key] = lane
            owners.own(self.core.state, lane, self.owner, holder.epoch)
            self.lanes.append(lane)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[PinKeeper]:
        keeper = PinKeeper(self.store, self.pins, self.core.state, self.step)
        task = asyncio.create_task(keeper.run())
        try:
            yield keeper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def all_stand(self) -> None:
        """Wait until each pin stands, under its owner and epoch."""

        async def stand() -> bool:
            pins = {item.key: Pin.FromString(item.value) for item in (await self.store.list("pins/")).items}
            found = [pins.get(owners.pin_key(lane.key)) for lane in self.lanes]
            return all(
                pin is not None and pin.epoch in (0, lane.epoch) and pin.agent_id == "chat/1"
                for pin, lane in zip(found, self.lanes, strict=True)
            )

        await eventually(stand, "all pins stand", 5)

    async def none_stand(self, store: MemoryStore) -> None:
        assert not (await store.list("pins/")).items


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def test_pins_that_were_deleted_are_written_again_as_they_were(store: MemoryStore) -> None:
    home = Home(store)
    async with home.kept():
        await home.begin()
        epochs = [lane.epoch for lane in home.lanes]
        await store.txn([], [Delete("pins/", prefix=True)])
        await home.none_stand(store)
        await home.all_stand()
        assert [lane.epoch for lane in home.lanes] == epochs


async def test_pins_whose_lease_was_revoked_are_written_again_under_another(store: MemoryStore) -> None:
    home = Home(store)
    async with home.kept():
        await home.begin()
        lease = (await store.list("pins/")).items[0].lease
        await store.revoke(lease)
        await home.none_stand(store)
        await home.all_stand()
        assert lease not in {item.lease for item in (await store.list("pins/")).items}


async def test_pins_that_were_deleted_while_this_node_could_not_see_the_store_are_written_when_it_can(
    store: MemoryStore,
) -> None:
    home = Home(store.share())
    async with home.kept():
        await home.begin()
        home.store.set_available(False)
        await store.txn([], [Delete("pins/", prefix=True)])
        await home.none_stand(store)
        home.store.set_available(True)
        await home.all_stand()


async def test_pins_whose_deletion_cannot_be_watched_any_more_are_written_again(store: MemoryStore) -> None:
    home = Home(store.share())
    async with home.kept():
        await home.begin()
        home.store.set_available(False)
        await store.txn([], [Delete("pins/", prefix=True)])
        store.compact((await store.txn([], [Put("elsewhere", b"")])).revision)
        home.store.set_available(True)
        await home.all_stand()


async def test_pins_that_a_store_of_an_older_time_never_had_are_written_again(store: MemoryStore) -> None:
    old = MemoryStore(first_revision=10)
    home = Home(store.share())
    async with home.kept() as keeper:
        await home.begin()
        home.store.set_available(False)
        home.store._state = old._state  # a restored one; what the watch waits for is of the other's time
        home.store._state.waiting.update(home.store._wake)
        keeper._next_revision = 5
        home.pins._lease_until = 0.0
        home.store.set_available(True)
        await home.all_stand()
        assert (await old.revision()) < home.lanes[0].epoch
        await old.txn([], [Delete("pins/", prefix=True)])
        await home.all_stand()


async def test_where_somebody_else_was_faster_the_core_is_told_and_the_pin_stays(store: MemoryStore) -> None:
    home = Home(store)
    async with home.kept():
        await home.begin(2)
        lane = home.lanes[0]
        key = owners.pin_key(lane.key)
        other = Pin(session_id="s0", agent_id="chat/2", incarnation=b"2" * 16, home="n2")
        await store.txn([], [Delete(key)])
        await store.txn([], [Put(key, other.SerializeToString())])

        async def disowned() -> bool:
            return lane.owner is None

        await eventually(disowned, "the lane follows the pin", 5)
        item = await store.get(key)
        assert item is not None and item.value == other.SerializeToString() and lane.epoch == item.mod_revision
        assert lane.owner_id == ("chat/2", b"2" * 16) and lane.home == "n2"
        assert home.lanes[1].owner is home.owner and list(home.core.state.pins.values()) == [home.lanes[1]]


async def test_pins_of_sessions_that_are_nobodys_here_are_left_alone(store: MemoryStore) -> None:
    home = Home(store)
    async with home.kept():
        await home.begin(3)
        await store.txn([], [Put("pins/default/production/chat/other", b"")])
        owners.disown(home.core.state, home.lanes[1])
        await store.txn([], [Delete("pins/", prefix=True)])
        one = home.lanes.pop(1)
        await home.all_stand()
        assert await store.get(owners.pin_key(one.key)) is None
        assert await store.get("pins/default/production/chat/other") is None
