"""What the audit log is told of: who came and went, who was denied what; and how much of what anybody can cause.

Only facts that belong to a principal are told, never what a message holds. Denials can be had by the thousand by
whoever wants to fill a disk: beyond a bound they are counted, and the sum is told instead. So can the coming and going
of agents by whoever may register one; a principal's whole fleet that starts anew is told one by one all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from reach.core.bucket import Bucket
from reach.core.effects import AuditLine
from reach.core.keyring import key_id_of

if TYPE_CHECKING:
    from reach.core.peers import Peer
    from reach.core.ports import Identity
    from reach.core.requests import Attachment
    from reach.core.state import State

LINES_PER_S = 20  # of one action with one outcome that anybody can cause; beyond, they are counted
SUMMARY_S = 10.0  # then their sum is told
FLEET_LINES = 5_000  # of one principal's agents at once: that came, that changed, that left; then LINES_PER_S of each
OWNERS_MAX = (
    10_000  # principals whose agents' lines are counted; beyond, those that have told little lately are forgotten
)
NAMES_SHOWN = 100  # of an agent's capabilities

_DENIED = codes.ErrorCode.Name(codes.PERMISSION_DENIED)
_BOUNDED = frozenset({"gate.refused", "message.denied", "message.restamped", "agent.denied", "topic.denied"})
_OF_FLEETS = frozenset({"agent.attached", "agent.changed", "agent.detached"})

Owner = tuple[str, str]
"""(tenant, principal); both empty: anybody's."""


def attached(state: State, attachment: Attachment, action: str = "agent.attached") -> None:
    """An agent is registered here, or the same process declares something else of it (`agent.changed`)."""
    agent, peer = attachment.agent, attachment.peer
    about = {
        "agent": agent.agent_id,
        "env": agent.env,
        "version": agent.version,
        "capabilities": ",".join(sorted(agent.capabilities)[:NAMES_SHOWN]),
    }
    state.effects.append(line(action, peer.who, peer.came_from, about))


def detached(state: State, attachment: Attachment, why: str) -> None:
    """An agent that was attached here is not any more."""
    agent, peer = attachment.agent, attachment.peer
    about = {"agent": agent.agent_id, "env": agent.env}
    state.effects.append(line("agent.detached", peer.who, peer.came_from, about, why=why))


def denied(
    state: State, action: str, who: Identity, peer: Peer | None, about: dict[str, str], why: str, trace_id: str = ""
) -> None:
    """Somebody wanted to do what it has no right to. Without a peer it came by a call of its own."""
    address = peer.came_from if peer is not None else None
    state.effects.append(line(action, who, address, about, outcome=_DENIED, why=why, trace_id=trace_id))


def key(state: State, action: str, who: Identity, why: str = "") -> None:
    """The key of `who` holds from now on, or no more: each node tells it, whoever changed it and wherever."""
    state.effects.append(line(action, who, "", {"key_id": key_id_of(who)}, why=why))


def restamped(state: State, who: Identity, peer: Peer | None, claimed: str, trace_id: str) -> None:
    """A message claimed to come from somebody that its sender is not; it goes on under its sender's own name."""
    address = peer.came_from if peer is not None else None
    about = {"source": claimed}
    state.effects.append(line("message.restamped", who, address, about, outcome="RESTAMPED", trace_id=trace_id))


def line(
    action: str,
    who: Identity | None,
    address: str | None,
    about: dict[str, str],
    *,
    outcome: str = "OK",
    why: str = "",
    trace_id: str = "",
) -> AuditLine:
    """One line; `who` None: nobody that is known, `address` None: that of the call that is being answered."""
    tenant, principal, key_id = ("", "", "") if who is None else (who.tenant, who.principal, key_id_of(who))
    return AuditLine(action, outcome, tenant, principal, key_id, address, trace_id, about, why)


class Bounded:
    """How many lines of a kind have been written lately, and how many were counted only."""

    def __init__(self) -> None:
        self._second = -1
        self._written: dict[tuple[str, str], int] = {}
        self._fleets: dict[tuple[str, Owner], Bucket] = {}
        self._counted: dict[tuple[str, str, Owner], int] = {}
        self.since = 0.0
        """When the first of those that were only counted came."""

    def admits(self, action: str, outcome: str, now: float, owner: Owner = ("", "")) -> bool:
        """Whether this line is written; if not, it is in the next sum. `owner` did it."""
        if action in _OF_FLEETS:
            written = self._fleet(action, owner, now).takes_one(now)
        elif action in _BOUNDED:
            owner = ("", "")
            written = self._in_this_second((action, outcome), now) <= LINES_PER_S
        else:
            return True
        if not written:
            if not self._counted:
                self.since = now
            key = (action, outcome, owner)
            self._counted[key] = self._counted.get(key, 0) + 1
        return written

    def _in_this_second(self, kind: tuple[str, str], now: float) -> int:
        if int(now) != self._second:
            self._second = int(now)
            self._written.clear()
        count = self._written[kind] = self._written.get(kind, 0) + 1
        return count

    def _fleet(self, action: str, owner: Owner, now: float) -> Bucket:
        found = self._fleets.get((action, owner))
        if found is None:
            if len(self._fleets) >= OWNERS_MAX:
                self._fleets = {key: each for key, each in self._fleets.items() if not each.is_full(now)}
            found = self._fleets[action, owner] = Bucket(LINES_PER_S, FLEET_LINES / LINES_PER_S)
        return found

    @property
    def due_at(self) -> float | None:
        """When sums are to be told; None: nothing is counted."""
        return self.since + SUMMARY_S if self._counted else None

    def sums(self) -> list[tuple[str, str, Owner, int]]:
        """(action, outcome, whose, how many) since the last call."""
        sums = [(*key, count) for key, count in self._counted.items()]
        self._counted.clear()
        return sums
