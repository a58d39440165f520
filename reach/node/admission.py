"""First registrations: the leader admits an agent_id that nobody has yet, for every node of the mesh.

One place decides, so that of two processes that start under one name on two nodes at the same moment one is first, and
so that the number of agents has one bound. A key that exists is none of the leader's business: whoever holds its
agent now writes it by compare-and-set (`registrar`), also while nobody leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Forward, Forwarded
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire.checks import record_fault
from agentreach.wire.errors import failure
from reach.core.store import TXN_OPERATIONS_MAX, Get, LeaseGone, Put, Store, StoreUnavailable, absent
from reach.node.election import Election, NotLeading
from reach.node.records import AGENTS, agent_key

AGENTS_PER_FORWARD_MAX = 60
"""First registrations in one `forward`; the leader writes them in one transaction, beside its fence."""
assert 2 * AGENTS_PER_FORWARD_MAX < TXN_OPERATIONS_MAX

EXISTS = codes.FENCED
"""The leader's answer for a key that somebody has written already: its home goes on by compare-and-set."""

LEASE_GONE = codes.FENCED
"""The same for a whole `forward`: the lease that it names has ended."""


class Forwarder(Protocol):
    """The way to the leader."""

    async def forward(self, forward: Forward) -> Forwarded:
        """Ask the leading node, and return its answer. `StoreUnavailable` if no leader is linked, or it is lost.

        Cancelling it gives up the answer; the leader may do what was asked all the same.
        """
        ...


class Nobody:
    """A `Forwarder` of a node without links to others."""

    async def forward(self, forward: Forward) -> Forwarded:
        """See `Forwarder.forward`."""
        raise StoreUnavailable("no node leads now")


class Admission:
    """Both sides of the door: `ask` for this node's own newcomers, `admit` for what peers forward to this node."""

    def __init__(
        self, store: Store, election: Election, node_id: str, *, agents_max: int, forwarder: Forwarder | None = None
    ) -> None:
        self._store = store
        self._election = election
        self._node_id = node_id
        self._agents_max = agents_max
        self._forwarder = forwarder or Nobody()
        self._one_at_a_time = asyncio.Lock()
        self._counted_for = 0
        """The leadership under which `_room` was counted."""
        self._room = 0
        """How many more may be admitted before they must be counted again: only the leader adds any."""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever another node leads, or none: asking may be worth it again."""
        self._election.listeners.append(listener)

    def connect(self, forwarder: Forwarder) -> None:
        """Ask this way while another node leads."""
        self._forwarder = forwarder

    async def ask(self, forward: Forward) -> Forwarded:
        """Have first registrations of this node's agents admitted, by this node if it leads. Raises like `forward`."""
        if self._election.leading is not None:
            return await self.admit(forward, self._node_id)
        answer = await self._forwarder.forward(forward)
        leader = self._election.leader
        if leader is not None and answer.election < leader.revision:
            raise StoreUnavailable("the answer is a former leader's")
        return answer

    async def admit(self, forward: Forward, node_id: str) -> Forwarded:
        """Answer the `forward` of a node, in the order of its agents. Never raises for what the node or store did."""
        answer = Forwarded(nonce=forward.nonce)
        leading = self._election.leading
        if leading is None:
            answer.error.CopyFrom(_unavailable(f"{self._node_id} does not lead"))
            return answer
        answer.election = leading.revision
        faults = [_fault(attach.record, node_id) for attach in forward.agents[:AGENTS_PER_FORWARD_MAX]]
        records = [attach.record for attach, fault in zip(forward.agents, faults, strict=False) if fault is None]
        try:
            async with self._one_at_a_time:
                outcomes = await self._write(records, forward.lease, leading.revision)
        except LeaseGone as error:
            answer.error.CopyFrom(failure(LEASE_GONE, str(error), retryable=True))
            return answer
        except StoreUnavailable as error:
            self._counted_for = 0  # they may have been written
            answer.error.CopyFrom(_unavailable(str(error)))
            return answer
        if isinstance(outcomes, NotLeading):
            answer.error.CopyFrom(_unavailable(f"{self._node_id} leads no more"))
            return answer
        for attach, fault in zip(forward.agents, faults, strict=False):
            outcome = fault or outcomes[agent_key(attach.record)]
            attached = answer.agents.add(agent_id=attach.record.agent_id)
            if isinstance(outcome, int):
                attached.generation = outcome
            else:
                attached.error.CopyFrom(outcome)
        return answer

    async def _write(
        self, records: Sequence[AgentRecord], lease: int, election: int
    ) -> dict[str, int | Error] | NotLeading:
        """Each record's generation, or why it has none, by key."""
        outcomes: dict[str, int | Error] = {}
        left: dict[str, AgentRecord] = {}
        for record in records:
            left.setdefault(agent_key(record), record)
        while left:
            room = await self._room_for(len(left), election)
            for key in list(left)[room:]:
                record = left.pop(key)
                outcomes[key] = _full(record.agent_id, self._agents_max)
            if not left:
                break
            puts = [Put(key, record.SerializeToString(), lease) for key, record in left.items()]
            result = await self._election.write_as_leader(
                [absent(key) for key in left], puts, [Get(key) for key in left]
            )
            if isinstance(result, NotLeading):
                return result
            if result.succeeded:
                self._room -= len(left)
                outcomes.update(dict.fromkeys(left, result.revision))
                break
            for item in (item for read in result.reads for item in read):
                record = left.pop(item.key)
                outcomes[item.key] = failure(EXISTS, f"{record.agent_id} is registered already")
        return outcomes

    async def _room_for(self, count: int, election: int) -> int:
        """How many of so many newcomers may come in."""
        if self._counted_for != election or self._room < count:
            self._counted_for = election
            self._room = self._agents_max - (await self._store.summary(AGENTS)).count
        return max(0, min(count, self._room))


def _fault(record: AgentRecord, node_id: str) -> Error | None:
    if record.node_id != node_id:
        return failure(codes.PERMISSION_DENIED, f"{node_id} cannot register an agent of {record.node_id or 'no node'}")
    return record_fault(record)


def _unavailable(why: str) -> Error:
    return failure(codes.REGISTRY_UNAVAILABLE, why, retry_after_ms=1_000)


def _full(agent_id: str, bound: int) -> Error:
    message = f"{agent_id} cannot be registered: the mesh holds {bound} agents, its limit"
    return failure(codes.OVERLOADED, message, retry_after_ms=5_000)
