"""What a caller uses: a `Mesh` sends requests, opens streams, subscribes and publishes.

    import asyncio
    from agent_sdk import connect

    async def main():
        async with connect() as mesh:
            reply = await mesh.request({"text": "Ada met Alan"}, capabilities=["ner"], timeout=5)
            print(reply.data, "from", reply.source)

    asyncio.run(main())

Inside a handler the same calls belong to the request being handled: they carry its trace and its lineage, and take no
more time than it has left.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_sdk import composing
from agent_sdk.calls import GRACE_S, Calls
from agent_sdk.errors import InvalidEnvelope, Timeout
from agent_sdk.messages import Acceptance, PublishCounts, Reply
from agent_sdk.outgoing import Routes
from agent_sdk.pending import Call, Joiner, StreamReader
from agent_sdk.streams import ReplyStream
from agent_sdk.topics import Subscription
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb

if TYPE_CHECKING:
    from typing import Unpack

    from agent_sdk.context import CallOptions
    from agent_sdk.link import MeshLink

PUBLISH_TIMEOUT_S = 2.0
_ROOM_TIMEOUT_S = 60.0  # for room in the outbox, where the request itself names no time
_TARGET = ("agent_id", "agent_type", "capabilities", "labels", "version", "policy", "hash_key")


class Mesh:
    """The sending face of a link; what `connect()` gives, and `agent.mesh`."""

    def __init__(self, owner: Callable[[], MeshLink], env: str = "", source: str = "") -> None:
        self._owner = owner
        self._routes = Routes(env, source)
        self._pid = os.getpid()

    async def request(
        self,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        timeout: float | None = None,
        profile: str | None = None,
        session: str | None = None,
        strict_session: bool = False,
        policy: str | None = None,
        hash_key: str | None = None,
        idempotent: bool = False,
        priority: str | None = None,
        message_id: str | None = None,
        dedup_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Ask whoever matches the target, and wait for the answer.

        The target is an `agent_id`, or any of `agent_type`, `capabilities` (all must match), `labels` (all must match)
        and `version` (exact, or a range such as `">=2.1,<3"`). `timeout` in seconds bounds the whole request; a
        `profile` (`"RPC"`, `"LLM"`, …) chooses timeout and retries by name; one of them must be given, except inside
        a handler, where the time left is the default.

        `session` keeps a conversation on one instance; `strict_session` prefers `SessionLost` to a new owner without
        the state. `idempotent` says that running twice does no harm. `message_id` makes repeated calls one: the
        handler runs once. `priority` is `"HIGH"`, `"NORMAL"` or `"LOW"`.

        Raises `ReachError`. Cancelling the call cancels the request down to the handler.
        """
        owner = self._owner()
        if owner.link.full:
            timeout = await self._wait_for_room(owner, timeout)
        call, joiner = composing.begin(
            owner,
            self._pid,
            self._routes.selector(pb.REQUEST, agent_id, agent_type, capabilities, labels, version, policy, hash_key),
            data,
            timeout,
            profile,
            message_id,
            None
            if session is None
            and not idempotent
            and priority is None
            and dedup_key is None
            and headers is None
            and not strict_session
            else (session, strict_session, idempotent, priority, dedup_key, headers),
            None,
        )
        try:
            if joiner is None:
                return await call.future
            return await self._joined(call, joiner)
        except asyncio.CancelledError:
            owner.calls.leave(call, joiner)
            raise

    def stream(
        self,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        timeout: float | None = None,
        profile: str | None = None,
        session: str | None = None,
        strict_session: bool = False,
        policy: str | None = None,
        hash_key: str | None = None,
        idempotent: bool = False,
        priority: str | None = None,
        message_id: str | None = None,
        dedup_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ReplyStream:
        """The same request, its reply item by item: see `ReplyStream`. A plain handler's answer is one item."""
        route = self._routes.selector(pb.REQUEST, agent_id, agent_type, capabilities, labels, version, policy, hash_key)
        extras = (session, strict_session, idempotent, priority, dedup_key, headers)

        async def start(reader: StreamReader) -> Call:
            owner, left = self._owner(), timeout
            if owner.link.full:
                left = await self._wait_for_room(owner, timeout)
            call, _ = composing.begin(owner, self._pid, route, data, left, profile, message_id, extras, reader)
            return call

        return ReplyStream(self._calls, start)

    async def submit(self, data: Any, *, reply_topic: str, **options: Unpack[CallOptions]) -> Acceptance:
        """Hand a request over and go: its outcome is published on `reply_topic`, as an event with `.correlation_id`.

        Returns when the mesh has taken it in; takes the options of `request`. What is refused at once (nobody matches,
        a loop) is raised here and not published; after an acceptance exactly one event follows, with the result or
        with `.error`, by the timeout at the latest. It needs a timeout or a profile of its own, also inside a handler,
        which it may outlive. `cancel` withdraws it. See "callbacks" among the how-to pages for what a restart of the
        node means.
        """
        owner = self._owner()
        timeout = options.get("timeout")
        if owner.link.full:
            timeout = await self._wait_for_room(owner, timeout)
        route = self._routes.selector(pb.REQUEST, *(options.get(name) for name in _TARGET))  # type: ignore[arg-type]
        call, joiner = composing.begin(
            owner,
            self._pid,
            self._routes.replying(route, reply_topic),
            data,
            timeout,
            options.get("profile"),
            options.get("message_id"),
            (
                options.get("session"),
                options.get("strict_session", False),
                options.get("idempotent", False),
                options.get("priority"),
                options.get("dedup_key"),
                options.get("headers"),
            ),
            None,
        )
        try:
            reply = await (call.future if joiner is None else self._joined(call, joiner))
        except asyncio.CancelledError:
            owner.calls.leave(call, joiner)
            raise
        return Acceptance(reply.message_id, reply.trace_id, reply_topic)

    async def cancel(self, message_id: str) -> None:
        """Withdraw a submitted request, down to its handler; its topic hears that it is cancelled.

        One that has ended, or is not of this client's principal, is not touched.
        """
        cancel = pb.Envelope(type=pb.CANCEL, correlation_id=message_id, env=self._routes.env)
        self._owner().send(cancel.SerializeToString())

    def subscribe(self, topic: str) -> Subscription:
        """The events of a topic: see `Subscription`."""
        return Subscription(self._owner, topic, self._routes.env)

    async def publish(
        self,
        topic: str | None,
        data: Any,
        *,
        agent_id: str | None = None,
        agent_type: str | None = None,
        capabilities: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        version: str | None = None,
        broadcast: bool = False,
        timeout: float = PUBLISH_TIMEOUT_S,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PublishCounts:
        """Send an event to a topic's subscribers, or with `topic=None` to one match of a target (all: `broadcast`).

        Returns how many there were and how many have acknowledged it within `timeout` seconds.
        """
        if topic is not None:
            if agent_id or agent_type or capabilities or labels or version:
                raise InvalidEnvelope("target: a topic or a selector, not both")
            route = self._routes.topic(topic)
        else:
            route = self._routes.selector(pb.EVENT, agent_id, agent_type, capabilities, labels, version, None, None)
        if broadcast:
            route = self._routes.broadcast(route)
        extras = (None, False, False, None, None, headers) if headers else None
        owner = self._owner()
        left: float | None = timeout
        if owner.link.full:
            left = await self._wait_for_room(owner, timeout)
        call, joiner = composing.begin(owner, self._pid, route, data, left, None, message_id, extras, None)
        try:
            reply = await (call.future if joiner is None else self._joined(call, joiner))
        except asyncio.CancelledError:
            self._calls().leave(call, joiner)
            raise
        counts = reply.data
        if isinstance(counts, bytes):
            counts = json.loads(counts)
        return PublishCounts(*(int(counts.get(name, 0)) for name in ("matched", "accepted", "dropped", "unknown")))

    # ---- making a call ----

    def _calls(self) -> Calls:
        return self._owner().calls

    async def _joined(self, call: Call, joiner: Joiner) -> Reply:
        try:
            async with asyncio.timeout(joiner.deadline + GRACE_S - boot_time()):
                return await joiner.future
        except TimeoutError:
            if joiner.future.done() and not joiner.future.cancelled():
                raise
            self._calls().leave(call, joiner)
            raise Timeout(
                f"no answer from {call.target} in time",
                may_have_executed=call.may_have_executed,
                trace_id=call.trace_id,
            ) from None

    async def _wait_for_room(self, owner: MeshLink, timeout: float | None) -> float | None:
        """Wait until the outbox takes more; returns what is left of `timeout`."""
        began = boot_time()
        try:
            async with asyncio.timeout(timeout if timeout is not None else _ROOM_TIMEOUT_S):
                await owner.room()
        except (TimeoutError, ValueError):  # ValueError: a timeout that is no number, which is told further on
            if timeout is not None and not timeout > 0:
                return timeout
            raise Timeout("not sent in time: the link's outbox is full") from None
        return timeout if timeout is None else max(timeout - (boot_time() - began), 0.001)
