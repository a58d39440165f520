"""Every invariant of the design that a run can show, each a small function with a name and a statement.

A function gets the world and a fact (what it is about depends on the moment) and returns what is wrong, or nothing.
Moments: `start` of a handler (Run), `outcome` of a request (Ask), `heard` event, `turn` of any process, `node turn`,
`answered` (all deadlines are over), `settled` (all graces are over), `rest` (the end).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_sdk.host import QUEUED_MAX
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import limits
from reach.core.profiles import PROFILES
from reach.core.requests import Stage

from .ledger import Ask, Run

if TYPE_CHECKING:
    from .process import Process
    from .world import World

SLACK_S = 0.75  # the SDK's grace of 0.25 s, its coarse timer, and a round trip
DEFINITE = ("REJECTED", "OVERLOADED")  # a handler's own no: it ran, and says that nothing was done

Check = Callable[["World", Any], str]


@dataclass(frozen=True, slots=True)
class Invariant:
    """One checker."""

    name: str
    statement: str
    violated: Check


ALL: dict[str, list[Invariant]] = {
    moment: [] for moment in ("start", "outcome", "heard", "turn", "node turn", "answered", "settled", "rest")
}


def invariant(moment: str, statement: str) -> Callable[[Check], Check]:
    """Make a function a checker of a moment; its name in words is the invariant's."""

    def declare(check: Check) -> Check:
        ALL[moment].append(Invariant(check.__name__.replace("_", " "), statement, check))
        return check

    return declare


# ---- once means once ----


def _repeatable(world: World, run: Run) -> bool:
    """After this run the message may run again: the handler said so, or nobody wanted it any more.

    A handler that was cancelled because its time had passed is none of these: that outcome is kept.
    """
    if run.state == "cancelled":
        asks = world.ledger.groups[run.group]
        return any(ask.outcome in ("cancelled", "left") or not ask.by.alive or ask.nested for ask in asks)
    return run.state.startswith("said no")


@invariant("start", "a message that is not idempotent runs once, whatever fails and however often it is sent")
def side_effects_happen_once(world: World, run: Run) -> str:
    asks = world.ledger.groups.get(run.group, [])
    if not asks or asks[0].idempotent:
        return ""
    for other in world.ledger.runs[run.group]:
        if other is run or other.life != run.life or _repeatable(world, other):
            continue
        before = f"run {other.number} at {other.agent_id}, which is {other.state}"
        return f"m{run.group} runs at {run.agent_id} (run {run.number}) after {before}"
    return ""


@invariant("start", "a message that is not idempotent never runs twice at once, not even over a restart of the node")
def side_effects_never_overlap(world: World, run: Run) -> str:
    asks = world.ledger.groups.get(run.group, [])
    if not asks or asks[0].idempotent:
        return ""
    for other in world.ledger.runs[run.group]:
        if other is not run and other.state == "running":
            return f"m{run.group} runs at {run.agent_id} (run {run.number}) while run {other.number} is under way"
    return ""


@invariant("start", "one process runs a message once, idempotent or not, unless it was cancelled or failed")
def a_process_runs_a_message_once(world: World, run: Run) -> str:
    for other in world.ledger.runs[run.group]:
        if other is not run and other.process is run.process and other.state in ("running", "done"):
            return f"m{run.group} runs again in {run.process} (run {run.number}); run {other.number} is {other.state}"
    return ""


@invariant("outcome", "copies of a message that succeed have the outcome of the same run")
def one_message_has_one_outcome(world: World, ask: Ask) -> str:
    if ask.outcome != "OK" or not ask.run:
        return ""
    runs = {run.number: run for run in world.ledger.runs.get(ask.group, ())}
    for other in world.ledger.groups[ask.group]:
        if other is ask or other.outcome != "OK" or not other.run or other.run == ask.run:
            continue
        one, two = runs.get(ask.run), runs.get(other.run)
        if one is not None and two is not None and one.life == two.life:
            return f"{ask} was answered by run {ask.run}, {other} by run {other.run}"
    return ""


# ---- never lie ----


@invariant("outcome", "a success is told only of a run that has finished")
def a_success_has_happened(world: World, ask: Ask) -> str:
    if ask.outcome != "OK" or not ask.run:
        return ""
    run = next((each for each in world.ledger.all_runs if each.number == ask.run), None)
    if run is None or run.state != "done":
        return f"{ask} is told a success of run {ask.run}, which is {run.state if run else 'unknown'}"
    return ""


@invariant("outcome", "a reply goes to who asked, and to nobody else")
def a_reply_goes_to_who_asked(world: World, ask: Ask) -> str:
    if ask.outcome == "OK" and ask.run and ask.run_group != ask.group:
        return f"{ask} got the answer to m{ask.run_group}"
    return ""


@invariant("outcome", "an error that says nothing was executed is told only if no handler has run")
def not_executed_means_not_executed(world: World, ask: Ask) -> str:
    return _executed_after_all(world, ask)


