"""What becomes of a request's outcome for those who send its message again (behaviour.md §5).

Most outcomes go to the replay table. That of a fresh id is kept only until its caller's link has acknowledged the
reply: until then the settled request stays in `State.by_key`, so that full speed does not wash the table out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.content import content_digest
from reach.core import replay

if TYPE_CHECKING:
    from reach.core.requests import Request
    from reach.core.state import State

SHRUNK_FROM_BYTES = 16 << 10  # below, a digest costs more than it saves


def keep(state: State, request: Request, data: bytes) -> None:
    """Keep an outcome for copies of its message. What is too large, or came in items, is in its agent's own table."""
    agent, digest = request.agent, request.digest or content_digest(Envelope.FromString(request.data))
    streamed = request.items and not request.failed
    if agent is not None and (streamed or len(data) > replay.OUTCOME_BYTES_MAX):
        state.replay.store(request.key, digest, (agent.agent_id, agent.incarnation), state.now)
    else:
        state.replay.store(request.key, digest, data, state.now)


def shrink(request: Request) -> None:
    """Let go of a large request's bytes: until its reply is acknowledged only their digest is needed."""
    if len(request.data) > SHRUNK_FROM_BYTES:
        request.digest = content_digest(Envelope.FromString(request.data))
        request.data = b""


def forget(state: State, request: Request) -> None:
    """Copies of its message are not this request's any more."""
    if state.by_key.get(request.key) is request:
        del state.by_key[request.key]


def confirmed(state: State, request: Request) -> None:
    """The caller's link has accepted the final reply of a fresh id: it will not be sent again."""
    request.reply = None
    forget(state, request)


def keep_unconfirmed(state: State, request: Request) -> None:
    """A fresh id was sent again, or its link is gone: keep its outcome like that of any other message."""
    reply, request.reply = request.reply, None
    forget(state, request)
    if reply is not None and reply.data is not None:
        keep(state, request, reply.data)
