"""What becomes of a request's outcome for those who send its message again (behaviour.md §5).

Most outcomes go to the replay table. That of a fresh id is kept only until its caller's link has acknowledged the
reply: until then the settled request stays in `State.by_key`, so that full speed does not wash the table out. So does
at an agent's home what its entry has not acknowledged. An entry may end with what it has acknowledged and had not yet
passed on: of the last of these the home remembers whose they were (`State.answered`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.content import content_digest
from reach.core import replay
from reach.core.answered import Answered
from reach.core.replay import Conflict, Elsewhere, Stored, TooOld
from reach.core.requests import MessageKey, Request

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.state import State

SHRUNK_FROM_BYTES: Final = 16 << 10  # below, a digest costs more than it saves


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
    agent = request.agent
    if request.visitor is not None and agent is not None and (request.data or request.digest):
        data = b"" if request.digest else request.data
        answered = Answered(data, request.digest, agent.agent_id, agent.incarnation)
        state.answered.remember(request.key, answered, state.now)


def keep_unconfirmed(state: State, request: Request) -> None:
    """A fresh id was sent again, or its link is gone: keep its outcome like that of any other message."""
    reply, request.reply = request.reply, None
    forget(state, request)
    if reply is not None and reply.data is not None:
        keep(state, request, reply.data)


def keep_all_unconfirmed(state: State, items: Iterable[Item]) -> None:
    """Whom these were for is gone, or has forgotten all: keep the outcomes that stand among them."""
    for item in items:
        owner = item.owner
        if isinstance(owner, Request):
            item.owner = None
            keep_unconfirmed(state, owner)


def is_known(state: State, key: MessageKey) -> bool:
    """Whether `find` says what became of a message."""
    request = state.by_key.get(key)
    if request is not None and request.is_settled:
        keep_unconfirmed(state, request)
    return state.replay.has(key, state.now) or state.answered.has(key, state.now)


def find(state: State, key: MessageKey, digest: bytes) -> Stored | Elsewhere | Conflict | TooOld | None:
    """What this node knows of a finished message that is sent again; None: nothing."""
    found = state.replay.find(key, digest, state.now)
    if found is None or isinstance(found, TooOld):
        return state.answered.find(key, digest, state.now) or found
    return found
