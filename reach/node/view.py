"""The view: who is registered at other nodes and which nodes there are, as the store says, and how old that is.

One watch a prefix: list at a revision, go on from the next one. After a compaction, an end of the watch or any other
doubt the prefix is listed again, and the difference is applied like changes that were watched. The core is told of
each change in a step, at most `STEP_CHANGES` in one, so that ten thousand agents do not hold up the loop.

The view tells of other nodes' agents only; one that was this node's and is another's now is seen there by the core,
which then lets go of it here. What else happens to this node's own keys is the registrar's: it hears of every change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import structlog

from agentreach.aio.clock import boot_time
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from reach.core import elsewhere
from reach.core.lookups import UNSEEN_S
from reach.core.state import State
from reach.core.store import Change, Compacted, Item, Store, StoreUnavailable
from reach.node.contact import Contact
from reach.node.mirror import Mirror
from reach.node.records import AGENTS, NODES, Unreadable, read_agent, read_node, scope_of

log = structlog.get_logger("reach.view")

STEP_CHANGES = 500  # ≈ 20 µs each
LIST_AGAIN_S = 0.5  # after the store did not answer

Record = TypeVar("Record", AgentRecord, NodeRecord)
Step = Callable[[], AbstractContextManager[State]]


class Remote(Protocol):
    """What the core does with what the view sees: `reach.core.remote`. A generation is a key's revision.

    Each is called in a step. Nothing happens for a generation smaller than the one that the core knows.
    """

    def agent_seen(self, state: State, record: AgentRecord, generation: int, /) -> None:
        """Another node has registered this agent, or has written its record again."""

    def agent_gone(self, state: State, tenant: str, env: str, agent_id: str, generation: int, /) -> None:
        """The record of this generation is not there any more."""

    def left_behind(self, state: State, record: AgentRecord, /) -> None:
        """A record of this node's own, though it has just started: its former life was killed."""

    def node_seen(self, state: State, record: NodeRecord, /) -> None:
        """Another node is there, or was started again."""

    def node_gone(self, state: State, node_id: str, /) -> None:
        """Another node's key is not there any more."""


class OwnKeys(Protocol):
    """What becomes of this node's own keys: `reach.node.registrar`."""

    contact: Contact
    overtaken: Callable[[Change], None]
    """Called with a record of another node that was found in the place of one of ours."""

    def listed(self) -> None:
        """The keys are listed anew: what became of ours meanwhile may not have been seen."""

    def changed(self, change: Change) -> None:
        """A key was written or deleted. Called in a step, after the core was told."""


