"""Each checker of the simulator finds the fault it is for: the mesh is broken on purpose, and it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import agent_sdk.host
import agent_sdk.lanes
import agent_sdk.pending
import agent_sdk.redial
import agent_sdk.replies
import agent_sdk.topics
import reach.core.admit
import reach.core.agents
import reach.core.directory
import reach.core.events
import reach.core.lanes
import reach.core.loops
import reach.core.replay
import reach.core.replies
import reach.core.requests
import reach.core.route
import reach.core.sessions
import reach.core.settle
import reach.core.stats
import reach.core.writing
import reach.node.election
import reach.node.registrar
from agentreach.v1.registry_pb2 import AgentRecord
from reach.adapters.etcd.lease import EtcdLease
from tools.simulation import invariants
from tools.simulation.ledger import Violation
from tools.simulation.world import World

SEEDS_MAX = 12
Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]

MUTATIONS: dict[str, Mutation] = {}
OF_NODES: set[str] = set()


def breaks(mutation: Mutation) -> Mutation:
    """The checker of this function's name must find what it breaks."""
    MUTATIONS[mutation.__name__.replace("_", " ")] = mutation
    return mutation


def breaks_nodes(mutation: Mutation) -> Mutation:
    """The same, in worlds of three nodes on one store."""
    OF_NODES.add(mutation.__name__.replace("_", " "))
    return breaks(mutation)


