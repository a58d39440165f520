"""Pins in a store: whoever else writes them, a session has one owner, and only that one's state counts."""

from __future__ import annotations

import asyncio

import pytest

from reach.adapters.memory_store import MemoryStore
from reach.adapters.snapshots import MemorySnapshots
from reach.core import owners
from reach.core.effects import CreatePin, RefreshPin, StoreSnapshot, VoidPin
from reach.core.lanes import Lane
from reach.core.moving import Holder
from reach.core.requests import Attachment
from reach.core.store import Delete, StoreUnavailable
from reach.node.pins import Fenced, PinBook, pin_key
from tests.support.core import CoreMesh

KEY = ("default", "production", "chat", "s")


class Book:
    """One node's pins of the session `s`, in a store that others share."""

    def __init__(self, store: MemoryStore, snapshots: MemorySnapshots, node_id: str) -> None:
        core = CoreMesh(seed=len(node_id) + ord(node_id[-1]), node_id=node_id)
        core.agent(f"chat/{node_id}")
        agent = core.state.directory.get("default", "production", f"chat/{node_id}")
        assert agent is not None and isinstance(agent.link, Attachment)
        self.core, self.owner, self.lane = core, agent.link, Lane(KEY, 0.0)
        self.away = ""
        self.pins = PinBook(store, node_id, 1800.0, lambda: self.away, snapshots)

    async def create(self, replaces: int = 0, **more: object) -> Holder:
        return await self.pins.create(CreatePin(self.lane, self.owner, replaces, **more))  # type: ignore[arg-type]

    async def checkpoint(self, epoch: int, turn: int) -> str:
        return await self.pins.store_snapshot(StoreSnapshot(self.lane, self.owner, epoch, turn, b"state %d" % turn))

    async def holder(self) -> Holder:
        found = await self.pins.holder(KEY)
        assert found is not None
        return found


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def snapshots() -> MemorySnapshots:
    return MemorySnapshots()


@pytest.fixture
def one(store: MemoryStore, snapshots: MemorySnapshots) -> Book:
    return Book(store, snapshots, "n1")


@pytest.fixture
def other(store: MemoryStore, snapshots: MemorySnapshots) -> Book:
    return Book(store, snapshots, "n2")


async def test_of_two_that_pin_a_session_at_once_one_does_and_the_other_is_told_who(one: Book, other: Book) -> None:
    first, second = await asyncio.gather(one.create(), other.create())
    assert first.made != second.made
    assert (first.agent_id, first.epoch, first.home) == (second.agent_id, second.epoch, second.home)
    assert await other.holder() == Holder(first.agent_id, first.incarnation, first.epoch, False, first.home,
                                          since=first.epoch)  # fmt: skip


async def test_a_pin_is_replaced_by_who_knows_its_epoch_and_by_nobody_else(one: Book, other: Book) -> None:
    first = await one.create()
    refused = await other.create(first.epoch - 1)
    assert not refused.made and refused.epoch == first.epoch
    second = await other.create(first.epoch)
    assert second.made and second.epoch > first.epoch and second.home == "n2"
    again = await one.create(first.epoch)
    assert not again.made and again.epoch == second.epoch
    assert (await one.holder()).agent_id == "chat/n2"


async def test_of_two_that_replace_a_pin_at_once_one_does(one: Book, other: Book) -> None:
    epoch = (await one.create()).epoch
    results = await asyncio.gather(one.create(epoch), other.create(epoch))
    assert sorted(each.made for each in results) == [False, True]
    assert len({each.epoch for each in results}) == 1


async def test_a_new_pin_names_the_state_that_the_former_named_unless_it_was_forsaken(
    one: Book, other: Book, snapshots: MemorySnapshots
) -> None:
    first = await one.create()
    reference = await one.checkpoint(first.epoch, 3)
    second = await other.create(first.epoch)
    assert (second.snapshot, second.turn, second.since) == (reference, 3, first.epoch)
    third = await one.create(second.epoch, forsaken=True)
    assert (third.snapshot, third.turn) == ("", 0) and await snapshots.get(reference) is None


async def test_a_state_is_named_by_its_own_epochs_pin_and_by_its_largest_turn_alone(
    one: Book, other: Book, snapshots: MemorySnapshots
) -> None:
    first = await one.create()
    old = await one.checkpoint(first.epoch, 1)
    new = await one.checkpoint(first.epoch, 2)
    assert (await one.holder()).snapshot == new and await snapshots.get(old) is None
    assert await one.checkpoint(first.epoch, 1) == new
    second = await other.create(first.epoch)
    with pytest.raises(Fenced):
        await one.checkpoint(first.epoch, 9)
    assert (await one.holder()).snapshot == new and (await one.holder()).epoch == second.epoch
    assert await snapshots.get(new) == b"state 2" and len(snapshots._held) == 1


async def test_an_owner_is_declared_dead_in_its_own_epochs_pin_alone(one: Book, other: Book) -> None:
    first = await one.create()
    await one.pins.void(VoidPin(one.lane, first.epoch - 1))
    assert (await one.holder()).incarnation
    await one.pins.void(VoidPin(one.lane, first.epoch))
    dead = await other.holder()
    assert not dead.incarnation and dead.epoch == first.epoch
    heir = await other.create(first.epoch)
    await one.pins.void(VoidPin(one.lane, first.epoch))
    assert (await other.holder()).incarnation and heir.epoch == (await other.holder()).epoch


async def test_a_pin_in_use_keeps_its_epoch_and_is_written_again_when_it_is_gone_but_never_over_anothers(
    one: Book, other: Book, store: MemoryStore
) -> None:
    first = await one.create()
    owners.own(one.core.state, one.lane, one.owner, first.epoch)
    await one.pins.refresh(RefreshPin(one.lane))
    assert (await one.holder()).epoch == first.epoch
    await store.txn([], [Delete(pin_key(KEY))])
    await one.pins.refresh(RefreshPin(one.lane))
    assert (await other.holder()).agent_id == "chat/n1" and (await other.holder()).epoch == first.epoch
    second = await other.create(first.epoch)
    await one.pins.refresh(RefreshPin(one.lane))
    assert (await one.holder()).agent_id == "chat/n2" and (await one.holder()).epoch == second.epoch


async def test_while_the_store_is_away_nothing_is_pinned_read_or_kept(one: Book) -> None:
    first = await one.create()
    one.away = "it does not answer"
    for asking in (one.create(first.epoch), one.pins.holder(KEY), one.checkpoint(first.epoch, 1)):
        with pytest.raises(StoreUnavailable):
            await asking
