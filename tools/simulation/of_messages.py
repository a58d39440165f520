"""What holds of every message, stream, session and event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reach.core.requests import Stage

from .invariants import invariant
from .ledger import Ask, Run

if TYPE_CHECKING:
    from .process import Process
    from .world import World


SLACK_S = 0.75  # the SDK's grace of 0.25 s, its coarse timer, and a round trip
LOOKED_FOR_S = 10.0  # so long after both are dead that had a message it is still told from a new one
DEFINITE = ("REJECTED", "OVERLOADED")  # a handler's own no: it ran, and says that nothing was done


# ---- once means once ----


def _repeatable(world: World, run: Run) -> bool:
    """After this run the message may run again: the handler said so, or nobody wanted it any more.

    A handler that was cancelled because its time had passed is none of these: that outcome is kept.
    """
    if run.state == "cancelled":
        asks = world.ledger.groups[run.group]
        return any(
            ask.outcome in ("cancelled", "left")
            or not ask.by.alive
            or ask.nested
            or ask.text.startswith("no answer from")  # its SDK gave up by itself, and withdrew the request
            for ask in asks
        )
    return run.state.startswith("said no")


def _forgotten(world: World, run: Run) -> bool:
    """Nobody can know of this run: its node is dead. Of several nodes one that owns a message asks the agents, too.

    An agent remembers what it has answered, and not what it was told to end. One that died is remembered for a while.
    """
    node = world.lives.get(run.life)
    if node is None or node.died_at is None or len(world.addresses) == 1:
        return node is not None and not node.alive
    if run.process.died_at is None:
        return run.state == "cancelled"
    return world.now - max(node.died_at, run.process.died_at) > LOOKED_FOR_S


@invariant("start")
def side_effects_happen_once(world: World, run: Run) -> str:
    """A message that is not idempotent runs once, whatever fails and however often it is sent."""
    asks = world.ledger.groups.get(run.group, [])
    if not asks or asks[0].idempotent:
        return ""
    for other in world.ledger.runs[run.group]:
        if other is run or _forgotten(world, other) or _repeatable(world, other):
            continue
        before = f"run {other.number} at {other.agent_id}, which is {other.state}"
        return f"m{run.group} runs at {run.agent_id} (run {run.number}) after {before}"
    return ""


@invariant("start")
def side_effects_never_overlap(world: World, run: Run) -> str:
    """A message that is not idempotent never runs twice at once, not even over a restart of the node."""
    asks = world.ledger.groups.get(run.group, [])
    if not asks or asks[0].idempotent:
        return ""
    for other in world.ledger.runs[run.group]:
        if other is not run and other.state == "running":
            return f"m{run.group} runs at {run.agent_id} (run {run.number}) while run {other.number} is under way"
    return ""


@invariant("start")
def a_process_runs_a_message_once(world: World, run: Run) -> str:
    """One process runs a message once, idempotent or not, unless it was cancelled or failed."""
    for other in world.ledger.runs[run.group]:
        if other is not run and other.process is run.process and other.state in ("running", "done"):
            return f"m{run.group} runs again in {run.process} (run {run.number}); run {other.number} is {other.state}"
    return ""


@invariant("outcome")
def one_message_has_one_outcome(world: World, ask: Ask) -> str:
    """Copies of a message that succeed have the outcome of the same run."""
    if ask.outcome != "OK" or not ask.run:
        return ""
    runs = {run.number: run for run in world.ledger.runs.get(ask.group, ())}
    for other in world.ledger.groups[ask.group]:
        if other is ask or other.outcome != "OK" or not other.run or other.run == ask.run:
            continue
        one, two = runs.get(ask.run), runs.get(other.run)
        if one is None or two is None or _forgotten(world, one) or _forgotten(world, two):
            continue
        if not ask.idempotent or not _may_be_gone_round(world, ask, one, two):
            return f"{ask} was answered by run {ask.run}, {other} by run {other.run}"
    return ""


def _may_be_gone_round(world: World, ask: Ask, *runs: Run) -> bool:
    """Who keeps the reply is dead, or slow to repeat it (agents keep large and streamed ones), or cut off."""
    cut_off = world.sharing > 1 and bool(world.fault_names)
    return ask.kind == "stream" or cut_off or not all(run.process.alive for run in runs)


# ---- never lie ----


@invariant("outcome")
def a_success_has_happened(world: World, ask: Ask) -> str:
    """A success is told only of a run that has finished."""
    if ask.outcome != "OK" or not ask.run:
        return ""
    run = next((each for each in world.ledger.all_runs if each.number == ask.run), None)
    if run is None or run.state != "done":
        return f"{ask} is told a success of run {ask.run}, which is {run.state if run else 'unknown'}"
    return ""


@invariant("outcome")
def a_reply_goes_to_who_asked(world: World, ask: Ask) -> str:
    """A reply goes to who asked, and to nobody else."""
    if ask.outcome == "OK" and ask.run and ask.run_group != ask.group:
        return f"{ask} got the answer to m{ask.run_group}"
    return ""


@invariant("outcome")
def not_executed_means_not_executed(world: World, ask: Ask) -> str:
    """An error that says nothing was executed is told only if no handler has run."""
    return _executed_after_all(world, ask)


@invariant("answered")
def nothing_runs_after_it_was_denied(world: World, _: None) -> str:
    """What was told not to have executed does not run afterwards either."""
    return next(filter(None, (_executed_after_all(world, ask) for ask in world.ledger.asks.values())), "")


def _executed_after_all(world: World, ask: Ask) -> str:
    if ask.outcome in ("", "OK", "cancelled", "left", *DEFINITE) or ask.may_have_executed:
        return ""
    if len(world.ledger.groups[ask.group]) > 1:
        return ""  # what is said of one copy is not said of the others
    for run in world.ledger.runs.get(ask.group, ()):
        if not run.state.startswith("said no"):
            return f"{ask} ended with {ask.outcome} ({ask.text}), not executed, but run {run.number} is {run.state}"
    return ""


# ---- never hang ----


@invariant("node turn")
def a_request_ends_once(world: World, process: Process) -> str:
    """A request ends exactly once in the node's books, and everybody who waits is told then."""
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


