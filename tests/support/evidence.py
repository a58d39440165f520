"""What a test that waited in vain shows: how this process is linked, and what each node process says of itself.

Taken in the moment of the failure, since links and nodes are gone when pytest writes its report.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from agent_sdk.link import MeshLink
from tests.support.node import NodeProcess

_LOG_SHOWN_CHARS = 4_000
_SERIES = ("reach_agents", "reach_links", "reach_requests_in_flight", "reach_queue", "reach_breaker_state")
_COMMAND_S = 5.0


def found() -> str:
    """Everything, as text. Blocks for some seconds."""
    links = [each for each in gc.get_objects() if isinstance(each, MeshLink)]
    return "\n".join(["---- links of this process", *map(_link, links), *map(_node, sorted_nodes())])


def sorted_nodes() -> list[NodeProcess]:
    """The node processes that were started and not closed, by address."""
    return sorted(NodeProcess.open, key=lambda node: node.grpc)


def _link(link: MeshLink) -> str:
    redial = link.redial
    agents = {host.agent_id: (host.registered.is_set(), host.ready.is_set()) for host in link.hosts.values()}
    where = f"up at {link.node_id}" if link.up else f"down, was at {link.node_id or 'no node'}"
    return (
        f"{link.caller_id or 'never welcomed'}: {where}; dials {redial.address}, waits {redial.wait_s:.2f} s, knows "
        f"{', '.join(redial.known)}; trouble: {link.dialler.trouble or 'none'}; leaving {link.leaving}, closing "
        f"{link.closing}, failure {link.failure!r}; agents (registered, ready): {agents}"
    )


def _node(node: NodeProcess) -> str:
    code = node.process.poll()
    told = [f"---- node at {node.grpc}: " + ("runs" if code is None else f"ended with {code}")]
    if code is None:
        told += [f"readyz: {node.get('/readyz')}", _agents(node.grpc)]
        told += [line for line in node.get("/metrics")[1].splitlines() if line.startswith(_SERIES)]
    return "\n".join([*told, node.log[-_LOG_SHOWN_CHARS:]])


def _agents(address: str) -> str:
    """As `reach agents` lists them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    command = [sys.executable, "-m", "reach.cli", "agents", "--url", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"reach agents: no answer within {_COMMAND_S:g} s"
    return done.stdout + done.stderr
