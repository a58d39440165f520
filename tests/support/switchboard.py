"""A small real `Switchboard`: answers by rule, without agents, so that the servers can be tested by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from google.protobuf.message import Message

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import RESPONSE, Envelope
from agentreach.v1.error_pb2 import AGENT_ERROR, NO_ROUTE, OVERLOADED, SHUTTING_DOWN
from agentreach.v1.mesh_pb2 import PublishReply
from agentreach.wire import errors
from reach.core.effects import AuditLine
from reach.core.ports import Identity, MeshFailure


class EchoStream:
    """Gives every frame back; `finish` ends it from the node's side."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.over = asyncio.Event()
        self._ready = asyncio.Event()
        self._finished = False
        self.severed = False
        self.read_after_finish = 0
        self.fault: Exception | None = None

    def received(self, data: bytes) -> None:
        """Queue it as the answer."""
        if self._finished:
            self.read_after_finish += 1
            return
        self.frames.append(data)
        self._ready.set()

    def ended(self) -> None:
        """Finish when the peer has."""
        self.over.set()
        self.finish()

    def finish(self) -> None:
        """Give what is queued, then None."""
        self._finished = True
        self._ready.set()

    async def next_frame(self) -> bytes | None:
        """The oldest frame not given back yet."""
        while not self.frames:
            if self.fault is not None:
                raise self.fault
            if self._finished:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self.frames.pop(0)


