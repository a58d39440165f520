"""Which topics the subscribers of each node want, so that an event crosses once to each node that has any.

Nodes tell each other when the first subscriber of a topic came and when the last left. A node believes the other's last
word: an event for which nobody is there any more is dropped at its end.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from agentreach.v1.frame_pb2 import Interest, Signal

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State
    from reach.core.topics import TopicKey

TOPICS_A_SIGNAL = 500


class Interests:
    """The topics that other nodes want."""

    __slots__ = ("_by_node", "_by_topic")

    def __init__(self) -> None:
        self._by_topic: dict[TopicKey, dict[NodePeer, None]] = {}
        self._by_node: dict[NodePeer, set[TopicKey]] = {}

    def of(self, key: TopicKey) -> list[NodePeer]:
        """The nodes that want this topic."""
        nodes = self._by_topic.get(key)
        return list(nodes) if nodes else []

    def add(self, node: NodePeer, key: TopicKey, most: int) -> None:
        """A node wants a topic; beyond `most` of one node nothing more is noted."""
        wanted = self._by_node.setdefault(node, set())
        if key in wanted or len(wanted) >= most:
            return
        wanted.add(key)
        self._by_topic.setdefault(key, {})[node] = None

    def remove(self, node: NodePeer, key: TopicKey) -> None:
        """It wants it no more."""
        wanted = self._by_node.get(node)
        if wanted is None or key not in wanted:
            return
        wanted.discard(key)
        nodes = self._by_topic[key]
        del nodes[node]
        if not nodes:
            del self._by_topic[key]

    def forget(self, node: NodePeer) -> None:
        """Nothing that it said counts any more."""
        for key in list(self._by_node.get(node, ())):
            self.remove(node, key)
        self._by_node.pop(node, None)


def tell_all(state: State, node: NodePeer) -> None:
    """A link to a node begins: say all topics, and keep on saying what changes."""
    state.topics.telling = True
    node.link.signal(Signal(interest=Interest(complete=True)))
    _tell(state, [node], [(key, True) for key in state.topics.keys()])  # noqa: SIM118 - not a mapping


def tell_news(state: State) -> None:
    """Topics got their first subscriber here, or lost their last, in this step."""
    news = dict.fromkeys(state.topics.news)
    state.topics.news.clear()
    linked = [node for node in state.nodes.values() if node.connected]
    state.topics.telling = bool(linked)
    _tell(state, linked, [(key, state.topics.has(key)) for key in news])


def _tell(state: State, nodes: list[NodePeer], topics: list[tuple[TopicKey, bool]]) -> None:
    for (tenant, env), group in groupby(sorted(topics), key=lambda each: each[0][:2]):
        found = list(group)
        for at in range(0, len(found), TOPICS_A_SIGNAL):
            part = found[at : at + TOPICS_A_SIGNAL]
            wanted = [key[2] for key, wants in part if wants]
            gone = [key[2] for key, wants in part if not wants]
            signal = Signal(interest=Interest(tenant=tenant, env=env, topics=wanted, gone=gone))
            for node in nodes:
                node.link.signal(signal)
    state.woken.update(nodes)


def heard(state: State, node: NodePeer, message: Interest) -> None:
    """A node tells what its subscribers want."""
    if message.complete:
        state.interests.forget(node)
    for topic in message.topics:
        state.interests.add(node, (message.tenant, message.env, topic), state.rules.topics_max)
    for topic in message.gone:
        state.interests.remove(node, (message.tenant, message.env, topic))
