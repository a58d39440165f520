"""Once means once, the node's half for requests that are finished (behaviour.md §5).

An outcome is kept under the message's key for a while and given again to whoever sends the message again. Requests in
flight are none of this module's business: a copy of one of those joins it before anybody asks here.

A bounded table forgets, and forgetting must not mean running twice. So the table remembers how young the youngest
message is that it had to let go of: a repeated UUIDv7 that is older than that, and not here, may have run (`TooOld`).
Ids of other kinds carry no time; of these an unknown one counts as new.
"""

from __future__ import annotations

from agentreach.policy.seen import Seen
from agentreach.v1 import error_pb2
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.ids import uuid7_unix_ms

MessageKey = tuple[str, str, str, str]
"""(tenant, principal, env, message_id)."""

OUTCOME_BYTES_MAX = 64 << 10
"""Larger outcomes stay in the agent's table; here stands only who has them."""

# What an entry costs besides its outcome: key, digest, objects and places in the table (measured: 496 bytes).
ENTRY_BYTES = 512

# A caller's clock may be ahead by so much. Ids from further ahead do not move the mark of what was forgotten:
# one wrong clock must not turn everybody's repeats away.
CLOCK_AHEAD_MS_MAX = 5 * 60 * 1000


class Stored:
    """An outcome to be given again: the final RESPONSE as serialised Envelope."""

    __slots__ = ("digest", "outcome")

    def __init__(self, digest: bytes, outcome: bytes) -> None:
        self.digest = digest
        self.outcome = outcome


class Elsewhere:
    """The outcome was too large to keep: this incarnation of this agent has it in its own table."""

    __slots__ = ("agent_id", "digest", "incarnation")

    def __init__(self, digest: bytes, agent_id: str, incarnation: bytes) -> None:
        self.digest = digest
        self.agent_id = agent_id
        self.incarnation = incarnation


class Conflict:
    """The same id was sent with other content: IDEMPOTENCY_CONFLICT."""

    __slots__ = ()


class TooOld:
    """Not here, but it may have been: AGENT_LOST with `may_have_executed`, never a second run."""

    __slots__ = ()


CONFLICT = Conflict()
_TOO_OLD = TooOld()


class Replay:
    """The outcomes of finished requests. `now` is monotonic seconds and must not run backwards.

    `unix_offset_s` added to `now` gives the wall clock; without it ids from a future are believed.
    """

    __slots__ = ("_now", "_table", "_unix_offset_s", "forgotten_unix_ms")

    def __init__(
        self,
        *,
        entries_max: int = 100_000,
        bytes_max: int = 64 << 20,
        age_s: float = 300.0,
        unix_offset_s: float | None = None,
    ) -> None:
        self._table: Seen[MessageKey, Stored | Elsewhere] = Seen(entries_max, bytes_max, age_s, self._dropped)
        self._unix_offset_s = unix_offset_s
        self._now = 0.0
        self.forgotten_unix_ms = -1
        """Time of the youngest UUIDv7 that was dropped by bound or age; -1 while none was."""

    def __len__(self) -> int:
        return len(self._table)

    @property
    def bytes_held(self) -> int:
        """What the table takes, about."""
        return self._table.bytes_held

    def store(self, key: MessageKey, digest: bytes, outcome: bytes | tuple[str, bytes], now: float) -> None:
        """Keep an outcome that `is_stored`; an earlier one of the same key is replaced, and its time begins anew.

        `outcome` is the serialised final RESPONSE or, above `OUTCOME_BYTES_MAX`, (agent_id, incarnation) of its holder.
        `digest` stands for the content of the request.
        """
        self._now = now
        if isinstance(outcome, bytes):
            self._table.put(key, Stored(digest, outcome), ENTRY_BYTES + len(outcome), now)
        else:
            self._table.put(key, Elsewhere(digest, *outcome), ENTRY_BYTES, now)

    def find(self, key: MessageKey, digest: bytes, now: float) -> Stored | Elsewhere | Conflict | TooOld | None:
        """What is known of a message that is not `fresh`; None: nothing, so it may run."""
        self._now = now
        entry = self._table.get(key, now)
        if entry is not None:
            return entry if entry.digest == digest else CONFLICT
        if self.forgotten_unix_ms >= 0:
            made_unix_ms = uuid7_unix_ms(key[3])
            if made_unix_ms is not None and made_unix_ms <= self.forgotten_unix_ms:
                return _TOO_OLD
        return None

    def reopen(self, key: MessageKey, now: float) -> None:
        """Let go of a stored failure: an agent that has the message is back, and what it says counts. Results stay."""
        entry = self._table.get(key, now)
        if isinstance(entry, Stored) and Envelope.FromString(entry.outcome).HasField("error"):
            self._table.discard(key)

    def has(self, key: MessageKey, now: float) -> bool:
        """Whether an outcome is kept for this message."""
        return self._table.get(key, now) is not None

    def expire(self, now: float) -> None:
        """Let go of what is too old. Also done at each `store`."""
        self._now = now
        self._table.expire(now)

    def _dropped(self, key: MessageKey, entry: Stored | Elsewhere) -> None:
        made_unix_ms = uuid7_unix_ms(key[3])
        if made_unix_ms is None or made_unix_ms <= self.forgotten_unix_ms:
            return
        if self._unix_offset_s is not None:
            wall_unix_ms = int((self._now + self._unix_offset_s) * 1000)
            made_unix_ms = min(made_unix_ms, wall_unix_ms + CLOCK_AHEAD_MS_MAX)
        self.forgotten_unix_ms = max(self.forgotten_unix_ms, made_unix_ms)


def is_stored(code: int, retryable: bool, may_have_executed: bool) -> bool:
    """Whether an outcome is kept for copies of its message; `code` is 0 for a result.

    Kept is what would be wrong to do again: results, and every error after which the handler may have run, whatever
    its code (an error that a handler let out of a nested call carries that call's code). Not kept: what cannot have
    run, what the caller cancelled, and what the agent itself said to try again; of these the next copy runs.
    """
    if code == error_pb2.ERROR_CODE_UNSPECIFIED:
        return True
    if code == error_pb2.CANCELLED:
        return False
    if code == error_pb2.AGENT_ERROR:
        return not retryable
    return may_have_executed
