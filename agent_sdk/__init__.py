"""Agent-Reach for Python: write an agent, or call one.

An agent:

    from agent_sdk import Agent

    agent = Agent("greeter", capabilities=["greet"])

    @agent.handler
    async def greet(name: str) -> str:
        return f"Hello, {name}"

    agent.run()

A caller (`agent_sdk.sync` has the same without `async`):

    from agent_sdk import connect

    async with connect() as mesh:
        reply = await mesh.request("Ada", capabilities=["greet"], timeout=5)
"""

from agent_sdk.agent import Agent
from agent_sdk.client import Mesh
from agent_sdk.connecting import ConnectedMesh, connect
from agent_sdk.context import BlockingContext, Context
from agent_sdk.errors import (
    AgentError,
    AgentLost,
    AgentReplaced,
    BreakerOpen,
    Cancelled,
    ConnectFailed,
    ErrorCode,
    Fenced,
    HopLimit,
    IdempotencyConflict,
    Internal,
    InvalidEnvelope,
    LoopDetected,
    NoAgentAvailable,
    NoRoute,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    ReachError,
    RegistryUnavailable,
    Rejected,
    SessionLost,
    ShuttingDown,
    Timeout,
    Unauthenticated,
    WouldDeadlock,
)
from agent_sdk.logs import TraceFilter, current_trace_id
from agent_sdk.messages import Acceptance, Event, PublishCounts, Reply
from agent_sdk.serving import run, serve
from agent_sdk.sessions import Session
from agent_sdk.settings import Tls
from agent_sdk.streams import ReplyStream
from agent_sdk.topics import Subscription
from agentreach.wire.payload import Blob

__all__ = [
    "Acceptance",
    "Agent",
    "AgentError",
    "AgentLost",
    "AgentReplaced",
    "Blob",
    "BlockingContext",
    "BreakerOpen",
    "Cancelled",
    "ConnectFailed",
    "ConnectedMesh",
    "Context",
    "ErrorCode",
    "Event",
    "Fenced",
    "HopLimit",
    "IdempotencyConflict",
    "Internal",
    "InvalidEnvelope",
    "LoopDetected",
    "Mesh",
    "NoAgentAvailable",
    "NoRoute",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "PublishCounts",
    "ReachError",
    "RegistryUnavailable",
    "Rejected",
    "Reply",
    "ReplyStream",
    "Session",
    "SessionLost",
    "ShuttingDown",
    "Subscription",
    "Timeout",
    "Tls",
    "TraceFilter",
    "Unauthenticated",
    "WouldDeadlock",
    "connect",
    "current_trace_id",
    "run",
    "serve",
]
