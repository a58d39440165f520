"""What holds of the node and of every process: limits, bounds, no fault unseen, and rest when faults stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_sdk.host import QUEUED_MAX
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import limits
from reach.core.profiles import PROFILES

from .invariants import invariant
from .ledger import Run

if TYPE_CHECKING:
    from .process import Process
    from .world import World


# ---- limits ----


@invariant("start")
def handlers_stay_within_the_limit(world: World, run: Run) -> str:
    """An agent never handles more at once than its max_concurrency."""
    running = [each for each in world.ledger.running[run.process.name] if each.agent_id == run.agent_id]
    if run.limit and len(running) > run.limit:
        return f"{run.agent_id} handles {len(running)}, its limit is {run.limit}"
    return ""


@invariant("node turn")
def slots_stay_within_the_limit(world: World, process: Process) -> str:
    """A node never has more under way at an agent than its max_concurrency, and counts right."""
    state = process.things.get("state")
    for agent in state.directory if state is not None else ():
        held = sum(request.holds_slot for request in agent.link.attempts.values())
        brought = len(agent.link.held)  # runs that outlived the node's memory
        promised = sum(len(given) for to, given in state.wants.granted.items() if to[1] is agent)
        if agent.in_flight != held + brought + promised:
            others = f"{held} requests and {brought} others hold one, {promised} are promised"
            return f"{agent.agent_id}: {agent.in_flight} slots are taken, {others}"
        if agent.max_concurrency and held > agent.max_concurrency and not agent.link.remote:  # else its home counts
            return f"{agent.agent_id}: {held} requests hold a slot, its limit is {agent.max_concurrency}"
    return ""


@invariant("start")
def attempts_stay_within_the_profile(world: World, run: Run) -> str:
    """A message makes no more attempts than its profile allows."""
    asks = world.ledger.groups.get(run.group, [])
    if not asks:
        return ""
    profile = PROFILES[pb.CallProfile.Value(asks[0].profile or "RPC")]
    if run.attempt > profile.attempts:
        return f"m{run.group} is at attempt {run.attempt}; {asks[0].profile or 'RPC'} allows {profile.attempts}"
    return ""


@invariant("start")
def hops_stay_within_the_limit(world: World, run: Run) -> str:
    """A call tree goes through no more agents than max_hops."""
    return f"m{run.group} comes through {run.hops} agents" if run.hops > 10 else ""


@invariant("node turn")
def bounds_of_the_node_hold(world: World, process: Process) -> str:
    """Every table and queue of a node stays within its bound."""
    state = process.things.get("state")
    if state is None:
        return ""
    rules = state.rules
    if state.unsettled > rules.requests_in_flight_max:
        return f"{state.unsettled} requests are in flight, the bound is {rules.requests_in_flight_max}"
    if len(state.replay._table) > rules.replay_entries_max:
        return f"{len(state.replay._table)} outcomes are kept, the bound is {rules.replay_entries_max}"
    for lane in state.lanes.values():
        waiting = sum(not request.attempt for request in lane.waiting)  # a retry has its place already
        if waiting > rules.lane_max:
            return f"{waiting} messages wait in {lane.key}, the bound is {rules.lane_max}"
    for peer in (*state.peers.values(), *state.nodes.values()):
        link = peer.link
        if link.waiting_bytes > limits.OUTBOX_BYTES_HARD_MAX or link.unacked > limits.UNACKED_ENVELOPES_MAX + 256:
            return f"{peer.caller_id}: {link.waiting_bytes} bytes wait, {link.unacked} envelopes are unacknowledged"
    return ""


@invariant("turn")
def bounds_of_a_process_hold(world: World, process: Process) -> str:
    """Every queue of a process stays within its bound."""
    troupe = process.things.get("troupe")
    for _, agent, agent_id in troupe.agents if troupe is not None else ():
        host = agent._host
        if host is not None and host._lanes.queued > QUEUED_MAX:
            return f"{agent_id}: {host._lanes.queued} messages wait"
    return ""


# ---- nothing breaks inside ----


@invariant("turn")
def nothing_fails_inside_a_process(world: World, process: Process) -> str:
    """Nothing inside a process fails unseen."""
    return _failed(world, process)


@invariant("node turn")
def nothing_fails_inside_the_node(world: World, process: Process) -> str:
    """Nothing inside the node fails unseen."""
    return _failed(world, process)


def _failed(world: World, process: Process) -> str:
    found = world.faults or process.loop.faults
    return f"{process}: {found[0]}" if found else ""


# ---- everything settles ----


@invariant("settled")
def the_node_is_at_rest(world: World, _: None) -> str:
    """When faults stop, every gauge of the node is back to 0."""
    for process in world.nodes.values():
        state = process.things.get("state")
        what = _restless(state) if state is not None else "it does not run"
        if what:
            return f"{process}: {what}"
    return ""


@invariant("rest")
def the_node_is_at_rest_again(world: World, _: None) -> str:
    """After more requests the gauges are back to 0 again."""
    return the_node_is_at_rest(world, None)


def _restless(state: Any) -> str:
    if state.requests or state.unsettled or state.by_key:
        left = [f"{request.message_id} {request.stage.name}" for request in state.requests.values()]
        return f"requests are left: {left} {state.unsettled} unsettled, {len(state.by_key)} keys"
    if len(state.wheel):
        return f"{len(state.wheel)} timers of requests are left"
    if state.lanes_ready:
        return "lanes are left to be looked at"
    for name, numbers in state.stats.types():
        if numbers.in_flight:
            return f"{numbers.in_flight} requests of {name} count as in flight"
    for agent in state.directory:
        if agent.in_flight or agent.link.attempts or agent.link.lanes_waiting:
            held = f"{len(agent.link.attempts)} attempts, {len(agent.link.lanes_waiting)} lanes in turn"
            return f"{agent.agent_id} has {agent.in_flight} in flight, {held}"
        if agent.pinned_sessions != len(agent.link.pinned):
            return f"{agent.agent_id} counts {agent.pinned_sessions} sessions, {len(agent.link.pinned)} are pinned"
    for lane in state.lanes.values():
        if lane.running or lane.waiting or lane.pinning or lane.in_turn:
            return f"lane {lane.key}: {len(lane.running)} run, {len(lane.waiting)} wait"
    for node in state.nodes.values():
        if node.visiting or node.link.waiting or (node.connected and node.link.unacked):
            return f"{node.node_id}: {len(node.visiting)} requests of it, {node.link.waiting} envelopes wait"
    if state.wants.granted or state.wants.wishes:
        return f"{len(state.wants.granted)} slots are promised, {len(state.wants.wishes)} are wanted"
    for peer in state.peers.values():
        if peer.requests or peer.link.waiting or (peer.connected and peer.link.unacked):
            return f"{peer.caller_id}: {len(peer.requests)} requests, {peer.link.waiting} envelopes wait"
    if set(map(id, state.tokens.values())) != set(map(id, state.peers.values())):
        return "there are tokens without a link"
    return ""


@invariant("settled")
def the_processes_are_at_rest(world: World, _: None) -> str:
    """When faults stop, no process has anything left under way."""
    for process in world.processes:
        if not process.alive:
            continue
        for name in ("troupe", "caller"):
            holder = process.things.get(name)
            if holder is None or holder.lease is None:
                continue
            link = holder.lease.link
            if len(link.calls):
                return f"{process} has {len(link.calls)} calls under way"
            for host in link.hosts.values():
                if host.busy or host._lanes.active or host._lanes.queued:
                    return f"{host.agent_id} has {host._lanes.active} running, {host._lanes.queued} waiting"
    return ""


@invariant("rest")
def every_agent_answers_again(world: World, _: None) -> str:
    """When faults stop, every agent that runs can be reached again."""
    for ask in world.ledger.asks.values():
        if ask.kind == "probe" and ask.outcome not in ("OK", "BREAKER_OPEN"):
            return f"{ask} to {ask.target} ended with {ask.outcome or 'nothing'}: {ask.text}"
    return ""
