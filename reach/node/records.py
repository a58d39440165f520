"""What stands in the registry under a key. Read with distrust: any version of a node, or anybody, may have written it.

Pure.
"""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import DecodeError

from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire.checks import record_fault
from reach.core.agents import Agent
from reach.core.store import Item

AGENTS, NODES = "agents/", "nodes/"


class Unreadable(Exception):
    """It is not a record that a node can use; says why."""


class Named(Protocol):
    """An `Agent` or its record."""

    @property
    def tenant(self) -> str: ...

    @property
    def env(self) -> str: ...

    @property
    def agent_id(self) -> str: ...


def agent_key(agent: Named) -> str:
    """Where an agent's record stands."""
    return f"{AGENTS}{agent.tenant}/{agent.env}/{agent.agent_id}"


def stored_record(agent: Agent) -> AgentRecord:
    """The part of a record that changes rarely: what changes all the time never goes to the store."""
    record = agent.to_record()
    for name in ("load", "in_flight", "heartbeat_at", "status"):
        record.ClearField(name)
    return record


def read_agent(item: Item) -> AgentRecord:
    """The agent that a key stands for. Raises `Unreadable`."""
    try:
        record = AgentRecord.FromString(item.value)
    except DecodeError as error:
        raise Unreadable(str(error)) from error
    if scope_of(item.key) != (record.tenant, record.env, record.agent_id):
        raise Unreadable(f"it is of agent {record.agent_id[:200]!r}")
    if not record.node_id:
        raise Unreadable("it names no node")
    fault = record_fault(record)
    if fault is not None:
        raise Unreadable(fault.message)
    return record


def written_by(item: Item) -> str:
    """The principal that registered the agent under a key; empty: nobody knows."""
    try:
        return AgentRecord.FromString(item.value).principal
    except DecodeError:
        return ""


def incarnation_in(item: Item) -> bytes:
    """The process that is registered under a key; empty: nobody knows."""
    try:
        return AgentRecord.FromString(item.value).incarnation
    except DecodeError:
        return b""


def read_node(item: Item) -> NodeRecord:
    """The node that a key stands for. Raises `Unreadable`."""
    try:
        record = NodeRecord.FromString(item.value)
    except DecodeError as error:
        raise Unreadable(str(error)) from error
    if item.key != f"{NODES}{record.node_id}":
        raise Unreadable(f"it is of node {record.node_id[:200]!r}")
    if not record.address:
        raise Unreadable("it names no address")
    return record


def scope_of(key: str) -> tuple[str, str, str]:
    """(tenant, env, agent_id) of an agent's key."""
    tenant, _, rest = key.removeprefix(AGENTS).partition("/")
    env, _, agent_id = rest.partition("/")
    return tenant, env, agent_id
