"""Events that cross from the node of their publisher to a node of their subscribers, and the counts that come back.

An event crosses once for each node that wants its topic, or for each agent of another node that it was sent to. That
node delivers it to its own, and answers how many took it; the publisher is told the sum. What is not answered in time
counts as unknown, as if its subscriber had not acknowledged it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.names import normalise_env
from agentreach.wire.outbox import Item
from reach.core import admit, events, nodes, writing
from reach.core.lineage import Forged
from reach.core.requests import Attachment
from reach.core.topics import Publishing

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.nodes import NodePeer
    from reach.core.peers import Peer
    from reach.core.state import State

MARGIN_S = 0.1  # the other node's counts must be there before the publisher's time is over
COUNTS_PRIORITY = 0


class EventPort:
    """Where the counts of an event that came from another node go."""

    __slots__ = ("_entry", "_node", "_state")

    streaming = False

    def __init__(self, state: State, node: NodePeer, entry: bytes) -> None:
        self._state = state
        self._node = node
        self._entry = entry

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Send the counts back."""
        self._node.link.put_bytes(reply + writing.returned(self._entry, 0), self._state.now, COUNTS_PRIORITY)
        self._state.woken.add(self._node)
        return None


def send(
    state: State, publishing: Publishing, node: NodePeer, agent_id: str, envelope: Envelope, parent: Lineage | None
) -> None:
    """Let an event cross to a node: for one of its agents, or (without an agent_id) for all who want its topic."""
    if not events.make_room(state, node):
        publishing.matched += 1
        publishing.dropped += 1
        events.count_gap(state, node, agent_id, publishing.topic)
        return
    number = state.next_number
    state.next_number = number + 1
    copy = Envelope()
    copy.CopyFrom(envelope)
    copy.entry = state.nonce + number.to_bytes(8, "big")
    copy.recipient = agent_id
    copy.lineage = state.lineage.sign(parent) if parent is not None else b""
    copy.timeout_ms = max(1, int((publishing.deadline - state.now - MARGIN_S) * 1000))
    item = node.link.put(copy, state.now, admit.PRIORITY_LANE[envelope.priority])
    events.remember(node, item)
    publishing.awaiting.add(number)
    state.crossings[number] = (publishing, node)
    state.woken.add(node)


def arrived(state: State, node: NodePeer, envelope: Envelope, spent_ms: int) -> None:
    """An event of another node's publisher has come for subscribers of this one."""
    wait_s = max(0.0, (envelope.timeout_ms - spent_ms) / 1000)
    publishing = Publishing(EventPort(state, node, envelope.entry), envelope, state.now + wait_s)
    parent: Lineage | None = None
    if envelope.lineage:
        try:
            parent = state.lineage.verify(envelope.lineage)
        except Forged:
            state.log("warning", "an event of a node has a forged lineage", envelope.trace_id, node=node.node_id)
            return
    env = normalise_env(envelope.env)
    receivers: list[tuple[Peer, str]] = []
    if envelope.recipient:
        agent = state.directory.get(envelope.tenant, env, envelope.recipient)
        attachment = agent.link if agent is not None else None
        if isinstance(attachment, Attachment) and not attachment.remote:
            receivers.append((attachment.peer, envelope.recipient))
    else:
        receivers.extend(state.topics.subscribers((envelope.tenant, env, envelope.target.topic)))
    envelope.ClearField("entry")
    events.spread(state, publishing, receivers, envelope, parent)


def is_count(state: State, entry: bytes) -> bool:
    """Whether a RESPONSE of a node answers an event that crossed to it."""
    return len(entry) == 16 and entry[:8] == state.nonce and int.from_bytes(entry[8:], "big") in state.crossings


def counted(state: State, node: NodePeer, reply: Envelope) -> None:
    """A node tells how many of its subscribers took an event."""
    number = int.from_bytes(reply.entry[8:], "big")
    publishing, asked = state.crossings[number]
    if asked is not node:
        return
    del state.crossings[number]
    publishing.awaiting.discard(number)
    counts = events.counts_of(reply)
    publishing.matched += counts.matched
    publishing.accepted += counts.accepted
    publishing.dropped += counts.dropped
    publishing.lost += counts.unknown
    events.finish_if_all_is_known(state, publishing)


def over(state: State, publishing: Publishing) -> int:
    """The publisher's time is over: how many nodes have not said what became of the event there."""
    for number in publishing.awaiting:
        state.crossings.pop(number, None)
    silent = len(publishing.awaiting)
    publishing.awaiting.clear()
    return silent


def receivers_elsewhere(state: State, envelope: Envelope, env: str) -> list[tuple[Peer, str]]:
    """The nodes that want this event's topic."""
    wanting = state.interests.of((envelope.tenant, env, envelope.target.topic))
    return [(node, "") for node in wanting if isinstance(node, nodes.NodePeer)]
