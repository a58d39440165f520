"""`reach breakers`: which agents get no requests because those failed there, and how to let them have some again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, duration, how_many, message_as_dict, note, print_json, print_table

if TYPE_CHECKING:
    from agentreach.v1.admin_pb2 import BreakerInfo, ListBreakersReply

_COLOURS = {"OPEN": "red", "HALF_OPEN": "yellow", "RAMPING": "cyan", "CLOSED": "green"}


@click.group(invoke_without_command=True)
@click.option("--limit", type=how_many, default=1000, metavar="N", help="At most so many, the worst first.")
@targets.url
@as_json
@click.pass_context
def breakers(context: click.Context, limit: int, url: str | None, json_wanted: bool) -> None:
    """List the agents whose breaker is not closed, or has tripped lately.

    OPEN: it gets no requests. HALF_OPEN: the next request is the probe. RAMPING: it gets a growing share. CLOSED: it
    gets all of them, but it has tripped, and the next trip will last longer.

    \b
    Examples:
      reach breakers
      reach breakers reset extractor/7f9c5d
    """
    context.obj = url
    if context.invoked_subcommand is not None:
        return
    reply = ending.run(_list(limit, url))
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    if reply.breakers:
        print_table(("AGENT", "BREAKER", "TRIPS", "NEXT PROBE", "ENV"), (_row(each) for each in reply.breakers))
    else:
        note("every breaker is closed")
    if reply.silent_nodes:
        note(f"not complete: no answer from {', '.join(reply.silent_nodes)}")


@breakers.command()
@click.argument("agent_id", metavar="AGENT_ID")
@click.option("--env", default="", metavar="NAME", help="The agent's environment.  [default: production]")
@targets.url
@click.pass_obj
def reset(group_url: str | None, agent_id: str, env: str, url: str | None) -> None:
    """Close an agent's breaker and forget its trips: it gets requests again at once.

    \b
    Example:
      reach breakers reset extractor/7f9c5d
    """
    ending.run(_reset(agent_id, env, url or group_url))
    click.echo(f"the breaker of {agent_id} is closed")


async def _list(limit: int, url: str | None) -> ListBreakersReply:
    async with targets.client(url) as client:
        return await client.list_breakers(limit)


async def _reset(agent_id: str, env: str, url: str | None) -> None:
    from agentreach.v1.admin_pb2 import ResetBreakerRequest

    async with targets.client(url) as client:
        await client.reset_breaker(ResetBreakerRequest(agent_id=agent_id, env=env))


def _row(info: BreakerInfo) -> tuple[Any, ...]:
    from rich.text import Text

    return (
        Text(info.agent_id, style="bold"),
        Text(info.state, style=_COLOURS.get(info.state, "")),
        str(info.trips),
        f"in {duration(info.next_probe_ms / 1000)}" if info.next_probe_ms else "–",
        info.env,
    )
