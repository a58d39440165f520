"""Subscriptions of one link: who gets which topic's events. Declared anew whenever the node has forgotten the link."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from agent_sdk.errors import InvalidEnvelope, ReachError, from_proto
from agent_sdk.messages import Event
from agentreach.policy.seen import Seen
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire import names

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink

log = logging.getLogger("agent_sdk")

_DECLARE_AGAIN_S = 5.0  # an event handler's topic that the node did not take is asked for again so often
_EVENTS_MAX = 1024  # events that wait for a subscriber; beyond, the oldest are dropped and counted
_SEEN_MAX, _SEEN_S = 10_000, 600.0  # ids by which a subscriber knows a repeated event

Key = tuple[str, str, str]
"""Agent id (empty: the caller), env, topic."""


class _Subscribers:
    __slots__ = ("number", "seen", "takers")

    def __init__(self) -> None:
        self.takers: list[Callable[[pb.Envelope], None]] = []
        self.number = 0
        self.seen: Seen[str, bool] = Seen(_SEEN_MAX, _SEEN_MAX * 64, _SEEN_S)


class Topics:
    """Every subscription of the agents and callers of a link."""

    def __init__(self, owner: MeshLink) -> None:
        self._owner = owner
        self._by_key: dict[Key, _Subscribers] = {}
        self._inboxes: set[_Inbox] = set()

    def open(self, inbox: _Inbox) -> int:
        """Fill an inbox from now on; returns the number of the frame that tells the node."""
        inbox.open = True
        self._inboxes.add(inbox)
        return self.add(inbox.key, inbox.take)

    def close(self, inbox: _Inbox, error: ReachError | None = None) -> None:
        """Fill it no more; `error`: why, if that is not its subscriber's wish."""
        self._inboxes.discard(inbox)
        self.remove(inbox.key, inbox.take)
        inbox.end(error)

    def add(self, key: Key, take: Callable[[pb.Envelope], None]) -> int:
        """Give the topic's events to `take` from now on; returns the number of the frame that tells the node."""
        subscribers = self._by_key.get(key)
        if subscribers is None:
            subscribers = self._by_key[key] = _Subscribers()
            subscribers.number = self._declare(key)
        subscribers.takers.append(take)
        return subscribers.number

    def remove(self, key: Key, take: Callable[[pb.Envelope], None]) -> None:
        """Stop; the node is told with the last taker."""
        subscribers = self._by_key.get(key)
        if subscribers is None or take not in subscribers.takers:
            return
        subscribers.takers.remove(take)
        if not subscribers.takers:
            del self._by_key[key]
            agent_id, env, topic = key
            if self._owner.up:
                gone = frames.Unsubscribe(agent_id=agent_id, env=env, topics=[topic])
                self._owner.signal(frames.Signal(unsubscribe=gone))

    def withdraw_agent(self, agent_id: str) -> None:
        """Ask the node for no more events for an agent; those under way still find it."""
        for key in self._by_key:
            if key[0] == agent_id:
                gone = frames.Unsubscribe(agent_id=agent_id, env=key[1], topics=[key[2]])
                self._owner.signal(frames.Signal(unsubscribe=gone))

    def remove_agent(self, agent_id: str) -> None:
        """Forget an agent's subscriptions: the node does so when it is detached."""
        for key in [key for key in self._by_key if key[0] == agent_id]:
            del self._by_key[key]

    def declare(self) -> None:
        """Tell the node of every subscription again."""
        for key, subscribers in self._by_key.items():
            subscribers.number = self._declare(key)

    def _declare(self, key: Key) -> int:
        agent_id, env, topic = key
        return self._owner.signal(frames.Signal(subscribe=frames.Subscribe(agent_id=agent_id, env=env, topics=[topic])))

    def on_event(self, envelope: pb.Envelope, now: float, lost_ms: int) -> None:
        """Give an event to its subscribers; one to a selector goes to the agent it was delivered to."""
        recipient = envelope.recipient
        host = self._owner.hosts.get(recipient)
        topic = envelope.target.topic
        if not topic:
            if host is not None:
                host.deliver(envelope, now, lost_ms, pb.EVENT)
            return
        key = (recipient if host is not None else "", names.normalise_env(envelope.env), topic)
        subscribers = self._by_key.get(key)
        if subscribers is None:
            return
        message_id = envelope.message_id
        if message_id:
            if subscribers.seen.get(message_id, now):
                return
            subscribers.seen.put(message_id, True, 64, now)
        for take in list(subscribers.takers):
            take(envelope)

    def on_gap(self, gap: frames.Gap) -> None:
        """The node dropped events for a subscriber that was too slow."""
        for inbox in self._inboxes:
            if inbox.key[0] == gap.agent_id and inbox.key[2] == gap.topic:
                inbox.dropped += gap.dropped
        if gap.agent_id:
            log.warning("%s was too slow: the node dropped %d events of %r", gap.agent_id, gap.dropped, gap.topic)

    def on_unsubscribed(self, ended: frames.Unsubscribed) -> None:
        """The node does not give us these topics: `subscribe()` raises; for handlers of events it is asked again."""
        error = from_proto(ended.error)
        for topic in ended.topics:
            key = (ended.agent_id, names.normalise_env(ended.env or self._owner.env), topic)
            for inbox in [inbox for inbox in self._inboxes if inbox.key == key]:
                self.close(inbox, error)
            if key in self._by_key:  # an agent's `on_event`
                log.error("no events of %r come to %s: %s", topic, ended.agent_id or "this client", error.message)
                wait_s = max(ended.error.retry_after_ms / 1000, _DECLARE_AGAIN_S)
                self._owner.loop.call_later(wait_s, self._declare_if_wanted, key)

    def _declare_if_wanted(self, key: Key) -> None:
        if key in self._by_key and self._owner.up:
            self._by_key[key].number = self._declare(key)

    def fail_all(self, error: ReachError) -> None:
        """The link is over."""
        for inbox in self._inboxes:
            inbox.end(error)
        self._inboxes.clear()


