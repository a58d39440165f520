"""Asking a node about itself: unary calls of RegistryService and AdminService for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.aio.tls import Credentials, TlsFileError, TlsFiles, explained
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import Envelope
from reach.adapters.told import told

M = TypeVar("M", bound=Message)

_LISTED_MAX = 100_000  # agents shown to a person at most; a mesh of more is asked with a filter


class NodeUnreached(Exception):
    """No node answered at any of the addresses; the text is one line that says what to do."""


class AdminClient:
    """Calls to the first of `addresses` (HOST:PORT) that answers. Use it as an async context manager.

    Every call raises `MeshFailure` for what the node answered, `NodeUnreached` if none did within `limit_s`.
    """

    def __init__(
        self, addresses: Sequence[str], *, limit_s: float = 4.0, api_key: str = "", tls: TlsFiles | None = None
    ) -> None:
        """`tls` None: in the clear."""
        self._addresses = list(addresses)
        self._limit_s = limit_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._credentials = Credentials(tls.read) if tls is not None else None
        self._channel: grpc.aio.Channel | None = None
        self._at = 0
        self._reasons: list[str] = []

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def list_agents(self, request: registry.ListAgentsRequest) -> list[registry.AgentRecord]:
        """Every page of ListAgents."""
        found: list[registry.AgentRecord] = []
        while len(found) < _LISTED_MAX:
            page = await self._call("RegistryService/ListAgents", request, registry.ListAgentsReply)
            found.extend(page.agents)
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        return found

    async def list_capabilities(self, env: str = "") -> registry.ListCapabilitiesReply:
        """The inventory."""
        request = registry.ListCapabilitiesRequest(env=env)
        return await self._call("RegistryService/ListCapabilities", request, registry.ListCapabilitiesReply)

    async def explain(self, envelope: Envelope) -> admin.ExplainReply:
        """Who would get this message, and why not the others."""
        return await self._call("AdminService/Explain", envelope, admin.ExplainReply)

    async def get_trace(self, trace_id: str) -> admin.GetTraceReply:
        """The stages of every message of a trace."""
        request = admin.GetTraceRequest(trace_id=trace_id)
        return await self._call("AdminService/GetTrace", request, admin.GetTraceReply)

    async def list_dead_letters(self, limit: int = 0, message_id: str = "") -> admin.ListDeadLettersReply:
        """The requests that the mesh gave up and keeps."""
        request = admin.ListDeadLettersRequest(limit=limit, message_id=message_id)
        return await self._call("AdminService/ListDeadLetters", request, admin.ListDeadLettersReply)

    async def redrive_dead_letter(self, request: admin.RedriveDeadLetterRequest) -> admin.RedriveDeadLetterReply:
        """Send one of them once more."""
        return await self._call("AdminService/RedriveDeadLetter", request, admin.RedriveDeadLetterReply)

    async def get_node(self) -> admin.GetNodeReply:
        """The node that answers."""
        return await self._call("AdminService/GetNode", admin.GetNodeRequest(), admin.GetNodeReply)

    async def list_nodes(self) -> admin.ListNodesReply:
        """The nodes of the mesh, as the one that answers sees them."""
        return await self._call("AdminService/ListNodes", admin.ListNodesRequest(), admin.ListNodesReply)

    async def list_sessions(self, request: admin.ListSessionsRequest) -> admin.ListSessionsReply:
        """Conversations with their owners."""
        return await self._call("AdminService/ListSessions", request, admin.ListSessionsReply)

    async def release_session(self, request: admin.ReleaseSessionRequest) -> admin.ReleaseSessionReply:
        """Have a conversation leave its agent; returns when that has begun."""
        return await self._call("AdminService/ReleaseSession", request, admin.ReleaseSessionReply)

    async def get_agent(self, agent_id: str, env: str = "") -> registry.AgentRecord:
        """One agent's record."""
        request = registry.GetAgentRequest(agent_id=agent_id, env=env)
        return await self._call("RegistryService/GetAgent", request, registry.AgentRecord)

    async def get_version_policy(self, agent_type: str, env: str = "") -> registry.VersionPolicy:
        """Which versions of a type are preferred; version 0: there is no policy."""
        request = registry.GetVersionPolicyRequest(agent_type=agent_type, env=env)
        reply = await self._call("RegistryService/GetVersionPolicy", request, registry.GetVersionPolicyReply)
        return reply.policy

    async def set_version_policy(self, policy: registry.VersionPolicy) -> registry.VersionPolicy:
        """Set it in place of its `version`; the policy with its new one."""
        request = registry.SetVersionPolicyRequest(policy=policy)
        reply = await self._call("RegistryService/SetVersionPolicy", request, registry.SetVersionPolicyReply)
        return reply.policy

    async def get_config(self, name: str) -> admin.GetConfigReply:
        """What is set for agents under a name."""
        return await self._call("AdminService/GetConfig", admin.GetConfigRequest(name=name), admin.GetConfigReply)

    async def set_config(self, name: str, settings: Mapping[str, str], version: int = 0) -> int:
        """Set it in place of `version`; the new one."""
        request = admin.SetConfigRequest(name=name, settings=settings, version=version)
        return (await self._call("AdminService/SetConfig", request, admin.SetConfigReply)).version

    async def drain_agent(self, request: admin.DrainAgentRequest) -> admin.DrainAgentReply:
        """Have an agent finish and leave; returns when that has begun."""
        return await self._call("AdminService/DrainAgent", request, admin.DrainAgentReply)

    async def drain_node(self, request: admin.DrainNodeRequest) -> admin.DrainNodeReply:
        """Have the node finish and end; returns when that has begun."""
        return await self._call("AdminService/DrainNode", request, admin.DrainNodeReply)

    async def create_key(self, request: admin.CreateKeyRequest) -> admin.CreateKeyReply:
        """A new API key; the reply alone holds it."""
        return await self._call("AdminService/CreateKey", request, admin.CreateKeyReply)

    async def list_keys(self) -> admin.ListKeysReply:
        """The API keys of the caller's tenant; of all, for those who run the mesh."""
        return await self._call("AdminService/ListKeys", admin.ListKeysRequest(), admin.ListKeysReply)

    async def revoke_key(self, key_id: str) -> None:
        """End a key, and what it has opened on any node."""
        await self._call("AdminService/RevokeKey", admin.RevokeKeyRequest(key_id=key_id), admin.RevokeKeyReply)

    async def rotate_key(self, request: admin.RotateKeyRequest) -> admin.RotateKeyReply:
        """A new key in place of another; the reply alone holds it."""
        return await self._call("AdminService/RotateKey", request, admin.RotateKeyReply)

    async def explain_access(self, request: admin.ExplainAccessRequest) -> admin.ExplainAccessReply:
        """What a principal may, and by which rule."""
        return await self._call("AdminService/ExplainAccess", request, admin.ExplainAccessReply)

    async def list_breakers(self, limit: int) -> admin.ListBreakersReply:
        """Breakers that are not closed, or have tripped lately."""
        return await self._call(
            "AdminService/ListBreakers", admin.ListBreakersRequest(limit=limit), admin.ListBreakersReply
        )

    async def reset_breaker(self, request: admin.ResetBreakerRequest) -> admin.ResetBreakerReply:
        """Close an agent's breaker."""
        return await self._call("AdminService/ResetBreaker", request, admin.ResetBreakerReply)

    async def _call(self, method: str, request: Message, reply_type: type[M]) -> M:
        while True:
            address = self._addresses[self._at]
            if self._channel is None:
                self._channel = self._dial(address)
            call = self._channel.unary_unary(
                f"/agentreach.v1.{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply_type.FromString,
            )
            try:
                return await call(request, timeout=self._limit_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                refused = told(error)
                if refused is not None:
                    raise refused from error
                await self._give_up_address(address, error.details() or "")

    def _dial(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        try:
            credentials, _ = self._credentials.current()
        except TlsFileError as error:
            raise NodeUnreached(str(error)) from error
        return grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS)

    async def _give_up_address(self, address: str, details: str) -> None:
        tls = self._credentials.current()[1] if self._credentials is not None else None
        reason = await explained(address, details, tls)
        if reason != details:
            self._reasons.append(f"{address}: {reason}")
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        self._at += 1
        if self._at >= len(self._addresses):
            self._at = 0
            reasons, self._reasons = self._reasons, []
            if reasons:
                raise NodeUnreached(f"no node to talk to; {'; '.join(reasons)}")
            where = ", ".join(self._addresses)
            raise NodeUnreached(f"no node answers at {where}; start one with: reach serve")
