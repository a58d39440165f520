"""What the node offers to the adapters that serve people and peers, and what they tell it about a caller.

The gRPC and HTTP servers know this shape only; `reach.node.engine` fills it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from google.protobuf.message import Message

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.mesh_pb2 import PublishReply
from reach.core.access import Decision, Rights
from reach.core.effects import AuditLine


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is behind a stream or a call, as the gate established it."""

    tenant: str = "default"
    principal: str = "anonymous"
    rights: Rights | None = field(default=None, compare=False, repr=False)
    """None: authentication is off, and everybody may do anything."""
    key_id: str = field(default="", compare=False)
    """The API key, or the start of the certificate's fingerprint, by which it was established."""
    signing_key: bytes = field(default=b"", compare=False, repr=False)
    """What its messages are signed with, if they must be (`Rights.signs`)."""
    decisions: dict[tuple[bytes, str], Decision] = field(default_factory=dict, compare=False, repr=False)
    """What was decided of its targets, by (serialised target, env); for `actors` to look up again."""


class End(Enum):
    """Why what somebody came in by counts no more. The text is for whoever came in by it."""

    KEY = "its key was revoked or has expired"
    CERTIFICATE = "its certificate has expired, or its authority is trusted no more"
    CHANGED = "what it may do has changed: it has to come in anew"
    """Its key or certificate is as good as before, and stands for something else now, or for nobody."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is new of the keys, or of the certificates, by which somebody comes in."""

    ended: tuple[tuple[Identity, End], ...] = ()
    """Those whose key or certificate counts no more."""
    begun: tuple[Identity, ...] = ()
    """Those whose key holds from now on."""


ANYBODY = Identity()

OWNERS_TENANT = ANYBODY.tenant
"""The tenant of those who run the mesh: its admins alone may do what concerns all tenants."""

ASKED_ALONE = ("reach-nodes", "this")
"""Metadata of a question that a node shall answer for itself, without asking others: another node merges."""


ASKED_FOR = "reach-for"
"""Metadata of such a question, about the admin who asked: TENANT/ENVS/PRINCIPAL, its envs parted by commas."""


Introduce = Callable[[str, "Identity | None"], tuple[tuple[str, str], ...]]
"""The headers by which this node shows the one at an address that it is one of the mesh too, on behalf of an admin."""


def nothing_to_show(address: str, asked_for: Identity | None = None) -> tuple[tuple[str, str], ...]:
    """An `Introduce` where no gate stands."""
    return ()