def around(patch: Patch, place: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put a function around one of ours, which it gets first."""
    ours = getattr(place, name)
    patch.setattr(place, name, lambda *given, **named: wrapper(ours, *given, **named))


# ---- once means once ----


@breaks
def side_effects_happen_once(patch: Patch) -> None:
    """The node forgets every outcome."""
    patch.setattr(reach.core.replay.Replay, "find", lambda *_: None)


@breaks
def side_effects_never_overlap(patch: Patch) -> None:
    """Copies of a message under way are messages of their own."""

    def join(ours: Any, state: Any, port: Any, envelope: Any, twin: Any, left_s: float, source: str) -> None:
        request = reach.core.admit.open_request(state, port, envelope, twin.key, left_s, None, False)
        target = envelope.target
        reach.core.route.route(state, request, envelope, target, target.SerializeToString(), None)

    around(patch, reach.core.admit, "_join", join)


@breaks
def a_process_runs_a_message_once(patch: Patch) -> None:
    """The node and the agents forget every outcome."""
    patch.setattr(reach.core.replay.Replay, "find", lambda *_: None)
    patch.setattr(agent_sdk.replies.Replies, "known", lambda *_: None)


@breaks
def one_message_has_one_outcome(patch: Patch) -> None:
    """As for the first."""
    patch.setattr(reach.core.replay.Replay, "find", lambda *_: None)


# ---- never lie ----


@breaks
def a_success_has_happened(patch: Patch) -> None:
    """An item of a streamed reply is taken for the end of it."""

    def on_response(ours: Any, self: Any, envelope: Any, now: float) -> None:
        envelope.more = False
        ours(self, envelope, now)

    around(patch, agent_sdk.calls.Calls, "on_response", on_response)


@breaks
def a_reply_goes_to_who_asked(patch: Patch) -> None:
    """A reply's payload goes to the next who waits."""
    last: list[Any] = []

    def on_response(ours: Any, self: Any, envelope: Any, now: float) -> None:
        if envelope.HasField("payload") and envelope.payload.WhichOneof("content") != "json" and not envelope.more:
            last.append(type(envelope.payload).FromString(envelope.payload.SerializeToString()))
            envelope.payload.CopyFrom(last[-2] if len(last) > 1 else last[-1])
        ours(self, envelope, now)

    around(patch, agent_sdk.calls.Calls, "on_response", on_response)


def deny(patch: Patch) -> None:
    """Every error says that nothing was executed."""

    def from_proto(ours: Any, *given: Any) -> Any:
        error = ours(*given)
        error.may_have_executed = False
        return error

    around(patch, agent_sdk.calls, "from_proto", from_proto)
    patch.setattr(agent_sdk.pending.Call, "may_have_executed", False)


@breaks
def not_executed_means_not_executed(patch: Patch) -> None:
    """Every error says that nothing was executed."""
    deny(patch)


@breaks
def nothing_runs_after_it_was_denied(patch: Patch) -> None:
    """The same."""
    deny(patch)


# ---- never hang ----


@breaks
def a_request_ends_once(patch: Patch) -> None:
    """Waiters are not let go of when they were answered."""

    def answer(ours: Any, state: Any, request: Any, *given: Any) -> None:
        waiters = list(request.waiters)
        ours(state, request, *given)
        request.waiters.extend(waiters)

    around(patch, reach.core.settle, "answer", answer)


@breaks
def a_request_ends_by_its_deadline(patch: Patch) -> None:
    """The node takes more time than it was given, and the SDK lets it."""
    around(patch, reach.core.admit, "time_left_s", lambda ours, *given: ours(*given) + 3.0)
    patch.setattr(agent_sdk.calls, "GRACE_S", 5.0)


@breaks
def no_request_hangs(patch: Patch) -> None:
    """The SDK looks at no deadline, and hears no error."""

    def on_response(ours: Any, self: Any, envelope: Any, now: float) -> None:
        if not envelope.HasField("error"):
            ours(self, envelope, now)

    around(patch, agent_sdk.calls.Calls, "on_response", on_response)
    patch.setattr(agent_sdk.calls.Calls, "tick", lambda *_: False)


# ---- order ----


@breaks
def items_come_in_order(patch: Patch) -> None:
    """The reader of a stream gets each item twice."""

    def keep(ours: Any, self: Any, call: Any, value: Any, envelope: Any, now: float) -> None:
        ours(self, call, value, envelope, now)
        ours(self, call, value, envelope, now)

    around(patch, agent_sdk.calls.Calls, "_keep", keep)


@breaks
def a_session_keeps_its_order(patch: Patch) -> None:
    """Who came last into a session's lane goes first."""

    def take_head(ours: Any, state: Any, lane: Any) -> Any:
        lane.waiting.rotate(1)
        return ours(state, lane)

    around(patch, reach.core.lanes, "take_head", take_head)


@breaks
def events_come_in_order(patch: Patch) -> None:
    """A subscriber's inbox is a stack, and it looks at it late."""

    def take(ours: Any, self: Any, envelope: Any) -> None:
        ours(self, envelope)
        self.events.rotate(1)

    around(patch, agent_sdk.topics._Inbox, "take", take)


@breaks
def accepted_events_were_heard(patch: Patch) -> None:
    """Subscribers acknowledge events and drop them."""
    patch.setattr(agent_sdk.topics.Topics, "on_event", lambda *_: None)


# ---- sessions ----


@breaks
def a_session_has_one_owner(patch: Patch) -> None:
    """The messages of a session are routed like any others."""

    def enter(ours: Any, state: Any, request: Any, envelope: Any, parent: Any) -> None:
        for agent in state.directory:
            if agent.agent_type == "chat" and agent.in_flight == request.number % 2:
                reach.core.route.hand_over(state, request, envelope, agent.link, parent)
                return
        ours(state, request, envelope, parent)

    around(patch, reach.core.sessions, "enter", enter)
    patch.setattr(agent_sdk.lanes.Lanes, "admit", start_at_once)


# ---- limits ----


def start_at_once(self: Any, work: Any, over_limit: bool = False) -> bool:
    """Of `Lanes`: no limit at all."""
    work.admitted = True
    self.active += 1
    if work.session is not None:
        self._lanes.setdefault(work.session, agent_sdk.lanes._Lane()).active += 1
    return True


def no_slots(patch: Patch) -> None:
    """The node believes that every agent has a free slot."""
    patch.setattr(reach.core.agents.Agent, "has_slot", True)
    patch.setattr(reach.core.agents.Agent, "full_at_now", lambda _: -1)


@breaks
def handlers_stay_within_the_limit(patch: Patch) -> None:
    """Neither the node nor the agents count slots."""
    no_slots(patch)
    patch.setattr(agent_sdk.lanes.Lanes, "admit", start_at_once)


@breaks
def slots_stay_within_the_limit(patch: Patch) -> None:
    """The node does not count slots."""
    no_slots(patch)


@breaks
def attempts_stay_within_the_profile(patch: Patch) -> None:
    """Attempts are counted from where no profile ends."""
    patch.setattr(reach.core.requests.Request, "attempt", 9)


@breaks
def hops_stay_within_the_limit(patch: Patch) -> None:
    """Nothing is done against loops."""
    patch.setattr(reach.core.loops, "check_hop", lambda *_, **__: None)
    patch.setattr(reach.core.loops, "would_deadlock", lambda *_, **__: False)
    no_slots(patch)
    patch.setattr(agent_sdk.lanes.Lanes, "admit", start_at_once)


@breaks
def bounds_of_the_node_hold(patch: Patch) -> None:
    """The node refuses nobody."""
    patch.setattr(reach.core.admit, "_shut_door", lambda *_: None)
    patch.setattr(reach.core.sessions, "_refusal", lambda *_: None)


@breaks
def bounds_of_a_process_hold(patch: Patch) -> None:
    """An agent's queue counts a thousand for each."""

    def admit(ours: Any, self: Any, work: Any, over_limit: bool = False) -> bool:
        self.queued += 1001
        return bool(ours(self, work, over_limit))

    around(patch, agent_sdk.lanes.Lanes, "admit", admit)


# ---- nothing breaks inside ----


@breaks
def nothing_fails_inside_a_process(patch: Patch) -> None:
    """A callback of the SDK raises."""

    def fails(*_: Any) -> bool:
        raise RuntimeError("broken on purpose")

    patch.setattr(agent_sdk.host.Host, "tick", fails)


@breaks
def nothing_fails_inside_the_node(patch: Patch) -> None:
    """A step of the node raises."""

    def fails(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    patch.setattr(reach.core.replies, "respond", fails)


# ---- everything settles ----


def leak(patch: Patch) -> None:
    """Every fifth request keeps what it holds."""

    def release(ours: Any, state: Any, request: Any) -> None:
        if request.number % 5:
            ours(state, request)

    around(patch, reach.core.settle, "release", release)


@breaks
def the_node_is_at_rest(patch: Patch) -> None:
    """Every fifth request keeps what it holds."""
    leak(patch)


@breaks
def the_node_is_at_rest_again(patch: Patch) -> None:
    """The same."""
    leak(patch)


@breaks
def the_processes_are_at_rest(patch: Patch) -> None:
    """A place of an agent is never given back."""
    patch.setattr(agent_sdk.lanes.Lanes, "release", lambda *_: [])


_never_again = property(lambda self: 1e4 if self._linked else 0.0, lambda self, value: None)


@breaks
def every_agent_answers_again(patch: Patch) -> None:
    """Whose stream was cut does not dial again."""

    def failed(ours: Any, self: Any, *given: Any, **named: Any) -> None:
        ours(self, *given, **named)
        self.wait_s = 1e4 if self._linked else self.wait_s

    around(patch, agent_sdk.redial.Redial, "failed", failed)


# ---- several nodes ----


@breaks_nodes
def what_only_the_leader_may_write_is_the_leaders(patch: Patch) -> None:
    """Who stood last believes that it leads."""

    def first(ours: Any, self: Any) -> Any:
        if self._items:
            newest = max(self._items.values(), key=lambda each: each.create_revision)
            self._items = {newest.key: newest}
        return ours(self)

    around(patch, reach.node.election.Candidates, "first", first)


@breaks_nodes
def two_nodes_never_lead_at_once(patch: Patch) -> None:
    """A leader does not look at the clock, nor does its lease."""

    def leading(self: Any) -> Any:
        own = self._standing
        return own.leads if own is not None and not own.over else None

    patch.setattr(reach.node.election.Election, "leading", property(leading))
    patch.setattr(EtcdLease, "lost", property(lambda self: self._gone.is_set()))
    patch.setattr(EtcdLease, "_watch_the_clock", lambda self: None)
    patch.setattr(reach.node.election.Election, "_check_time", lambda self, own: None)
    patch.setattr(reach.node.election.Election, "_wait", lambda self, own: asyncio.sleep(0.1))


@breaks_nodes
def every_view_is_what_the_store_says(patch: Patch) -> None:
    """Nobody mends what the store has lost."""

    async def mend(self: Any) -> None: ...

    patch.setattr(reach.node.registrar.Registrar, "_mend", mend)


@breaks_nodes
def epochs_of_a_session_never_go_down(patch: Patch) -> None:
    """Each message of a session comes under a smaller epoch than the one before."""

    def take_head(ours: Any, state: Any, lane: Any) -> Any:
        lane.epoch -= 1
        return ours(state, lane)

    around(patch, reach.core.lanes, "take_head", take_head)


@breaks_nodes
def only_an_agents_home_delivers(patch: Patch) -> None:
    """Agents are registered as another node's."""

    def value(ours: Any, agent: Any) -> bytes:
        record = AgentRecord.FromString(ours(agent))
        record.node_id = "node-9"
        return record.SerializeToString()

    around(patch, reach.node.registrar, "_value", value)


@breaks
def hops_count_agents(patch: Patch) -> None:
    """A hop is counted twice."""

    def longer(ours: Any, parent: Any, hop: bytes) -> Any:
        twice = type(parent).FromString(parent.SerializeToString())
        twice.hop_count += 1
        return ours(twice, hop)

    around(patch, reach.core.writing, "_longer_path", longer)


# ---- the tests ----


def test_every_checker_has_a_fault_that_it_must_find() -> None:
    assert {each.name for found in invariants.ALL.values() for each in found} == set(MUTATIONS)


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {moment: [each for each in found if each.name == name] for moment, found in invariants.ALL.items()}
    monkeypatch.setattr(invariants, "ALL", alone)
    MUTATIONS[name](monkeypatch)
    for seed in range(1, SEEDS_MAX + 1):
        try:
            World(seed, nodes=3 if name in OF_NODES else None).run()
        except Violation as violation:
            assert violation.invariant == name
            return
    pytest.fail(f"{SEEDS_MAX} seeds do not show it: {MUTATIONS[name].__doc__}")
