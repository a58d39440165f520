"""The calls of the demo, printed so that one sees who was reached, by what route, and how long it took."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_sdk import connect
from agent_sdk.errors import ReachError
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.registry_pb2 import HEALTHY, ListAgentsRequest
from agentreach.wire.addresses import DEFAULT_URL
from reach.adapters.admin_client import AdminClient, NodeUnreached
from reach.cli.output import duration

_OTHERS = ("alan", "grace", "edsger", "barbara", "john", "frances", "donald", "radia", "niklaus", "margaret")
_ASK_EVERY_S = 0.1
_SHOWN_CHARS_MAX = 100


async def wait_for_agents(listen: str, count: int, limit_s: float) -> bool:
    """True as soon as the node answers and `count` agents are healthy; False if that takes longer than the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            async with AdminClient([listen], limit_s=1.0) as client:
                found = await client.list_agents(ListAgentsRequest())
        except NodeUnreached:
            found = None
        if found is not None and sum(record.status == HEALTHY for record in found) >= count:
            return True
        await asyncio.sleep(_ASK_EVERY_S)
    return False


async def make_calls(listen: str, screen: Console) -> bool:
    """Make the calls; False if one that should work did not."""
    async with connect(listen, name="demo") as mesh, AdminClient([listen]) as client:
        shown = _Shown(screen, client)
        try:
            await shown.ask(mesh, "by capability", {"hello": "world"}, capabilities=["echo"])
            await shown.ask(mesh, "by type", "are you there?", agent_type="echo")
            await shown.stream(mesh, "a stream", "why is the sky blue?", capabilities=["think"])
            await shown.ask(mesh, "session ada", "my name is Ada", agent_type="memory", session="ada")
            other = await _elsewhere(client)
            await shown.ask(mesh, f"session {other}", f"I am {other.title()}", agent_type="memory", session=other)
            await shown.ask(mesh, "session ada", "who am I?", agent_type="memory", session="ada")
            trace_id = await shown.ask(mesh, "agent to agent", "pass it on", capabilities=["report"])
        except ReachError as error:
            screen.print(Text(f"  failed: {error.code.value}: {error}", style="red"))
            return False
        await shown.refused(mesh, "nobody can", "please fly", capabilities=["fly"])
    screen.print(f"\n  where the time of that call went:  reach trace{_url(listen)} {trace_id}")
    return True


def print_how_to(listen: str, http: str, screen: Console) -> None:
    """How to call it from a second terminal."""
    url = _url(listen)
    call = '{"target":{"capabilities":["echo"]},"timeoutMs":2000,"payload":{"json":{"hello":"world"}}}'
    screen.print(
        f"""
try it from another terminal (in .venv/bin, if it is not on your PATH):

  reach call{url} --capability echo '{{"hello": "world"}}'
  reach call{url} --type memory --session ada 'what did I say?'
  reach agents{url}
  grpcurl -plaintext -d '{call}' \\
          {listen} agentreach.v1.MeshService/Invoke
  curl {http}/metrics

Ctrl-C ends it.""",
        soft_wrap=True,
    )


def _url(listen: str) -> str:
    return "" if listen == DEFAULT_URL else f" --url {listen}"


async def _elsewhere(client: AdminClient) -> str:
    """A session that goes to the other instance than ada's, so that one sees that there are two."""
    target = Target(agent_type="memory")
    home = await client.explain(Envelope(target=target, session_id="ada", timeout_ms=1000))
    for session in _OTHERS:
        other = await client.explain(Envelope(target=target, session_id=session, timeout_ms=1000))
        if other.chosen != home.chosen:
            return session
    return _OTHERS[0]


class _Shown:
    """Makes a call and prints its line."""

    def __init__(self, screen: Console, client: AdminClient) -> None:
        self._screen = screen
        self._client = client

    async def ask(self, mesh: Any, what: str, data: Any, **target: Any) -> str:
        """One request; its trace_id."""
        began = time.monotonic()
        reply = await mesh.request(data, timeout=10, **target)
        took_s = time.monotonic() - began
        await self._line(what, _named(target), reply.source, took_s, reply.data, reply.trace_id)
        return str(reply.trace_id)

    async def stream(self, mesh: Any, what: str, data: Any, **target: Any) -> None:
        """One request whose answer is printed as it comes."""
        began = time.monotonic()
        line = _head("✓", "green", what, _named(target))
        self._screen.print(line, end="")
        count = 0
        async with mesh.stream(data, timeout=30, **target) as items:
            async for item in items:
                count += 1
                self._screen.print(f" {item}", end="", soft_wrap=True)
        self._screen.print(f"\n{'':42}{count} items in {duration(time.monotonic() - began)}")

    async def refused(self, mesh: Any, what: str, data: Any, **target: Any) -> None:
        """One request that ends with an error, as it should."""
        began = time.monotonic()
        try:
            await mesh.request(data, timeout=10, **target)
        except ReachError as error:
            took = duration(time.monotonic() - began)
            line = _head("✗", "yellow", what, _named(target))
            line.append(f" {error.code.value}", style="yellow")
            line.append(f" in {took}: {error.message}")
            self._screen.print(line, soft_wrap=True)

    async def _line(self, what: str, target: str, source: str, took_s: float, data: Any, trace_id: str) -> None:
        line = _head("✓", "green", what, target)
        line.append(f" {source}", style="bold")
        line.append(f"  {duration(took_s)}  ")
        text = json.dumps(data, ensure_ascii=False)
        line.append(text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…", style="cyan")
        self._screen.print(line, soft_wrap=True)
        route = await self._route(trace_id)
        if route:
            self._screen.print(Text(f"{'':42}{route}", style="dim"), soft_wrap=True)

    async def _route(self, trace_id: str) -> str:
        """Through whom the call went, and how the node chose, as its trace has it."""
        trace = await self._client.get_trace(trace_id)
        hops: list[str] = []
        for message in trace.messages:
            if message.stages:
                how = next((stage.detail for stage in message.stages if stage.name == "routed"), "")
                hops.append(f"{message.source} → node {message.stages[0].node_id} → {message.agent_id}")
                hops[-1] += f" ({how})" if how else ""
        return ", then ".join(hops)


def _head(mark: str, style: str, what: str, target: str) -> Text:
    line = Text("  ")
    line.append(mark, style=style)
    line.append(f" {what:<16}{target:<18} → ")
    return line


def _named(target: dict[str, Any]) -> str:
    if "capabilities" in target:
        return "can " + "+".join(target["capabilities"])
    return f"type {target['agent_type']}"
