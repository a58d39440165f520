"""Which method of the contract is answered by what; the ones of later issues are served as UNIMPLEMENTED and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from agentreach.v1 import admin_pb2, mesh_pb2, peer_pb2, registry_pb2
from agentreach.v1.envelope_pb2 import Envelope
from reach.adapters.grpc_server import calls, connect
from reach.adapters.grpc_server.auditing import audited
from reach.adapters.grpc_server.calls import Handler, query
from reach.adapters.grpc_server.gating import admitted
from reach.core.ports import Identity, Switchboard

MESH = "agentreach.v1.MeshService"
REGISTRY = "agentreach.v1.RegistryService"
ADMIN = "agentreach.v1.AdminService"
PEER = "agentreach.v1.PeerService"

_CHANGES = frozenset({"SetVersionPolicy"})
"""What changes something, outside of AdminService."""


def mesh(node: Switchboard) -> grpc.GenericRpcHandler:
    """Connect, Invoke, InvokeStream, Publish."""
    return _service(
        mesh_pb2.DESCRIPTOR,
        "MeshService",
        {
            "Connect": connect.connect("Connect", lambda call: node.open_stream(admitted(), call.peer())),
            "Invoke": calls.message_call("Invoke", node.invoke),
            "InvokeStream": calls.stream_call("InvokeStream", node),
            "Publish": calls.message_call("Publish", node.publish, event=True),
        },
    )


def registry(node: Switchboard) -> grpc.GenericRpcHandler:
    """What is registered, as this node sees it."""
    return _service(
        registry_pb2.DESCRIPTOR,
        "RegistryService",
        {
            "Resolve": query("Resolve", registry_pb2.ResolveRequest, node.resolve),
            "GetAgent": query("GetAgent", registry_pb2.GetAgentRequest, node.get_agent),
            "ListAgents": query("ListAgents", registry_pb2.ListAgentsRequest, node.list_agents),
            "ListCapabilities": query("ListCapabilities", registry_pb2.ListCapabilitiesRequest, node.list_capabilities),
            "WatchAgents": calls.watch("WatchAgents", registry_pb2.WatchAgentsRequest, node.watch_agents),
            "SetVersionPolicy": query(
                "SetVersionPolicy", registry_pb2.SetVersionPolicyRequest, node.set_version_policy
            ),
            "GetVersionPolicy": query(
                "GetVersionPolicy", registry_pb2.GetVersionPolicyRequest, node.get_version_policy
            ),
        },
        node,
    )


def admin(node: Switchboard) -> grpc.GenericRpcHandler:
    """What operators ask."""

    def everywhere(method: str, own: Callable[[Any, Identity], Message]) -> Handler:
        return calls.everywhere(method, getattr(admin_pb2, f"{method}Request"), own, node)

    return _service(
        admin_pb2.DESCRIPTOR,
        "AdminService",
        {
            "GetNode": query("GetNode", admin_pb2.GetNodeRequest, lambda _, who: node.get_node()),
            "ListNodes": query("ListNodes", admin_pb2.ListNodesRequest, lambda _, who: node.list_nodes()),
            "Explain": query("Explain", Envelope, node.explain),
            "GetTrace": everywhere("GetTrace", lambda request, who: node.get_trace(request.trace_id, who)),
            "ListSessions": everywhere("ListSessions", node.list_sessions),
            "ReleaseSession": everywhere("ReleaseSession", node.release_session),
            "ListDeadLetters": everywhere("ListDeadLetters", node.list_dead_letters),
            "RedriveDeadLetter": everywhere("RedriveDeadLetter", node.redrive_dead_letter),
            "ListBreakers": everywhere("ListBreakers", node.list_breakers),
            "ResetBreaker": everywhere("ResetBreaker", node.reset_breaker),
            "DrainAgent": everywhere("DrainAgent", node.drain_agent),
            "DrainNode": everywhere("DrainNode", node.drain_node),
            "GetConfig": query("GetConfig", admin_pb2.GetConfigRequest, node.get_config),
            "CreateKey": query(
                "CreateKey", admin_pb2.CreateKeyRequest, lambda request, who: node.keys.create_key(request, who)
            ),
            "ListKeys": query(
                "ListKeys", admin_pb2.ListKeysRequest, lambda request, who: node.keys.list_keys(request, who)
            ),
            "RevokeKey": query(
                "RevokeKey", admin_pb2.RevokeKeyRequest, lambda request, who: node.keys.revoke_key(request, who)
            ),
            "RotateKey": query(
                "RotateKey", admin_pb2.RotateKeyRequest, lambda request, who: node.keys.rotate_key(request, who)
            ),
            "ExplainAccess": query(
                "ExplainAccess",
                admin_pb2.ExplainAccessRequest,
                lambda request, who: node.keys.explain_access(request, who),
            ),
            "SetConfig": query("SetConfig", admin_pb2.SetConfigRequest, node.set_config),
        },
        node,
    )


def peer(node: Switchboard) -> grpc.GenericRpcHandler:
    """The links of other nodes."""
    link = connect.connect("Link", lambda call: node.open_node_stream(call.peer()))
    return _service(peer_pb2.DESCRIPTOR, "PeerService", {"Link": link})


def _service(
    file: FileDescriptor, name: str, served: dict[str, Handler], node: Switchboard | None = None
) -> grpc.GenericRpcHandler:
    """With `node` its audit log is told who uses AdminService, or sets a policy."""
    service = file.services_by_name[name]
    table = dict(served)
    for name in table:
        if node is not None and (service.name == "AdminService" or name in _CHANGES):
            table[name] = audited(service.methods_by_name[name], table[name], node)
    for method in service.methods:
        if method.name not in table:
            table[method.name] = calls.later(
                f"{service.full_name}/{method.name}",
                streams_in=method.client_streaming,
                streams_out=method.server_streaming,
            )
    return grpc.method_handlers_generic_handler(service.full_name, table)