@invariant("answered", "what was told not to have executed does not run afterwards either")
def nothing_runs_after_it_was_denied(world: World, _: None) -> str:
    return next(filter(None, (_executed_after_all(world, ask) for ask in world.ledger.asks.values())), "")


def _executed_after_all(world: World, ask: Ask) -> str:
    if ask.outcome in ("", "OK", "cancelled", "left", *DEFINITE) or ask.may_have_executed:
        return ""
    if len(world.ledger.groups[ask.group]) > 1:
        return ""  # what is said of one copy is not said of the others
    for run in world.ledger.runs.get(ask.group, ()):
        return f"{ask} ended with {ask.outcome} ({ask.text}), not executed, but run {run.number} is {run.state}"
    return ""


# ---- never hang ----


@invariant("node turn", "a request ends exactly once in the node's books, and everybody who waits is told then")
def a_request_ends_once(world: World, process: Process) -> str:
    state = process.things.get("state")
    if state is None:
        return ""
    open_ones = [request for request in state.requests.values() if request.stage is not Stage.SETTLED]
    if len(open_ones) != state.unsettled:
        return f"{len(open_ones)} requests have not ended, {state.unsettled} are counted"
    for request in state.requests.values():
        if bool(request.waiters) == (request.stage is Stage.SETTLED):
            return f"{request.message_id} is {request.stage.name}, {len(request.waiters)} wait for it"
    return ""


@invariant("outcome", "a request ends by its deadline")
def a_request_ends_by_its_deadline(world: World, ask: Ask) -> str:
    assert ask.ended_at is not None
    late = ask.ended_at - ask.deadline - SLACK_S - ask.by.lost_s(ask.issued_at, ask.ended_at)
    if ask.kind == "stream" and ask.items:
        return ""  # its consumer takes what came in time at its own pace
    return f"{ask} ended {late + SLACK_S:.3f} s after its deadline ({ask.outcome})" if late > 0 else ""


@invariant("answered", "no request hangs")
def no_request_hangs(world: World, _: None) -> str:
    for ask in world.ledger.asks.values():
        if not ask.ends and ask.by.alive:
            return f"{ask} to {ask.target} of {ask.by} has not ended; its deadline was {ask.deadline:.3f}"
    return ""


# ---- order ----


@invariant(
    "outcome", "the items of a streamed reply come in order, without gap or repetition, and an error counts them"
)
def items_come_in_order(world: World, ask: Ask) -> str:
    if ask.items != list(range(len(ask.items))):
        return f"{ask} got items {ask.items[:50]}"
    if ask.told_items is not None and ask.told_items < len(ask.items) and ask.outcome != "OK":
        return f"{ask} got {len(ask.items)} items and is told {ask.told_items}"
    return ""


@invariant("start", "messages of one session run in the order in which their sender sent them")
def a_session_keeps_its_order(world: World, run: Run) -> str:
    asks = world.ledger.groups.get(run.group, [])
    if not run.session or not asks or asks[0].kind != "request" or len(asks) > 1:
        return ""
    if run is not world.ledger.runs[run.group][0]:
        return ""  # a repetition keeps its place, but its followers may have had theirs since the node forgot
    for other in world.ledger.all_runs:
        if other.session == run.session and other.group > run.group and other.started_at <= run.started_at:
            later = world.ledger.groups.get(other.group, [])
            if later and later[0].by is asks[0].by and later[0].kind == "request":
                return f"m{run.group} of session {run.session} runs after m{other.group}, which was sent later"
    return ""


@invariant("heard", "a subscriber hears a publisher's events of a topic in order, none twice")
def events_come_in_order(world: World, fact: tuple[str, str, str, list[int]]) -> str:
    subscriber, topic, publisher, numbers = fact
    if len(numbers) > 1 and numbers[-1] <= numbers[-2]:
        return f"{subscriber} hears {topic} of {publisher}: {numbers[-2]} and then {numbers[-1]}"
    return ""


@invariant("settled", "an event counts as accepted only by subscribers that have it")
def accepted_events_were_heard(world: World, _: None) -> str:
    for (what, number), told in world.ledger.published.items():
        topic, _, publisher = what.partition(" of ")
        heard = sum(
            number in numbers for (_, at, by), numbers in world.ledger.heard.items() if (at, by) == (topic, publisher)
        )
        died = sum(1 for process in world.processes if not process.alive)
        if told["accepted"] > heard + died:
            return f"event {number} {what}: {told['accepted']} accepted it, {heard} heard it"
    return ""


# ---- sessions ----


@invariant("start", "a session has one owner at a time: two run it at once only if the one is lost and the other newer")
def a_session_has_one_owner(world: World, run: Run) -> str:
    if not run.session:
        return ""
    for other in world.ledger.all_runs:
        if other is run or other.session != run.session or other.state != "running" or other.life != run.life:
            continue
        if other.process is run.process:
            if other.agent_id == run.agent_id:
                return f"{run.agent_id} runs two messages of session {run.session} at once"
        elif other.epoch >= run.epoch:
            return f"session {run.session}: {other.agent_id} (epoch {other.epoch}) and {run.agent_id} ({run.epoch})"
    return ""


