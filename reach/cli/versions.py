"""`reach versions`: which versions of agents are there, who gets how much, and which are done with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, note, print_json, print_table

if TYPE_CHECKING:
    from agentreach.v1.registry_pb2 import AgentRecord, VersionPolicy
    from reach.adapters.admin_client import AdminClient

SESSIONS_ASKED = 1_000
_COLOURS = {"active": "green", "canary": "cyan", "draining": "yellow", "drained": "dim", "absent": "red"}
_WORKING = ("HEALTHY", "DEGRADED", "STARTING")


@dataclass(frozen=True, slots=True)
class Row:
    """One version of one agent type in one environment."""

    agent_type: str
    env: str
    version: str
    instances: Mapping[str, int]
    """By status."""
    sessions: int
    in_flight: int
    share: float | None
    """Of new requests, 0 to 1; None: there is no policy."""
    state: str

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "agentType": self.agent_type,
            "env": self.env,
            "version": self.version,
            "instances": dict(self.instances),
            "sessions": self.sessions,
            "inFlight": self.in_flight,
            "share": self.share,
            "state": self.state,
        }


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node says of the versions that are there."""

    rows: tuple[Row, ...]
    policies: tuple[VersionPolicy, ...]
    sessions_complete: bool
    """False: there are more sessions than were asked for; their numbers are too low."""


@click.command()
@click.argument("agent_type", required=False, metavar="[TYPE]")
@click.option("--env", default="", metavar="NAME", help="Only those of this environment.")
@targets.url
@as_json
def versions(agent_type: str | None, env: str, url: str | None, json_wanted: bool) -> None:
    """List the versions of agents, with what they do and how much of the new requests they get.

    STATE is active; canary: it gets a smaller share than another; draining: it gets nothing new and still has
    something to do; drained: it has nothing to do and can be stopped; absent: it shall get requests, and is not there.

    \b
    Examples:
      reach versions
      reach versions extractor --json
    """
    seen = ending.run(_look(agent_type or "", env, url))
    if json_wanted:
        print_json([row.as_json() for row in seen.rows])
    elif not seen.rows:
        note(f"no agent of type {agent_type} is registered" if agent_type else "no agents are registered")
    else:
        show(seen)


def show(seen: Seen) -> None:
    """The table."""
    print_table(
        ("TYPE", "VERSION", "INSTANCES", "SESSIONS", "IN FLIGHT", "SHARE", "STATE", "ENV"),
        (_cells(row, seen.sessions_complete) for row in seen.rows),
    )


async def _look(agent_type: str, env: str, url: str | None) -> Seen:
    async with targets.client(url) as client:
        return await look(client, agent_type, env)


async def look(client: AdminClient, agent_type: str, env: str) -> Seen:
    """Ask a node for all versions; empty names: of all types, in all environments."""
    from agentreach.v1.admin_pb2 import ListSessionsRequest
    from agentreach.v1.registry_pb2 import ListAgentsRequest

    agent_type = agent_type.lower()
    request = ListAgentsRequest(env=env)
    request.target.agent_type = agent_type
    records = await client.list_agents(request)
    asked = ListSessionsRequest(agent_type=agent_type, limit=SESSIONS_ASKED)
    sessions = (await client.list_sessions(asked)).sessions
    held = Counter((session.env or "production", session.agent_id) for session in sessions)
    places = {(record.env, record.agent_type) for record in records}
    if agent_type:
        places.add((env or "production", agent_type))
    policies = [await client.get_version_policy(name, place) for place, name in sorted(places)]
    rows = [row for policy in policies for row in rows_of(policy, records, held)]
    return Seen(tuple(rows), tuple(policies), len(sessions) < SESSIONS_ASKED)


def rows_of(
    policy: VersionPolicy, records: Iterable[AgentRecord], sessions: Mapping[tuple[str, str], int]
) -> list[Row]:
    """The versions of the policy's type, those that get most first. `sessions`: how many by (env, agent_id)."""
    from reach.core.versions import version_matches

    shares = shares_of(policy)
    by_version: dict[str, list[AgentRecord]] = {name: [] for name in shares}
    for record in records:
        if (record.env, record.agent_type) == (policy.env, policy.agent_type):
            named = next((name for name in shares if version_matches(name, record.version)), record.version)
            by_version.setdefault(named, []).append(record)
    rows = [_row(policy, name, found, sessions, shares) for name, found in by_version.items()]
    return sorted(rows, key=lambda row: (-(row.share or 0), row.version))


def shares_of(policy: VersionPolicy) -> dict[str, float]:
    """The part of new requests that each version of a policy gets; empty without one."""
    if policy.preferred:
        return {policy.preferred: 1.0}
    total = sum(policy.weights.values())
    return {version: weight / total for version, weight in policy.weights.items()} if total else {}


def _row(
    policy: VersionPolicy,
    version: str,
    records: Sequence[AgentRecord],
    sessions: Mapping[tuple[str, str], int],
    shares: Mapping[str, float],
) -> Row:
    from agentreach.v1.registry_pb2 import AgentStatus

    instances = Counter(AgentStatus.Name(record.status) for record in records)
    held = sum(sessions.get((record.env, record.agent_id), 0) for record in records)
    in_flight = sum(record.in_flight for record in records)
    share = shares.get(version, 0.0) if shares else None
    state = _state(instances, bool(held or in_flight), share, max(shares.values(), default=0.0))
    return Row(policy.agent_type, policy.env, version, instances, held, in_flight, share, state)


def _state(instances: Mapping[str, int], busy: bool, share: float | None, largest: float) -> str:
    if share == 0 or not any(instances.get(status) for status in _WORKING):
        if share and not instances:
            return "absent"
        return "draining" if busy or instances.get("DRAINING") else "drained"
    return "active" if share is None or share == largest else "canary"


def _cells(row: Row, sessions_complete: bool) -> tuple[Any, ...]:
    from rich.text import Text

    counts = ", ".join(f"{count} {status.lower()}" for status, count in sorted(row.instances.items()))
    return (
        Text(row.agent_type, style="bold"),
        row.version or "–",
        counts or "none",
        f"{row.sessions}" if sessions_complete else f"≥ {row.sessions}",
        row.in_flight,
        "–" if row.share is None else f"{row.share * 100:.3g} %",
        Text(row.state, style=_COLOURS[row.state]),
        row.env,
    )
