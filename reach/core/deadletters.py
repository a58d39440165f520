"""Dead letters: what becomes of requests that no further attempt can bring to a good end.

Kept are those that were cut as loops (HOP_LIMIT, LOOP_DETECTED), and TASKs whose attempts are used up. Their callers
were told, and are often programs that are gone; what was lost can be seen, mended and sent once more by a person.

A letter holds the request as its sender gave it. What nodes wrote into it is taken out, its lineage above all. What
its payload holds is in no log. Showing letters and sending them again is `redriving`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire import limits
from agentreach.wire.checks import payload_size
from agentreach.wire.errors import code_name
from reach.core import actors
from reach.core.dead_letter_book import Letter
from reach.core.profiles import whole_timeout_ms
from reach.core.redacting import redact

if TYPE_CHECKING:
    from reach.core.requests import Request
    from reach.core.state import State

_WRITTEN_BY_NODES = (
    "recipient", "tenant", "principal", "actors", "entry", "lineage", "hop_count", "path", "attempt", "epoch",
    "session_event", "parent_message_id", "span_id", "parent_span_id", "fresh", "source",
)  # fmt: skip
"""What a request does not take along: nodes wrote it, or it is of the call tree that was cut."""


def bury(state: State, request: Request, error: Error, data: bytes = b"") -> None:
    """Keep a request that ends now with `error`. Call it before the request is settled.

    `data` is its envelope, if none was delivered yet. With no room for it (or none at all: `dead_letters_max` 0) it is
    counted as dropped.
    """
    data = data or request.data
    if not data:
        return
    envelope = Envelope.FromString(data)
    for name in _WRITTEN_BY_NODES:
        envelope.ClearField(name)  # type: ignore[arg-type]  # names of its fields
    envelope.type = pb.REQUEST
    envelope.timeout_ms = _whole_ms(request, envelope.profile)
    told = Error()
    told.CopyFrom(error)
    redact(state, told)
    told.attempts = max(told.attempts, request.attempt)
    letter = Letter(
        request.key,
        actors.behind(request.parent, request.key[1]),
        request.trace_id,
        request.source,
        told,
        envelope.SerializeToString(),
        payload_size(envelope.payload),
        state.now,
        state.unix,
    )
    kept = state.dead_letters.keep(letter)
    request.note("dead letter", state.now, "kept: see reach dead" if kept else "no room to keep it")
    state.log(
        "warning",
        "dead letter",
        request.trace_id,
        message_id=request.message_id,
        target=request.agent_type,
        code=code_name(error.code),
        payload_bytes=letter.payload_bytes,
        kept=kept,
    )


def _whole_ms(request: Request, profile: int) -> int:
    """The time that the request had when it came in; 0 where its profile alone says so."""
    whole_ms = min(
        limits.TIMEOUT_MS_MAX, max(limits.TIMEOUT_MS_MIN, round((request.deadline - request.received) * 1000))
    )
    return 0 if profile and whole_ms == whole_timeout_ms(0, profile) else whole_ms
