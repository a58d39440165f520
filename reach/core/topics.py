"""Who is subscribed to which topic, and what becomes of one publishing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from agentreach.wire.outbox import Item
    from reach.core.peers import Peer
    from reach.core.requests import Port

TopicKey = tuple[str, str, str]
"""(tenant, env, topic)."""


class Topics:
    """Subscriptions by topic. A subscriber is a process's caller (empty agent_id) or one of its agents."""

    __slots__ = ("_subscribers", "count", "news", "telling")

    def __init__(self) -> None:
        self._subscribers: dict[TopicKey, dict[tuple[Peer, str], None]] = {}
        self.count = 0
        """Subscriptions there are."""
        self.telling = False
        """Other nodes are told of topics that get their first subscriber or lose their last: noted in `news`."""
        self.news: list[TopicKey] = []

    def subscribe(self, key: TopicKey, peer: Peer, agent_id: str) -> bool:
        """True if it is new."""
        subscribers = self._subscribers.setdefault(key, {})
        if (peer, agent_id) in subscribers:
            return False
        if self.telling and not subscribers:
            self.news.append(key)
        subscribers[peer, agent_id] = None
        self.count += 1
        return True

    def unsubscribe(self, key: TopicKey, peer: Peer, agent_id: str) -> bool:
        """True if it was there."""
        subscribers = self._subscribers.get(key)
        if subscribers is None or (peer, agent_id) not in subscribers:
            return False
        del subscribers[peer, agent_id]
        self.count -= 1
        if not subscribers:
            del self._subscribers[key]
            if self.telling:
                self.news.append(key)
        return True

    def has(self, key: TopicKey) -> bool:
        """Whether anybody is subscribed to it."""
        return key in self._subscribers

    def keys(self) -> list[TopicKey]:
        """All topics that somebody is subscribed to."""
        return list(self._subscribers)

    def subscribers(self, key: TopicKey) -> Iterable[tuple[Peer, str]]:
        """Who gets an event of this topic."""
        return self._subscribers.get(key, {})


class Publishing:
    """One EVENT on its way: what is acknowledged, dropped, still unknown."""

    __slots__ = (
        "accepted",
        "awaiting",
        "deadline",
        "dropped",
        "items",
        "lost",
        "matched",
        "message_id",
        "port",
        "timer",
        "topic",
        "trace_id",
    )

    def __init__(self, port: Port, envelope: Envelope, deadline: float) -> None:
        self.port = port
        self.message_id = envelope.message_id
        self.trace_id = envelope.trace_id
        self.topic = envelope.target.topic
        self.deadline = deadline
        self.matched = 0
        self.accepted = 0
        self.dropped = 0
        self.lost = 0
        """At other nodes: not acknowledged in time."""
        self.items: set[Item] = set()
        """On the links of subscribers, not acknowledged."""
        self.awaiting: set[int] = set()
        """Crossings to other nodes that were not answered."""
        self.timer: Token | None = None