@invariant("outcome")
def a_request_ends_by_its_deadline(world: World, ask: Ask) -> str:
    """A request ends by its deadline."""
    assert ask.ended_at is not None
    late = ask.ended_at - ask.deadline - SLACK_S - ask.by.lost_s(ask.issued_at, ask.ended_at)
    if ask.kind == "stream" and ask.items:
        return ""  # its consumer takes what came in time at its own pace
    return f"{ask} ended {late + SLACK_S:.3f} s after its deadline ({ask.outcome})" if late > 0 else ""


@invariant("answered")
def no_request_hangs(world: World, _: None) -> str:
    """No request hangs."""
    for ask in world.ledger.asks.values():
        if not ask.ends and ask.by.alive:
            return f"{ask} to {ask.target} of {ask.by} has not ended; its deadline was {ask.deadline:.3f}"
    return ""


# ---- order ----


@invariant("outcome")
def items_come_in_order(world: World, ask: Ask) -> str:
    """The items of a streamed reply come in order, without gap or repetition, and an error counts them."""
    if ask.items != list(range(len(ask.items))):
        return f"{ask} got items {ask.items[:50]}"
    if ask.told_items is not None and ask.told_items < len(ask.items) and ask.outcome != "OK":
        return f"{ask} got {len(ask.items)} items and is told {ask.told_items}"
    return ""


@invariant("start")
def a_session_keeps_its_order(world: World, run: Run) -> str:
    """Messages of one session run in the order in which their sender sent them."""
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


@invariant("heard")
def events_come_in_order(world: World, fact: tuple[str, str, str, list[int]]) -> str:
    """A subscriber hears a publisher's events of a topic in order, none twice."""
    subscriber, topic, publisher, numbers = fact
    if len(numbers) > 1 and numbers[-1] <= numbers[-2]:
        return f"{subscriber} hears {topic} of {publisher}: {numbers[-2]} and then {numbers[-1]}"
    return ""


@invariant("settled")
def accepted_events_were_heard(world: World, _: None) -> str:
    """An event counts as accepted only by subscribers that have it."""
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


@invariant("start")
def a_session_has_one_owner(world: World, run: Run) -> str:
    """A session is never run by two owners at once; only one that nobody could reach for long may still be at it."""
    if not run.session:
        return ""
    for other in world.ledger.all_runs:
        if other is run or other.session != run.session or other.state != "running":
            continue
        if other.process is run.process:
            if other.agent_id == run.agent_id:
                return f"{run.agent_id} runs two messages of session {run.session} at once"
        elif other.epoch >= run.epoch or not _unreachable(world, other):
            return f"session {run.session}: {other.agent_id} (epoch {other.epoch}) and {run.agent_id} ({run.epoch})"
    return ""


def _unreachable(world: World, run: Run) -> bool:
    """Since it began its process could not be reached for so long that the mesh had to go on without it."""
    window_s = float(world.node_flags.get("resume_window_s", 10.0))
    return run.process.longest_cut_s(run.started_at) >= window_s - 0.5


@invariant("start")
def epochs_of_a_session_never_go_down(world: World, run: Run) -> str:
    """Handlers never see an epoch of a session below one that was seen before, but where nobody could reach them."""
    if not run.session or world.registry is None:
        return ""
    for other in world.ledger.all_runs:
        if other.session == run.session and other.epoch > run.epoch and not _unreachable(world, run):
            seen = f"run {other.number} of {other.agent_id} saw {other.epoch}"
            return f"session {run.session}: run {run.number} of {run.agent_id} sees epoch {run.epoch}; {seen}"
    return ""
