"""`reach agents`: who is registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, message_as_dict, note, print_json, print_table

if TYPE_CHECKING:
    from agentreach.v1.registry_pb2 import AgentRecord

_STATUSES = ("STARTING", "HEALTHY", "DEGRADED", "DRAINING", "UNREACHABLE")
_COLOURS = {"HEALTHY": "green", "STARTING": "cyan", "DEGRADED": "yellow", "DRAINING": "yellow", "UNREACHABLE": "red"}


@click.command()
@click.option("--capability", "-c", "capabilities", multiple=True, metavar="NAME", help="Only those that can do this.")
@click.option("--type", "-t", "agent_type", metavar="TYPE", help="Only those of this type.")
@click.option("--env", default="", metavar="NAME", help="Only those of this environment.")
@click.option("--status", type=click.Choice(_STATUSES, case_sensitive=False), help="Only those in this state.")
@targets.url
@as_json
def agents(
    capabilities: tuple[str, ...],
    agent_type: str | None,
    env: str,
    status: str | None,
    url: str | None,
    json_wanted: bool,
) -> None:
    """List the agents that are registered.

    \b
    Examples:
      reach agents
      reach agents --capability ner --json
    """
    from agentreach.v1 import registry_pb2

    request = registry_pb2.ListAgentsRequest(env=env)
    if agent_type:
        request.target.agent_type = agent_type
    request.target.capabilities.extend(capabilities)
    if status:
        request.status = registry_pb2.AgentStatus.Value(status.upper())
    found = ending.run(_list(request, url))
    if json_wanted:
        print_json([message_as_dict(record) for record in found])
        return
    if not found:
        filtered = agent_type or capabilities or env or status
        note("no agent matches" if filtered else "no agents are registered; start one with: reach test-agent")
        return
    print_table(
        ("AGENT", "STATUS", "CAPABILITIES", "VERSION", "IN FLIGHT", "LOAD", "ENV", "NODE"),
        (_row(record) for record in found),
    )


async def _list(request: Any, url: str | None) -> list[AgentRecord]:
    async with targets.client(url) as client:
        return await client.list_agents(request)


def _row(record: AgentRecord) -> tuple[Any, ...]:
    from rich.text import Text

    from agentreach.v1.registry_pb2 import AgentStatus

    status = AgentStatus.Name(record.status) if record.status in AgentStatus.values() else str(record.status)
    limit = f"/{record.max_concurrency}" if record.max_concurrency else ""
    return (
        Text(record.agent_id, style="bold"),
        Text(status, style=_COLOURS.get(status, "")),
        ", ".join(record.capabilities) or "–",
        record.version or "–",
        f"{record.in_flight}{limit}",
        f"{record.load:.0%}",
        record.env,
        record.node_id,
    )