class MeshFailure(Exception):
    """A call that ends with an `Error`. `items` counts the items of a streamed reply that came before it."""

    def __init__(self, error: Error, trace_id: str = "", items: int | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.trace_id = trace_id
        self.items = items


class TurnedAway(MeshFailure):
    """A call that did not get past the gate. `who` makes it, if that is known."""

    def __init__(self, error: Error, who: Identity | None = None) -> None:
        super().__init__(error)
        self.who = who


class NoAnswer(Exception):
    """A node that was asked said nothing in time; the text says where, and what the transport knows."""


class NodeStream(Protocol):
    """The node's end of one Connect stream; the adapter only carries bytes between it and the transport."""

    def received(self, data: bytes) -> None:
        """One stream message from the peer. Never raises: what is wrong with it is answered on the stream."""
        ...

    def ended(self) -> None:
        """The peer will send no more: half-closed, reset or dead. May be called more than once."""
        ...

    async def next_frame(self) -> bytes | None:
        """The next stream message for the peer; None when the node is done with this stream.

        Only one caller at a time. Cancelling it loses nothing.
        """
        ...

    @property
    def severed(self) -> bool:
        """Nothing was said to the peer and nothing more is heard from it: no need to wait for its half."""
        ...


class Doorkeeper(Protocol):
    """Who gets in, and as whom. Raises `MeshFailure` UNAUTHENTICATED or PERMISSION_DENIED for who does not."""

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Identity | None:
        """Who calls a method, by the headers of the call; None: it is said by the certificate (`certified`)."""
        ...

    def certified(self, method: str, certificate: Mapping[str, Iterable[bytes]]) -> Identity:
        """The same by the client's certificate, as gRPC's auth_context tells of it."""
        ...

    def check(self, who: Identity) -> None:
        """Raises UNAUTHENTICATED if what somebody got in by has ended since."""
        ...

    def turned_away(self, method: str, refused: MeshFailure, address: str) -> None:
        """What `admit` or `certified` has refused came from there."""
        ...


class KeyDesk(Protocol):
    """Where admins have API keys made and ended. Raises `MeshFailure`, also for what another tenant's admin may do."""

    async def create_key(self, request: admin.CreateKeyRequest, who: Identity) -> admin.CreateKeyReply: ...

    async def list_keys(self, request: admin.ListKeysRequest, who: Identity) -> admin.ListKeysReply: ...

    async def revoke_key(self, request: admin.RevokeKeyRequest, who: Identity) -> admin.RevokeKeyReply: ...

    async def rotate_key(self, request: admin.RotateKeyRequest, who: Identity) -> admin.RotateKeyReply: ...

    def explain_access(self, request: admin.ExplainAccessRequest, who: Identity) -> admin.ExplainAccessReply: ...


class Switchboard(Protocol):
    """The node, as servers see it. Everything raises `MeshFailure` for an error that the caller shall read."""

    def audit(self, line: AuditLine, /) -> None:
        """Have the audit log say that somebody did something. Never raises."""
        ...

    def open_stream(self, who: Identity, peer: str) -> NodeStream:
        """Take on a new Connect stream; `peer` is its transport address, for logs."""
        ...

    def open_node_stream(self, peer: str) -> NodeStream:
        """Take on a new stream of another node."""
        ...

    async def invoke(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> Envelope:
        """One request, its final reply; `deadline_s` is the RPC's own time left. Cancelling it cancels the request."""
        ...

    def invoke_stream(
        self, envelope: Envelope, who: Identity, deadline_s: float | None
    ) -> AsyncGenerator[Envelope, None]:
        """One request, every item of its reply. Closing the generator cancels the request."""
        ...

    async def publish(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> PublishReply: ...

    async def everywhere(self, method: str, request: Message, own: Callable[[], Message], who: Identity) -> Message:
        """The answer of all nodes to a question of AdminService, or of the node that an order is for.

        `own` gives this node's, and is asked for it first.
        """
        ...

    def explain(self, envelope: Envelope, who: Identity) -> admin.ExplainReply: ...

    def get_trace(self, trace_id: str, who: Identity) -> admin.GetTraceReply: ...

    def get_node(self) -> admin.GetNodeReply: ...

    def list_nodes(self) -> admin.ListNodesReply: ...

    def list_sessions(self, request: admin.ListSessionsRequest, who: Identity) -> admin.ListSessionsReply: ...

    def release_session(self, request: admin.ReleaseSessionRequest, who: Identity) -> admin.ReleaseSessionReply: ...

    def list_breakers(self, request: admin.ListBreakersRequest, who: Identity) -> admin.ListBreakersReply: ...

    def reset_breaker(self, request: admin.ResetBreakerRequest, who: Identity) -> admin.ResetBreakerReply: ...

    def drain_agent(self, request: admin.DrainAgentRequest, who: Identity) -> admin.DrainAgentReply: ...

    def drain_node(self, request: admin.DrainNodeRequest, who: Identity) -> admin.DrainNodeReply: ...

    def list_dead_letters(self, request: admin.ListDeadLettersRequest, who: Identity) -> admin.ListDeadLettersReply: ...

    def redrive_dead_letter(
        self, request: admin.RedriveDeadLetterRequest, who: Identity
    ) -> admin.RedriveDeadLetterReply: ...

    def resolve(self, request: registry.ResolveRequest, who: Identity) -> registry.ResolveReply: ...

    async def get_agent(self, request: registry.GetAgentRequest, who: Identity) -> registry.AgentRecord: ...

    def list_agents(self, request: registry.ListAgentsRequest, who: Identity) -> registry.ListAgentsReply: ...

    def list_capabilities(
        self, request: registry.ListCapabilitiesRequest, who: Identity
    ) -> registry.ListCapabilitiesReply: ...

    def watch_agents(
        self, request: registry.WatchAgentsRequest, who: Identity
    ) -> AsyncGenerator[registry.WatchAgentsReply, None]:
        """All agents, then what changes. Closing the generator ends it."""
        ...

    async def set_version_policy(
        self, request: registry.SetVersionPolicyRequest, who: Identity
    ) -> registry.SetVersionPolicyReply: ...

    def get_version_policy(
        self, request: registry.GetVersionPolicyRequest, who: Identity
    ) -> registry.GetVersionPolicyReply: ...

    async def set_config(self, request: admin.SetConfigRequest, who: Identity) -> admin.SetConfigReply: ...

    def get_config(self, request: admin.GetConfigRequest, who: Identity) -> admin.GetConfigReply: ...

    @property
    def keys(self) -> KeyDesk:
        """The API keys."""
        ...

    @property
    def ready(self) -> bool:
        """True while the node takes new work: registry known and fresh enough, not draining, loop not stuck."""
        ...

    @property
    def unready_reason(self) -> str:
        """Why it is not ready; empty when it is."""
        ...
