"""What a handler knows of the request it handles, and how it sends from there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from agent_sdk.messages import Acceptance, PublishCounts, Reply, failed_callback
from agent_sdk.sessions import Session
from agent_sdk.streams import ReplyStream
from agentreach.aio.clock import boot_time

if TYPE_CHECKING:
    from typing import Unpack

    from agent_sdk.client import Mesh
    from agent_sdk.errors import ReachError
    from agent_sdk.sync import BlockingStream
    from agent_sdk.work import Work

T = TypeVar("T")


class CallOptions(TypedDict, total=False):
    """What `Mesh.request` takes besides the data; see there."""

    agent_id: str | None
    agent_type: str | None
    capabilities: Sequence[str] | None
    labels: Mapping[str, str] | None
    version: str | None
    timeout: float | None
    profile: str | None
    session: str | None
    strict_session: bool
    policy: str | None
    hash_key: str | None
    idempotent: bool
    priority: str | None
    message_id: str | None
    dedup_key: str | None
    headers: Mapping[str, str] | None


class RequestFacts:
    """What is known of the request being handled."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    @property
    def trace_id(self) -> str:
        """The trace the request belongs to; everything sent from here belongs to it too."""
        return self._work.envelope.trace_id

    @property
    def message_id(self) -> str:
        """The request's id, the same on every retry."""
        return self._work.envelope.message_id

    @property
    def session_id(self) -> str:
        """The conversation it belongs to; empty for none."""
        return self._work.envelope.session_id

    @property
    def source(self) -> str:
        """Who asked: an agent_id, or `caller/…`."""
        return self._work.envelope.source

    @property
    def agent_id(self) -> str:
        """This agent's own id."""
        return self._work.host.agent_id

    @property
    def topic(self) -> str:
        """The topic of an event; empty for a request."""
        return self._work.envelope.target.topic

    @property
    def headers(self) -> dict[str, str]:
        """The sender's metadata."""
        return dict(self._work.envelope.headers)

    @property
    def correlation_id(self) -> str:
        """For the outcome of a submitted request: that request's message_id; else empty."""
        return self._work.envelope.correlation_id

    @property
    def error(self) -> ReachError | None:
        """For the outcome of a submitted request that failed: why (the handler's data is None then); else None."""
        return failed_callback(self._work.envelope)

    @property
    def attempt(self) -> int:
        """1 for the first delivery of this message."""
        return self._work.envelope.attempt

    @property
    def deadline(self) -> float:
        """When the answer must be there, as `time.time()` tells it."""
        return time.time() + self.time_left()

    def time_left(self) -> float:
        """Seconds until the deadline; 0.0 when it has passed."""
        return max(self._work.deadline - boot_time(), 0.0)

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the answer any more. `def` handlers look here; `async def` ones are cancelled."""
        return self._work.cancelled

    def _mesh(self) -> Mesh:
        mesh = self._work.host.mesh
        assert mesh is not None  # a handler runs only while its agent is attached
        return mesh


class _Turn(Session):
    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        envelope = work.envelope
        turn = work.host.sessions.turn_of(work) if envelope.session_id else 0
        super().__init__(envelope.session_id, envelope.epoch, turn)
        self._work = work


class SessionTurn(_Turn):
    """A turn of a conversation. That of a request without one is false: no `session_id`, `epoch` and `turn` 0."""

    __slots__ = ()

    async def checkpoint(self, state: Any) -> None:
        """Have the conversation's state kept with this turn's answer; the last one of a turn counts.

        Should the agent be lost, `on_session_restore` of another one gets it, and the conversation goes on (`MOVED`).
        It goes out with the answer: a turn that raises keeps nothing. Raises `PayloadTooLarge` above 256 KiB, and
        `Rejected`, for the caller to read, if the request belongs to no conversation.
        """
        self._work.host.sessions.keep(self._work, state)


class BlockingSessionTurn(_Turn):
    """The same for a `def` handler."""

    __slots__ = ()

    def checkpoint(self, state: Any) -> None:
        """Have the conversation's state kept with this turn's answer; see `SessionTurn.checkpoint`."""
        self._work.host.sessions.keep(self._work, state)


class Context(RequestFacts):
    """The second argument of an `async def` handler."""

    __slots__ = ()

    @property
    def session(self) -> SessionTurn:
        """The conversation that the request belongs to, and this turn of it."""
        return SessionTurn(self._work)

    async def request(self, data: Any, **options: Unpack[CallOptions]) -> Reply:
        """Ask another agent, as part of this request; without a timeout it may take all the time left."""
        return await self._mesh().request(data, **options)

    def stream(self, data: Any, **options: Unpack[CallOptions]) -> ReplyStream:
        """Ask another agent, and take its reply item by item."""
        return self._mesh().stream(data, **options)

    async def submit(self, data: Any, *, reply_topic: str, **options: Unpack[CallOptions]) -> Acceptance:
        """Hand a request over and go: its outcome is published on `reply_topic`. It may outlive this request."""
        return await self._mesh().submit(data, reply_topic=reply_topic, **options)

    async def publish(self, topic: str, data: Any, **options: Any) -> PublishCounts:
        """Send an event to a topic."""
        return await self._mesh().publish(topic, data, **options)

    async def progress(self, percent: float | None = None, text: str = "") -> None:
        """Say how far the work is: shown in traces, and a sign of life for streams that think for long.

        Told at most ten times a second; if you say more, the last one counts.
        """
        self._work.host.progress(self._work, percent, text)


class BlockingContext(RequestFacts):
    """The second argument of a `def` handler: the same calls, without `await`. They run on the agent's loop."""

    __slots__ = ()

    @property
    def session(self) -> BlockingSessionTurn:
        """The conversation that the request belongs to, and this turn of it."""
        return BlockingSessionTurn(self._work)

    def request(self, data: Any, **options: Unpack[CallOptions]) -> Reply:
        """Ask another agent, as part of this request, and wait for the answer."""
        return self._wait(self._mesh().request(data, **options))

    def stream(self, data: Any, **options: Unpack[CallOptions]) -> BlockingStream:
        """Ask another agent, and take its reply item by item."""
        from agent_sdk.sync import BlockingStream

        async def make() -> ReplyStream:
            return self._mesh().stream(data, **options)

        return BlockingStream(self._work.host.owner.loop, make)

    def submit(self, data: Any, *, reply_topic: str, **options: Unpack[CallOptions]) -> Acceptance:
        """Hand a request over and go: its outcome is published on `reply_topic`. It may outlive this request."""
        return self._wait(self._mesh().submit(data, reply_topic=reply_topic, **options))

    def publish(self, topic: str, data: Any, **options: Any) -> PublishCounts:
        """Send an event to a topic."""
        return self._wait(self._mesh().publish(topic, data, **options))

    def progress(self, percent: float | None = None, text: str = "") -> None:
        """Say how far the work is; see `Context.progress`."""
        host = self._work.host
        host.owner.loop.call_soon_threadsafe(host.progress, self._work, percent, text)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._work.host.owner.loop).result()
