"""Which version of an agent type a request goes to: one that is preferred, or one drawn by weights (behaviour.md §2).

The stage `version policy`, between capacity and choose: of the agents that could take a request now it leaves those of
one version. A version that has nobody usable gives way to the others the policy names, then to all: a policy steers, it
never makes a request fail. Versions are compared as targets compare them, and only those that the target allows count.

Each version has a pool of its own, kept like any other, so that a decision costs the same with ten agents or ten
thousand. Where the point of a draw comes from, and how one of a pool's agents is chosen, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentreach.v1 import registry_pb2 as pb
from agentreach.wire.checks import VERSION_CHARS_MAX
from agentreach.wire.names import CALLER_TYPE, NAME_RULE, agent_type_fault, is_name, normalise_env, shown
from reach.core.agents import HEALTHY, Agent
from reach.core.ring import key_bytes, stable_hash
from reach.core.versions import parsed_range, parsed_version, version_matches

if TYPE_CHECKING:
    from reach.core.directory import Directory
    from reach.core.pool import Pool

VERSIONS_MAX = 16  # that one policy may name
VERSION_WEIGHT_MAX = 1_000_000
_POINTS = 1 << 53  # what a float tells apart


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """What one agent type's requests are steered by. `shares` are weights by version, in the order of their names."""

    shares: tuple[tuple[str, int], ...]
    preferred: bool
    version: int
    """Of the policy itself: the revision at which it was written."""

    def drawn(self, point: float, allowed: str = "") -> str:
        """The version that `point` (0 up to 1) falls on, among those that satisfy `allowed` (a version or a range).

        Empty if none does.
        """
        shares = [share for share in self.shares if version_matches(allowed, share[0])] if allowed else self.shares
        left = point * sum([weight for _, weight in shares])
        for version, weight in shares:
            left -= weight
            if left < 0:
                return version
        return max(shares, key=_weight)[0] if shares else ""

    def others(self, drawn: str, allowed: str = "") -> list[str]:
        """Where it falls back to, the heaviest first."""
        ordered = sorted(self.shares, key=_weight, reverse=True)
        return [version for version, _ in ordered if version != drawn and version_matches(allowed, version)]


def _weight(share: tuple[str, int]) -> int:
    return share[1]


Policies = Mapping[tuple[str, str], VersionPolicy]
"""By (env, agent type)."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A choice under the policies. Without one that applies, `wanted` and `got` are empty."""

    agent: Agent | None
    wanted: str = ""
    got: str = ""
    """The version whose agents were left to choose from; empty: all."""

    @property
    def fell_back(self) -> bool:
        """True if the request goes to another version than the wanted one, which has nobody usable."""
        return self.agent is not None and self.wanted != self.got and not version_matches(self.wanted, self.version)

    @property
    def version(self) -> str:
        """That of the chosen agent."""
        return self.agent.version if self.agent is not None else ""

    @property
    def told(self) -> str:
        """For traces and Explain, of one that fell back."""
        return f"version {self.wanted} has nobody usable: {self.version or 'one without a version'} instead"


def pick(
    policies: Policies, directory: Directory, pool: Pool, point: float, choose: Callable[[Pool, bool], Agent | None]
) -> Picked:
    """Choose from the pool by `choose`, of one version only where a policy says so.

    `choose` is told whether its pool is the last one: whoever is passed over while there are others may be chosen then.
    A target without a type is under the policy of the type of whom it would be given to.
    """
    selector = pool.selector
    agent_type, first = selector.agent_type, None
    if not agent_type and not selector.agent_id:
        first = choose(pool, True)
        agent_type = first.agent_type if first is not None else ""
    policy = policies.get((selector.env, agent_type))
    wanted = policy.drawn(point, selector.version) if policy is not None else ""
    if policy is None or not wanted:
        return Picked(first or choose(pool, True))
    agent = choose(_of_version(directory, pool, agent_type, wanted), False)
    if agent is not None and agent.status == HEALTHY:
        return Picked(agent, wanted, wanted)
    weak = None if agent is None else Picked(agent, wanted, wanted)
    for version in policy.others(wanted, selector.version):
        agent = choose(_of_version(directory, pool, agent_type, version), False)
        if agent is not None and agent.status == HEALTHY:
            return Picked(agent, wanted, version)
        if agent is not None and weak is None:
            weak = Picked(agent, wanted, version)
    anybody = choose(pool, True)
    if weak is not None and (anybody is None or anybody.status != HEALTHY):
        return weak
    return Picked(anybody, wanted)


