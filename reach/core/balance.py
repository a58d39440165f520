"""Which of the usable candidates gets the request: the seven policies of behaviour.md §2, over one pool.

A choice takes from the first tier that is not empty: healthy agents, healthy ones that lately answered OVERLOADED,
degraded ones. So a degraded agent is chosen only when no healthy one is left that could take the request now.

No policy scans a large tier: above 32 agents the least loaded of four drawn at random is nearly as good as the least
of all (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996), and a report that is seconds old
does not send everybody to one agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from agentreach.v1.envelope_pb2 import RoutingPolicy
from reach.core.agents import BROKEN, DEGRADED, HEALTHY, USABLE_TIERS, Agent
from reach.core.pool import Pool
from reach.core.ring import key_bytes, stable_hash

RANDOM: Final = int(RoutingPolicy.RANDOM)
WEIGHTED_RANDOM: Final = int(RoutingPolicy.WEIGHTED_RANDOM)
ROUND_ROBIN: Final = int(RoutingPolicy.ROUND_ROBIN)
LEAST_ACTIVE: Final = int(RoutingPolicy.LEAST_ACTIVE)
LEAST_LOAD: Final = int(RoutingPolicy.LEAST_LOAD)
SCORE: Final = int(RoutingPolicy.SCORE)
CONSISTENT_HASH: Final = int(RoutingPolicy.CONSISTENT_HASH)

SCAN_MAX: Final = 32  # up to here every agent is looked at
DRAWS: Final = 4  # above it, so many drawn at random
_IDLE_DRAWS: Final = 3  # tries to hit an idle agent before all are compared
_WEIGHTED_DRAWS: Final = 64  # rejections before WEIGHTED_RANDOM adds the weights up instead
_LEVELS_MAX: Final = 8  # priorities that SCORE looks at in a large tier, highest first

WARM_UP_S: Final = 10.0


class Rng(Protocol):
    """Where chance comes from; `random.Random` is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class _Choice:
    """What a policy may look at besides the agents of the tier."""

    __slots__ = ("key", "now", "pool", "rng", "tier", "warm_up_s")

    def __init__(self, pool: Pool, tier: int, now: float, rng: Rng, key: str | bytes, warm_up_s: float) -> None:
        self.pool = pool
        self.tier = tier
        self.now = now
        self.rng = rng
        self.key = key
        self.warm_up_s = warm_up_s


def choose(
    pool: Pool,
    policy: int,
    *,
    now: float,
    rng: Rng,
    hash_key: str | bytes = "",
    warm_up_s: float = WARM_UP_S,
    exclude: Collection[str] = frozenset(),
    readmit: bool = True,
) -> Agent | None:
    """One agent that can take the request now, or None if no member can. The caller reserves its slot at once.

    `exclude` holds agent_ids that failed this message: they are passed over while anybody else is usable, or with
    `readmit` False in any case. `hash_key` is the message's hash_key, else its session_id; without either
    CONSISTENT_HASH is LEAST_ACTIVE, as is an unknown policy.
    """
    if pool.avoidance.next_at <= now:
        pool.avoidance.expire(now)
    if exclude:
        return _choose_excluding(pool, policy, now, rng, hash_key, warm_up_s, exclude, readmit)
    tiers = pool.tiers
    for number in range(USABLE_TIERS):
        agents = tiers[number].agents
        if not agents:
            continue
        if len(agents) == 1 and policy != ROUND_ROBIN:
            return agents[0]
        picker = _POLICIES.get(policy)
        if picker is None:
            return _least_active(agents, now, rng, warm_up_s)
        return picker(_Choice(pool, number, now, rng, hash_key, warm_up_s), agents)
    return None


def choose_owner(pool: Pool, session_id: str | bytes, exclude: Collection[str] = frozenset()) -> Agent | None:
    """The owner for a session that has none: by ring over the healthy members, with bounded load in pinned sessions.

    Slots do not count: a session's messages wait in its lane. Degraded members only if no healthy one is left, and
    nobody whose breaker is open, or whose agent_id is in `exclude`.
    """
    broken = pool.tiers[BROKEN].agents
    for status in (HEALTHY, DEGRADED):
        weight = pool.weights[status]
        if broken:
            weight -= sum(agent.weight_placed for agent in broken if agent.status_placed == status)
        if weight:
            agent = _owner_of_status(pool, session_id, status, weight, exclude)
            if agent is not None:
                return agent
    return None


def _owner_of_status(
    pool: Pool, session_id: str | bytes, status: int, weight: int, exclude: Collection[str]
) -> Agent | None:
    members = pool.members
    name = pool.ring.pick_bounded(
        session_id,
        load=lambda name: members[name].pinned_sessions,
        total=pool.pinned[status],
        usable=lambda name: members[name].status == status and not members[name].shut and name not in exclude,
        weight_usable=weight,
    )
    if name is not None:
        return members[name]
    others = [agent for agent in pool if agent.status == status and not agent.shut and agent.agent_id not in exclude]
    return _by_rendezvous(session_id, others) if others else None


