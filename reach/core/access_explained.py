"""`reach authz explain`: what a principal may do, by the same table that decides when it does it.

Of a chain of principals the first that may not decides, as it would of a call made on behalf of the others.
"""

from __future__ import annotations

from collections.abc import Callable

from agentreach.v1.admin_pb2 import ExplainAccessReply, ExplainAccessRequest
from reach.core import access
from reach.core.access import Action, Decision, Rights
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


def explained(
    request: ExplainAccessRequest, principal: str, rights: Rights | None, rights_of: Callable[[str], Rights | None]
) -> ExplainAccessReply:
    """The answer. `rights` are those of the principal, or of its one key; None: it has no key.

    `rights_of` gives those of an actor.
    """
    decision = _decided(request, rights, f"principal {principal}")
    for name in request.actors:
        if not decision.allowed:
            break
        behind = _decided(request, rights_of(name), f"principal {name}, on whose behalf it is done,")
        if not behind.allowed or behind.among:
            decision = behind
    return ExplainAccessReply(allowed=decision.allowed, why=decision.why, rule=decision.rule)


def _decided(request: ExplainAccessRequest, rights: Rights | None, who: str) -> Decision:
    if rights is None:
        return Decision(False, "unknown", f"{who} has no key or certificate that holds")
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
