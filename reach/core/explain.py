"""Why this agent and not that one: the decision taken again slowly, one candidate and one stage after the other.

This is the honest walk beside the pools' fast answer: it looks at every agent of the tenant, in the order of stages of
behaviour.md §2, and says what removed each. A property test holds the two together. It changes nothing: no slot is
taken, no turn is used up. Agents of other tenants do not exist for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from agentreach.v1.admin_pb2 import Candidate, ExplainReply
from agentreach.v1.envelope_pb2 import RoutingPolicy, Target
from agentreach.v1.registry_pb2 import AgentStatus
from reach.core.access import fits
from reach.core.agents import DEGRADED, HEALTHY, Agent
from reach.core.balance import CONSISTENT_HASH, LEAST_ACTIVE, ROUND_ROBIN, WARM_UP_S, Rng, choose, choose_owner
from reach.core.directory import Directory
from reach.core.pool import Pool
from reach.core.selector import Selector, parse_selector
from reach.core.version_policy import Picked, Policies, pick, point_of
from reach.core.versions import version_matches

ENV, SELECTOR, STATUS, EXCLUDED = "env", "selector", "status", "excluded"
BREAKER, PIN, CAPACITY, VERSION_POLICY, CHOOSE = "breaker", "session pin", "capacity", "version policy", "choose"
STAGES = (ENV, SELECTOR, STATUS, EXCLUDED, BREAKER, PIN, CAPACITY, VERSION_POLICY, CHOOSE)
"""In order."""

_NO_POLICY = int(RoutingPolicy.ROUTING_POLICY_UNSPECIFIED)
_NO_POLICIES: Policies = MappingProxyType({})

ROWS_MAX = 1000
_WALKED_MAX = 50_000  # agents looked at; ≈ 4 µs each, and the node does nothing else meanwhile

Removal = tuple[str, str]
"""The stage that removed a candidate (empty: usable), and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate. `removed_by` is empty if it could have been chosen."""

    agent_id: str
    removed_by: str
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Explain` answers: the candidates that came furthest first, at most `ROWS_MAX`."""

    candidates: tuple[Row, ...]
    chosen: str
    policy: int
    """That chose; 0 if the session's pin did."""
    revision: int

    def to_reply(self, age_ms: int = 0) -> ExplainReply:
        """As the wire has it; `age_ms` = how old the view is."""
        rows = [Candidate(agent_id=row.agent_id, removed_by=row.removed_by, why=row.why) for row in self.candidates]
        return ExplainReply(
            candidates=rows,
            chosen=self.chosen,
            policy=RoutingPolicy.ValueType(self.policy),
            revision=self.revision,
            age_ms=age_ms,
        )


def explain(
    directory: Directory,
    target: Target,
    tenant: str,
    env: str,
    *,
    policy: int = 0,
    pin: str | None = None,
    session_id: str = "",
    now: float,
    rng: Rng,
    hash_key: str | bytes = "",
    warm_up_s: float = WARM_UP_S,
    exclude: Collection[str] = frozenset(),
    readmit: bool = True,
    version_policies: Policies = _NO_POLICIES,
    within: frozenset[str] | None = None,
) -> Explanation:
    """Decide as `balance.choose` would, and say why. Arguments are those of the decision explained.

    `within`: the envs that whoever reads it may know of; None: all of the tenant.
    `pin` is the agent_id that the message's session is pinned to: it is the choice, whatever its state, and everybody
    else is removed. `session_id` is that of a session without one: as `balance.choose_owner` would, the ring chooses,
    whatever the policy and the slots. `SelectorError` for a target that cannot be routed.
    """
    selector = parse_selector(target, tenant, env, directory.aliases)
    policy = policy or LEAST_ACTIVE
    matching: list[Agent] = []
    removals: dict[Agent, Removal] = {}
    for agent in _related_first(directory, selector, within):
        if selector.matches(agent):
            matching.append(agent)
        else:
            removals[agent] = _by_env_or_selector(selector, agent)
    if pin is not None:
        policy = _NO_POLICY
        removals.update(_by_pin(matching, pin))
        picked = Picked(next((agent for agent in matching if agent.agent_id == pin), None))
    else:
        key = session_id or hash_key
        if session_id:
            policy = CONSISTENT_HASH
            removals.update(_by_status(matching))
        else:
            removals.update(_by_state(matching, now, exclude, readmit))
        picked = pick(
            version_policies,
            directory,
            directory.pool(selector),
            point_of(key) if key else rng.random(),
            lambda pool, last: (
                choose_owner(pool, session_id)
                if session_id
                else _choice(pool, policy, now, rng, hash_key, warm_up_s, exclude, readmit and last)
            ),
        )
    chosen = picked.agent
    if chosen is not None:
        removals.update(_by_version(removals, chosen, picked, now))
    return Explanation(_rows(removals, chosen, now), chosen.agent_id if chosen else "", policy, directory.revision)


