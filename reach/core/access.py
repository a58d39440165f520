"""Who may do what: one decision table, in plain code.

What a principal may do is its `Rights`. Without any (authentication is off) everything is allowed; with them nothing is
that no pattern allows. A call that a handler makes carries its actors, the principals on whose behalf it is made, and
is allowed only if each of them would be allowed it too.

A pattern is a name in which `*` stands for any text. For registering and calling it names an agent type
(`extractor`, `extract*`), one of its instances (`extractor/blue-*`), or with `cap:` a capability (`cap:ner`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Final

from agentreach.v1.envelope_pb2 import Target
from reach.core.agents import DEFAULT_ENV, normal_capability

CAPABILITY: Final = "cap:"
PATTERN_CHARS_MAX = 200
_PATTERN = re.compile(r"(cap:)?[A-Za-z0-9*][A-Za-z0-9._*/-]*")


class Action(Enum):
    """What somebody wants to do."""

    REGISTER = "register"
    CALL = "call"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"
    SCRAPE = "scrape"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether it is allowed, and by what: the pattern that allows it, or the default that does not."""

    allowed: bool
    rule: str
    why: str
    among: str = ""
    """Of a call that names no type: it may go to agents that fit one of these patterns only."""


def pattern_fault(pattern: str, *, topic: bool = False) -> str:
    """What is wrong with a pattern, for the person who wrote it; empty: nothing."""
    if not pattern or len(pattern) > PATTERN_CHARS_MAX:
        return f"a pattern has 1 to {PATTERN_CHARS_MAX} characters"
    if not _PATTERN.fullmatch(pattern) or (topic and pattern.startswith(CAPABILITY)):
        kinds = (
            "a topic, with * for any text" if topic else "TYPE, TYPE/INSTANCE or cap:CAPABILITY, with * for any text"
        )
        return f"{pattern!r} is no pattern; allowed: {kinds}"
    return ""


class Patterns:
    """Some patterns, ready to be asked."""

    __slots__ = ("_any", "_capabilities", "_instances", "_types", "texts")

    def __init__(self, texts: Iterable[str] = (), *, topics: bool = False) -> None:
        self.texts = tuple(dict.fromkeys(texts if topics else map(_normal, texts)))
        capabilities: list[str] = []
        instances: list[str] = []
        types: list[str] = []
        for text in self.texts:
            if topics:
                types.append(text)
            elif text.startswith(CAPABILITY):
                capabilities.append(text)
            else:
                (instances if "/" in text else types).append(text)
        self._any = "*" in types
        self._types = _compiled(types)
        self._instances = _compiled(instances)
        self._capabilities = _compiled(capabilities)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patterns) and other.texts == self.texts

    def __hash__(self) -> int:
        return hash(self.texts)

    def __repr__(self) -> str:
        return f"Patterns({', '.join(self.texts)})"

    def of_name(self, name: str) -> str:
        """The pattern for a type or a topic that this name fits; empty: none."""
        return "*" if self._any else _first(self._types, name)

    def of_agent(self, agent_id: str) -> str:
        """The pattern for a type or an instance that this agent_id fits; empty: none."""
        return self.of_name(agent_id.partition("/")[0]) or _first(self._instances, agent_id)

    def of_capability(self, name: str) -> str:
        """The pattern for a capability that this one fits; empty: none."""
        return _first(self._capabilities, CAPABILITY + normal_capability(name))

    @property
    def anything(self) -> bool:
        """Every type fits."""
        return self._any

    @property
    def names_agents(self) -> bool:
        """There are patterns for types or instances."""
        return self._any or bool(self._types or self._instances)

    @property
    def names_capabilities(self) -> bool:
        """There are patterns for capabilities."""
        return bool(self._capabilities)

    @property
    def among(self) -> str:
        """The patterns for types and instances as one word: `fits` reads it."""
        return "" if self._any else " ".join(text for text in self.texts if not text.startswith(CAPABILITY))


def _normal(text: str) -> str:
    if text.startswith(CAPABILITY):
        return CAPABILITY + normal_capability(text[len(CAPABILITY) :])
    agent_type, slash, instance = text.partition("/")
    return agent_type.lower() + slash + instance


