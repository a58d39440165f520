"""`reach nodes`: which nodes there are, who leads, and how the one that is asked sees the others."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, duration, message_as_dict, print_json, print_table, short

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp
    from rich.text import Text

    from agentreach.v1.admin_pb2 import ListNodesReply, NodeRecord, NodeState

_WHY_CHARS = 100  # the longest of what agentreach.aio.tls explains, whose end says what to do
_GRPC_STATUS = re.compile(r"(?:\S+:\d+: )?([A-Z_]+): (?:.*last error: .*: )?(.*?)(?: \(\d+\))?", re.DOTALL)
COLUMNS = ("NODE", "ADDRESS", "ZONE", "VERSION", "UP", "LEADER", "STATE", "AGENTS")


@click.command()
@targets.url
@as_json
def nodes(url: str | None, json_wanted: bool) -> None:
    """List the nodes of the mesh, as the node that is asked sees them.

    LEADER: since when that node leads. STATE: "linked" if the asked node can give it requests, else why not. AGENTS:
    how many are attached there.

    \b
    Examples:
      reach nodes
      reach nodes --json
    """
    reply = ending.run(_list(url))
    if json_wanted:
        print_json(message_as_dict(reply))
    else:
        print_table(COLUMNS, rows(reply))


async def _list(url: str | None) -> ListNodesReply:
    async with targets.client(url) as client:
        return await client.list_nodes()


def rows(reply: ListNodesReply) -> list[tuple[Any, ...]]:
    """The table's rows."""
    states = {state.node_id: state for state in reply.states}
    return [_row(record, states.get(record.node_id), reply) for record in reply.nodes]


def _row(record: NodeRecord, state: NodeState | None, reply: ListNodesReply) -> tuple[Any, ...]:
    from rich.text import Text

    leads = record.node_id == reply.leader_id
    return (
        Text(record.node_id, style="bold"),
        record.address or "–",
        record.zone or "–",
        record.version or "–",
        _since(record.started_at) if record.HasField("started_at") else "–",
        Text(f"for {_since(reply.leader_since)}", style="green") if leads else "–",
        _told(state),
        str(state.agents) if state is not None else "–",
    )


def _told(state: NodeState | None) -> Text:
    from rich.text import Text

    if state is None:
        return Text("–")
    if not state.linked:
        return Text(f"not linked for {duration(state.since_s)}: {brief(state.why)}", style="red")
    return Text("draining", style="yellow") if state.draining else Text("linked", style="green")


def brief(why: str) -> str:
    """Why a node is not linked, as a table has room for it: of a gRPC status what went wrong in the end."""
    status = _GRPC_STATUS.fullmatch(why)
    if status is None:
        return short(why, _WHY_CHARS)
    name, told = status.groups()
    told = told or name.replace("_", " ").capitalize()
    return short(told[0].lower() + told[1:] if told[1:2].islower() else told, _WHY_CHARS)


def _since(moment: Timestamp) -> str:
    return duration(max(0.0, time.time() - moment.ToNanoseconds() / 1e9))