def _by_version(removals: dict[Agent, Removal], chosen: Agent, picked: Picked, now: float) -> dict[Agent, Removal]:
    """What becomes of the chosen one, and by the version policy of those of its type that came so far."""
    why = f"{_state(chosen, True, now)}; {picked.told}" if picked.fell_back else ""
    found = {chosen: removals.get(chosen, ("", "")) if not why else ("", why)}
    if not picked.got:
        return found
    came = [
        agent
        for agent, (stage, _) in removals.items()
        if stage in ("", CHOOSE) and agent.agent_type == chosen.agent_type
    ]
    left = [agent for agent in came if version_matches(picked.got, agent.version)]
    if all(removals[agent][0] == CHOOSE for agent in left):  # the others who would be chosen before them are gone
        found = dict.fromkeys(left, ("", "")) | {chosen: ("", why)}
    for agent in came:
        if agent not in left:
            told = f"version: is {agent.version or '(none)'}; the policy gives this to {picked.got}"
            found[agent] = (VERSION_POLICY, told)
    return found


def _related_first(directory: Directory, selector: Selector, within: frozenset[str] | None = None) -> Iterator[Agent]:
    """The tenant's agents, those of the same id, type or with a capability in common before all others."""
    rest: list[Agent] = []
    walked = 0
    for env in sorted(directory.envs(selector.tenant, within), key=lambda env: (env != selector.env, env)):
        for agent in directory.agents_in(selector.tenant, env):
            walked += 1
            if walked > _WALKED_MAX:
                break
            if _related(selector, agent):
                yield agent
            elif len(rest) < ROWS_MAX:
                rest.append(agent)
    yield from rest


def _related(selector: Selector, agent: Agent) -> bool:
    if selector.agent_id:
        return agent.agent_type == selector.agent_id.partition("/")[0]
    if selector.agent_type or selector.capabilities:
        return agent.agent_type == selector.agent_type or not selector.capabilities.isdisjoint(agent.offers)
    return True


def _by_env_or_selector(selector: Selector, agent: Agent) -> Removal:
    if agent.env != selector.env:
        return ENV, f"is in env {agent.env}, not {selector.env}"
    if selector.agent_id:
        return SELECTOR, f"agent_id: is not {selector.agent_id}"
    if selector.agent_type and agent.agent_type != selector.agent_type:
        return SELECTOR, f"type: is {agent.agent_type}, not {selector.agent_type}"
    missing = selector.capabilities - agent.offers
    if missing:
        return SELECTOR, f"capabilities: lacks {', '.join(sorted(missing))}"
    for key, value in sorted(selector.labels):
        if agent.labels.get(key) != value:
            return SELECTOR, f"labels: {key} is {agent.labels.get(key, '(none)')}, not {value}"
    if not fits(selector.among, agent.agent_id):
        return SELECTOR, f"rights: is none of {'; '.join(selector.among)}"
    assert not version_matches(selector.version, agent.version)
    return SELECTOR, f"version: is {agent.version or '(none)'}, not {selector.version}"


def _by_pin(matching: list[Agent], pin: str) -> dict[Agent, Removal]:
    owner = ("", "owner of the session: it waits for this one, whatever its state")
    return {agent: owner if agent.agent_id == pin else (PIN, f"the session is pinned to {pin}") for agent in matching}


def _by_status(matching: list[Agent]) -> dict[Agent, Removal]:
    """What counts for the owner of a new session: its messages wait for slots in their lane."""
    healthy_left = any(agent.status == HEALTHY for agent in matching)
    return {agent: _status_removal(agent, healthy_left) or ("", "") for agent in matching}


