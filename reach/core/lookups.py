"""What this node does not know because its view of the registry may be old (cluster.md, "Views").

A view that was complete within the last `OLD_S` seconds is taken for the truth: who is not in it is not there. In an
older one a missing agent_id that a request names exactly is asked of the store before anybody says NO_ROUTE. If the
store does not answer either, the view is believed up to `registry_grace_s`; after that nobody can know who is there:
REGISTRY_UNAVAILABLE. Agents that are in the view are given work as ever, as far as their links go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core import access, actors, auditing, route, settle
from reach.core.brought import Parked
from reach.core.effects import LookUpAgent
from reach.core.ports import Identity
from reach.core.requests import Request, Stage

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.pool import Pool
    from reach.core.state import State

UNSEEN_S = 5.0  # from one look at the store, every three seconds, to the answer of the next
OLD_S = 10.0
RETRY_AFTER_MS = 1_000
LOOKUPS_MAX = 100  # agents that the store is asked for at once; beyond, requests are answered by the view
PARKED_MAX = 100  # requests that wait for one of them; beyond, the same

AgentKey = tuple[str, str, str]
"""(tenant, env, agent_id)."""


def age_s(state: State) -> float:
    """How old the view may be; 0 while it is looked at every few seconds and found complete."""
    unseen_s = state.now - state.view_complete_at
    return 0.0 if unseen_s <= UNSEEN_S and not state.registry_away else max(0.0, unseen_s)


def took(
    state: State, request: Request, envelope: Envelope, target: Target, target_data: bytes, parent: Lineage | None
) -> bool:
    """True if this request names an agent that an old view does not know: it waits for what the store says."""
    if not target.agent_id or request.looked_up or age_s(state) <= OLD_S or request.visitor is not None:
        return False
    tenant, _, env, _ = request.key
    key = (tenant, env, target.agent_id)
    if state.directory.get(*key) is not None:
        return False
    if len(state.lookups.get(key, ())) >= PARKED_MAX or (
        key not in state.lookups and len(state.lookups) >= LOOKUPS_MAX
    ):
        return False
    request.data = envelope.SerializeToString()
    request.parent = parent
    request.note("registry", state.now, f"the view is {age_s(state):.0f} s old: the store is asked for the agent")
    if key not in state.lookups:
        state.lookups[key] = []
        state.effects.append(LookUpAgent(*key))
    state.lookups[key].append(Parked(request, target))
    return True


def answered(state: State, key: AgentKey, known: bool) -> None:
    """The store has told the view of this agent, or that there is none; if not `known`, it did not answer."""
    for parked in state.lookups.pop(key, []):
        request = parked.request
        if request.stage is not Stage.ADMITTED:
            continue  # it ended meanwhile: its deadline, its caller
        request.looked_up = known
        pool = state.directory.pool_for(parked.target, key[0], key[1], parked.target_data)
        if known or len(pool):
            envelope = Envelope.FromString(request.data)
            route.route(state, request, envelope, parked.target, parked.target_data, request.parent)
        else:
            settle.fail(state, request, route.nobody(state, pool, request))


def no_match(state: State, pool: Pool, request: Request) -> Error:
    """Nobody in the view matches a request, or nobody of those that its sender may call."""
    selector = pool.selector
    if selector.among:
        others = len(state.directory.pool(replace(selector, among=())))
        if others:
            error = actors.not_among(selector, others)
            tenant, principal, _, message_id = request.key
            about = {"message": message_id, "to": str(selector)[:200]}
            who = Identity(tenant, principal)
            auditing.denied(state, "message.denied", who, None, about, error.message, request.trace_id)
            return error
    rights = actors.rights_of(state, request.key[0], request.key[1])
    hint = state.directory.hint(pool.selector, access.within(rights))
    return unknown(state, f"no agent matches {pool.selector}", hint, age_s=0.0 if request.looked_up else age_s(state))


def unknown(state: State, said: str, hint: str, *, age_s: float) -> Error:
    """Somebody is not in the view, which may be so old: NO_ROUTE, or it is too old to say so."""
    if age_s > state.rules.registry_grace_s:
        return failure(
            codes.REGISTRY_UNAVAILABLE,
            f"{said} in this node's view, which is {age_s:.0f} s old, and the registry does not answer: nobody knows "
            "who is there now; try again",
            retry_after_ms=RETRY_AFTER_MS,
        )
    if age_s > OLD_S:
        said += f" as of {age_s:.0f} s ago, and the registry does not answer"
    return failure(codes.NO_ROUTE, f"{said}{'; ' if hint[:1].islower() else '. '}{hint}" if hint else said)
