"""What would have been near: the sentence in a NO_ROUTE error that saves the reader a search.

Looks only at the caller's own tenant; other tenants' names never appear.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING

from reach.core.agents import Agent
from reach.core.selector import Anchor, Selector
from reach.core.versions import parsed_version, version_matches

if TYPE_CHECKING:
    from reach.core.directory import Directory

_NAMED_MAX = 5  # names in one sentence
_COMPARED_MAX = 500  # names a misspelt one is compared with: ≈ 5 ms, on an error's way only
_LOOKED_AT_MAX = 1000  # agents


def near_miss(directory: Directory, selector: Selector, within: frozenset[str] | None = None) -> str:
    """One sentence, or several; empty if nothing is near. Other envs are named if they are among those of `within`.

    It follows "no agent matches SELECTOR", and does not say that once more.
    """
    elsewhere = _elsewhere(directory, selector, within)
    if not directory.agents_in(selector.tenant, selector.env):
        here = "" if elsewhere else f"No agent at all is registered in env {selector.env}."
    elif selector.agent_id:
        here = _of_id(directory, selector)
    else:
        here = _of_properties(directory, selector)
    return " ".join(sentence for sentence in (elsewhere, here) if sentence)


def _elsewhere(directory: Directory, selector: Selector, within: frozenset[str] | None) -> str:
    """The same in another env of the tenant."""
    envs = [
        env
        for env in directory.envs(selector.tenant, within)
        if env != selector.env and _any_match(directory, selector, env)
    ]
    return f"It matches in env {_listed(envs)}, but env {selector.env} was asked for." if envs else ""


def _any_match(directory: Directory, selector: Selector, env: str) -> bool:
    agents = _some(directory, selector, selector.anchor, env)
    return any(selector.describes(agent) for agent in agents)


def _some(directory: Directory, selector: Selector, anchor: Anchor, env: str = "") -> list[Agent]:
    found = directory.agents_in(selector.tenant, env or selector.env, anchor)
    return [agent for agent, _ in zip(found, range(_LOOKED_AT_MAX), strict=False)]


def _of_id(directory: Directory, selector: Selector) -> str:
    agent_type = selector.agent_id.partition("/")[0]
    instances = _some(directory, selector, ("type", agent_type))
    types = directory.names_in(selector.tenant, selector.env, "type")
    if instances:
        names = sorted(agent.agent_id for agent in instances)
        near = get_close_matches(selector.agent_id, names[:_COMPARED_MAX], n=_NAMED_MAX) or names
        return f"Registered of type {agent_type}: {_listed(near, types[agent_type])}."
    return _misspelt("type", agent_type, types)


def _of_properties(directory: Directory, selector: Selector) -> str:
    """The first part of the selector that leaves nobody, and what there is instead."""
    if selector.agent_type:
        types = directory.names_in(selector.tenant, selector.env, "type")
        if selector.agent_type not in types:
            return _misspelt("type", selector.agent_type, types, said=str(selector))
    offered = directory.names_in(selector.tenant, selector.env, "capability")
    for name in sorted(selector.capabilities):
        if name not in offered:
            return _misspelt("capability", name, [*offered, *directory.aliases.known()], said=str(selector))
    able = [
        agent
        for agent in _some(directory, selector, selector.anchor)
        if selector.capabilities <= agent.offers
        and (not selector.agent_type or agent.agent_type == selector.agent_type)
    ]
    if not able:
        return _never_together(directory, selector)
    for key, value in sorted(selector.labels):
        if not any(agent.labels.get(key) == value for agent in able):
            values = sorted({agent.labels[key] for agent in able if key in agent.labels})
            there = f"{key} is {_listed(values)}" if values else f"no such agent has a label {key}"
            return f"No match has label {key}={value}: {there}."
    labelled = [agent for agent in able if selector.labels <= agent.labels.items()]
    if not labelled:
        return "Each label is there, but on no agent all of them together."
    versions = {agent.version for agent in labelled if not version_matches(selector.version, agent.version)}
    if not versions:
        return ""
    return f"Registered versions: {_listed(sorted(versions, key=_version_order))}; {selector.version} was asked for."


def _never_together(directory: Directory, selector: Selector) -> str:
    if selector.agent_type:
        of_type = _some(directory, selector, ("type", selector.agent_type))
        offers = sorted({name for agent in of_type for name in agent.offers})
        return f"Type {selector.agent_type} offers {_listed(offers) if offers else 'no capability'}."
    return "Each capability is offered, but by no agent all of them together."


def _misspelt(kind: str, name: str, known: Collection[str], said: str = "") -> str:
    """`said` of the selector before: where that is this name alone, nothing more is to be said of it."""
    near = get_close_matches(name, sorted(known)[:_COMPARED_MAX], n=3)
    question = f"did you mean {_listed(near, join=' or ')}?" if near else ""
    if said in (f"type {name}", f"capabilities {name}"):
        return question
    return f"No {kind} {name} is registered here; {question}" if near else f"No {kind} {name} is registered here."


def _version_order(text: str) -> tuple[bool, object, str]:
    version = parsed_version(text)
    return (version is None, version or parsed_version("0"), text)


def _listed(names: Collection[str], total: int = 0, join: str = ", ") -> str:
    shown = list(names)[:_NAMED_MAX]
    more = max(total, len(names)) - len(shown)
    return join.join(name or "(none)" for name in shown) + (f" and {more} more" if more else "")
