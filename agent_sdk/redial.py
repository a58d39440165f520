"""Which node to dial next, after how long, and for how long. No I/O, no clock.

The first time the configured addresses are dialled in their order. After a loss the same node comes first, at once
(within 200 ms) and for at most a second: a cut stream is resumed there. Then the others have their turn, in a random
order, so that those who lost a node spread over all that are left; and the first of these dials waits up to
`SPREAD_S`, so that they do not all come in one second. A node that said that it is leaving comes last while it is.

Where nobody answers, the list is gone through in rounds, within 200 ms from address to address. Between rounds (with
one address: between dials) the wait grows with full jitter up to `CAP_S`. When it was drawn up to there it stays: by
then a crowd is spread evenly over `CAP_S`, and an even beat keeps it so, whereas each further draw would bring more
than that into the first second of a node that comes back.

A connection that did not hold for ten seconds counts as a failure, so a node that flaps is not hammered; but one that
resumed the link and held for half a second shows that the node is well and only the way to it was cut (a middlebox that
resets streams): then the next dial is at once again, or the waits would outgrow the resume window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from agentreach.policy.backoff import Backoff
from agentreach.wire.limits import PEERS_MAX

SAME_NODE_S = 1.0  # how long the same node is tried before another address (contract.md, "Resume")
_SAME_NODE_TRIES = 2  # where both were refused, nobody listens there: the second need not pass
SPREAD_S = 2.5
"""Over so long those who lost a node come to the others: two in five of them a second, so with two nodes a fifth of a
fleet, and everybody is there four seconds after the loss."""
DIAL_S = 5.0  # until a node has admitted the stream
_DIAL_LEAST_S = 1.0  # a fair part of `DIAL_S` for each address, but enough for TLS around the world
_AT_ONCE_S = 0.2
_RESUMED_HELD_S = 0.5  # at most two dials a second of a process whose way to the node is cut again and again
_FIRST_S = 0.5
CAP_S = 4.8
"""The longest wait. A fleet comes back at 1 / `CAP_S` of it a second: at most a quarter of it may (K1), and everybody
should be back within 5 s."""
_LEFT_LEAST_S = 2.0  # for so long a node that said goodbye is taken to be gone


class Redial:
    """The dialling state of one link. Times are seconds of the caller's clock; `draw` gives numbers in [0, 1)."""

    def __init__(self, addresses: Sequence[str], draw: Callable[[], float]) -> None:
        self._draw = draw
        self._configured = tuple(addresses)
        self._home: tuple[str, ...] = ()
        """The address that was last welcomed at."""
        self._learnt: tuple[str, ...] = ()
        self._leaving: dict[str, float] = {}
        """Until when a node is taken to be on its way out, by address."""
        self._round = deque(self._configured)
        """What is still to be dialled before the next longer wait; the first is dialled now."""
        self._first_round = True
        self._backoff = Backoff(_FIRST_S, CAP_S, at_once_s=_AT_ONCE_S)
        self.wait_s = 0.0
        """How long to wait before dialling `address`; nothing before the very first time."""
        self._linked = False
        """The node at `address` may know the link."""
        self._failing_since: float | None = None
        self._failures = 0
        self._resumed_at: float | None = None

    @property
    def address(self) -> str:
        """The address to dial now."""
        return self._round[0]

    @property
    def known(self) -> tuple[str, ...]:
        """All addresses: the configured ones, then where we were last, then those that this node told of."""
        return tuple(dict.fromkeys((*self._configured, *self._home, *self._learnt)))

    @property
    def elsewhere(self) -> bool:
        """True when there is another node to go to."""
        return any(address != self.address for address in self.known)

    @property
    def limit_s(self) -> float:
        """How long the dial of `address` may take."""
        if not self.elsewhere:
            return DIAL_S
        if self._linked:
            return SAME_NODE_S
        return max(DIAL_S / len(self.known), _DIAL_LEAST_S) if self._first_round else DIAL_S

    def connected(self, now: float, peers: Sequence[str], *, resumed: bool = False) -> None:
        """A node welcomed us and named its peers, none that it does not; `resumed`: it went on with the link."""
        self._backoff.connected(now)
        self._resumed_at = now if resumed else None
        self._failing_since, self._failures = None, 0
        self._linked, self._home = True, (self.address,)
        self._learnt = tuple(peers)[:PEERS_MAX]

    def told(self, peers: Sequence[str]) -> None:
        """The node named its peers anew; a node that knows of none says nothing."""
        if peers:
            self._learnt = tuple(peers)[:PEERS_MAX]

    def failed(self, now: float) -> None:
        """The stream ended, or none came about."""
        self._count(now)
        if not self._linked:
            self._next(now)
            return
        self.wait_s = self._longer()
        if self.elsewhere and (self._gave_up(now) or self.wait_s > SAME_NODE_S):
            self._leave(now, self.address)
            self.wait_s = self._spread(self.wait_s)

    def left(
        self, now: float, address: str, peers: Sequence[str] = (), for_s: float = 0.0, *, in_time: bool = False
    ) -> None:
        """The node at `address` is leaving, for `for_s`; it named `peers`. `in_time`: we go before it has gone."""
        self.told(peers)
        self._leaving[address] = now + max(for_s, _LEFT_LEAST_S)
        self._count(now)
        self._leave(now, address)
        self.wait_s = 0.0 if in_time else self._spread(self._longer())

    def _count(self, now: float) -> None:
        self._backoff.failed(now)
        if self._resumed_at is not None and now - self._resumed_at >= _RESUMED_HELD_S:
            self._backoff.reset()
        self._resumed_at = None
        if self._failing_since is None:
            self._failing_since = now
        self._failures += 1

    def _gave_up(self, now: float) -> bool:
        """True when the same node had its time; the loss itself is the first failure."""
        assert self._failing_since is not None
        return self._failures > _SAME_NODE_TRIES or now - self._failing_since >= SAME_NODE_S

    def _leave(self, now: float, left: str) -> None:
        """Turn to the other nodes; the one that was left comes after them."""
        self._linked, self._first_round = False, True
        self._round = deque([*(address for address in self._order(now) if address != left), left])

    def _next(self, now: float) -> None:
        self._round.popleft()
        if self._round:
            self.wait_s = _AT_ONCE_S * self._draw()
        else:
            self._round.extend(self._order(now))
            self._first_round = False
            self.wait_s = self._longer()

    def _order(self, now: float) -> list[str]:
        """A round: at random, once there was a node; those that are leaving last."""
        self._leaving = {each: until for each, until in self._leaving.items() if until > now}
        order = sorted(self.known, key=lambda _: self._draw()) if self._home else list(self.known)
        return sorted(order, key=lambda address: address in self._leaving)

    def _longer(self) -> float:
        return CAP_S if self._backoff.capped else self._backoff.next_s(self._draw)

    def _spread(self, least_s: float) -> float:
        """For the first dial of another node."""
        return max(SPREAD_S * self._draw(), least_s)