class _Inbox:
    """Events that wait for a subscriber. The link holds this, never the subscription its user holds."""

    __slots__ = ("dropped", "error", "events", "key", "open", "waiter")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.events: deque[Event] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.error: ReachError | None = None
        self.open = False
        self.dropped = 0

    def take(self, envelope: pb.Envelope) -> None:
        """An event came in; the oldest gives way when there are too many."""
        if len(self.events) >= _EVENTS_MAX:
            self.events.popleft()
            self.dropped += 1
        self.events.append(Event(envelope))
        self.wake()

    def end(self, error: ReachError | None) -> None:
        """No more events will come."""
        self.open, self.error = False, error
        self.wake()

    def wake(self) -> None:
        """Something changed for who waits."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Subscription:
    """The events of a topic, from entry on. An async context manager and an iterator of `Event`.

        async with mesh.subscribe("orders/created") as events:
            async for event in events:
                print(event.source, event.data)

    Once entered, the node has confirmed it: what is published from then on arrives. A node that takes no more
    subscriptions makes entering raise `Overloaded`. It ends when left or collected.
    """

    def __init__(self, owner: Callable[[], MeshLink], topic: str, env: str, agent_id: str = "") -> None:
        self._inbox: _Inbox | None = None
        if not names.is_topic(topic):
            raise InvalidEnvelope(f"{names.shown(topic)} is not a topic")
        self._owner = owner
        self._inbox = _Inbox((agent_id, names.normalise_env(env), topic))
        self._loop = asyncio.get_running_loop()
        self._entered = False
        self.topic = topic

    @property
    def dropped(self) -> int:
        """Events lost because they were not taken fast enough, here or at the node."""
        return self._inbox.dropped if self._inbox is not None else 0

    async def __aenter__(self) -> Subscription:
        inbox = self._inbox
        if not self._entered and inbox is not None:
            self._entered = True
            owner = self._owner()
            number = owner.topics.open(inbox)
            try:
                await owner.flushed(number)
            except asyncio.CancelledError:
                owner.topics.close(inbox)
                raise
            if inbox.error is not None and not inbox.events:
                raise inbox.error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop receiving."""
        if self._inbox is not None and self._inbox.open:
            self._owner().topics.close(self._inbox)

    def __del__(self) -> None:
        inbox = self._inbox
        if inbox is not None and inbox.open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._owner().topics.close, inbox)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        """The next event. Cancelling the wait loses nothing."""
        inbox = self._inbox
        if inbox is None:
            raise StopAsyncIteration
        await self.__aenter__()
        while not inbox.events:
            if inbox.error is not None:
                raise inbox.error
            if not inbox.open:
                raise StopAsyncIteration
            inbox.waiter = self._loop.create_future()
            try:
                await inbox.waiter
            finally:
                inbox.waiter = None
        return inbox.events.popleft()
