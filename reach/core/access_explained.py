"""`reach authz explain`: what a principal may do, by the same table that decides when it does it.

Of a chain of principals the first that may not decides, as it would of a call made on behalf of the others. Who asks is
told no more than its own envs allow.
"""

from __future__ import annotations

from collections.abc import Callable

from agentreach.v1.admin_pb2 import ExplainAccessReply, ExplainAccessRequest
from reach.core import access
from reach.core.access import Action, Decision, Rights
from reach.core.agents import DEFAULT_ENV
from reach.core.ports import OWNERS_TENANT

ACTORS_MAX = 32  # as many as a call may pass through


def fault(request: ExplainAccessRequest) -> str:
    """What is wrong with a question; empty: nothing."""
    actions = [each.value for each in Action]
    if request.action not in actions:
        return f"action is {request.action[:50]!r}; allowed: {', '.join(actions)}"
    if not request.principal and not request.key_id:
        return "principal: it is empty; name a principal, or a key by its id"
    if len(request.actors) > ACTORS_MAX:
        return f"actors: at most {ACTORS_MAX} are allowed"
    target = request.target
    if request.action in ("publish", "subscribe") and not target.topic:
        return f"target: {request.action} needs a topic"
    if request.action == "register" and not (target.agent_type or target.agent_id):
        return "target: register needs a type"
    return ""


def env_fault(request: ExplainAccessRequest, by: Rights | None, who: str) -> str:
    """Why somebody with these rights is not told of the env that it asks about; empty: it is."""
    if Action(request.action) in (Action.ADMIN, Action.SCRAPE):
        return ""
    decision = access.may_read(by, request.env or DEFAULT_ENV, who=who)
    return "" if decision.allowed else decision.why


def explained(
    request: ExplainAccessRequest,
    principal: str,
    rights: Rights | None,
    rights_of: Callable[[str], Rights | None],
    within: frozenset[str] | None = None,
) -> ExplainAccessReply:
    """The answer. `rights` are those of the principal, or of its one key; None: it has no key.

    `rights_of` gives those of an actor. `within` are the envs of which the asker is told; None: all.
    """
    decision = _decided(request, rights, f"principal {principal}", within)
    for name in request.actors:
        if not decision.allowed:
            break
        behind = _decided(request, rights_of(name), f"principal {name}, on whose behalf it is done,", within)
        if not behind.allowed or behind.among:
            decision = behind
    return ExplainAccessReply(allowed=decision.allowed, why=decision.why, rule=decision.rule)


def _decided(request: ExplainAccessRequest, rights: Rights | None, who: str, within: frozenset[str] | None) -> Decision:
    rights = access.narrowed(rights, within) if rights is not None else None
    if rights is None:
        where = "" if within is None else f" in {', '.join(sorted(within))}"
        return Decision(False, "unknown", f"{who} has no key or certificate that holds{where}")
    target, env = request.target, request.env
    match Action(request.action):
        case Action.REGISTER:
            agent_id = target.agent_id or target.agent_type
            return access.may_register(rights, agent_id, tuple(target.capabilities), env, who=who)
        case Action.CALL:
            return access.may_call(rights, target, env, who=who)
        case Action.PUBLISH:
            return access.may_publish(rights, target.topic, env, who=who)
        case Action.SUBSCRIBE:
            return access.may_subscribe(rights, target.topic, env, who=who)
        case Action.ADMIN:
            return access.may_administer(rights, who=who)
        case Action.SCRAPE:
            return access.may_scrape(rights, owners=request.tenant in ("", OWNERS_TENANT), who=who)
