"""On whose behalf: the actors of a call, and whether all of them, and its sender, may make it.

A message sent from a handler names, by its lineage, the principals that the handled message came from: its actors,
oldest first. Its rights are what its sender's and all its actors' have in common, so nobody gets more through an agent
than by calling themselves. An actor whose keys are gone meanwhile has no rights any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import access
from reach.core.access import NO_RIGHTS, Decision, Rights

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.ports import Identity
    from reach.core.selector import Selector
    from reach.core.state import State

DECISIONS_KEPT = 1_000  # of one principal: a decision again costs a few microseconds


def behind(parent: Lineage | None, principal: str) -> tuple[str, ...]:
    """The actors of what this principal sends from handling a message: those before it, oldest first."""
    if parent is None:
        return ()
    earlier = tuple(parent.actors)
    return earlier if parent.principal in ("", principal) else (*earlier, parent.principal)


def call_fault(
    state: State, who: Identity, envelope: Envelope, target_data: bytes, parent: Lineage | None
) -> Error | None:
    """Why a request, or an event to agents, may not be sent; None: it may.

    Writes `Target.among` if it may go to some of those that match only.
    """
    assert who.rights is not None
    target = envelope.target
    if target.among:
        target.ClearField("among")
        target_data = target.SerializeToString()
    key = (target_data, envelope.env)
    decision = who.decisions.get(key)
    if decision is None:
        decision = access.may_call(who.rights, target, envelope.env, who=f"principal {who.principal}")
        if len(who.decisions) >= DECISIONS_KEPT:
            who.decisions.clear()
        who.decisions[key] = decision
    if decision.allowed and not decision.among and parent is None:
        return None
    among = [decision.among]
    for name, rights in _behind(state, who, parent):
        if not decision.allowed:
            break
        decision = access.may_call(rights, target, envelope.env, who=f"principal {name}, on whose behalf it is made,")
        among.append(decision.among)
    if not decision.allowed:
        return denied(state, decision)
    target.among.extend(filter(None, dict.fromkeys(among)))
    return None


def topic_fault(state: State, who: Identity, topic: str, env: str, parent: Lineage | None) -> Error | None:
    """Why nothing may be published to a topic; None: it may."""
    decision = access.may_publish(who.rights, topic, env, who=f"principal {who.principal}")
    for name, rights in _behind(state, who, parent):
        if decision.allowed:
            decision = access.may_publish(rights, topic, env, who=f"principal {name}, on whose behalf it is sent,")
    return None if decision.allowed else denied(state, decision)


def _behind(state: State, who: Identity, parent: Lineage | None) -> list[tuple[str, Rights]]:
    return [(name, rights_of(state, who.tenant, name) or NO_RIGHTS) for name in behind(parent, who.principal)]


def rights_of(state: State, tenant: str, principal: str) -> Rights | None:
    """What a principal may, wherever in the mesh it came in; None: it has nothing to come in by."""
    found = state.principals.get((tenant, principal))
    return state.named(tenant, principal) if found is None and state.named is not None else found


def denied(state: State, decision: Decision) -> Error:
    """The error for what is not allowed; it is counted."""
    state.stats.denied += 1
    return failure(codes.PERMISSION_DENIED, f"{decision.why}; `reach authz explain` shows who may what")


def not_among(selector: Selector, others: int) -> Error:
    """Some match a request, and its sender may call none of them."""
    return failure(
        codes.PERMISSION_DENIED,
        f"{others} agent{'s'[: others != 1]} match {selector}, and none is among those that may be called: "
        f"{'; and '.join(selector.among)}",
    )
