"""What `make cluster` shows: nodes, etcd members, agents, and calls with the way each took."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent_sdk import Mesh, connect
from agent_sdk.errors import ReachError
from agentreach.v1.admin_pb2 import GetTraceReply, ListNodesReply
from agentreach.v1.registry_pb2 import HEALTHY, AgentRecord, ListAgentsRequest
from reach.adapters.admin_client import AdminClient, NodeUnreached
from reach.cli import nodes as node_table
from reach.cli.output import duration
from reach.core.ports import MeshFailure

if TYPE_CHECKING:
    from tools.cluster import Cluster, Part

CALL_EVERY_S = 1.0
CALLS_SHOWN = 9
CALLS_ONCE = 9
REFRESH_S = 0.5
POLL_S = 0.1
CALL_TIMEOUT_S = 5.0
AGENTS_EXPECTED = 7  # of the demo's five processes
SHOWN_CHARS_MAX = 40

ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hello", {"capabilities": ["echo"]}),
    ("my name is Ada", {"agent_type": "memory", "session": "ada"}),
    ("pass it on", {"capabilities": ["report"]}),
    ("I am Alan", {"agent_type": "memory", "session": "alan"}),
)


class View:
    """Looks at the cluster and calls its agents."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._screen = Console(highlight=False, markup=False, emoji=False)
        self._nodes = ListNodesReply()
        self._agents: list[AgentRecord] = []
        self._calls: deque[Text] = deque(maxlen=CALLS_SHOWN)

    def say(self, text: str) -> None:
        """One line of text, above what is live."""
        self._screen.print(text, soft_wrap=True)

    async def ready(self, limit_s: float) -> None:
        """Wait until every node knows every node and every agent. Raises `TimeoutError`."""
        give_up = time.monotonic() + limit_s
        for place in self._cluster.places:
            while not await self._complete_at(place.grpc):
                if time.monotonic() > give_up:
                    raise TimeoutError
                await asyncio.sleep(POLL_S)

    async def _complete_at(self, address: str) -> bool:
        found = await _asked([address])
        if found is None:
            return False
        reply, agents = found
        linked = sum(state.linked for state in reply.states)
        healthy = sum(record.status == HEALTHY for record in agents)
        return linked == len(self._cluster.places) and healthy >= AGENTS_EXPECTED and bool(reply.leader_id)

    async def show(self, *, once: bool) -> None:
        """Show it until cancelled; with `once` a few calls only."""
        await self._look()
        if once or not self._screen.is_terminal:
            self._screen.print(self._tables())
            self.say(self._how_to())
            async with contextlib.aclosing(self._made(CALLS_ONCE if once else None)) as calls:
                async for line in calls:
                    self._screen.print(line, soft_wrap=True)
            return
        with Live(console=self._screen, auto_refresh=False, vertical_overflow="visible") as live:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._refresh(live), name="refresh")
                group.create_task(self._collect(), name="calls")

    async def _refresh(self, live: Live) -> None:
        while True:
            await self._look()
            live.update(Group(self._tables(), Text(self._how_to()), *self._calls), refresh=True)
            await asyncio.sleep(REFRESH_S)

    async def _collect(self) -> None:
        async for line in self._made(None):
            self._calls.append(line)

    async def _look(self) -> None:
        found = await _asked([place.grpc for place in self._cluster.places])
        if found is not None:
            self._nodes, self._agents = found

    # ---- pictures ----

    def _tables(self) -> Group:
        nodes = _table(("PID", *node_table.COLUMNS, "WHO"))
        rows = {str(row[0]): row for row in node_table.rows(self._nodes)}
        for part in self._cluster.nodes:
            row = rows.get(part.name, (part.name, *("–" for _ in node_table.COLUMNS[1:])))
            here = sorted(record.agent_id for record in self._agents if record.node_id == part.name)
            nodes.add_row(_pid(part), *row, ", ".join(here) or "–")
        members = _table(("PID", "ETCD", "ADDRESS"))
        for part, place in zip(self._cluster.etcds, self._cluster.places, strict=True):
            members.add_row(_pid(part), part.name, place.etcd)
        return Group(nodes, Text(), members, Text())

    def _how_to(self) -> str:
        urls = self._cluster.urls_from(0)
        second, member = self._cluster.nodes[1], self._cluster.etcds[0]
        return f"""try it from another terminal (in .venv/bin, if it is not on your PATH):

  export REACH_URL={urls}
  reach nodes
  reach call --type memory --session ada 'what did I say?'
  reach sessions
  kill -9 {second.pid:<17} # {second.name}: its agents move to the other nodes
  reach drain --node {second.name} # the same without a failed call
  kill -9 {member.pid:<17} # one etcd member of three: nothing happens

What ends is started again after a while. Ctrl-C ends it all.
"""

    # ---- calls ----

    async def _made(self, count: int | None) -> AsyncGenerator[Text, None]:
        """Make calls at each node in turn, one line each."""
        async with contextlib.AsyncExitStack() as stack:
            callers: list[Mesh] = []
            for number in range(len(self._cluster.places)):
                mesh = connect(self._cluster.urls_from(number), name=f"caller-{number + 1}", own_link=True)
                callers.append(await stack.enter_async_context(mesh))
            for number in _numbers(count):
                if number:
                    await asyncio.sleep(CALL_EVERY_S)
                text, target = ASKED[number % len(ASKED)]
                yield await self._call(callers[number % len(callers)], text, target)

    async def _call(self, mesh: Mesh, text: str, target: dict[str, Any]) -> Text:
        line = Text(time.strftime("  %H:%M:%S "), no_wrap=True, overflow="ellipsis")
        began = time.monotonic()
        try:
            reply = await mesh.request(text, timeout=CALL_TIMEOUT_S, **target)
        except ReachError as error:
            line.append(f"✗ {text!r}: {error.code.value} after {duration(time.monotonic() - began)}", style="red")
            return line
        took_s = time.monotonic() - began
        line.append("✓ ", style="green")
        line.append(f"{text!r:<18}")
        line.append(f"{await self._way(reply.trace_id):<52}", style="bold")
        line.append(f" {duration(took_s):>8}  ")
        line.append(json.dumps(reply.data, ensure_ascii=False)[:SHOWN_CHARS_MAX], style="cyan")
        return line

    async def _way(self, trace_id: str) -> str:
        """Entry → home and agent of each message of the call, as the nodes' traces have it."""
        try:
            async with AdminClient([place.grpc for place in self._cluster.places], limit_s=2.0) as client:
                trace = await client.get_trace(trace_id)
        except (NodeUnreached, MeshFailure):
            return "?"
        return ", then ".join(_ways(trace))


def _ways(trace: GetTraceReply) -> Iterator[str]:
    for message in trace.messages:
        passed = list(dict.fromkeys(stage.node_id for stage in message.stages))
        yield f"{' → '.join(passed)} → {message.agent_id}"


def _numbers(count: int | None) -> Iterator[int]:
    return itertools.count() if count is None else iter(range(count))


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pid(part: Part) -> Text:
    return Text(part.ended, style="red") if part.ended else Text(str(part.pid))


async def _asked(addresses: list[str]) -> tuple[ListNodesReply, list[AgentRecord]] | None:
    """Nodes and agents as the first node that answers knows them; None if none does."""
    try:
        async with AdminClient(addresses, limit_s=1.0) as client:
            return await client.list_nodes(), await client.list_agents(ListAgentsRequest())
    except (NodeUnreached, MeshFailure):
        return None
