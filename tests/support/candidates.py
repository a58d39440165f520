"""Candidates of an election that act as often as they are let, and the proof that no two of them ever acted together.

Each act of a leader is a fenced write of one key; the store's own history of that key is the order in which they acted.

    async with candidates(store, 3) as them, recorded(store) as acts:
        ...
    acts.check()

As a program (`python -m tests.support.candidates ENDPOINT PREFIX NODE_ID TTL_S`) it is one candidate on etcd, to be
killed and stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import EtcdStore
from reach.core.store import Put, Store, StoreUnavailable
from reach.node.election import Election, NotLeading
from tests.support.stores import Follower

ACTS = "test/acts"
PACE_S = 0.05
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Act:
    """One write of a leader: under which leadership, and when it was made."""

    node_id: str
    election: int
    at: float
    revision: int = 0

    def value(self) -> bytes:
        """As it stands in the store."""
        return f"{self.node_id} {self.election} {self.at}".encode()


class Acts:
    """All acts, in the store's order."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._read: list[Act] = []

    @property
    def all(self) -> list[Act]:
        """Until now."""
        for change in self._follower.seen[len(self._read) :]:
            assert change.item is not None
            node_id, election, at = change.item.value.decode().split()
            self._read.append(Act(node_id, int(election), float(at), change.revision))
        return self._read

    @property
    def leaders(self) -> list[str]:
        """Who acted, each once for each time that it began to."""
        found: list[tuple[str, int]] = []
        for act in self.all:
            if not found or found[-1] != (act.node_id, act.election):
                found.append((act.node_id, act.election))
        return [node_id for node_id, _ in found]

    def check(self) -> None:
        """Nobody acted under a leadership once another one had begun to act."""
        elections = [act.election for act in self.all]
        assert elections, "nobody ever acted"
        assert elections == sorted(elections), "a former leader acted"
        by_election = {act.election: act.node_id for act in self.all}
        assert all(by_election[act.election] == act.node_id for act in self.all)

    async def until(self, holds: Callable[[list[Act]], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until it holds of the acts."""
        async with asyncio.timeout(limit_s):
            while not holds(self.all):
                await self._follower.until(len(self._follower.seen) + 1)

    async def more(self, number: int) -> None:
        """Wait for so many acts more."""
        enough = len(self.all) + number
        await self.until(lambda acts: len(acts) >= enough)


@contextlib.asynccontextmanager
async def recorded(store: Store) -> AsyncIterator[Acts]:
    """Follow the acts of all candidates from now on."""
    follower = Follower(store.watch(ACTS, (await store.revision()) + 1))
    await follower.until(established=1)
    try:
        yield Acts(follower)
    finally:
        await follower.close()


class Candidate:
    """One candidate that acts whenever it may."""

    def __init__(
        self, store: Store, node_id: str, *, ttl_s: float = 5.0, clock: Callable[[], float] = boot_time
    ) -> None:
        self.store = store
        self.node_id = node_id
        self.clock = clock
        self.late_s = 0.0
        """By how much its own clock is behind the true one."""
        self.refused = 0
        """Acts for which it thought it led, and was told that it does not."""
        self.election = Election(store, node_id, ttl_s=ttl_s, clock=lambda: self.clock() - self.late_s)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def leads(self) -> bool:
        """True while it may act, as far as it knows itself."""
        return self.election.leading is not None

    async def start(self) -> None:
        """Stand, and act from now on."""
        await self.election.start()
        self.go_on()

    def go_on(self) -> None:
        """After `stand_still`."""
        names = {"election": self.election.run, "acting": self._act}
        self._tasks = [asyncio.create_task(run(), name=f"{self.node_id} {name}") for name, run in names.items()]

    async def stand_still(self) -> None:
        """Hear and do nothing any more, as a stopped process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def die(self) -> None:
        """End as with SIGKILL: its lease is not kept alive any more, and nobody is told."""
        await self.stand_still()
        if self.election._standing is not None:
            self.election._standing.lease.abandon()

    async def leave(self) -> None:
        """End as on SIGTERM."""
        self.election.resign()
        await self.stand_still()
        await self.election.stop()

    async def until(self, holds: Callable[[Election], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until something holds of its election that it tells its listeners."""
        told = asyncio.Event()
        self.election.listeners.append(told.set)
        async with asyncio.timeout(limit_s):
            while not holds(self.election):
                told.clear()
                await told.wait()
        self.election.listeners.remove(told.set)

    async def act(self) -> bool:
        """Write as the leader, if it thinks that it is; True if it was."""
        leading = self.election.leading
        if leading is None:
            return False
        act = Act(self.node_id, leading.revision, self.clock())
        result = await self.election.write_as_leader([], [Put(ACTS, act.value())])
        self.refused += isinstance(result, NotLeading)
        return not isinstance(result, NotLeading)

    async def _act(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.act()
            await asyncio.sleep(PACE_S)


async def _candidate(endpoint: str, prefix: str, node_id: str, ttl_s: float) -> None:
    store = await EtcdStore.connect([endpoint], prefix=prefix)
    await Candidate(store, node_id, ttl_s=ttl_s).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_candidate(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
