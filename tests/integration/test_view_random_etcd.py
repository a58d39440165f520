"""A view on real etcd under random writes, compactions, cuts and restarts: it ends true, and never was what was not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from reach.adapters.etcd import EtcdStore
from reach.core.store import Delete, Put
from reach.node import contact
from reach.node.view import View
from tests.support.agents import eventually
from tests.support.etcd_cluster import WiredEtcd, etcd_cluster
from tests.support.stores import connected
from tests.support.views import OWN, Book, OwnKeys, all_were_true, key_of, put_agent, truth

ACTIONS = 60
NAMES = [f"a/{number}" for number in range(8)]
TRUE_S = 20.0  # after the last fault; etcd and the client back off while it is away


@pytest.fixture(scope="module")
def etcd() -> Iterator[WiredEtcd]:
    """One member: what it forgets, nobody has."""
    with etcd_cluster(1) as etcd:
        yield etcd


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_random_faults_the_view_equals_etcd_and_it_never_was_what_etcd_never_was(
    etcd: WiredEtcd, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(contact, "LOOK_EVERY_S", 0.5)
    prefix, chance = f"/random-{seed}/", Random(seed)
    seen = EtcdStore(etcd.endpoints_for(f"view-{seed}"), prefix=prefix)
    book = Book()
    view = View(seen, OWN, OwnKeys(), step=book.step, remote=book)
    async with connected(etcd, prefix=prefix) as store:
        await view.start()
        duty = asyncio.create_task(view.run())
        try:
            truths = [await truth(store)]
            for _ in range(ACTIONS):
                await act(etcd, store, f"view-{seed}", chance)
                truths.append(await truth(store))
            etcd.heal()

            async def true() -> bool:
                return book.agents == await truth(store) and view.age_s == 0.0

            await eventually(true, f"the view is true: {book.agents}", TRUE_S)
            assert all_were_true(book, truths)
        finally:
            duty.cancel()
            await asyncio.wait([duty])
            await seen.close()


async def act(etcd: WiredEtcd, store: EtcdStore, client: str, chance: Random) -> None:
    """One write, or now and then something worse."""
    name, what = chance.choice(NAMES), chance.random()
    if what < 0.5:
        await store.txn([], [put_agent(name, chance.choice(["n2", "n3"]))])
    elif what < 0.7:
        await store.txn([], [Delete(key_of(name))])
    elif what < 0.75:
        await store.txn([], [Put(f"pins/{name}", b"")])
    elif what < 0.8:
        await store.txn([], [Put("pins/compacted", b"")])  # a revision is compacted once
        await etcd.compact()
    elif what < 0.87:
        etcd.cut_client(client, reset=chance.random() < 0.5)
    elif what < 0.96:
        etcd.heal()
        await asyncio.sleep(chance.random() * 0.3)  # how long it may catch up
    else:
        etcd.members[0].stop()
        await etcd.members[0].restart()
