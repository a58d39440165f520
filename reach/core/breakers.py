"""What the outcome of each attempt does to its agent's breaker, and what a breaker that is not closed does to routing.

A closed breaker costs a decision nothing: two flags of the agent say whether it must be asked at all (`suspect`) and
whether it admits nothing (`shut`: then the agent stands in a tier that is not chosen from). How a breaker judges is
`breaker`'s; which failures count is its `counts_as_failure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import health
from reach.core.agents import Agent
from reach.core.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, counts_as_failure
from reach.core.latency import Latency
from reach.core.requests import Attachment, Request
from reach.core.retry import Failed

if TYPE_CHECKING:
    from reach.core.state import State

LEFT_MAX = 1_000  # breakers kept of agents that left while theirs was not closed; the oldest goes


def answered(state: State, agent: Agent, began_at: float) -> None:
    """An attempt that began at this time was answered: the agent works."""
    breaker, latency = agent.breaker, agent.latency
    if breaker is None or latency is None:
        breaker, latency = _begin(agent)
    now = state.now
    latency.observe(now - began_at)
    if breaker.outcome(True, now, began_at):
        look(state, agent)


def failed(state: State, request: Request, how: Failed, *, tried: bool = True) -> None:
    """The request's current attempt failed in this way. `tried` False: no hand-over was tried."""
    agent, now = request.agent, state.now
    if agent is None or request.judged:
        return
    breaker, latency = agent.breaker, agent.latency
    if breaker is None or latency is None:
        breaker, latency = _begin(agent)
    began_at = request.delivered_at
    counts = counts_as_failure(how, now - began_at, latency.p95_s, tried=tried)
    if counts is None:
        return
    request.judged = True
    changed = breaker.outcome(not counts, now, began_at)
    agent.recent_failures = breaker.failures(now)
    if changed:
        look(state, agent)


def ended_unjudged(state: State, agent: Agent, began_at: float) -> None:
    """An attempt at a suspect agent is over and said nothing: if it was the probe, another may be."""
    assert agent.breaker is not None
    agent.breaker.neither(state.now, began_at)
    look(state, agent)


def admits(state: State, agent: Agent) -> bool:
    """Whether a suspect agent gets the request that is being routed."""
    return agent.breaker is None or agent.breaker.admits(state.now, state.rng)


def began(state: State, agent: Agent) -> None:
    """A request is given to a suspect agent: half open, that is the probe."""
    assert agent.breaker is not None
    agent.breaker.began(state.now)
    look(state, agent)


def look(state: State, agent: Agent) -> None:
    """Make what the breaker says now known to every decision, and see to it that it is asked again in time."""
    breaker, now = agent.breaker, state.now
    if breaker is None:
        return
    was = (agent.suspect, agent.shut)
    found = breaker.state(now)
    agent.suspect = found is not CLOSED
    agent.shut = found is OPEN or (found is HALF_OPEN and breaker.next_probe_s(now) > 0)
    if agent.recent_failures:
        agent.recent_failures = breaker.failures(now)
    if was != (agent.suspect, agent.shut):
        level = "warning" if found is OPEN else "info"
        state.log(level, "breaker", agent=agent.agent_id, state=found.value, trips=breaker.trips(now))
        state.directory.changed(agent)
    if agent.suspect and isinstance(agent.link, Attachment):
        health.look_by(state, agent.link, breaker.next_at(now))


def reset(state: State, agent: Agent) -> None:
    """An operator closes the agent's breaker and has its trips forgotten."""
    if agent.breaker is not None:
        agent.breaker.reset(state.now)
        agent.recent_failures = 0
        look(state, agent)


def left(state: State, agent: Agent) -> None:
    """The agent is leaving: the same process gets no clean slate by attaching again."""
    breaker = agent.breaker
    if breaker is None or not breaker.trips(state.now):
        return
    kept = state.breakers_left
    kept[_key(agent)] = breaker
    while len(kept) > LEFT_MAX:
        kept.popitem(last=False)


def came(state: State, agent: Agent) -> None:
    """A new attachment: if this very process left with a breaker, it has it again."""
    if state.breakers_left:
        breaker = state.breakers_left.pop(_key(agent), None)
        if breaker is not None:
            agent.breaker, agent.latency = breaker, Latency()
            look(state, agent)


def all_open(pool_name: str, agents: list[Agent], counts: dict[str, str], now: float) -> Error:
    """BREAKER_OPEN: everybody who could take a request has failed too often lately."""
    next_s = min([agent.breaker.next_probe_s(now) for agent in agents if agent.breaker is not None], default=0.0)
    who = agents[0].agent_id if len(agents) == 1 else f"all {len(agents)} usable agents matching {pool_name}"
    return failure(
        codes.BREAKER_OPEN,
        f"{who} failed too often and {'gets' if len(agents) == 1 else 'get'} no requests for now; the next probe is "
        f"due in {next_s:.1f} s (reach breakers shows them)",
        retry_after_ms=max(1, int(next_s * 1000)),
        agent_id=agents[0].agent_id if len(agents) == 1 else "",
        details=counts,
    )


def _key(agent: Agent) -> tuple[str, str, str, bytes]:
    return (agent.tenant, agent.env, agent.agent_id, agent.incarnation)


def _begin(agent: Agent) -> tuple[Breaker, Latency]:
    agent.breaker, agent.latency = Breaker(), Latency()
    return agent.breaker, agent.latency
