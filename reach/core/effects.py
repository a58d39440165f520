"""What decisions ask the outside to do. The engine carries effects out in order; results come back as new steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentreach.v1.frame_pb2 import Forward, Forwarded
    from reach.core.agents import Agent
    from reach.core.arrivals import Arrival
    from reach.core.lanes import Lane
    from reach.core.nodes import NodePeer
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
class LookUpAgent:
    """Read an agent's key in the store and tell the view, then `lookups.answered`."""

    tenant: str
    env: str
    agent_id: str


@dataclass(frozen=True, slots=True)
class CreatePin:
    """Write the pin of a lane for this agent by compare-and-set, then `owners.pinned`.

    It goes on naming the snapshot that the pin before it named, which another node may have written; `forsaken`: none.
    With `epoch` it has that one, not a new one: its owner stays.
    """

    lane: Lane
    attachment: Attachment
    replaces_epoch: int
    turn: int = 0
    snapshot: str = ""
    since: int = 0
    forsaken: bool = False
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class RefreshPin:
    """Keep a used session's pin for another `session_ttl_s`; `owners.taken` follows if it is another owner's."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class DialNodes:
    """Other nodes came, went, or have other addresses: see that there is a link to each."""


@dataclass(frozen=True, slots=True)
class ReadPin:
    """Read the pin of a lane, then `homes.pin_read`."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class VoidPin:
    """Its home says that a session's owner is dead: whoever needs the session may have a new one at once."""

    lane: Lane
    epoch: int


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Keep a session's state, and have its pin name it if that still is of this epoch and of no larger turn; then
    `moves.stored` or `moves.fenced`."""

    lane: Lane
    attachment: Attachment
    epoch: int
    turn: int
    data: bytes
    ownerless_since: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Read a session's state, then `moves.loaded`."""

    lane: Lane
    reference: str
    epoch: int


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Nobody needs this state any more."""

    reference: str


@dataclass(frozen=True, slots=True)
class Forwarding:
    """A node forwards a wish to this one (`forward`), answers one (`forwarded`), or its link was cut (neither)."""

    node: NodePeer
    forward: Forward | None = None
    forwarded: Forwarded | None = None


@dataclass(frozen=True, slots=True)
class EndStream:
    """Let the peer's current stream end after what is queued was sent."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class CutStream:
    """End the peer's current stream at once. Its link goes on with the next one."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LogLine:
    """A state change or failure for the log."""

    level: str
    event: str
    trace_id: str = ""
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """Somebody did something, or was not let: for the audit log."""

    action: str
    outcome: str
    tenant: str
    principal: str
    key_id: str
    address: str | None
    """Where it came from; None: from where the call comes that is being answered."""
    trace_id: str
    about: dict[str, str]
    why: str


SessionEffect = CreatePin | RefreshPin | ReadPin | VoidPin | StoreSnapshot | LoadSnapshot | DropSnapshot
Told = LogLine | AuditLine
Streams = EndStream | CutStream
Effect = RegisterAgents | DeregisterAgent | LookUpAgent | SessionEffect | DialNodes | Forwarding | Streams | Told