class View:
    """This node's picture of the registry. `start`, then `run` in a task."""

    def __init__(self, store: Store, node: NodeRecord, own_keys: OwnKeys, *, step: Step, remote: Remote) -> None:
        """`node` is this node's record, with the address that others know by the time of `start`."""
        self._store = store
        self._node = node
        self._own_keys = own_keys
        self._contact = own_keys.contact
        self._step = step
        self._remote = remote
        self._agents, self._nodes = Mirror(AGENTS), Mirror(NODES)
        self._watches: dict[str, asyncio.Timeout] = {}
        """Of the watches that go on now: how to end each."""
        self._told: dict[str, int] = {}
        """By key of an agent: the generation that the core knows from here."""
        self._addresses: dict[str, str] = {}
        """Of other nodes, by node_id."""
        self._unreadable: set[str] = set()
        self._told_at = float("-inf")
        self._starting = True
        """This node has registered nobody yet: records of its own are of a former life."""
        own_keys.overtaken = self._seen_early

    # ---- how old ----

    @property
    def revision(self) -> int:
        """The store's revision of which the view is known to be a true picture."""
        return self._agents.confirmed_revision

    @property
    def confirmed_at(self) -> float:
        """The time of the boot clock at which the view was known to be complete."""
        return min(self._agents.confirmed_at, self._nodes.confirmed_at)

    @property
    def age_s(self) -> float:
        """Seconds since the view was known to be complete; 0 while it is looked at and found so all the time."""
        age_s = boot_time() - self.confirmed_at
        return 0.0 if age_s <= UNSEEN_S and not self._contact.away else age_s

    async def look_up(self, tenant: str, env: str, agent_id: str) -> bool:
        """Read one agent's record, linearizably: the core knows it afterwards. False if there is none.

        Raises `StoreUnavailable`.
        """
        key = f"{AGENTS}{tenant}/{env}/{agent_id}"
        item = await self._store.get(key)
        if item is not None:
            self._seen_early(Change(key, item.mod_revision, item))
        return item is not None

    # ---- its life ----

    async def start(self) -> None:
        """List everything once. Raises `StoreUnavailable`."""
        await self._list(self._nodes)
        await self._list(self._agents)
        self._starting = False

    async def run(self) -> None:
        """Watch and look until cancelled."""
        async with asyncio.TaskGroup() as group:
            for mirror in (self._nodes, self._agents):
                group.create_task(self._keep(mirror), name=f"view-{mirror.prefix.rstrip('/')}")
            group.create_task(self._contact.keep(self._look), name="registry-contact")

    async def _keep(self, mirror: Mirror) -> None:
        """Watch a prefix; whenever that ends, for whatever reason, list it and watch again."""
        while True:
            try:
                async with asyncio.timeout(None) as watch:
                    self._watches[mirror.prefix] = watch
                    await self._watch(mirror)
            except StoreUnavailable:
                self._contact.doubted()
            except (Compacted, TimeoutError):
                pass
            finally:
                self._watches.pop(mirror.prefix, None)
            await self._list_stubbornly(mirror)

    def _doubt(self, mirror: Mirror) -> None:
        """List again: the watch has missed something."""
        watch = self._watches.pop(mirror.prefix, None)
        if watch is not None:
            log.warning("the watch of the registry has missed something: listing again", prefix=mirror.prefix)
            watch.reschedule(asyncio.get_running_loop().time())

    async def _watch(self, mirror: Mirror) -> None:
        async with contextlib.aclosing(self._store.watch(mirror.prefix, mirror.revision + 1)) as batches:
            async for batch in batches:
                if batch:
                    await self._apply(mirror, mirror.fresh(batch))
                    mirror.reached(batch[-1].revision)
                    if self.confirmed_at != self._told_at:
                        self._tell_age()

    async def _list_stubbornly(self, mirror: Mirror) -> None:
        while True:
            try:
                await self._list(mirror)
            except StoreUnavailable:
                self._contact.doubted()
                await asyncio.sleep(LIST_AGAIN_S)
            else:
                return

    async def _list(self, mirror: Mirror) -> None:
        asked_at = boot_time()
        listing = await self._store.list(mirror.prefix)
        self._own_keys.listed()
        await self._apply(mirror, mirror.difference(listing), listed=True)
        mirror.listed(listing.revision, asked_at)
        self._tell_age()

    async def _look(self) -> None:
        """Ask the store how far it is. Raises `StoreUnavailable`."""
        try:
            await self._compare()
        except StoreUnavailable:
            self._tell_age(away=True)
            raise
        self._tell_age(away=False)

    async def _compare(self) -> None:
        for mirror in (self._agents, self._nodes):
            asked_at, revision = boot_time(), mirror.revision
            summary = await self._store.summary(mirror.prefix)
            if not mirror.looked(summary, asked_at, revision):
                self._doubt(mirror)

    def _tell_age(self, *, away: bool | None = None) -> None:
        with self._step() as state:
            state.view_complete_at = self._told_at = self.confirmed_at
            if away is not None:
                state.registry_away = away

    # ---- what changed ----

    async def _apply(self, mirror: Mirror, changes: Sequence[Change], *, listed: bool = False) -> None:
        for at in range(0, len(changes), STEP_CHANGES):
            if at:
                await asyncio.sleep(0)
            with self._step() as state:
                for change in changes[at : at + STEP_CHANGES]:
                    mirror.hold(change)
                    if mirror is self._agents:
                        self._agent(state, change, listed=listed)
                    else:
                        self._other_node(state, change)
                if mirror is self._nodes:
                    self._tell_addresses(state)

    def _seen_early(self, change: Change) -> None:
        """Somebody has read a change that the watch still has to bring, or has brought before it mattered."""
        with self._step() as state:
            self._agent(state, change, listed=False)

    def _agent(self, state: State, change: Change, *, listed: bool) -> None:
        key, told = change.key, self._told.get(change.key, 0)
        if told > change.revision and not listed:
            return  # more was seen early
        record = self._readable(change, read_agent)
        own = record is not None and record.node_id == self._node.node_id
        # Of an own one nothing is told: another node's that it replaces gives way when it is let in, or ends with it.
        if told and (record is None or told > change.revision):
            del self._told[key]
            self._remote.agent_gone(state, *scope_of(key), told)
        if record is not None and not own:
            self._told[key] = record.generation = change.revision
            self._remote.agent_seen(state, record, change.revision)
        elif record is not None and self._starting:
            self._remote.left_behind(state, record)
        self._own_keys.changed(change)

    def _other_node(self, state: State, change: Change) -> None:
        node_id = change.key.removeprefix(NODES)
        if node_id == self._node.node_id:
            self._own_keys.changed(change)
            return
        record = self._readable(change, read_node)
        if record is not None:
            self._addresses[node_id] = record.address
            self._remote.node_seen(state, record)
        elif self._addresses.pop(node_id, None) is not None:
            self._remote.node_gone(state, node_id)

    def _tell_addresses(self, state: State) -> None:
        others = dict(sorted(self._addresses.items()))
        state.node_addresses = {**others, self._node.node_id: self._node.address}
        state.peer_addresses = tuple(others.values())
        elsewhere.node_came(state)

    def _readable(self, change: Change, read: Callable[[Item], Record]) -> Record | None:
        """What stands there now, or None: nothing, or nothing that this node can use. That is logged once a key."""
        if change.item is None:
            self._unreadable.discard(change.key)
            return None
        try:
            record = read(change.item)
        except Unreadable as error:
            if change.key not in self._unreadable:
                self._unreadable.add(change.key)
                log.warning("a record in the registry cannot be read: left out", key=change.key, why=str(error))
            return None
        self._unreadable.discard(change.key)
        return record