class RuleSwitchboard:
    """Does what the text of a payload says: echo, refuse, busy, verbose, crash, hang, cancel, or a number of items."""

    def __init__(self) -> None:
        self.streams: list[EchoStream] = []
        self.deadlines: list[float | None] = []
        self.published: list[Envelope] = []
        self.hanging = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.reason = ""
        self.policy = registry.VersionPolicy()
        self.settings: dict[str, str] = {}
        self.settings_version = 0
        self.closed = False
        self.audited: list[AuditLine] = []

    def open_stream(self, who: Identity, peer: str) -> EchoStream:
        """Admit, unless the door is closed."""
        if self.closed:
            raise MeshFailure(errors.failure(SHUTTING_DOWN, "this node is leaving"))
        stream = EchoStream()
        self.streams.append(stream)
        return stream

    def audit(self, line: AuditLine) -> None:
        """Keep it."""
        self.audited.append(line)

    async def invoke(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> Envelope:
        """Act by the rule."""
        self.deadlines.append(deadline_s)
        match envelope.payload.text:
            case "refuse":
                raise MeshFailure(errors.failure(NO_ROUTE, "nothing here can do that"), envelope.trace_id)
            case "busy":
                raise MeshFailure(errors.failure(OVERLOADED, "full", retry_after_ms=1500), envelope.trace_id)
            case "verbose":
                error = errors.failure(AGENT_ERROR, "ж" * 5000, agent_id="a" * 500, details={"hint": "ж" * 400})
                raise MeshFailure(error, envelope.trace_id)
            case "crash":
                raise RuntimeError("password=hunter2 in /etc/secret")
            case "cancel":
                inner = asyncio.get_running_loop().create_future()
                inner.cancel()
                await inner
            case "hang":
                self.hanging.set()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self.cancelled.set()
        reply = Envelope(type=RESPONSE, correlation_id=envelope.message_id, trace_id=envelope.trace_id)
        reply.payload.CopyFrom(envelope.payload)
        return reply

    async def invoke_stream(
        self, envelope: Envelope, who: Identity, deadline_s: float | None
    ) -> AsyncGenerator[Envelope, None]:
        """As many items as the number says, then, if it is negative, a refusal; a word acts as in `invoke`."""
        text = envelope.payload.text
        if not text.lstrip("-").isdigit():
            yield await self.invoke(envelope, who, deadline_s)
            return
        for sequence in range(abs(int(text))):
            yield Envelope(type=RESPONSE, sequence=sequence, more=sequence + 1 < abs(int(text)))
        if text.startswith("-"):
            raise MeshFailure(errors.failure(NO_ROUTE, "the rest is gone"), envelope.trace_id)

    async def publish(self, envelope: Envelope, who: Identity, deadline_s: float | None) -> PublishReply:
        """Count it as taken by one."""
        self.published.append(envelope)
        return PublishReply(matched=1, accepted=1)

    async def everywhere(self, method: str, request: Message, own: Callable[[], Message], who: Identity) -> Message:
        """There are no others."""
        return own()

    def explain(self, envelope: Envelope, who: Identity) -> admin.ExplainReply:
        """One candidate, chosen."""
        return admin.ExplainReply(candidates=[admin.Candidate(agent_id="echo/1")], chosen="echo/1", age_ms=3)

    def get_trace(self, trace_id: str, who: Identity) -> admin.GetTraceReply:
        """One message of that trace."""
        if trace_id == "unknown":
            raise MeshFailure(errors.failure(NO_ROUTE, f"no trace {trace_id}"), trace_id)
        stage = admin.TraceStage(name="received", node_id="n1")
        return admin.GetTraceReply(messages=[admin.TracedMessage(message_id="m1", stages=[stage])])

    def get_node(self) -> admin.GetNodeReply:
        """Node n1."""
        return admin.GetNodeReply(node=admin.NodeRecord(node_id="n1"), registry="memory")

    def list_nodes(self) -> admin.ListNodesReply:
        """Node n1."""
        return admin.ListNodesReply(nodes=[admin.NodeRecord(node_id="n1")])

    def list_sessions(self, request: admin.ListSessionsRequest, who: Identity) -> admin.ListSessionsReply:
        """None."""
        return admin.ListSessionsReply()

    def list_breakers(self, request: admin.ListBreakersRequest, who: Identity) -> admin.ListBreakersReply:
        """That of echo/1 is open."""
        return admin.ListBreakersReply(breakers=[admin.BreakerInfo(agent_id="echo/1", state="OPEN", trips=1)])

    def reset_breaker(self, request: admin.ResetBreakerRequest, who: Identity) -> admin.ResetBreakerReply:
        """Done."""
        return admin.ResetBreakerReply()

    def release_session(self, request: admin.ReleaseSessionRequest, who: Identity) -> admin.ReleaseSessionReply:
        """Begun."""
        return admin.ReleaseSessionReply(agent_id="echo/1", epoch=1)

    def drain_agent(self, request: admin.DrainAgentRequest, who: Identity) -> admin.DrainAgentReply:
        """Begun."""
        return admin.DrainAgentReply(in_flight=1)

    def drain_node(self, request: admin.DrainNodeRequest, who: Identity) -> admin.DrainNodeReply:
        """Begun."""
        return admin.DrainNodeReply(node_id="n1")

    def list_dead_letters(self, request: admin.ListDeadLettersRequest, who: Identity) -> admin.ListDeadLettersReply:
        """One, of message m1."""
        return admin.ListDeadLettersReply(dead_letters=[admin.DeadLetter(message_id="m1", reason="HOP_LIMIT")], kept=1)

    def redrive_dead_letter(
        self, request: admin.RedriveDeadLetterRequest, who: Identity
    ) -> admin.RedriveDeadLetterReply:
        """As message m2."""
        return admin.RedriveDeadLetterReply(message_id="m2")

    def resolve(self, request: registry.ResolveRequest, who: Identity) -> registry.ResolveReply:
        """Agent echo/1."""
        return registry.ResolveReply(agents=[registry.AgentRecord(agent_id="echo/1")], revision=7)

    async def get_agent(self, request: registry.GetAgentRequest, who: Identity) -> registry.AgentRecord:
        """Agent echo/1, else NO_ROUTE."""
        if request.agent_id != "echo/1":
            raise MeshFailure(errors.failure(NO_ROUTE, "no such agent"))
        return registry.AgentRecord(agent_id="echo/1", agent_type="echo", capabilities=["echo"])

    def list_agents(self, request: registry.ListAgentsRequest, who: Identity) -> registry.ListAgentsReply:
        """Agent echo/1."""
        return registry.ListAgentsReply(
            agents=[
                registry.AgentRecord(agent_id="echo/1", agent_type="echo", env="production", status=registry.HEALTHY)
            ]
        )

    def list_capabilities(
        self, request: registry.ListCapabilitiesRequest, who: Identity
    ) -> registry.ListCapabilitiesReply:
        """Capability echo."""
        return registry.ListCapabilitiesReply(capabilities=[registry.Capability(name="echo", agents=1)])

    async def watch_agents(
        self, request: registry.WatchAgentsRequest, who: Identity
    ) -> AsyncGenerator[registry.WatchAgentsReply, None]:
        """Agent echo/1, and then nothing more."""
        yield registry.WatchAgentsReply(snapshot=[registry.AgentRecord(agent_id="echo/1")], revision=1, begins=True)

    async def set_version_policy(
        self, request: registry.SetVersionPolicyRequest, who: Identity
    ) -> registry.SetVersionPolicyReply:
        """As version 2."""
        self.policy.CopyFrom(request.policy)
        self.policy.version = 2
        return registry.SetVersionPolicyReply(policy=self.policy)

    def get_version_policy(
        self, request: registry.GetVersionPolicyRequest, who: Identity
    ) -> registry.GetVersionPolicyReply:
        """The one that was set."""
        self.policy.agent_type, self.policy.env = request.agent_type, request.env or "production"
        return registry.GetVersionPolicyReply(policy=self.policy)

    async def set_config(self, request: admin.SetConfigRequest, who: Identity) -> admin.SetConfigReply:
        """As one version more."""
        self.settings, self.settings_version = dict(request.settings), request.version + 1
        return admin.SetConfigReply(version=self.settings_version)

    def get_config(self, request: admin.GetConfigRequest, who: Identity) -> admin.GetConfigReply:
        """What was set."""
        return admin.GetConfigReply(settings=self.settings, version=self.settings_version)

    @property
    def ready(self) -> bool:
        """True unless a reason was set."""
        return not self.reason

    @property
    def unready_reason(self) -> str:
        """The reason that was set."""
        return self.reason
