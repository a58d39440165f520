"""Whose the last outcomes were that this node, an agent's home, gave to other nodes, and that these acknowledged.

Such a node may end before it passes an outcome on, and its caller comes here by another one. So for the time in which
callers come back it is remembered which process answered: that one has the outcome in its own table.
"""

from __future__ import annotations

from typing import Final

from agentreach.policy.seen import Seen
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.content import content_digest
from reach.core.replay import CONFLICT, ENTRY_BYTES, Conflict, Elsewhere, MessageKey

ANSWERED_MAX: Final = (
    4_096  # all nodes together: more than they have in hand between acknowledging a reply and passing it on
)
ANSWERED_BYTES_MAX: Final = 4 << 20  # with what these messages said, where nobody has taken a digest of it
ANSWERED_S_MAX: Final = 300.0  # as long as an outcome itself is kept for copies: later, the same id is a new message


class Answered:
    """What is remembered of one message."""

    __slots__ = ("agent_id", "data", "digest", "incarnation")

    def __init__(self, data: bytes, digest: bytes, agent_id: str, incarnation: bytes) -> None:
        self.data = data
        """The envelope; empty if there is a digest of it."""
        self.digest = digest
        self.agent_id = agent_id
        self.incarnation = incarnation


class AnsweredBook:
    """By message. Nothing gets younger by being looked for; `now` is monotonic seconds."""

    __slots__ = ("_seen",)

    def __init__(self, age_s: float) -> None:
        self._seen: Seen[MessageKey, Answered] = Seen(ANSWERED_MAX, ANSWERED_BYTES_MAX, min(age_s, ANSWERED_S_MAX))

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, key: MessageKey, answered: Answered, now: float) -> None:
        """An outcome was acknowledged; what was remembered of this message before gives way."""
        self._seen.put(key, answered, ENTRY_BYTES + len(answered.data), now)

    def has(self, key: MessageKey, now: float) -> bool:
        """Whether this message is remembered."""
        return self._seen.get(key, now) is not None

    def find(self, key: MessageKey, digest: bytes, now: float) -> Elsewhere | Conflict | None:
        """Which process answered this message; `digest` stands for the content of the copy."""
        answered = self._seen.get(key, now)
        if answered is None:
            return None
        if digest != (answered.digest or content_digest(Envelope.FromString(answered.data))):
            return CONFLICT
        return Elsewhere(digest, answered.agent_id, answered.incarnation)
