"""The requests that the mesh gave up and keeps for a person: bounded by number, bytes and age, the oldest go first."""

from __future__ import annotations

from agentreach.policy.seen import Seen
from agentreach.v1.error_pb2 import Error

MessageKey = tuple[str, str, str, str]
"""(tenant, principal, env, message_id)."""

LETTER_BYTES = 1024  # what a letter takes besides its envelope: objects, error, places in the table


class Letter:
    """One request as its sender gave it, and how it ended."""

    __slots__ = ("actors", "at", "data", "error", "key", "payload_bytes", "redriven_as", "source", "trace_id", "unix")

    def __init__(
        self, key: MessageKey, actors: tuple[str, ...], trace_id: str, source: str, error: Error, data: bytes,
        payload_bytes: int, at: float, unix: float,
    ) -> None:  # fmt: skip
        self.key = key
        self.actors = actors
        """On whose behalf its sender sent it, oldest first."""
        self.trace_id = trace_id
        self.source = source
        self.error = error
        """What its caller was told."""
        self.data = data
        """The REQUEST, serialised, without what nodes write."""
        self.payload_bytes = payload_bytes
        self.at = at
        self.unix = unix
        """When it ended, by the node's clock and by the wall's."""
        self.redriven_as = ""
        """The message_id of the request that was made of it."""


class DeadLetterBook:
    """Letters by message key. A message that dies again replaces its letter."""

    __slots__ = ("_age_s", "_counts", "_now", "_table")

    def __init__(self, *, entries_max: int, bytes_max: int, age_s: float, counts: dict[str, int]) -> None:
        """`counts` are the node's numbers: kept, dropped (for want of room), expired."""
        self._table: Seen[MessageKey, Letter] = Seen(entries_max, bytes_max, age_s, self._gone)
        self._age_s = age_s
        self._counts = counts
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def bytes_held(self) -> int:
        """What the letters take, about."""
        return self._table.bytes_held

    @property
    def age_s(self) -> float:
        """How long a letter is kept."""
        return self._age_s

    def keep(self, letter: Letter) -> bool:
        """Keep a letter from now (`letter.at`) on; False if it is larger than all there is room for."""
        self._now = letter.at
        self._table.put(letter.key, letter, LETTER_BYTES + len(letter.data), letter.at)
        kept = self._table.get(letter.key, letter.at) is letter
        self._counts["kept"] += kept
        return kept

    def find(self, tenant: str, message_id: str = "") -> list[Letter]:
        """A tenant's letters, youngest first; of one message_id, if given."""
        return [
            letter
            for letter in reversed(self._table.values())
            if letter.key[0] == tenant and (not message_id or letter.key[3] == message_id)
        ]

    def expire(self, now: float) -> None:
        """Let go of what is too old."""
        self._now = now
        self._table.expire(now)

    def _gone(self, key: MessageKey, letter: Letter) -> None:
        self._counts["expired" if self._now - letter.at >= self._age_s else "dropped"] += 1
