"""`reach sessions`: which agent holds which conversation, and how to have one move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, duration, how_many, message_as_dict, note, print_json, print_table, short

if TYPE_CHECKING:
    from agentreach.v1.admin_pb2 import (
        ListSessionsReply,
        ListSessionsRequest,
        ReleaseSessionReply,
        ReleaseSessionRequest,
        SessionInfo,
    )


@click.group(invoke_without_command=True)
@click.option("--type", "-t", "agent_type", default="", metavar="TYPE", help="Only those of agents of this type.")
@click.option("--agent", "agent_id", default="", metavar="TYPE/INSTANCE", help="Only those that this agent holds.")
@click.option("--session", "session_id", default="", metavar="ID", help="Only those of this id.")
@click.option("--limit", type=how_many, default=1000, metavar="N", help="At most so many, the last used first.")
@targets.url
@as_json
@click.pass_context
def sessions(context: click.Context, /, url: str | None, json_wanted: bool, **asked: Any) -> None:
    """List the conversations that agents hold.

    EPOCH grows when a conversation gets another owner. WAITING: its messages that have not been given to the agent.
    SNAPSHOT: the turn after which its state was stored last.

    \b
    Examples:
      reach sessions --type memory
      reach sessions --agent memory/7f9c5d
      reach sessions release ada --type memory
    """
    context.obj = url
    if context.invoked_subcommand is not None:
        return
    from agentreach.v1.admin_pb2 import ListSessionsRequest

    reply = ending.run(_list(ListSessionsRequest(**asked), url))
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    if reply.sessions:
        columns = ("SESSION", "AGENT", "NODE", "EPOCH", "IDLE", "WAITING", "SNAPSHOT", "ENV", "")
        print_table(columns, (_row(each) for each in reply.sessions))
    else:
        note("no agent holds such a session")
    if reply.silent_nodes:
        note(f"not complete: no answer from {', '.join(reply.silent_nodes)}")


@sessions.command()
@click.argument("session_id", metavar="SESSION")
@click.option("--type", "-t", "agent_type", required=True, metavar="TYPE", help="The type of the agent that holds it.")
@click.option("--env", default="", metavar="NAME", help="The session's environment.  [default: production]")
@targets.url
@as_json
@click.pass_obj
def release(
    group_url: str | None, session_id: str, agent_type: str, env: str, url: str | None, json_wanted: bool
) -> None:
    """Have a conversation move to another agent of its type: its state is stored, and restored there.

    \b
    Example:
      reach sessions release ada --type memory
    """
    from agentreach.v1.admin_pb2 import ReleaseSessionRequest

    request = ReleaseSessionRequest(session_id=session_id, agent_type=agent_type, env=env)
    reply = ending.run(_release(request, url or group_url))
    if json_wanted:
        print_json(message_as_dict(reply))
    else:
        click.echo(f"session {short(session_id)} leaves {reply.agent_id}")


async def _list(request: ListSessionsRequest, url: str | None) -> ListSessionsReply:
    async with targets.client(url) as client:
        return await client.list_sessions(request)


async def _release(request: ReleaseSessionRequest, url: str | None) -> ReleaseSessionReply:
    async with targets.client(url) as client:
        return await client.release_session(request)


def _row(info: SessionInfo) -> tuple[Any, ...]:
    from rich.text import Text

    return (
        Text(short(info.session_id), style="bold"),
        info.agent_id,
        info.node_id,
        str(info.epoch),
        duration(info.idle_s),
        str(info.waiting) if info.waiting else "–",
        f"turn {info.turn}" if info.turn else "–",
        info.env,
        Text("moving", style="yellow") if info.moving else "",
    )
