"""What a request asks for, parsed once: the tenant and env it may look in, and what an agent must be to match.

Equal selectors are one key: names are normalised and aliases replaced here, so `Summarize`, `summarize` and
`text-summarize` (if configured) lead to one pool of candidates. How one of the candidates is chosen (policy,
hash_key) is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agentreach.v1.envelope_pb2 import Target
from reach.core.access import fits
from reach.core.agents import DEFAULT_ENV, Agent, normal_capability
from reach.core.versions import version_matches

Anchor = tuple[str, str]
"""What one looks candidates up by: ("id", agent_id), ("type", agent_type), ("capability", name) or ("any", "")."""

ANY: Anchor = ("any", "")


class SelectorError(ValueError):
    """The target cannot be routed; the text names the fields. Becomes INVALID_ENVELOPE."""


class Aliases:
    """Other names of capabilities, from configuration: alias -> canonical name."""

    __slots__ = ("_canonical", "_names")

    def __init__(self, canonical: Mapping[str, str] | None = None) -> None:
        """`ValueError` if an alias leads back to itself. An alias of an alias is resolved."""
        direct = {normal_capability(a): normal_capability(c) for a, c in (canonical or {}).items()}
        self._canonical = {alias: _resolved(alias, direct) for alias in direct}
        names: dict[str, list[str]] = {}
        for alias, name in sorted(self._canonical.items()):
            names.setdefault(name, []).append(alias)
        self._names = {name: tuple(aliases) for name, aliases in names.items()}

    def canonical(self, capability: str) -> str:
        """The one name under which a capability is compared."""
        name = normal_capability(capability)
        return self._canonical.get(name, name)

    def canonical_all(self, capabilities: Iterable[str]) -> frozenset[str]:
        """The same for a set of them."""
        return frozenset(map(self.canonical, capabilities))

    def of(self, capability: str) -> tuple[str, ...]:
        """The aliases of a canonical name, sorted."""
        return self._names.get(capability, ())

    def known(self) -> Iterator[str]:
        """All aliases."""
        return iter(self._canonical)


def _resolved(alias: str, direct: Mapping[str, str]) -> str:
    seen = {alias}
    name = direct[alias]
    while name in direct:
        if name in seen:
            raise ValueError(f"capability aliases lead round in a circle: {' = '.join(sorted(seen))}")
        seen.add(name)
        name = direct[name]
    return name


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed, normalised target. `agent_id` stands alone; of the others all that are given must match."""

    tenant: str
    env: str
    agent_id: str = ""
    agent_type: str = ""
    capabilities: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()
    version: str = ""
    among: tuple[str, ...] = ()
    """Whom the sender may call at all (`access.fits`); empty: all."""

    def matches(self, agent: Agent) -> bool:
        """Whether the agent is one of those asked for, whatever its state."""
        return agent.tenant == self.tenant and agent.env == self.env and self.describes(agent)

    def describes(self, agent: Agent) -> bool:
        """The same without looking at tenant and env."""
        if self.agent_id:
            return agent.agent_id == self.agent_id
        return (
            (not self.agent_type or agent.agent_type == self.agent_type)
            and self.capabilities <= agent.offers
            and (not self.labels or self.labels <= agent.labels.items())
            and version_matches(self.version, agent.version)
            and (not self.among or fits(self.among, agent.agent_id))
        )

    @property
    def anchor(self) -> Anchor:
        """One property that every match must have: what its candidates are looked up by."""
        if self.agent_id:
            return ("id", self.agent_id)
        if self.agent_type:
            return ("type", self.agent_type)
        if self.capabilities:
            return ("capability", min(self.capabilities))
        return ANY

    def __str__(self) -> str:
        """How a person would say it, for messages; names neither tenant nor env."""
        if self.agent_id:
            return f"agent {self.agent_id}"
        parts = []
        if self.agent_type:
            parts.append(f"type {self.agent_type}")
        if self.capabilities:
            parts.append(f"capabilities {', '.join(sorted(self.capabilities))}")
        if self.labels:
            parts.append("labels " + ", ".join(f"{key}={value}" for key, value in sorted(self.labels)))
        if self.version:
            parts.append(f"version {self.version}")
        return " and ".join(parts) or "any agent"


def anchors_of(agent: Agent) -> list[Anchor]:
    """All anchors under which a selector that matches this agent may look."""
    anchors: list[Anchor] = [("id", agent.agent_id), ("type", agent.agent_type), ANY]
    anchors.extend(("capability", name) for name in agent.offers)
    return anchors


def parse_selector(target: Target, tenant: str, env: str, aliases: Aliases) -> Selector:
    """Parse a target of the kinds agent_id or selector. An empty env is `production`.

    `SelectorError` if it names none or several of the kinds agent_id, topic and selector, or a topic: topics have
    subscribers, not candidates.
    """
    agent_id, topic = target.agent_id, target.topic
    agent_type, version = target.agent_type, target.version.strip()
    capabilities = aliases.canonical_all(target.capabilities)
    labels = frozenset(target.labels.items())
    by_properties = bool(agent_type or capabilities or labels or version)
    kinds = bool(agent_id) + bool(topic) + by_properties
    if kinds != 1:
        given = [field.name for field, _ in target.ListFields() if field.name not in _NO_KIND]
        raise SelectorError(
            "target: give exactly one of agent_id, topic, or a selector (agent_type, capabilities, labels, version); "
            + (f"given: {', '.join(given)}" if given else "nothing is given")
        )
    if topic:
        raise SelectorError("target.topic: a topic has subscribers; only an EVENT is sent to one")
    env = env or DEFAULT_ENV
    if agent_id:
        return Selector(tenant, env, agent_id=_normal_id(agent_id))
    return Selector(tenant, env, "", agent_type.lower(), capabilities, labels, version, tuple(target.among))


_NO_KIND = frozenset({"policy", "hash_key", "broadcast", "among"})


def _normal_id(agent_id: str) -> str:
    agent_type, slash, instance = agent_id.partition("/")
    return agent_type.lower() + slash + instance
