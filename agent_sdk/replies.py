"""The answers an agent has given, so that a repeated message gets its old answer instead of a second run.

Fresh ids, the normal traffic, have a table of their own: at full speed they do not wash out the ids that applications
chose, which are the ones that come again. No I/O, no clock.
"""

from __future__ import annotations

import zlib
from typing import Final

from agent_sdk.work import Key, Work
from agentreach.policy.seen import Seen
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire.content import content_digest

ENTRIES_MAX: Final = 50_000  # twice, as the next two: for fresh ids and for all others
BYTES_MAX: Final = 32 << 20
AGE_S: Final = 600.0
_ENTRY_BYTES: Final = 256  # what an entry costs besides its answer

Known = tuple[tuple[bytes, ...], bytes, int]
"""The answers to a finished message (none: they were too many or too large to keep), what the last one ends with, and
the fingerprint of the message's content."""

UNKNOWN_CONTENT: Final = -1
"""The fingerprint of a message that was handled by a former owner of its session."""


class Replies:
    """What was answered in the last ten minutes, as far as the bounds allow."""

    def __init__(self) -> None:
        self._fresh: Seen[Key, Known] = Seen(ENTRIES_MAX, BYTES_MAX, AGE_S)
        self._others: Seen[Key, Known] = Seen(ENTRIES_MAX, BYTES_MAX, AGE_S)

    def known(self, key: Key, now: float) -> Known | None:
        """The answers to a message, None if it is not known."""
        return self._fresh.get(key, now) or self._others.get(key, now)

    def remember(self, work: Work, core: bytes, tail: bytes, now: float) -> None:
        """Keep a final answer, in two parts so that a large one is not copied, and the items that came before it."""
        table = self._fresh if work.fresh else self._others
        body = work.body
        fingerprint = _fingerprint(body) if body is not None else fingerprint_of(work.envelope)
        if not work.handler.streams:
            table.put(work.key, ((core,), tail, fingerprint), len(core) + _ENTRY_BYTES, now)
            return
        cores = (*work.items, core) if work.items is not None else ()
        table.put(work.key, (cores, tail, fingerprint), work.items_bytes + _ENTRY_BYTES, now)

    def as_envelope(self, key: Key, now: float, bytes_max: int) -> pb.Envelope | None:
        """An answer to hand over with its session: empty if it is too large, or came in items. None: not known."""
        known = self.known(key, now)
        if known is None:
            return None
        cores, tail, _ = known
        if len(cores) != 1 or len(cores[0]) > bytes_max:
            return pb.Envelope()
        return pb.Envelope.FromString(cores[0] + tail)

    def learn(self, key: Key, reply: pb.Envelope | None, now: float) -> None:
        """Take over what a former owner of the session has answered."""
        core = reply.SerializeToString() if reply is not None else b""
        self._others.put(key, ((core,) if core else (), b"", UNKNOWN_CONTENT), len(core) + _ENTRY_BYTES, now)


def fingerprint_of(envelope: pb.Envelope) -> int:
    """Tells other content under the same id apart, cheaply for what SDKs send; the node compares exactly.

    What people type (json, text) is digested whole: its body is empty, and all of it would look the same.
    """
    payload = envelope.payload
    if payload.WhichOneof("content") in (None, "body"):
        return _fingerprint(payload.body)
    return int.from_bytes(content_digest(envelope), "big")


def _fingerprint(body: bytes) -> int:
    return zlib.crc32(body) << 32 | len(body) if body else 0