def point_of(key: str | bytes) -> float:
    """Where a session or hash key draws, the same each time: 0 up to 1."""
    return (stable_hash(b"version\0" + key_bytes(key)) >> 11) / _POINTS


def _of_version(directory: Directory, pool: Pool, agent_type: str, version: str) -> Pool:
    """The pool's agents of one type and version."""
    key = (agent_type, version)
    narrowed = pool.narrowed.get(key)
    if narrowed is None or narrowed.evicted:
        if len(pool.narrowed) >= VERSIONS_MAX:  # of former policies
            pool.narrowed.clear()
        selector = replace(pool.selector, agent_type=agent_type, version=version)
        narrowed = pool.narrowed[key] = directory.pool(selector, keep=True)
    narrowed.used = True
    return narrowed


def from_proto(policy: pb.VersionPolicy, version: int) -> VersionPolicy:
    """A checked policy as decisions use it; `version` is the revision at which it was written."""
    weights = {policy.preferred: 1} if policy.preferred else dict(policy.weights)
    return VersionPolicy(tuple(sorted(weights.items())), bool(policy.preferred), version)


def key_of(policy: pb.VersionPolicy) -> tuple[str, str]:
    """Whose policy it is: (env, agent type)."""
    return normalise_env(policy.env), policy.agent_type.lower()


def fault(policy: pb.VersionPolicy) -> str | None:
    """Why a policy cannot be set, naming the field; None if it can. Without versions it ends the former one."""
    why = agent_type_fault(policy.agent_type.lower())
    if why is not None or policy.agent_type.lower() == CALLER_TYPE:
        return f"policy.agent_type: {why or 'callers have no versions'}"
    if policy.env and not is_name(policy.env):
        return f"policy.env: {shown(policy.env)} is not a name: {NAME_RULE}"
    if policy.preferred and policy.weights:
        return "policy: give either preferred or weights"
    if policy.preferred:
        return _version_fault("policy.preferred", policy.preferred)
    return _weights_fault(policy.weights)


def _weights_fault(weights: Mapping[str, int]) -> str | None:
    if len(weights) > VERSIONS_MAX:
        return f"policy.weights: {len(weights)} versions; the limit is {VERSIONS_MAX}"
    same: dict[object, str] = {}
    for version, weight in weights.items():
        why = _version_fault("policy.weights", version)
        former = same.setdefault(parsed_version(version) or version, version)
        if why is None and former != version:
            why = f"policy.weights: {shown(former)} and {shown(version)} are the same version"
        if why is None and weight > VERSION_WEIGHT_MAX:
            why = f"policy.weights: {weight} for {shown(version)}; the limit is {VERSION_WEIGHT_MAX}"
        if why is not None:
            return why
    if weights and not any(weights.values()):
        return "policy.weights: all are 0; give one version some weight, or none at all to end the policy"
    return None


def _version_fault(field: str, version: str) -> str | None:
    if not version or version != version.strip() or not version.isprintable() or len(version) > VERSION_CHARS_MAX:
        return f"{field}: {shown(version)} is no version: at most {VERSION_CHARS_MAX} printable characters"
    if parsed_version(version) is None and parsed_range(version) is not None:
        return f"{field}: {shown(version)} is a range; name one version"
    return None
