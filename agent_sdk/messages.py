"""What the SDK hands to its user: replies, events, counts. Fields are read from the wire when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_sdk.errors import ReachError, from_proto
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import payload as payloads

_UNREAD: Any = object()


class Reply:
    """The answer to a request: `.data`, and where it came from."""

    __slots__ = ("_data", "_envelope", "_trace_id")

    def __init__(self, envelope: pb.Envelope, trace_id: str, data: Any = _UNREAD) -> None:
        self._envelope = envelope
        self._trace_id = trace_id
        self._data = data

    @property
    def data(self) -> Any:
        """What the handler returned; a list of items if it yielded."""
        data = self._data
        if data is _UNREAD:
            data = self._data = payloads.decode(self._envelope.payload)
        return data

    @property
    def source(self) -> str:
        """The agent_id of who answered."""
        return self._envelope.source

    @property
    def message_id(self) -> str:
        """The message_id of the request."""
        return self._envelope.correlation_id

    @property
    def trace_id(self) -> str:
        """Ask the mesh about this request with `reach trace`."""
        return self._envelope.trace_id or self._trace_id

    @property
    def session_event(self) -> str | None:
        """None, or what happened to the session: `"STARTED"`, `"MOVED"` (state restored elsewhere), `"LOST"`."""
        return session_event(self._envelope)

    def __repr__(self) -> str:
        return f"Reply(data={self.data!r}, source={self.source!r}, trace_id={self.trace_id!r})"


class Event:
    """A message of a topic: `.data`, `.topic`, `.source`, `.message_id`, `.trace_id`, `.headers`.

    An event compares equal to its data.
    """

    __slots__ = ("_data", "_envelope")
    __hash__ = None  # type: ignore[assignment]  # equal to its data, which may be a dict

    def __init__(self, envelope: pb.Envelope) -> None:
        self._envelope = envelope
        self._data: Any = _UNREAD

    @property
    def data(self) -> Any:
        """What was published."""
        if self._data is _UNREAD:
            self._data = payloads.decode(self._envelope.payload)
        return self._data

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self._envelope.target.topic

    @property
    def source(self) -> str:
        """The agent_id or caller id of who published it, or answered; empty if the request reached nobody."""
        return self._envelope.source

    @property
    def message_id(self) -> str:
        """Its id; a repeated one is not shown twice."""
        return self._envelope.message_id

    @property
    def trace_id(self) -> str:
        """The trace it belongs to."""
        return self._envelope.trace_id

    @property
    def headers(self) -> dict[str, str]:
        """The sender's metadata."""
        return dict(self._envelope.headers)

    @property
    def correlation_id(self) -> str:
        """The message_id of the submitted request that this is the outcome of; empty for what was published."""
        return self._envelope.correlation_id

    @property
    def error(self) -> ReachError | None:
        """Why a submitted request has no result (`.data` is None then); None if it has, and for what was published."""
        return failed_callback(self._envelope)

    @property
    def session_event(self) -> str | None:
        """For the outcome of a submitted request: None, or what happened to its session, as `Reply.session_event`."""
        return session_event(self._envelope)

    def __eq__(self, other: object) -> bool:
        return bool(self.data == (other.data if isinstance(other, Event) else other))

    def __repr__(self) -> str:
        return f"Event(topic={self.topic!r}, data={self.data!r}, source={self.source!r})"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A submitted request was taken in: its outcome is the event of `reply_topic` with this `correlation_id`."""

    message_id: str
    trace_id: str
    reply_topic: str


@dataclass(frozen=True, slots=True)
class PublishCounts:
    """What became of an event: `matched` subscribers; `accepted` it in time; `dropped` it, being too slow;
    `unknown`: handed over, not acknowledged in time."""

    matched: int = 0
    accepted: int = 0
    dropped: int = 0
    unknown: int = 0


def failed_callback(envelope: pb.Envelope) -> ReachError | None:
    """The error of a CALLBACK that has one."""
    if envelope.type != pb.CALLBACK or not envelope.HasField("error"):
        return None
    return from_proto(envelope.error, envelope.trace_id)


def session_event(envelope: pb.Envelope) -> str | None:
    """The name of an envelope's session event, None if there was none."""
    event = envelope.session_event
    return pb.SessionEvent.Name(event) if event and event in pb.SessionEvent.values() else None