def _compiled(texts: Iterable[str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((text, _expression(text)) for text in texts)


def _expression(text: str) -> re.Pattern[str]:
    """Each part is looked for once, as far left as it stands, and never again elsewhere (`(?>…)`).

    That finds what trying all places would, and takes no longer than the name is long: a pattern of many `*` that does
    not fit would otherwise keep the node busy for minutes.
    """
    parts = [re.escape(part) for part in re.sub(r"\*+", "*", text).split("*")]
    if len(parts) == 1:
        return re.compile(parts[0])
    middle = "".join(f"(?>.*?{part})" for part in parts[1:-1])
    return re.compile(f"{parts[0]}{middle}.*{parts[-1]}", re.DOTALL)


def _first(patterns: tuple[tuple[str, re.Pattern[str]], ...], name: str) -> str:
    return next((text for text, pattern in patterns if pattern.fullmatch(name)), "")


@dataclass(frozen=True, slots=True)
class Rights:
    """What a principal may do. Envs are names, or `*` for all."""

    envs: frozenset[str] = frozenset({"*"})
    register: Patterns = field(default_factory=Patterns)
    call: Patterns = field(default_factory=Patterns)
    publish: Patterns = field(default_factory=lambda: Patterns(topics=True))
    subscribe: Patterns = field(default_factory=lambda: Patterns(topics=True))
    admin: bool = False
    scrape: bool = False
    signs: bool = False
    """What it sends must be signed."""
    also: tuple[Rights, ...] = ()
    """Those of its other keys: what one key allows in its envs, another does not in its own."""

    def with_also(self, other: Rights) -> Rights:
        """What either allows: those of a principal with two keys."""
        return replace(
            self,
            admin=self.admin or other.admin,
            scrape=self.scrape or other.scrape,
            signs=self.signs or other.signs,
            also=(*self.also, replace(other, also=()), *other.also),
        )

    def holds_in(self, env: str) -> bool:
        """Whether they hold in this env at all."""
        return any("*" in each.envs or (env or DEFAULT_ENV) in each.envs for each in (self, *self.also))

    @property
    def within(self) -> frozenset[str] | None:
        """The envs in which they hold; None: all."""
        envs = self.envs.union(*(each.envs for each in self.also))
        return None if "*" in envs else envs


NO_RIGHTS = Rights(envs=frozenset())


def may_register(
    rights: Rights | None, agent_id: str, capabilities: Sequence[str], env: str, *, who: str = "this principal"
) -> Decision:
    """Whether an agent of this id, with these capabilities, may be registered.

    Patterns for capabilities, where there are any, must cover all that it declares.
    """
    if rights is None:
        return _OPEN
    if rights.also:
        return _either([may_register(each, agent_id, capabilities, env, who=who) for each in _apart(rights)])
    wrong_env = _env_fault(rights, env, who)
    if wrong_env is not None:
        return wrong_env
    rule = rights.register.of_agent(agent_id)
    if not rule:
        return _denied(f"{who} may not register agents of type {agent_id.partition('/')[0]}", rights.register)
    if rights.register.names_capabilities:
        for name in capabilities:
            if not rights.register.of_capability(name):
                return _denied(f"{who} may not register the capability {name}", rights.register)
    return Decision(True, rule, f"{who} may register {rule}")


def may_call(rights: Rights | None, target: Target, env: str, *, who: str = "this principal") -> Decision:
    """Whether a message may be sent to this target, which is no topic.

    One that names no type may be allowed to some of its agents only: `Decision.among`.
    """
    if rights is None:
        return _OPEN
    if rights.also:
        return _either([may_call(each, target, env, who=who) for each in _apart(rights)])
    wrong_env = _env_fault(rights, env, who)
    if wrong_env is not None:
        return wrong_env
    call = rights.call
    agent_id, agent_type = target.agent_id, target.agent_type
    if agent_id:
        kind, slash, instance = agent_id.partition("/")
        rule, what = call.of_agent(kind.lower() + slash + instance), f"agent {agent_id}"
    elif agent_type:
        rule, what = call.of_name(agent_type.lower()), f"agents of type {agent_type}"
    else:
        rule, what = "*" if call.anything else "", "agents that it does not name by type"
    rule = rule or next(filter(None, map(call.of_capability, target.capabilities)), "")
    if rule:
        among = call.among if "/" in rule else ""  # a session may go on at another instance
        return Decision(True, rule, f"{who} may call {rule}", among)
    if not agent_id and call.names_agents and (not agent_type or _instances_of(call, agent_type.lower())):
        return Decision(True, call.among, f"{who} may call those that fit {call.among}", call.among)
    return _denied(f"{who} may not call {what}", call)


def _instances_of(call: Patterns, agent_type: str) -> bool:
    """Whether some pattern for instances could fit one of this type."""
    return any(
        "/" in text and _expression(text.partition("/")[0]).fullmatch(agent_type) is not None for text in call.texts
    )


def may_publish(rights: Rights | None, topic: str, env: str, *, who: str = "this principal") -> Decision:
    """Whether an event may be sent to this topic."""
    if rights is None:
        return _OPEN
    return _either([_topic(each, each.publish, topic, env, f"{who} may not publish to") for each in _apart(rights)])


def may_subscribe(rights: Rights | None, topic: str, env: str, *, who: str = "this principal") -> Decision:
    """Whether this topic may be listened to."""
    if rights is None:
        return _OPEN
    return _either([_topic(each, each.subscribe, topic, env, f"{who} may not subscribe to") for each in _apart(rights)])


def _apart(rights: Rights) -> list[Rights]:
    """Those of each of a principal's keys."""
    return [replace(rights, also=()), *rights.also] if rights.also else [rights]


def _either(decisions: list[Decision]) -> Decision:
    """What a principal with several keys may: what one of them allows without limits, or what all allow together."""
    allowed = [each for each in decisions if each.allowed]
    for each in allowed:
        if not each.among:
            return each
    if not allowed:
        return next((each for each in decisions if each.rule == "default"), decisions[0])
    among = " ".join(each.among for each in allowed)
    return replace(allowed[0], rule=among, among=among)


def _topic(rights: Rights, patterns: Patterns, topic: str, env: str, denial: str) -> Decision:
    wrong_env = _env_fault(rights, env, denial.partition(" may not")[0])
    if wrong_env is not None:
        return wrong_env
    rule = patterns.of_name(topic)
    return Decision(True, rule, f"{rule} is allowed") if rule else _denied(f"{denial} {topic}", patterns)


def may_read(rights: Rights | None, env: str, *, who: str = "this principal") -> Decision:
    """Whether it may be told what there is in an env; empty: in each of its own."""
    if rights is None:
        return _OPEN
    if not env or rights.holds_in(env):
        return Decision(True, "envs", f"{who} may read what there is in its envs")
    return _wrong_env(rights, env, who)


def sees(rights: Rights | None, env: str) -> bool:
    """Whether somebody is told of what there is in an env."""
    return rights is None or rights.holds_in(env)


def within(rights: Rights | None) -> frozenset[str] | None:
    """The envs of which somebody is told; None: all."""
    return rights.within if rights is not None else None


def narrowed(rights: Rights, within: frozenset[str] | None) -> Rights | None:
    """What of these rights somebody may be told of who is told of these envs alone; None: nothing.

    Rights in all envs stay so: that tells no name of any.
    """
    if within is None:
        return rights
    told = []
    for each in _apart(rights):
        envs = each.envs if "*" in each.envs else each.envs & within
        if envs:
            told.append(replace(each, envs=envs))
    return replace(told[0], also=tuple(told[1:])) if told else None


def may_administer(rights: Rights | None, *, who: str = "this principal") -> Decision:
    """Whether AdminService may be used."""
    if rights is None:
        return _OPEN
    return (
        Decision(True, "admin", f"{who} is an admin")
        if rights.admin
        else Decision(False, "default", f"{who} is no admin")
    )


def may_scrape(rights: Rights | None, *, owners: bool = True, who: str = "this principal") -> Decision:
    """Whether /metrics may be read. They tell of all tenants: an admin may who is one of the `owners` of the mesh."""
    if rights is None:
        return _OPEN
    if rights.scrape or (rights.admin and owners and rights.within is None):
        return Decision(True, "scrape" if rights.scrape else "admin", f"{who} may read metrics")
    return Decision(False, "default", f"{who} may not read metrics")


def fits(among: Iterable[str], agent_id: str) -> bool:
    """Whether an agent is one of those that `Target.among` leaves: of each word one pattern must hold."""
    return all(_alternatives(word).of_agent(agent_id) for word in among)


@lru_cache(maxsize=1024)
def _alternatives(word: str) -> Patterns:
    return Patterns(word.split())


_OPEN = Decision(True, "open", "authentication is off: everybody may do anything")


def _env_fault(rights: Rights, env: str, who: str) -> Decision | None:
    return None if rights.holds_in(env) else _wrong_env(rights, env, who)


def _wrong_env(rights: Rights, env: str, who: str) -> Decision:
    envs = ", ".join(sorted(rights.within or ())) or "none"
    return Decision(False, "envs", f"{who} may do nothing in env {env or DEFAULT_ENV} (its envs: {envs})")


def _denied(why: str, patterns: Patterns) -> Decision:
    return Decision(False, "default", f"{why} (it may: {', '.join(patterns.texts) or 'nothing'})")
