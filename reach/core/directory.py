"""Who is there: every agent the node knows, the pools of those that match a selector, and the slots in use.

Everything is kept incrementally. Adding an agent touches the pools that may hold it, found by the same anchors (id,
type, capability) by which a pool finds its agents; a change of state moves it between tiers of the pools that do.
A decision is `pool_for` (a cache hit), `balance.choose`, `reserve`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from agentreach.v1.envelope_pb2 import Target
from reach.core.agents import DEFAULT_ENV, Agent
from reach.core.hints import near_miss
from reach.core.pool import Avoidance, Pool, retier
from reach.core.selector import ANY, Aliases, Anchor, Selector, anchors_of, parse_selector

POOLS_MAX = 1000  # selectors kept; callers invent labels and ranges, the node's memory must not follow
RAW_TARGETS_MAX = 4096  # serialised targets whose pool is remembered; a miss costs one parse (≈ 5 µs)
CHANGES_MAX = 10_000  # that somebody who watches may have missed; beyond, a snapshot
HINTS_MAX = 256  # a caller that insists on a name that is not there must not make the node search each time

Scope = tuple[str, str]
"""tenant, env: nothing is ever found across two of them."""


@dataclass(slots=True)
class _Place:
    """The agents and the pools of one scope, by anchor (the agents' split into its kind and name)."""

    by_id: dict[str, Agent] = field(default_factory=dict)
    agents: dict[str, dict[str, dict[Agent, None]]] = field(default_factory=dict)
    pools: dict[Anchor, dict[Selector, Pool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CapabilityCount:
    """One line of the inventory: a canonical capability, its aliases, how many agents offer it now."""

    name: str
    aliases: tuple[str, ...]
    agents: int


class Directory:
    """The agents of one node's view. Not thread-safe: one event loop owns it."""

    def __init__(self, aliases: Aliases | None = None, *, pools_max: int = POOLS_MAX) -> None:
        self.aliases = aliases or Aliases()
        self.revision = 0
        """Grows with every agent that comes, goes, or changes its status or weight; not with slots."""
        self.log: deque[tuple[str, str, str, bool]] = deque(maxlen=CHANGES_MAX)
        """One entry a revision, the youngest last: tenant, env, agent_id, and whether it left. `watching` reads it."""
        self.avoidance = Avoidance()
        self.wanted = False
        """Somebody waits for a slot: who becomes usable is noted in `freed`, and that somebody left in `shrunk`."""
        self.freed: list[Agent] = []
        self.shrunk = False
        self.telling = False
        """Other nodes are told who comes, leaves, or changes its status: noted in `news`."""
        self.news: list[Agent] = []
        self.of_tenant: dict[str, int] = {}
        """Agents by tenant."""
        self.of_principal: dict[tuple[str, str], int] = {}
        """Agents by (tenant, principal)."""
        self._pools_max = pools_max
        self._places: dict[Scope, _Place] = {}
        self._count = 0
        self._pools: OrderedDict[Selector, Pool] = OrderedDict()
        self._raw: dict[tuple[bytes, str, str], Pool] = {}
        self._hints: dict[tuple[Selector, frozenset[str] | None], str] = {}
        self._hints_revision = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Agent]:
        """All agents of all tenants, in no order."""
        for place in self._places.values():
            yield from place.by_id.values()

    def add(self, agent: Agent) -> Agent | None:
        """Take in an agent. Another one under the same id in its tenant and env is removed first and returned."""
        place = self._places.setdefault((agent.tenant, agent.env), _Place())
        former = place.by_id.get(agent.agent_id)
        if former is agent:
            raise ValueError(f"{agent.agent_id} is in the directory already; use changed()")
        if former is not None:
            self.remove(former)
            place = self._places.setdefault((agent.tenant, agent.env), _Place())
        offers = self.aliases.canonical_all(agent.capabilities)
        agent.offers = agent.capabilities if offers == agent.capabilities else offers  # one set, not two, if equal
        agent.tier, agent.full_at = agent.tier_now(), agent.full_at_now()
        agent.status_placed, agent.weight_placed = agent.status, agent.weight
        agent.pools = []
        place.by_id[agent.agent_id] = agent
        self._count_for_owner(agent, 1)
        for anchor in anchors_of(agent):
            kind, name = anchor
            place.agents.setdefault(kind, {}).setdefault(name, {})[agent] = None
            for selector, pool in place.pools.get(anchor, {}).items():
                if selector.describes(agent):
                    pool.add(agent)
                    agent.pools.append(pool)
        if agent.avoid_until > 0:
            self.avoidance.watch(agent)
        self._count += 1
        self.revision += 1
        self.log.append((agent.tenant, agent.env, agent.agent_id, False))
        if self.wanted:
            self.freed.append(agent)
        if self.telling:
            self.news.append(agent)
        return former

    def remove(self, agent: Agent) -> bool:
        """Take out this very agent. False if it is not (or no longer) the one under its id: a successor stays."""
        place = self._places.get((agent.tenant, agent.env))
        if place is None or place.by_id.get(agent.agent_id) is not agent:
            return False
        del place.by_id[agent.agent_id]
        self._count_for_owner(agent, -1)
        for pool in agent.pools:
            pool.remove(agent)
        agent.pools = []
        for kind, name in anchors_of(agent):
            holders = place.agents[kind][name]
            del holders[agent]
            if not holders:
                del place.agents[kind][name]
        if not place.by_id and not place.pools:
            del self._places[agent.tenant, agent.env]
        self.avoidance.forget(agent)
        self._count -= 1
        self.revision += 1
        self.log.append((agent.tenant, agent.env, agent.agent_id, True))
        self.shrunk = self.wanted
        if self.telling:
            self.news.append(agent)
        return True

    def _count_for_owner(self, agent: Agent, count: int) -> None:
        owner = (agent.tenant, agent.principal)
        of_tenant = self.of_tenant.get(agent.tenant, 0) + count
        of_principal = self.of_principal.get(owner, 0) + count
        if of_tenant:
            self.of_tenant[agent.tenant] = of_tenant
        else:
            del self.of_tenant[agent.tenant]
        if of_principal:
            self.of_principal[owner] = of_principal
        else:
            del self.of_principal[owner]

    def changed(self, agent: Agent) -> None:
        """Say that the agent's status, slots, weight, saturation or avoidance changed. It takes effect at once."""
        if agent.avoid_until > 0:
            self.avoidance.watch(agent)
        agent.full_at = agent.full_at_now()
        if agent.status != agent.status_placed or agent.weight != agent.weight_placed:
            for pool in agent.pools:
                pool.recount(agent)
            agent.status_placed, agent.weight_placed = agent.status, agent.weight
            self.revision += 1
            self.log.append((agent.tenant, agent.env, agent.agent_id, False))
            if self.telling:
                self.news.append(agent)
        if retier(agent) and self.wanted:
            self.freed.append(agent)
            self.shrunk = True

    def reserve(self, agent: Agent) -> None:
        """Take one of its slots for a request. `choose` has seen a free one; a pin may go beyond."""
        taken = agent.in_flight = agent.in_flight + 1
        if taken == agent.full_at:
            retier(agent)

    def release(self, agent: Agent) -> None:
        """Give the slot back. Also right for an agent that was removed meanwhile. `ValueError` if none is taken."""
        taken = agent.in_flight
        if taken <= 0:
            raise ValueError(f"{agent.agent_id} has no slot to release")
        agent.in_flight = taken - 1
        if taken == agent.full_at:
            retier(agent)
            if self.wanted:
                self.freed.append(agent)

    def avoid(self, agent: Agent, until: float) -> None:
        """Bias choices away from it up to `until` (monotonic): it answered OVERLOADED. Never shortens."""
        if until > agent.avoid_until:
            agent.avoid_until = until
            self.changed(agent)

    def pin(self, agent: Agent) -> None:
        """Count one session pinned to it."""
        agent.pinned_sessions += 1
        for pool in agent.pools:
            pool.pinned[agent.status_placed] += 1

    def unpin(self, agent: Agent) -> None:
        """Count one session less."""
        agent.pinned_sessions -= 1
        for pool in agent.pools:
            pool.pinned[agent.status_placed] -= 1

    def get(self, tenant: str, env: str, agent_id: str) -> Agent | None:
        """The agent under this id."""
        place = self._places.get((tenant, env or DEFAULT_ENV))
        return place.by_id.get(agent_id) if place is not None else None

    def pool_for(self, target: Target, tenant: str, env: str, data: bytes | None = None) -> Pool:
        """The candidates of a target; `SelectorError` if it is not one that can be routed. Look it up per decision.

        `data` is the serialised target, if the caller has it already.
        """
        key = (target.SerializeToString() if data is None else data, tenant, env)
        pool = self._raw.get(key)
        if pool is not None and not pool.evicted:
            pool.used = True
            return pool
        pool = self.pool(parse_selector(target, tenant, env, self.aliases))
        if not target.hash_key and not pool.evicted:  # a hash_key makes each serialised target another one
            if len(self._raw) >= RAW_TARGETS_MAX:
                self._raw.clear()
            self._raw[key] = pool
        return pool

    def pool(self, selector: Selector, *, keep: bool = False) -> Pool:
        """The candidates of a selector. One that matches nobody gets a pool of its own, which only `keep` keeps."""
        pool = self._pools.get(selector)
        if pool is not None:
            pool.used = True
            return pool
        pool = Pool(selector, self.avoidance)
        place = self._places.get((selector.tenant, selector.env))
        candidates = self.agents_in(selector.tenant, selector.env, selector.anchor)
        matching = [agent for agent in candidates if selector.describes(agent)]
        if place is None or not (matching or keep):
            pool.evicted = True
            return pool
        while len(self._pools) >= self._pools_max:
            self._evict_one()
        for agent in matching:
            pool.add(agent)
            agent.pools.append(pool)
        self._pools[selector] = pool
        place.pools.setdefault(selector.anchor, {})[selector] = pool
        return pool

    def _evict_one(self) -> None:
        """Drop a pool that was not looked up since the last round (second chance: a hit costs one write)."""
        while True:
            selector, pool = self._pools.popitem(last=False)
            if not pool.used:
                break
            pool.used = False
            self._pools[selector] = pool
        pool.evicted = True
        for agent in pool:
            agent.pools.remove(pool)
        place = self._places[selector.tenant, selector.env]
        siblings = place.pools[selector.anchor]
        del siblings[selector]
        if not siblings:
            del place.pools[selector.anchor]
        if not place.by_id and not place.pools:
            del self._places[selector.tenant, selector.env]

    def envs(self, tenant: str, within: frozenset[str] | None = None) -> list[str]:
        """The tenant's envs in which there is an agent, sorted; of some (`within`), if given."""
        return sorted(
            env
            for (owner, env), place in self._places.items()
            if owner == tenant and place.by_id and (within is None or env in within)
        )

    def agents_in(self, tenant: str, env: str, anchor: Anchor = ANY) -> Collection[Agent]:
        """The agents of one scope, or those of them under an anchor."""
        place = self._places.get((tenant, env))
        return () if place is None else place.agents.get(anchor[0], {}).get(anchor[1], {}).keys()

    def names_in(self, tenant: str, env: str, kind: str) -> dict[str, int]:
        """What exists in one scope of a kind ("type", "capability"), and how many agents have it."""
        place = self._places.get((tenant, env))
        if place is None:
            return {}
        return {name: len(agents) for name, agents in place.agents.get(kind, {}).items()}

    def listing(
        self,
        tenant: str,
        *,
        env: str = "",
        status: int = 0,
        target: Target | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
        within: frozenset[str] | None = None,
    ) -> list[Agent]:
        """A page of the tenant's agents after the key (env, agent_id), in that order; empty filters let all pass.

        Without an env, those in all of them, or in those of `within`.
        `SelectorError` for a target that is neither empty nor routable.
        """
        wanted = self._filter_of(target, tenant)
        found = [
            agent
            for name in ([env] if env else self.envs(tenant, within))
            for agent in self.agents_in(tenant, name)
            if (name, agent.agent_id) > after
            and (not status or agent.status == status)
            and (wanted is None or wanted.describes(agent))
        ]
        found.sort(key=lambda agent: (agent.env, agent.agent_id))
        return found[:limit]

    def _filter_of(self, target: Target | None, tenant: str) -> Selector | None:
        if target is None or not target.ListFields():
            return None
        return parse_selector(target, tenant, "", self.aliases)

    def capabilities(self, tenant: str, env: str = "", within: frozenset[str] | None = None) -> list[CapabilityCount]:
        """The inventory of one env, or of all the tenant's (those of `within`), by name."""
        counts: dict[str, int] = {}
        for name in [env] if env else self.envs(tenant, within):
            for capability, size in self.names_in(tenant, name, "capability").items():
                counts[capability] = counts.get(capability, 0) + size
        return [CapabilityCount(name, self.aliases.of(name), counts[name]) for name in sorted(counts)]

    def hint(self, selector: Selector, within: frozenset[str] | None = None) -> str:
        """What would be near a selector that matches nobody, as a sentence for NO_ROUTE; empty if nothing is.

        `within`: the envs that whoever reads it may know of; None: all of the tenant.
        """
        if self._hints_revision != self.revision or len(self._hints) >= HINTS_MAX:
            self._hints.clear()
            self._hints_revision = self.revision
        hint = self._hints.get((selector, within))
        if hint is None:
            hint = self._hints[selector, within] = near_miss(self, selector, within)
        return hint
