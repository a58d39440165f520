"""`reach drain`: take an agent, or a node, out of service without losing anything."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, duration, note, print_json
from reach.cli.times import Seconds

if TYPE_CHECKING:
    from reach.adapters.admin_client import AdminClient

_REACHED = "\0"  # --node without an id: what nobody can write on a command line
_LOOK_EVERY_S = 0.2
_MARGIN_S = 15.0  # after the time of the drain: for cancelled handlers, and for the process to end


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is being drained, and what it still had to do."""

    name: str
    in_flight: int
    sessions: int
    limit_s: float
    incarnation: bytes


@click.command()
@click.argument("agent_id", required=False, metavar="[AGENT_ID]")
@click.option(
    "--node",
    "node_id",
    is_flag=False,
    flag_value=_REACHED,
    metavar="[ID]",
    help="Drain this node (without ID: the one that is reached), not an agent. Its process ends then.",
)
@click.option("--env", default="", metavar="NAME", help="The agent's environment.  [default: production]")
@click.option("--reason", default="", metavar="TEXT", help="Why; for the logs of the node and of the agent.")
@click.option(
    "--timeout",
    type=Seconds(up_to_s=3600),
    metavar="SECONDS",
    help="Time for what runs to end; then it is cancelled.  [default: the node's drain_timeout_s]",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until it has left.")
@targets.url
@as_json
def drain(
    agent_id: str | None, node_id: str | None, url: str | None, json_wanted: bool, no_wait: bool, **how: Any
) -> None:
    """Take an agent out of service: no new work at once, what runs may end, then it leaves and its process ends with 0.

    Its conversations go on with other agents. With --node a node does the same, as if it got SIGTERM: no new requests,
    what runs may end, then its process ends. Whoever supervises the process starts it again.

    \b
    Examples:
      reach drain extractor/7f9c5d --reason 'new version'
      reach drain --node node-2 --timeout 30
      reach drain --node
    """
    if node_id == "":
        raise click.UsageError("--node '' names no node; for the one that is reached say --node alone")
    if (node_id is None) == (not agent_id):
        raise click.UsageError("say what to drain: AGENT_ID, or --node for a node")
    began = time.monotonic()
    begun, left = ending.run(_drain(agent_id or "", "" if node_id in (None, _REACHED) else node_id, url, no_wait, how))
    took_s = time.monotonic() - began
    if json_wanted:
        print_json(
            {
                "drains": begun.name,
                "in_flight": begun.in_flight,
                "sessions": begun.sessions,
                "timeout_ms": int(begun.limit_s * 1000),
                "left": left,
                "took_ms": round(took_s * 1e3),
            }
        )
    elif left:
        click.echo(f"{begun.name} has drained and left, in {duration(took_s)}")
    if not left and not no_wait:
        raise Ended(f"{begun.name} has not left in {duration(took_s)}; see its log", Exit.MESH_ERROR)


async def _drain(
    agent_id: str, node_id: str, url: str | None, no_wait: bool, how: dict[str, Any]
) -> tuple[_Begun, bool]:
    async with targets.client(url) as client:
        if agent_id:
            begun = await _agent(client, agent_id, **how)
        else:
            begun = await _node(client, node_id, how["reason"], how["timeout"])
        sessions = f", {begun.sessions} sessions" if agent_id else ""
        note(f"{begun.name} drains: {begun.in_flight} requests in flight{sessions}, up to {duration(begun.limit_s)}")
        give_up = time.monotonic() + begun.limit_s + _MARGIN_S
        while not no_wait and time.monotonic() < give_up:
            if await (_agent_left(client, begun, how["env"]) if agent_id else _node_left(client, begun, node_id)):
                return begun, True
            await asyncio.sleep(_LOOK_EVERY_S)
        return begun, False


async def agent_drained(client: AdminClient, agent_id: str, env: str, reason: str) -> bool:
    """Drain an agent and wait until it has left, which it may have already; False if it has not in its time."""
    from agentreach.v1.error_pb2 import NO_ROUTE
    from reach.core.ports import MeshFailure

    try:
        begun = await _agent(client, agent_id, env, reason, None)
    except MeshFailure as failure:
        if failure.error.code == NO_ROUTE:
            return True
        raise
    give_up = time.monotonic() + begun.limit_s + _MARGIN_S
    while time.monotonic() < give_up:
        if await _agent_left(client, begun, env):
            return True
        await asyncio.sleep(_LOOK_EVERY_S)
    return False


async def _agent(client: AdminClient, agent_id: str, env: str, reason: str, timeout: float | None) -> _Begun:
    from agentreach.v1.admin_pb2 import DrainAgentRequest

    timeout_ms = int((timeout or 0) * 1000)
    request = DrainAgentRequest(agent_id=agent_id, env=env, reason=reason, timeout_ms=timeout_ms)
    reply = await client.drain_agent(request)
    return _Begun(agent_id, reply.in_flight, reply.sessions, reply.timeout_ms / 1000, reply.incarnation)


async def _node(client: AdminClient, node_id: str, reason: str, timeout: float | None) -> _Begun:
    from agentreach.v1.admin_pb2 import DrainNodeRequest

    incarnation = await _incarnation(client, node_id)
    request = DrainNodeRequest(node_id=node_id, reason=reason, timeout_ms=int((timeout or 0) * 1000))
    reply = await client.drain_node(request)
    return _Begun(f"node {reply.node_id}", reply.in_flight, 0, reply.timeout_ms / 1000, incarnation)


async def _incarnation(client: AdminClient, node_id: str) -> bytes:
    """Which start of the node there is now; empty if there is none."""
    if node_id == _REACHED:
        return (await client.get_node()).node.incarnation
    found = (await client.list_nodes()).nodes
    return next((record.incarnation for record in found if record.node_id == node_id), b"")


async def _agent_left(client: AdminClient, begun: _Begun, env: str) -> bool:
    """Nobody is registered under its name any more, or a successor is."""
    from agentreach.v1.error_pb2 import NO_ROUTE
    from reach.core.ports import MeshFailure

    try:
        record = await client.get_agent(begun.name, env)
    except MeshFailure as failure:
        if failure.error.code == NO_ROUTE:
            return True
        raise
    return record.incarnation != begun.incarnation


async def _node_left(client: AdminClient, begun: _Begun, node_id: str) -> bool:
    """It is not among the nodes any more, nobody answers at the address of the one that was reached, or a successor."""
    from reach.adapters.admin_client import NodeUnreached

    try:
        return await _incarnation(client, node_id) != begun.incarnation
    except NodeUnreached:
        return True
