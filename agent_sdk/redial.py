"""Which node to dial next, and after how long. No I/O, no clock.

The same node comes first, at once (within 200 ms): a cut stream is resumed there. From the second try on the wait
grows with full jitter; after a second of failing the next address of the list has its turn. Where there is no link to
resume, before the first welcome or after that second, each failure gives the next address its turn, within 200 ms: the
waits grow from round to round of the list, not from address to address. A connection that did not hold for ten seconds
counts as a failure, so a node that flaps is not hammered; but one that resumed the link and held for half a second
shows that the node is well and only the way to it was cut (a middlebox that resets streams): then the next dial is at
once again, or the waits would outgrow the resume window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentreach.policy.backoff import Backoff

SAME_NODE_S = 1.0  # how long the same node is tried before the next address (contract.md, "Resume")
_AT_ONCE_S = 0.2
_RESUMED_HELD_S = 0.5  # at most two dials a second of a process whose way to the node is cut again and again
_FIRST_S = 0.5
CAP_S = 8.0
"""The longest wait: within a node's `resume_window_s`, for which it lets resent requests wait for agents that come
back. Shorter ones bring too many in one second: of a fleet that waits 0 to 8 s, a quarter comes in the first."""


class Redial:
    """The dialling state of one link."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._peers: list[str] = []
        self._at = 0
        self._failing_since: float | None = None
        self._backoff = Backoff(_FIRST_S, CAP_S, at_once_s=_AT_ONCE_S)
        self._dialled = False
        self._linked = False
        """The node at `address` may know the link."""
        self._untried = len(self._addresses) - 1
        """Addresses that this round of the list has not come to."""
        self._soon = False
        self._resumed_at: float | None = None

    @property
    def address(self) -> str:
        """The address to dial now."""
        known = self._known()
        return known[self._at % len(known)]

    @property
    def elsewhere(self) -> bool:
        """True when there is another node to go to."""
        return len(self._known()) > 1

    def _known(self) -> list[str]:
        return self._addresses + [peer for peer in self._peers if peer not in self._addresses]

    def wait_s(self, rng: Callable[[], float]) -> float:
        """How long to wait before dialling `address`; nothing before the very first time."""
        if not self._dialled:
            self._dialled = True
            return 0.0
        if self._soon:
            self._soon = False
            return _AT_ONCE_S * rng()
        self._untried = len(self._known()) - 1
        return self._backoff.next_s(rng)

    def connected(self, now: float, peers: Sequence[str], *, resumed: bool = False) -> None:
        """A node welcomed us and told its peers; `resumed`: it knew the link and went on with it."""
        self._backoff.connected(now)
        self._resumed_at = now if resumed else None
        self._failing_since = None
        self._linked, self._soon = True, False
        self._peers = list(peers)

    def failed(self, now: float, *, moved: bool = False) -> None:
        """The stream ended, or none came about; `moved`: the node named others, `move_on` follows."""
        self._backoff.failed(now)
        if self._resumed_at is not None and now - self._resumed_at >= _RESUMED_HELD_S:
            self._backoff.reset()
        self._resumed_at = None
        if self._failing_since is None:
            self._failing_since = now
        if moved or (self._linked and now - self._failing_since < SAME_NODE_S):
            return
        self.move_on()
        if self._untried > 0:
            self._untried -= 1
            self._soon = True

    def move_on(self, peers: Sequence[str] = ()) -> None:
        """Take the next address; `peers` are added to those known."""
        before = self.address
        self._linked = False
        self._peers = list(dict.fromkeys([*peers, *self._peers]))
        known = self._known()
        self._at = (known.index(before) + 1) % len(known) if before in known else 0