# ---- limits ----


@invariant("start", "an agent never handles more at once than its max_concurrency")
def handlers_stay_within_the_limit(world: World, run: Run) -> str:
    running = [each for each in world.ledger.running[run.process.name] if each.agent_id == run.agent_id]
    if run.limit and len(running) > run.limit:
        return f"{run.agent_id} handles {len(running)}, its limit is {run.limit}"
    return ""


@invariant("node turn", "a node never has more under way at an agent than its max_concurrency, and counts right")
def slots_stay_within_the_limit(world: World, process: Process) -> str:
    state = process.things.get("state")
    for agent in state.directory if state is not None else ():
        held = sum(request.holds_slot for request in agent.link.attempts.values())
        brought = len(agent.link.held)  # runs that outlived the node's memory
        if agent.in_flight != held + brought:
            return f"{agent.agent_id}: {agent.in_flight} slots are taken, {held} requests and {brought} others hold one"
        if agent.max_concurrency and held > agent.max_concurrency:
            return f"{agent.agent_id}: {held} requests hold a slot, its limit is {agent.max_concurrency}"
    return ""


@invariant("start", "a message makes no more attempts than its profile allows")
def attempts_stay_within_the_profile(world: World, run: Run) -> str:
    asks = world.ledger.groups.get(run.group, [])
    if not asks:
        return ""
    profile = PROFILES[pb.CallProfile.Value(asks[0].profile or "RPC")]
    if run.attempt > profile.attempts:
        return f"m{run.group} is at attempt {run.attempt}; {asks[0].profile or 'RPC'} allows {profile.attempts}"
    return ""


@invariant("start", "a call tree goes through no more agents than max_hops")
def hops_stay_within_the_limit(world: World, run: Run) -> str:
    return f"m{run.group} comes through {run.hops} agents" if run.hops > 10 else ""


@invariant("node turn", "every table and queue of a node stays within its bound")
def bounds_of_the_node_hold(world: World, process: Process) -> str:
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
    for peer in state.peers.values():
        link = peer.link
        if link.waiting_bytes > limits.OUTBOX_BYTES_HARD_MAX or link.unacked > limits.UNACKED_ENVELOPES_MAX + 256:
            return f"{peer.caller_id}: {link.waiting_bytes} bytes wait, {link.unacked} envelopes are unacknowledged"
    return ""


@invariant("turn", "every queue of a process stays within its bound")
def bounds_of_a_process_hold(world: World, process: Process) -> str:
    troupe = process.things.get("troupe")
    for _, agent, agent_id in troupe.agents if troupe is not None else ():
        host = agent._host
        if host is not None and host._lanes.queued > QUEUED_MAX:
            return f"{agent_id}: {host._lanes.queued} messages wait"
    return ""


# ---- nothing breaks inside ----


@invariant("turn", "nothing inside a process fails unseen")
def nothing_fails_inside_a_process(world: World, process: Process) -> str:
    return _failed(world, process)


@invariant("node turn", "nothing inside the node fails unseen")
def nothing_fails_inside_the_node(world: World, process: Process) -> str:
    return _failed(world, process)


def _failed(world: World, process: Process) -> str:
    found = world.faults or process.loop.faults
    return f"{process}: {found[0]}" if found else ""


# ---- everything settles ----


@invariant("settled", "when faults stop, every gauge of the node is back to 0")
def the_node_is_at_rest(world: World, _: None) -> str:
    for process in world.nodes.values():
        state = process.things.get("state")
        what = _restless(state) if state is not None else "it does not run"
        if what:
            return f"{process}: {what}"
    return ""


@invariant("rest", "after more requests the gauges are back to 0 again")
def the_node_is_at_rest_again(world: World, _: None) -> str:
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
    for peer in state.peers.values():
        if peer.requests or peer.link.waiting or (peer.connected and peer.link.unacked):
            return f"{peer.caller_id}: {len(peer.requests)} requests, {peer.link.waiting} envelopes wait"
    if set(map(id, state.tokens.values())) != set(map(id, state.peers.values())):
        return "there are tokens without a link"
    return ""


@invariant("settled", "when faults stop, no process has anything left under way")
def the_processes_are_at_rest(world: World, _: None) -> str:
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


@invariant("rest", "when faults stop, every agent that runs can be reached again")
def every_agent_answers_again(world: World, _: None) -> str:
    for ask in world.ledger.asks.values():
        if ask.kind == "probe" and ask.outcome not in ("OK", "BREAKER_OPEN"):
            return f"{ask} to {ask.target} ended with {ask.outcome or 'nothing'}: {ask.text}"
    return ""
