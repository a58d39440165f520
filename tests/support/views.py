"""What stands around a view of the registry in tests: the core and the registrar as it sees them, others' writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from reach.core.state import State
from reach.core.store import Change, Operation, Put, Store
from reach.node.contact import Contact
from tests.support.core import CoreMesh

OWN = NodeRecord(node_id="n1", address="127.0.0.1:1")

Agents = dict[tuple[str, str, str], int]


@dataclass
class Book:
    """What the core would know: it takes the calls as `reach.core.remote` does, and notes what it knew after steps."""

    agents: Agents = field(default_factory=dict)
    """The generation of each."""
    nodes: dict[str, str] = field(default_factory=dict)
    behind: list[str] = field(default_factory=list)
    """What stood there of this node's own when it started."""
    calls: int = 0
    most_calls: int = 0
    """Of one step."""
    after_steps: list[Agents] = field(default_factory=list)
    state: State = field(default_factory=lambda: CoreMesh().state)

    @contextlib.contextmanager
    def step(self) -> Iterator[State]:
        """As the engine's."""
        before = self.calls
        yield self.state
        self.most_calls = max(self.most_calls, self.calls - before)
        if self.after_steps[-1:] != [self.agents]:
            self.after_steps.append(dict(self.agents))

    def left_behind(self, state: State, record: AgentRecord, /) -> None:
        """See `Remote`."""
        assert record.node_id == OWN.node_id
        self.behind.append(record.agent_id)

    def agent_seen(self, state: State, record: AgentRecord, generation: int, /) -> None:
        """See `Remote`."""
        self.calls += 1
        assert record.node_id != OWN.node_id and record.generation == generation
        key = (record.tenant, record.env, record.agent_id)
        if self.agents.get(key, 0) < generation:
            self.agents[key] = generation

    def agent_gone(self, state: State, tenant: str, env: str, agent_id: str, generation: int, /) -> None:
        """See `Remote`."""
        self.calls += 1
        key = (tenant, env, agent_id)
        if self.agents.get(key, generation + 1) <= generation:
            del self.agents[key]

    def node_seen(self, state: State, record: NodeRecord, /) -> None:
        """See `Remote`."""
        self.nodes[record.node_id] = record.address

    def node_gone(self, state: State, node_id: str, /) -> None:
        """See `Remote`."""
        del self.nodes[node_id]


class OwnKeys:
    """What the registrar would hear."""

    def __init__(self) -> None:
        self.contact = Contact()
        self.heard: list[Change] = []
        self.listings = 0
        self.overtaken: Callable[[Change], None] = self.heard.append

    def listed(self) -> None:
        """See `view.OwnKeys`."""
        self.listings += 1

    def changed(self, change: Change) -> None:
        """See `view.OwnKeys`."""
        self.heard.append(change)


def key_of(name: str) -> str:
    return f"agents/default/production/{name}"


def put_agent(name: str, node_id: str = "n2", **more: str) -> Operation:
    record = AgentRecord(agent_id=name, tenant="default", env="production", node_id=node_id, **more)  # type: ignore[arg-type]
    return Put(key_of(name), record.SerializeToString())


async def truth(store: Store) -> Agents:
    """What the core should know of other nodes' agents."""
    return {
        (record.tenant, record.env, record.agent_id): item.mod_revision
        for item in (await store.list("agents/")).items
        if (record := AgentRecord.FromString(item.value)).node_id != OWN.node_id
    }


def all_were_true(book: Book, truths: list[Agents]) -> bool:
    """Whether what the core knew after each step was once so in the store, in this order."""
    remaining = iter(truths)
    return all(any(known == truth for truth in remaining) for known in book.after_steps)
