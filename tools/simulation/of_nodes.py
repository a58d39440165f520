"""What holds of several nodes and the store that they share: leading, homes, views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentreach.v1.registry_pb2 import AgentRecord

from .invariants import invariant
from .ledger import Run

if TYPE_CHECKING:
    from .process import Process
    from .world import World

KNOWN_WITHIN_S = 3.0  # until a node has heard what the store says of its agents, if it hears at all


# ---- leading ----


@invariant("led")
def what_only_the_leader_may_write_is_the_leaders(world: World, fact: tuple[Process, int, int]) -> str:
    """A write of a leader that the store takes comes from who leads then."""
    by, revision, leading = fact
    return f"{by} writes as the leader of {revision}, but {leading} leads" if revision != leading else ""


@invariant("node turn")
def two_nodes_never_lead_at_once(world: World, process: Process) -> str:
    """At no moment do two nodes act as the leader."""
    if world.registry is None or world.registry.ousted:
        return ""  # who loses its key by hand hears of it a little later; its writes are refused
    leading = [each for each in world.nodes.values() if each.alive and not each.loop.frozen and _leads(world, each)]
    return " and ".join(map(str, leading)) + " lead" if len(leading) > 1 else ""


def _leads(world: World, process: Process) -> bool:
    parts = process.things["node"].parts if "node" in process.things else None
    return parts is not None and world.as_process(process, lambda: parts._election.leading is not None)


# ---- homes ----


@invariant("start")
def only_an_agents_home_delivers(world: World, run: Run) -> str:
    """Nothing is delivered to an agent whose key names another process or node, once its node must have heard that."""
    troupe, registry = run.process.things.get("troupe"), world.registry
    if registry is None or troupe is None:
        return ""
    key = f"agents/default/production/{run.agent_id}"
    item = registry.keys.get(key)
    node = next((each for each in world.nodes.values() if _id_of(each) == troupe.lease.link.node_id), None)
    if item is None or node is None or not node.things["node"].store.hears_since(KNOWN_WITHIN_S):
        return ""
    if world.now - max(registry.changed_at[key], node.ran_since) < KNOWN_WITHIN_S:
        return ""
    record = AgentRecord.FromString(item.value)
    if record.incarnation == run.process.incarnation and record.node_id == troupe.lease.link.node_id:
        return ""
    return f"run {run.number} of {run.agent_id} comes by {node}; the store names another, at {record.node_id}"


def _id_of(process: Process) -> str:
    return str(process.things["address"]).partition(":")[0]


# ---- views ----


@invariant("settled")
def every_view_is_what_the_store_says(world: World, _: None) -> str:
    """When faults stop, the store names every agent that runs, and every node knows what the store says, no more."""
    if world.registry is None:
        return ""
    said = {}
    for item in world.registry.keys.below("agents/"):
        record = AgentRecord.FromString(item.value)
        said[record.agent_id] = (record.node_id, record.incarnation.hex()[:6])
    missing = _agents_that_run(world).items() - {agent_id: made for agent_id, (_, made) in said.items()}.items()
    if missing:
        return f"the store does not name {dict(missing)}; it names {said}"
    for process in world.nodes.values():
        known = {agent.agent_id: _where(process, agent) for agent in process.things["state"].directory}
        if known != said and len(world.addresses) > 1:
            wrong, right = dict(known.items() - said.items()), dict(said.items() - known.items())
            return f"{process} knows {wrong}; the store says {right}"
    return ""


def _agents_that_run(world: World) -> dict[str, str]:
    return {
        agent_id: process.incarnation.hex()[:6]
        for process in world.processes
        if process.alive and process.kind == "agents" and not process.things.get("leaving")
        for _, _, agent_id in process.things["troupe"].agents
    }


def _where(process: Process, agent: Any) -> tuple[str, str]:
    return (agent.node_id or _id_of(process), agent.incarnation.hex()[:6])


# ---- hops ----


@invariant("start")
def hops_count_agents(world: World, run: Run) -> str:
    """A call tree counts the agents that it went through: no node, no forwarding, no repetition counts."""
    asks = world.ledger.groups.get(run.group, [])
    if not asks:
        return ""
    parent = asks[0].parent
    hops = 1 if parent is None else parent.hops + 1
    if run.hops != hops or run.path != hops:
        return f"m{run.group} at {run.agent_id}: hop_count {run.hops}, a path of {run.path}; {hops} agents passed it on"
    return ""
