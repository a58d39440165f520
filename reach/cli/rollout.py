"""`reach rollout`: bring a new version of an agent type into use, step by step, and the former one out of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets, versions
from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, message_as_dict, note, print_json

if TYPE_CHECKING:
    from agentreach.v1.registry_pb2 import AgentRecord
    from reach.adapters.admin_client import AdminClient

_LOOK_EVERY_S = 1.0


class _Weights(click.ParamType[dict[str, int]]):
    """VERSION=WEIGHT pairs, with commas between them."""

    name = "VERSION=WEIGHT,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """The weights by version; a usage error for anything else."""
        weights: dict[str, int] = {}
        for part in value.split(","):
            version, found, weight = part.strip().rpartition("=")
            if not found or not version or not weight.isdecimal() or len(weight) > 9:
                self.fail(f"{part.strip()!r} is not VERSION=WEIGHT, with a whole number as weight", param, ctx)
            if version in weights:
                self.fail(f"{version!r} is there twice", param, ctx)
            weights[version] = int(weight)
        return weights


@click.command()
@click.argument("agent_type", metavar="TYPE")
@click.option("--prefer", metavar="VERSION", help="All new requests and conversations go to this version.")
@click.option("--weights", type=_Weights(), metavar="VERSION=WEIGHT,…", help="They are split by these weights.")
@click.option("--clear", is_flag=True, help="End the policy: every version gets its share by its instances again.")
@click.option("--drain", metavar="VERSION", help="Drain the agents of this version, one after another, until all left.")
@click.option("--status", is_flag=True, help="Only show how far it is (what happens without an option, too).")
@click.option("--watch", is_flag=True, help="Go on showing it until what gets no share any more is drained.")
@click.option("--env", default="", metavar="NAME", help="The environment.  [default: production]")
@targets.url
@as_json
def rollout(
    agent_type: str,
    prefer: str | None,
    weights: dict[str, int] | None,
    clear: bool,
    drain: str | None,
    status: bool,
    watch: bool,
    env: str,
    url: str | None,
    json_wanted: bool,
) -> None:
    """Choose which version of TYPE gets new requests; conversations stay with their agents.

    A version that is preferred, or drawn by its weight, and has nobody usable gives way to the others. Nothing fails
    because of a policy; what falls back is counted (`reach_version_fallbacks_total`).

    \b
    Examples:
      reach rollout extractor --weights 2.1.0=5,2.0.3=95
      reach rollout extractor --prefer 2.1.0
      reach rollout extractor --status --watch
      reach rollout extractor --drain 2.0.3
      reach rollout extractor --clear
    """
    if "" in (agent_type, prefer, drain):
        raise click.UsageError("an empty TYPE or VERSION names nothing")
    if sum(map(bool, (prefer, weights, clear, drain, status))) > 1:
        raise click.UsageError("say one of --prefer, --weights, --clear, --drain and --status")
    if watch and (clear or drain):
        raise click.UsageError("--watch goes with --status, --prefer and --weights")
    if watch and json_wanted:
        raise click.UsageError("--watch is for people: without --json")
    ending.run(_rollout(agent_type.lower(), prefer or "", weights or {}, clear, drain, watch, env, url, json_wanted))


async def _rollout(
    agent_type: str,
    prefer: str,
    weights: dict[str, int],
    clear: bool,
    drain: str | None,
    watch: bool,
    env: str,
    url: str | None,
    json_wanted: bool,
) -> None:
    async with targets.client(url) as client:
        if prefer or weights or clear:
            await _set(client, agent_type, env, prefer, weights)
        elif drain:
            await _drain(client, agent_type, env, drain)
        seen = await versions.look(client, agent_type, env or "production")
        if json_wanted:
            (policy,) = seen.policies
            print_json({"policy": message_as_dict(policy), "versions": [row.as_json() for row in seen.rows]})
            return
        _show(seen)
        while watch and not _is_over(seen):
            await asyncio.sleep(_LOOK_EVERY_S)
            before, seen = seen, await versions.look(client, agent_type, env or "production")
            if seen.rows != before.rows:
                _show(seen)


async def _set(client: AdminClient, agent_type: str, env: str, prefer: str, weights: dict[str, int]) -> None:
    """Set or end the policy, in place of the one that is there now."""
    policy = await client.get_version_policy(agent_type, env)
    if not prefer and not weights and not policy.version:
        return
    policy.preferred = prefer
    policy.weights.clear()
    policy.weights.update(weights)
    await client.set_version_policy(policy)


def _show(seen: versions.Seen) -> None:
    if not seen.rows:
        note(f"no agent of type {seen.policies[0].agent_type} is registered, and there is no policy for it")
        return
    for row in seen.rows:
        if row.state == "absent":
            note(f"no agent of version {row.version} is there yet: its requests go to the others until one is")
    versions.show(seen)


def _is_over(seen: versions.Seen) -> bool:
    """All that gets no new requests has nothing left to do."""
    return all(row.state not in ("draining", "absent") for row in seen.rows)


async def _drain(client: AdminClient, agent_type: str, env: str, version: str) -> None:
    """Drain every agent of a version, one after another."""
    from reach.cli.drain import agent_drained

    leaving = await _of_version(client, agent_type, env, version)
    policy = await client.get_version_policy(agent_type, env)
    if versions.shares_of(policy).get(version):
        note(
            f"the policy still gives requests to {version}; steer them elsewhere with --prefer, or end it with --clear"
        )
    for number, record in enumerate(leaving, 1):
        note(f"{number} of {len(leaving)}: {record.agent_id}")
        if not await agent_drained(client, record.agent_id, env, f"rollout: version {version} is drained"):
            raise Ended(f"{record.agent_id} has not left in its time; see its log", Exit.MESH_ERROR)
    note(f"version {version} is drained: {len(leaving)} of {len(leaving)} have left")


async def _of_version(client: AdminClient, agent_type: str, env: str, version: str) -> list[AgentRecord]:
    """The agents of a version. `Ended` if there are none, or nobody else could take their requests."""
    from agentreach.v1.registry_pb2 import HEALTHY, ListAgentsRequest
    from reach.core.versions import version_matches

    request = ListAgentsRequest(env=env or "production")
    request.target.agent_type = agent_type
    records = await client.list_agents(request)
    leaving = [record for record in records if version_matches(version, record.version)]
    if not leaving:
        there = ", ".join(sorted({record.version or "(none)" for record in records})) or "none"
        raise Ended(
            f"no agent of type {agent_type} and version {version} is there; its versions: {there}", Exit.MESH_ERROR
        )
    if not any(record.status == HEALTHY for record in records if record not in leaving):
        raise Ended(
            f"no agent of another version than {version} is healthy: start one first, or drain agents by name "
            "(reach drain AGENT_ID)",
            Exit.MESH_ERROR,
        )
    return leaving
