"""The election on the embedded store with faults, in virtual time: failures H3 and what the design says of leaders."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from reach.adapters.memory_store import MemoryStore
from reach.core.store import Change, Compare, Delete, Field, Get, Operation, Put, TxnResult, absent
from reach.node.election import MARGIN_S, PREFIX, Election, NotLeading
from tests.support.candidates import Acts, Candidate, recorded

pytestmark = pytest.mark.looptime

TTL_S = 5.0
PROMPT_S = 0.5  # of something that need not wait for any lease to end


class Bench:
    """Candidates n0, n1, …, each with a connection of its own, and `store`, one that never fails."""

    def __init__(self, store: MemoryStore, acts: Acts) -> None:
        self.store = store
        self.acts = acts
        self.them: list[Candidate] = []

    async def stand(self, number: int = 1) -> None:
        """So many candidates more."""
        for _ in range(number):
            self.them.append(
                Candidate(self.store.share(), f"n{len(self.them)}", ttl_s=TTL_S, clock=asyncio.get_running_loop().time)
            )
            await self.them[-1].start()

    def cut(self, candidate: Candidate, available: bool = False) -> None:
        """Cut a candidate from the store, or mend that."""
        assert isinstance(candidate.store, MemoryStore)
        candidate.store.set_available(available)

    def leaders(self) -> list[str]:
        """Who thinks that it leads."""
        return [each.node_id for each in self.them if each.leads]


@contextlib.asynccontextmanager
async def bench(number: int = 0) -> AsyncIterator[Bench]:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    async with recorded(store) as acts:
        at = Bench(store, acts)
        await at.stand(number)
        yield at
        for each in at.them:
            await each.stand_still()
        acts.check()
    await store.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_one_that_stands_alone_leads_when_it_has_started() -> None:
    began = now()
    async with bench(1) as at:
        assert at.leaders() == ["n0"] and now() == began
        leader = at.them[0].election.leader
        assert leader is not None and leader.node_id == "n0" and leader.since > 0
        await at.acts.until(bool)


async def test_of_several_the_first_leads_and_all_know_it() -> None:
    async with bench(4) as at:
        for each in at.them:
            await each.until(lambda election: election.leader_id == "n0", PROMPT_S)
        assert at.leaders() == ["n0"]
        assert len({each.election.leader for each in at.them}) == 1
        assert at.them[3].election.leader_since == at.them[0].election.leader_since
        assert len((await at.store.list(PREFIX)).items) == 4
        assert all(item.lease for item in (await at.store.list(PREFIX)).items)
        await at.acts.until(bool)


async def test_who_resigns_is_followed_at_once_and_does_not_stand_again() -> None:
    async with bench(3) as at:
        await at.acts.until(bool)
        at.them[0].election.resign()
        assert not at.them[0].leads
        for each in at.them:
            await each.until(lambda election: election.leader_id == "n1", PROMPT_S)
        await at.acts.until(lambda acts: acts[-1].node_id == "n1", PROMPT_S)
        await asyncio.sleep(3 * TTL_S)
        assert len((await at.store.list(PREFIX)).items) == 2
        assert at.them[0].election.leader_id == "n1"
        await at.them[1].leave()
        await at.acts.until(lambda acts: acts[-1].node_id == "n2", PROMPT_S)


async def test_who_dies_is_followed_when_its_lease_is_over_and_not_before() -> None:
    async with bench(3) as at:
        await asyncio.sleep(7.3)
        died = now()
        await at.them[0].die()
        await at.them[1].until(lambda election: election.leading is not None)
        assert TTL_S * 2 / 3 - 0.1 <= now() - died <= TTL_S + 0.1
        await at.acts.until(lambda acts: acts[-1].node_id == "n1")
        assert at.them[2].election.leader_id == "n1"


async def test_a_follower_that_dies_changes_nothing() -> None:
    async with bench(3) as at:
        await at.acts.until(bool)
        await at.them[1].die()
        await asyncio.sleep(2 * TTL_S)
        assert at.acts.leaders == ["n0"]
        await at.them[0].leave()
        await at.them[2].until(lambda election: election.leading is not None, PROMPT_S)


@pytest.mark.parametrize("seed", range(50))
async def test_a_leader_that_is_cut_off_stops_before_another_starts(seed: int) -> None:
    chance = random.Random(seed)
    async with bench(3) as at:
        await at.acts.until(bool)
        await asyncio.sleep(chance.random() * 10)
        cut = now()
        at.cut(at.them[0])
        stopped = 0.0

        async def watch_it_stop() -> None:
            nonlocal stopped
            await at.them[0].until(lambda election: election.leading is None)
            stopped = now()

        watching = asyncio.create_task(watch_it_stop())
        await at.them[1].until(lambda election: election.leading is not None)
        started = now()
        await watching
        assert started - stopped >= MARGIN_S - 0.01
        assert started - cut <= TTL_S + 0.1
        assert at.them[0].election.leader is None, "who is cut off cannot know who leads"
        at.cut(at.them[0], available=True)
        await at.them[0].until(lambda election: election.leader_id == "n1", 2)
        for each in at.them[1:]:
            await each.die()
        await at.them[0].until(lambda election: election.leading is not None, TTL_S + 1)


async def test_a_candidate_that_was_cut_off_for_longer_than_its_lease_can_lead_later() -> None:
    async with bench(2) as at:
        at.cut(at.them[1])
        await asyncio.sleep(2 * TTL_S)
        at.cut(at.them[1], available=True)
        await at.them[1].until(lambda election: election.leader_id == "n0", 2)
        await at.acts.until(bool)
        await at.them[0].die()
        await at.them[1].until(lambda election: election.leading is not None, TTL_S + 1)
        await at.acts.until(lambda acts: acts[-1].node_id == "n1")


async def test_a_leader_that_stood_still_and_whose_clock_did_too_is_refused_whatever_it_tries() -> None:
    async with bench(2) as at:
        old, new = at.them
        await at.acts.until(bool)
        leading = old.election.leading
        await old.stand_still()
        assert leading is not None
        await at.store.txn([], [Delete(leading.key)])  # as the end of its lease does; it does not hear of it
        await new.until(lambda election: election.leading is not None)
        await at.acts.until(lambda acts: acts[-1].node_id == "n1")
        assert old.leads, "by its own clock it does"
        assert not await old.act()
        assert old.refused == 1 and not old.leads, "refused once, it leads no more"
        assert not await old.act() and old.refused == 1
        old.go_on()
        await old.until(lambda election: election.leader_id == "n1", 2)


async def test_a_leader_that_stood_still_for_longer_than_its_lease_knows_by_its_clock() -> None:
    async with bench(1) as at:
        await at.acts.until(bool)
        assert at.them[0].leads
        at.them[0].late_s = -(TTL_S - MARGIN_S)  # the time went on, and no task of it ran
        assert not at.them[0].leads and at.them[0].election.leader is None
        at.them[0].late_s = 0.0


async def test_a_leader_whose_keepalives_are_not_answered_steps_down_by_the_clock_alone() -> None:
    async with bench(1) as at:
        await at.acts.until(bool)
        assert at.them[0].election._standing is not None
        at.them[0].election._standing.lease.abandon()
        began = now()
        await at.them[0].until(lambda election: election.leading is None)
        assert now() - began <= TTL_S - MARGIN_S + 0.01
        await at.them[0].until(lambda election: election.leading is not None, PROMPT_S)  # anew, under another lease


@pytest.mark.parametrize("by_hand", ["key deleted", "lease revoked"])
@pytest.mark.parametrize("whose", [0, 1])
async def test_whose_key_or_lease_is_ended_by_hand_stands_again_behind_the_others(by_hand: str, whose: int) -> None:
    async with bench(2) as at:
        await at.acts.until(bool)
        (item,) = (await at.store.list(f"{PREFIX}n{whose}/")).items
        if by_hand == "key deleted":
            await at.store.txn([], [Delete(item.key)])
        else:
            await at.store.revoke(item.lease)
        await at.them[whose].until(lambda election: election.leader is None, PROMPT_S)
        leader = "n1" if whose == 0 else "n0"
        for each in at.them:
            await each.until(lambda election: election.leader_id == leader, PROMPT_S)
        assert at.leaders() == [leader]
        again = (await at.store.list(f"{PREFIX}n{whose}/")).items
        assert len(again) == 1 and again[0].create_revision > item.create_revision


async def test_while_the_store_is_away_nobody_leads_and_afterwards_one_does_at_once() -> None:
    async with bench(3) as at:
        await at.acts.until(bool)
        for each in at.them:
            at.cut(each)
        await asyncio.sleep(TTL_S + 1)
        assert at.leaders() == [] and {each.election.leader_id for each in at.them} == {""}
        for each in at.them:
            at.cut(each, available=True)
        back = now()
        await at.acts.until(lambda acts: acts[-1].at > back, 1)


async def test_a_short_absence_of_the_store_changes_no_leader() -> None:
    async with bench(3) as at:
        await asyncio.sleep(1.6)  # just before a keepalive is due
        for each in at.them:
            at.cut(each)
        await asyncio.sleep(1.6)
        for each in at.them:
            at.cut(each, available=True)
        await asyncio.sleep(2 * TTL_S)
        assert at.acts.leaders == ["n0"]


async def test_what_was_compacted_while_a_candidate_was_cut_off_is_read_again() -> None:
    async with bench(3) as at:
        await at.acts.until(bool)
        at.cut(at.them[2])
        await at.them[0].leave()
        await at.acts.until(lambda acts: acts[-1].node_id == "n1")
        at.store.compact(await at.store.revision())
        at.cut(at.them[2], available=True)
        await at.them[2].until(lambda election: election.leader_id == "n1", PROMPT_S)


async def test_a_key_whose_writing_was_not_answered_does_not_lead() -> None:
    async with bench() as at:
        silent = at.store.share()
        silent.set_answers(False)
        lost = Candidate(silent, "lost", ttl_s=TTL_S, clock=now)
        await lost.start()
        assert not lost.leads
        await at.stand()
        await at.acts.until(bool, 2)
        silent.set_answers(True)
        await lost.until(lambda election: election.leader_id == "n0", 2)
        await lost.stand_still()


async def test_the_former_life_of_a_node_is_not_waited_for() -> None:
    async with bench(1) as at:
        await at.acts.until(bool)
        await at.them[0].die()
        again = Candidate(at.store.share(), "n0", ttl_s=TTL_S, clock=now)
        await again.start()
        assert again.leads
        assert not await at.them[0].act()
        await again.act()
        await again.stand_still()


async def test_a_write_as_leader_tells_its_own_conditions_from_not_leading() -> None:
    async with bench(2) as at:
        leads, follows = (each.election for each in at.them)
        await at.them[1].until(lambda election: election.leader_id == "n0", PROMPT_S)
        made = await leads.write_as_leader([absent("a")], [Put("a", b"1")])
        assert not isinstance(made, NotLeading) and made.succeeded
        refused = await leads.write_as_leader([absent("a")], [Put("a", b"2")], [Get("a"), Get("b")])
        assert not isinstance(refused, NotLeading) and not refused.succeeded
        ((found,), nothing) = refused.reads
        assert found.value == b"1" and nothing == ()
        assert leads.leading is not None
        assert await follows.write_as_leader([], [Put("a", b"3")]) == NotLeading("n0")
        item = await at.store.get("a")
        assert item is not None and item.value == b"1"
        await at.acts.until(bool)


async def test_a_candidate_whose_key_vanishes_just_before_it_takes_office_does_not_lead() -> None:
    class Takes(MemoryStore):
        """Its keys are deleted by hand when a candidate is about to say that it leads."""

        taken = False

        async def txn(
            self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
        ) -> TxnResult:
            """See `Store.txn`."""
            if any(each.field is Field.CREATE and each.operand for each in compares) and not self.taken:
                self.taken = True
                await super().txn([], [Delete(PREFIX, prefix=True)])
            return await super().txn(compares, then, otherwise)

    store = Takes(clock=asyncio.get_running_loop().time)
    election = Election(store, "n0", ttl_s=TTL_S, clock=asyncio.get_running_loop().time)
    await election.start()
    assert store.taken and election.leading is None and not (await store.list(PREFIX)).items
    await election.stop()
    await store.close()


class Behind(MemoryStore):
    """What it watches it is told late: nothing before `up_to_date` is set."""

    up_to_date: asyncio.Event

    async def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        async with contextlib.aclosing(super().watch(prefix, from_revision, deletes_only=deletes_only)) as batches:
            async for batch in batches:
                await self.up_to_date.wait()
                yield batch


async def test_a_former_leader_whose_view_is_old_takes_its_own_old_key_for_nobody_s() -> None:
    """It stood again, and its watch had not told it that its former key is gone: by that it led, and so did another."""
    async with bench() as at:
        behind = Behind(state=at.store._state)
        behind.up_to_date = asyncio.Event()
        former = Candidate(behind, "n0", ttl_s=TTL_S, clock=now)
        await former.start()
        await at.acts.until(bool)
        assert former.leads
        (item,) = (await at.store.list(PREFIX)).items
        at.them.append(former)
        await at.stand()
        await at.store.revoke(item.lease)
        await at.them[1].until(lambda election: election.leading is not None, PROMPT_S)
        await asyncio.sleep(TTL_S / 2)
        assert (await at.store.list(f"{PREFIX}n0/")).items, "it stands again"
        assert former.election.leader is None and former.election.leader_id == ""
        behind.up_to_date.set()
        await former.until(lambda election: election.leader_id == "n1", PROMPT_S)
        await at.acts.until(bool)


async def test_a_leader_whose_key_somebody_else_has_made_anew_writes_no_more() -> None:
    async with bench(1) as at:
        leads = at.them[0].election
        leading = leads.leading
        assert leading is not None
        at.cut(at.them[0])
        await at.store.txn([], [Delete(leading.key)])
        await at.store.txn([absent(leading.key)], [Put(leading.key, b"")])
        at.cut(at.them[0], available=True)
        assert isinstance(await leads.write_as_leader([], [Put("a", b"1")]), NotLeading)
        assert leads.leading is None and await at.store.get("a") is None
        await at.store.txn([], [Delete(leading.key)])
        await at.acts.until(bool)


async def test_listeners_are_told_of_each_change() -> None:
    async with bench(2) as at:
        told: list[str] = []
        at.them[1].election.listeners.append(lambda: told.append(at.them[1].election.leader_id))
        await at.acts.until(bool)
        await at.them[0].leave()
        await at.them[1].until(lambda election: election.leading is not None)
        await at.them[1].leave()
        assert [who for place, who in enumerate(told) if place == 0 or told[place - 1] != who][-2:] == ["n1", ""]