def _status_removal(agent: Agent, healthy_left: bool) -> Removal | None:
    if agent.status not in (HEALTHY, DEGRADED):
        return STATUS, AgentStatus.Name(AgentStatus.ValueType(agent.status or 1))
    if agent.status == DEGRADED and healthy_left:
        return STATUS, "DEGRADED, and a HEALTHY one is left"
    return None


def _by_state(matching: list[Agent], now: float, exclude: Collection[str], readmit: bool) -> dict[Agent, Removal]:
    """The stages from status to choose. "Left" means: could take the request now."""
    able = [
        agent for agent in matching if agent.status in (HEALTHY, DEGRADED) and not agent.shut and _why_full(agent) == ""
    ]
    others = [agent for agent in able if agent.agent_id not in exclude]
    shut_out = frozenset(exclude) if others or not readmit else frozenset()
    left = others if shut_out else able
    healthy_left = any(agent.status == HEALTHY for agent in left)
    status_left = HEALTHY if healthy_left else DEGRADED
    unbiased_left = any(agent.status == status_left and agent.avoid_until <= now for agent in left)
    return {agent: _removal(agent, now, agent.agent_id in shut_out, healthy_left, unbiased_left) for agent in matching}


def _removal(agent: Agent, now: float, shut_out: bool, healthy_left: bool, unbiased_left: bool) -> Removal:
    by_status = _status_removal(agent, healthy_left)
    if by_status is not None:
        return by_status
    if shut_out:
        return EXCLUDED, "failed this message before"
    if agent.shut and agent.breaker is not None:
        state = agent.breaker.state(now)
        return BREAKER, f"{state.value}, next probe in {agent.breaker.next_probe_s(now):.1f} s"
    full = _why_full(agent)
    if full:
        return CAPACITY, full
    avoided_s = agent.avoid_until - now
    if avoided_s > 0 and unbiased_left:
        return CHOOSE, f"answered OVERLOADED: avoided for another {avoided_s:.1f} s"
    return "", ""


def _why_full(agent: Agent) -> str:
    if agent.saturated:
        return "its link takes nothing more for now"
    if agent.max_concurrency and agent.in_flight + agent.leftovers >= agent.max_concurrency:
        leftovers = f" and {agent.leftovers} left over from cancelled calls" if agent.leftovers else ""
        return f"full: {agent.in_flight} in flight{leftovers}, of {agent.max_concurrency}"
    return ""


def _choice(
    pool: Pool,
    policy: int,
    now: float,
    rng: Rng,
    hash_key: str | bytes,
    warm_up_s: float,
    exclude: Collection[str],
    readmit: bool,
) -> Agent | None:
    """What `choose` gives, without using up anybody's turn."""
    turns = pool.turns.copy_state() if policy == ROUND_ROBIN else None
    try:
        return choose(
            pool,
            policy,
            now=now,
            rng=rng,
            hash_key=hash_key,
            warm_up_s=warm_up_s,
            exclude=exclude,
            readmit=readmit,
        )
    finally:
        if turns is not None:
            pool.turns.restore_state(turns)


def _rows(removals: dict[Agent, Removal], chosen: Agent | None, now: float) -> tuple[Row, ...]:
    """The chosen one, the usable ones, then those that came furthest; ties by name."""
    progress = {stage: -number for number, stage in enumerate(STAGES)} | {"": -len(STAGES)}
    order = sorted(removals.items(), key=lambda item: (item[0] is not chosen, progress[item[1][0]], item[0].agent_id))
    return tuple(
        Row(agent.agent_id, stage, why or _state(agent, agent is chosen, now))
        for agent, (stage, why) in order[:ROWS_MAX]
    )


def _state(agent: Agent, chosen: bool, now: float) -> str:
    slots = f"of {agent.max_concurrency}" if agent.max_concurrency else "of any number"
    warm = agent.warmth(now, WARM_UP_S)
    ramp = (
        f", gets {agent.breaker.share(now):.0%} of its share after its breaker"
        if agent.suspect and agent.breaker
        else ""
    )
    warming = f", warming up ({warm:.0%} of its weight)" if warm < 1 else ""
    told = f"{agent.in_flight} {slots} in flight, weight {agent.weight}, load {agent.load:.2f}{warming}{ramp}"
    return ("chosen: " if chosen else "usable: ") + told
