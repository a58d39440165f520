"""Processes that are gone together with their homes: what they had, nobody can say.

A home that lives knows what it gave to an agent that has ended. If the home ends at about the same time, and another
process takes the agent_id over or the key vanishes, nobody would know that there was anybody to ask. So every node
remembers such a process for a while, and counts it as missing (`once`) where a message may have been given to it; and
does not say that nobody has the message (`claims`). A node that was killed and started anew remembers so those that
its former life left in the store, until they are back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reach.core import nodes
from reach.core.agents import Agent
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from agentreach.v1.registry_pb2 import AgentRecord
    from reach.core.nodes import NodePeer
    from reach.core.selector import Selector
    from reach.core.state import State

REMEMBERED_S = 15.0  # callers send again within 5 s, and their owner then waits for 10
SETTLED_S = 2.0  # a home that lived so much longer than an agent has told everybody what became of its messages
VANISHED_MAX = 10_000  # processes that are remembered; beyond, the oldest is forgotten

SELECTORS_MAX = 1_000  # whose matches are kept; beyond, they are looked for again

Process = tuple[str, bytes]
"""(agent_id, incarnation)."""
Key = tuple[str, str, str, bytes]
"""(tenant, env, agent_id, incarnation)."""


class Vanished:
    """One process, with its last home in the life that it had then. None: this node, in a former life of its own."""

    __slots__ = ("agent", "life", "node", "until")

    def __init__(self, agent: Agent, node: NodePeer | None, life: bytes, until: float) -> None:
        self.agent = agent
        self.node = node
        self.life = life
        self.until = until

    @property
    def home_is_gone(self) -> bool:
        """Whether its home cannot tell what it had: it lives no more, or has forgotten."""
        node = self.node
        if node is None:
            return True
        if node.connected:
            return node.incarnation != self.life
        return not (node.is_registered and node.record.incarnation == self.life)


class VanishedBook:
    """Those that are remembered, the oldest first."""

    __slots__ = ("entries", "matching")

    def __init__(self) -> None:
        self.entries: dict[Key, Vanished] = {}
        self.matching: dict[Selector, list[Key]] = {}
        """By who was asked for since `entries` last grew."""

    def put(self, vanished: Vanished, now: float) -> None:
        """Remember one."""
        agent, entries = vanished.agent, self.entries
        key = (agent.tenant, agent.env, agent.agent_id, agent.incarnation)
        entries.pop(key, None)
        while entries and (len(entries) >= VANISHED_MAX or next(iter(entries.values())).until <= now):
            del entries[next(iter(entries))]
        entries[key] = vanished
        self.matching.clear()

    def asked_for(self, selector: Selector) -> list[Key]:
        """Those that match, some of which may have been forgotten."""
        found = self.matching.get(selector)
        if found is None:
            found = [key for key, each in self.entries.items() if selector.matches(each.agent)]
            if len(self.matching) >= SELECTORS_MAX:
                self.matching.clear()
            self.matching[selector] = found
        return found


def remember(state: State, attachment: Attachment, node: NodePeer) -> None:
    """A remote agent is gone, or its home has forgotten it. One that its home let go of before it left is settled."""
    agent = attachment.agent
    if not node.connected and node.closing and not _had(node, agent):
        return
    life = node.incarnation or node.record.incarnation
    known = state.vanished.entries.get((agent.tenant, agent.env, agent.agent_id, agent.incarnation))
    if known is not None and known.node is node and known.life != life and not _had(node, agent):
        return  # it was an earlier life's, and this one never had it: that its key goes now is no news
    state.vanished.put(Vanished(agent, node, life, state.now + REMEMBERED_S), state.now)


def left_behind(state: State, record: AgentRecord) -> None:
    """A record of this node's own stood in the store when it started: its former life was killed."""
    state.vanished.put(Vanished(Agent.from_record(record), None, b"", state.now + REMEMBERED_S), state.now)


def home_left(state: State, node: NodePeer) -> None:
    """A home left in good order: whoever asked it has been told."""
    _settled(state, node, state.now)


def home_cut(state: State, node: NodePeer) -> None:
    """The link to a home was cut, which may be its end: what it had judged long before is settled."""
    _settled(state, node, state.now - SETTLED_S)


def _settled(state: State, node: NodePeer, gone_by: float) -> None:
    entries = state.vanished.entries
    until = gone_by + REMEMBERED_S
    for key, each in list(entries.items()):
        if each.node is node and each.until <= until and not _had(node, each.agent):
            del entries[key]


def _had(node: NodePeer, agent: Agent) -> bool:
    """Whether its home said last that it has it."""
    last = node.told.get((agent.tenant, agent.env, agent.agent_id))
    return last is not None and last.incarnation == agent.incarnation


def among(state: State, selector: Selector, before: float = math.inf) -> list[Process]:
    """Those that a message of this target may have been given to, and that have not come back.

    With `before` only those that were remembered by then.
    """
    book = state.vanished
    if not book.entries:
        return []
    found: list[Process] = []
    for key in book.asked_for(selector):
        each = book.entries.get(key)
        if each is None or each.until <= state.now or each.until - REMEMBERED_S > before or not each.home_is_gone:
            continue
        tenant, env, agent_id, incarnation = key
        present = state.directory.get(tenant, env, agent_id)
        if present is None or present.incarnation != incarnation or not _is_back(present):
            found.append((agent_id, incarnation))  # else it is asked itself, as long as it lives
    return found


def _is_back(agent: Agent) -> bool:
    """Whether it is attached to a node, which says so; its key alone is of before, or of soon."""
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    return not attachment.remote or _had(_node_of(attachment), agent)


def _node_of(attachment: Attachment) -> NodePeer:
    node = attachment.peer
    assert isinstance(node, nodes.NodePeer)
    return node
