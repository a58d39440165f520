"""`reach trace ID`: where the time of a request went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from reach.cli import ending, targets
from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, console, duration, message_as_dict, note, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from agentreach.v1.admin_pb2 import GetTraceReply
    from reach.cli.timeline import Message

_BAR_WIDTH = 30
_COLOURS = {
    "in the agent's local queue": "yellow",
    "in the node's queue": "yellow",
    "in the handler": "green",
    "in the handler, streaming": "green",
}


@click.command()
@click.argument("trace_id", metavar="ID")
@targets.url
@as_json
def trace(trace_id: str, url: str | None, json_wanted: bool) -> None:
    """Show every message of a trace, where it was, and for how long. Replies and errors name their trace.

    \b
    Example:
      reach trace 0af7651916cd43dd8448eb211c80319c
    """
    reply = ending.run(_ask(trace_id, url))
    if json_wanted:
        print_json(message_as_dict(reply))
    if not reply.messages:
        silent = f" (no answer from {', '.join(reply.silent_nodes)})" if reply.silent_nodes else ""
        raise Ended(
            f"no node knows a trace {trace_id!r}{silent}; traces are kept for a while only (settings trace_recent_max,"
            " trace_kept_max, trace_kept_s)",
            Exit.MESH_ERROR,
        )
    if not json_wanted:
        _show(reply)


async def _ask(trace_id: str, url: str | None) -> GetTraceReply:
    async with targets.client(url) as client:
        return await client.get_trace(trace_id)


def _show(reply: GetTraceReply) -> None:
    from reach.cli import timeline

    found = timeline.messages(reply)
    whole_us = timeline.whole_us(found)
    screen = console()
    for message in found:
        for line in _lines(message, whole_us):
            screen.print(line, overflow="ellipsis", no_wrap=True)
    if reply.silent_nodes:
        note(f"not complete: no answer from {', '.join(reply.silent_nodes)}")


def _lines(message: Message, whole_us: int) -> list[Text]:
    from rich.text import Text

    from reach.cli import timeline

    indent = "  " * message.depth
    arrow = "└ " if message.depth else ""
    outcome = message.outcome or "running"
    colour = {"OK": "green", "running": "cyan"}.get(outcome, "red")
    head = Text(f"{indent}{arrow}")
    head.append(f"{message.source or '?'} → {message.agent_id or '(nobody)'}", style="bold")
    head.append("  ")
    head.append(outcome, style=colour)
    head.append(f"  {duration((message.end_us - message.begin_us) / 1e6)}")
    head.append(f"  message {message.message_id}", style="dim")
    lines = [head]
    for span in message.spans:
        line = Text(f"{indent}  ")
        line.append(timeline.bar(span, whole_us, _BAR_WIDTH), style=_COLOURS.get(span.where, "blue"))
        line.append(f" {duration((span.end_us - span.begin_us) / 1e6):>10}  {span.where}")
        again = f"attempt {span.attempt}" if span.attempt > 1 else ""
        detail = ", ".join(part for part in (again, span.detail) if part)
        if detail:
            line.append(f"   {detail}", style="dim")
        lines.append(line)
    if message.ending:
        lines.append(Text(f"{indent}  {' ' * _BAR_WIDTH} {'':>10}  {message.ending}", style=colour))
    return lines
