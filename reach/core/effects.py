"""What decisions ask the outside to do. The engine carries effects out in order; results come back as new steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.arrivals import Arrival
    from reach.core.lanes import Lane
    from reach.core.peers import Peer
    from reach.core.requests import Attachment


@dataclass(frozen=True, slots=True)
class RegisterAgents:
    """Write these agents to the store, then `arrivals.registered`."""

    peer: Peer
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class DeregisterAgent:
    """Delete the agent's key if it still has this generation."""

    agent: Agent
    generation: int


@dataclass(frozen=True, slots=True)
class CreatePin:
    """Write the pin of a lane for this agent by compare-and-set, then `owners.pinned`."""

    lane: Lane
    attachment: Attachment
    replaces_epoch: int


@dataclass(frozen=True, slots=True)
class RefreshPin:
    """Keep a used session's pin for another `session_ttl_s`."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class DialNodes:
    """Other nodes came, went, or have other addresses: see that there is a link to each."""


@dataclass(frozen=True, slots=True)
class EndStream:
    """Let the peer's current stream end after what is queued was sent."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LogLine:
    """A state change or failure for the log."""

    level: str
    event: str
    trace_id: str = ""
    fields: dict[str, object] = field(default_factory=dict)


Effect = RegisterAgents | DeregisterAgent | CreatePin | RefreshPin | DialNodes | EndStream | LogLine
