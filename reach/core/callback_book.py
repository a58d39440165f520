"""What the node remembers of callbacks: where which outcome was published, and how much is being gathered for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.policy.seen import Seen

if TYPE_CHECKING:
    from reach.core.callbacks import Callback
    from reach.core.requests import MessageKey

GATHERED_BYTES_MAX = 64 << 20
"""Items of streamed replies held for callbacks, of all requests together: their callers are gone, so no client's own
limit bounds them."""

ENTRY_BYTES = 256  # of the table of what was published: key, topic, their places


class CallbackBook:
    """One node's. Entries live as long as outcomes do, and are as many at most."""

    __slots__ = ("gathered_bytes", "over", "published")

    def __init__(self, *, age_s: float, entries_max: int) -> None:
        self.published: Seen[tuple[MessageKey, str], bool] = Seen(entries_max, entries_max * ENTRY_BYTES, age_s)
        """By message and topic: whether what was published there was an error."""
        self.gathered_bytes = 0
        self.over: list[Callback] = []
        """Those whose items became too many in this step."""
