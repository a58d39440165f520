"""Dead letters shown to a person, and sent once more.

Sent again, a request is a new root under a new message_id, for the principal it was of and on behalf of the same
actors, with the time it had. Whoever redrives is told at once whether it was taken in: it lives on by itself, as a
callback does. Nothing here shows what a payload holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.peer_pb2 import Lineage
from agentreach.wire.errors import code_name, failure
from agentreach.wire.names import normalise_env, topic_fault
from agentreach.wire.redaction import Redaction
from reach.core import access, actors, admit
from reach.core.access import NO_RIGHTS
from reach.core.callbacks import Callback
from reach.core.dead_letter_book import Letter
from reach.core.lineage import valid_until_unix_ms
from reach.core.ports import Identity

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.state import State

LISTED_MAX = 1_000  # letters of one answer
LISTED_BYTES_MAX = 4 << 20  # of one answer; the bound of most gRPC clients


def listed(state: State, who: Identity, asked: admin.ListDeadLettersRequest) -> admin.ListDeadLettersReply:
    """The letters of the asker's tenant, youngest first, without anything that a payload holds."""
    state.dead_letters.expire(state.now)
    letters = state.dead_letters.find(who.tenant, asked.message_id)
    found = [letter for letter in letters if access.sees(who.rights, letter.key[2])]
    reply = admin.ListDeadLettersReply(kept=len(found))
    size = 0
    for letter in found[: min(asked.limit or LISTED_MAX, LISTED_MAX)]:
        shown = _shown(state, letter)
        size += shown.ByteSize()
        if size > LISTED_BYTES_MAX:
            break
        reply.dead_letters.append(shown)
    return reply


def _shown(state: State, letter: Letter) -> admin.DeadLetter:
    tenant, principal, env, message_id = letter.key
    envelope = Envelope.FromString(letter.data)
    for name in ("json", "text", "body", "blob"):
        envelope.payload.ClearField(name)
    envelope.ClearField("headers")
    envelope.ClearField("signature")
    _redact(state.redaction, envelope)
    envelope.tenant, envelope.principal, envelope.env, envelope.source = tenant, principal, env, letter.source
    return admin.DeadLetter(
        message_id=message_id,
        trace_id=letter.trace_id,
        reason=code_name(letter.error.code),
        envelope=envelope,
        at=_stamp(letter.unix),
        redriven=bool(letter.redriven_as),
        error=letter.error,
        payload_bytes=letter.payload_bytes,
        redriven_as=letter.redriven_as,
        expires_at=_stamp(letter.unix + state.dead_letters.age_s),
        node_id=state.rules.node_id,
    )


def _redact(redaction: Redaction, envelope: Envelope) -> None:
    """What the sender chose besides the payload may hold a secret too. The message_id names the letter, and stays."""
    for name in ("session_id", "dedup_key", "correlation_id"):
        if getattr(envelope, name):
            setattr(envelope, name, redaction.text(getattr(envelope, name)))
    target = envelope.target
    if target.hash_key:
        target.hash_key = redaction.text(target.hash_key)
    for name, value in list(target.labels.items()):
        target.labels[name] = redaction.field(name, value)


def _stamp(unix: float) -> Timestamp:
    return Timestamp(seconds=int(unix), nanos=int(unix % 1 * 1e9))


@dataclass(frozen=True, slots=True)
class Redriven:
    """The request that was made of a letter is in the books."""

    message_id: str
    trace_id: str


class _Answer:
    """The `Port` of whoever redrives: hears only whether the request was taken in."""

    streaming = False

    def __init__(self) -> None:
        self.error: Error | None = None

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """An acceptance, or why there is none."""
        envelope = Envelope.FromString(reply)
        if envelope.HasField("error"):
            self.error = envelope.error
        return None


def redrive(state: State, who: Identity, asked: admin.RedriveDeadLetterRequest) -> Redriven | Error:
    """Send a letter's request once more, as its sender's, under a new message_id.

    It needs the rights that its principal, and those on whose behalf it was sent, have now. Its outcome goes to its
    reply_topic (or the one asked for), into the trace, and to its principal if that sends the new message_id. What is
    refused at the door leaves its letter as it was.
    """
    letter = _the_one(state, who, asked)
    if isinstance(letter, Error):
        return letter
    if letter.redriven_as:
        return failure(
            codes.REJECTED,
            f"{asked.message_id} was sent once more before, as {letter.redriven_as}; a letter is redriven once "
            "(should that one die too, it leaves a letter of its own)",
        )
    if asked.reply_topic and (fault := topic_fault(asked.reply_topic)):
        return failure(codes.INVALID_ENVELOPE, f"reply_topic {fault}", details={"field": "reply_topic"})
    tenant, principal, env, _ = letter.key
    envelope = Envelope.FromString(letter.data)
    envelope.message_id = message_id = admit.new_id(state)
    envelope.fresh = True
    envelope.env = env
    envelope.source, envelope.trace_id = letter.source, letter.trace_id
    envelope.reply_topic = asked.reply_topic or envelope.reply_topic
    if letter.actors:
        envelope.lineage = _on_behalf(state, letter)
    rights = actors.rights_of(state, tenant, principal) or NO_RIGHTS if who.rights is not None else None
    if rights is not None:
        rights = replace(rights, signs=False)  # it was signed when it came first
    answer, owner = _Answer(), Identity(tenant, principal, rights)
    # Without a topic it needs no less to outlive this call, so it waits as a callback that is published nowhere.
    port = answer if envelope.reply_topic else Callback(state, answer, owner, envelope, "")
    admit.admit(state, port, owner, envelope, 0, None, letter.source)
    if answer.error is not None:
        return answer.error
    if isinstance(port, Callback):
        port.accept(envelope, (tenant, principal, env, message_id), state.by_key.get((*letter.key[:3], message_id)))
    letter.redriven_as = message_id
    state.stats.dead_letters["redriven"] += 1
    state.log("info", "dead letter redriven", letter.trace_id, message_id=asked.message_id, again_as=message_id)
    return Redriven(message_id, envelope.trace_id)


def _on_behalf(state: State, letter: Letter) -> bytes:
    """A lineage that begins with this request, and names its actors."""
    tenant, principal, env, _ = letter.key
    lineage = Lineage(
        trace_id=letter.trace_id,
        valid_until_unix_ms=valid_until_unix_ms(int(state.unix * 1000)),
        tenant=tenant,
        env=env,
        actors=letter.actors,
    )
    return state.lineage.sign(lineage, principal)


def _the_one(state: State, who: Identity, asked: admin.RedriveDeadLetterRequest) -> Letter | Error:
    state.dead_letters.expire(state.now)
    env = normalise_env(asked.env) if asked.env else ""
    found = [
        letter
        for letter in state.dead_letters.find(who.tenant, asked.message_id)
        if access.sees(who.rights, letter.key[2])
        and asked.message_id
        and asked.principal in ("", letter.key[1])
        and env in ("", letter.key[2])
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        return failure(
            codes.NO_ROUTE,
            f"no dead letter {asked.message_id[:200]!r} is kept here; they go after {state.dead_letters.age_s:g} s, "
            "and the oldest first when there are too many",
        )
    owners = ", ".join(f"principal {letter.key[1]} in env {letter.key[2]}" for letter in found[:10])
    return failure(
        codes.INVALID_ENVELOPE,
        f"{len(found)} dead letters have the message_id {asked.message_id[:200]}: say which by principal and env "
        f"({owners})",
        details={"field": "message_id"},
    )