def _choose_excluding(
    pool: Pool,
    policy: int,
    now: float,
    rng: Rng,
    hash_key: str | bytes,
    warm_up_s: float,
    exclude: Collection[str],
    readmit: bool,
) -> Agent | None:
    named = (pool.members.get(agent_id) for agent_id in exclude)
    aside = [agent for agent in named if agent is not None and agent.tier < USABLE_TIERS]
    for agent in aside:
        pool.set_aside(agent)
    try:
        chosen = choose(pool, policy, now=now, rng=rng, hash_key=hash_key, warm_up_s=warm_up_s)
    finally:
        for agent in aside:
            pool.put_back(agent)
    if chosen is None and aside and readmit:
        return choose(pool, policy, now=now, rng=rng, hash_key=hash_key, warm_up_s=warm_up_s)
    return chosen


def _random(choice: _Choice, agents: list[Agent]) -> Agent:
    return agents[int(choice.rng.random() * len(agents))]


def _weighted_random(choice: _Choice, agents: list[Agent]) -> Agent:
    """Draw anybody, keep it with a chance of its weight over the largest: exact, and no sum to keep up to date."""
    draw, now, warm_up_s = choice.rng.random, choice.now, choice.warm_up_s
    size, weight_max = len(agents), choice.pool.weight_max
    for _ in range(_WEIGHTED_DRAWS):
        agent = agents[int(draw() * size)]
        if draw() * weight_max < agent.weight * agent.warmth(now, warm_up_s):
            return agent
    shares = [agent.weight * agent.warmth(now, warm_up_s) for agent in agents]  # very unequal weights
    point = draw() * sum(shares)
    for agent, share in zip(agents, shares, strict=True):
        point -= share
        if point < 0:
            return agent
    return agents[-1]  # rounding


def _round_robin(choice: _Choice, agents: list[Agent]) -> Agent:
    return choice.pool.turns.take(choice.tier)


def _least_active(agents: list[Agent], now: float, rng: Rng, warm_up_s: float) -> Agent:
    """Fewest in flight per weight. An idle agent cannot be beaten, so a drawn one that is idle is the choice."""
    draw, size = rng.random, len(agents)
    looked_at = []
    for _ in range(DRAWS if size > SCAN_MAX else _IDLE_DRAWS):
        agent = agents[int(draw() * size)]
        if not agent.in_flight:
            return agent
        looked_at.append(agent)
    if size <= SCAN_MAX:
        looked_at = agents
    warm = now - warm_up_s  # who has been there since before is warm by now
    active = [
        agent.in_flight / (agent.weight if agent.warm_since <= warm else agent.weight * agent.warmth(now, warm_up_s))
        for agent in looked_at
    ]
    least = min(active)
    if active.count(least) == 1:
        return looked_at[active.index(least)]
    ties = [agent for agent, number in zip(looked_at, active, strict=True) if number == least]
    return ties[int(draw() * len(ties))]


def _least_load(choice: _Choice, agents: list[Agent]) -> Agent:
    """Lowest reported load; what is no number between 0 and 1 is taken as the nearer end (NaN: fully loaded)."""
    draw, size = choice.rng.random, len(agents)
    looked_at = agents if size <= SCAN_MAX else [agents[int(draw() * size)] for _ in range(DRAWS)]
    loads = [reported_load(agent) for agent in looked_at]
    least = min(loads)
    ties = [agent for agent, load in zip(looked_at, loads, strict=True) if load == least]
    return ties[int(draw() * len(ties))]


def reported_load(agent: Agent) -> float:
    """The agent's load as LEAST_LOAD counts it, 0..1."""
    load = agent.load
    if 0.0 <= load <= 1.0:
        return load
    return 0.0 if load < 0.0 else 1.0


def score(agent: Agent) -> float:
    """The SCORE formula of behaviour.md §2 without its random part."""
    return 10.0 * agent.priority - 5.0 * agent.in_flight - 20.0 * agent.recent_failures


def _by_score(choice: _Choice, agents: list[Agent]) -> Agent:
    """Highest score. In a large tier: four drawn of each priority, so that a rare high priority is never missed."""
    draw = choice.rng.random
    looked_at = agents
    if len(agents) > SCAN_MAX:
        levels = choice.pool.levels.of_tier(choice.tier)
        looked_at = []
        for priority in sorted(levels, reverse=True)[:_LEVELS_MAX]:
            level = levels[priority].agents
            if len(level) <= DRAWS:
                looked_at.extend(level)
            else:
                looked_at.extend([level[int(draw() * len(level))] for _ in range(DRAWS)])
    return max(looked_at, key=lambda agent: score(agent) + draw())


def _consistent_hash(choice: _Choice, agents: list[Agent]) -> Agent:
    """The key's place on the ring of all members, then on to the first one that is in this tier."""
    if not choice.key:
        return _least_active(agents, choice.now, choice.rng, choice.warm_up_s)
    usable = choice.pool.tiers[choice.tier].at
    members = choice.pool.members
    for name in choice.pool.ring.walk(choice.key):
        agent = members[name]
        if agent in usable:
            return agent
    return _by_rendezvous(choice.key, agents)


def _by_rendezvous(key: str | bytes, agents: list[Agent]) -> Agent:
    """Where a walk along the ring met no usable agent there are few of them: each is hashed with the key."""
    salt = key_bytes(key) + b"\0"
    return max(agents, key=lambda agent: stable_hash(salt + agent.agent_id.encode()))


_POLICIES: dict[int, Callable[[_Choice, list[Agent]], Agent]] = {
    RANDOM: _random,
    WEIGHTED_RANDOM: _weighted_random,
    ROUND_ROBIN: _round_robin,
    LEAST_LOAD: _least_load,
    SCORE: _by_score,
    CONSISTENT_HASH: _consistent_hash,
}
