"""From an admitted request to an attempt: who could, who should, a slot, and the envelope on the agent's link.

Choosing and reserving are one synchronous step, so two hundred requests submitted at once spread over the instances
and never exceed a limit. A request for which only a slot is missing waits (`waiting`); an attempt that fails may be
followed by another (`again`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.error_pb2 import Error
from agentreach.v1.peer_pb2 import Lineage
from agentreach.wire.errors import failure
from reach.core import (
    balance,
    breakers,
    deadletters,
    deadlines,
    health,
    lookups,
    loops,
    once,
    order,
    retry,
    returning,
    sessions,
    settle,
    version_policy,
    visiting,
    waiting,
    writing,
)
from reach.core.agents import BROKEN, FULL, Agent
from reach.core.requests import Attachment, MessageKey, Request, Stage

if TYPE_CHECKING:
    from reach.core.pool import Pool
    from reach.core.state import State

LEAST_ACTIVE: Final = int(pb.LEAST_ACTIVE)
CONSISTENT_HASH: Final = int(pb.CONSISTENT_HASH)
RAMPING_DRAWS: Final = 4  # how often a choice that falls on a ramping agent and is turned down is made again


def route(
    state: State, request: Request, envelope: Envelope, target: Target, target_data: bytes, parent: Lineage | None
) -> None:
    """Find the agent for a request and hand it over; a session's request goes to its lane first."""
    if parent is not None:
        if not envelope.reply_topic:  # else its sender does not wait for it
            request.ancestors = loops.ancestors(parent.path)
        request.parent = parent
    if state.directory.freed:
        waiting.serve(state)  # who waits goes before who comes
    if (not request.fresh or state.now < state.returning.until) and _elsewhere(
        state, request, envelope, target, parent
    ):
        return
    if envelope.session_id:
        if state.lines and order.waits(state, request, envelope, parent):
            return
        if not lookups.took(state, request, envelope, target, target_data, parent):
            sessions.enter(state, request, envelope, parent)
        return
    pool = state.directory.pool_for(target, request.key[0], request.key[2], target_data)
    policy = policy_of(state, pool, target)
    agent = choose(state, pool, target, "", policy, request=request)
    if agent is None:
        agent = own_slot(state, pool, request)
        if agent is None:
            if len(pool) or not lookups.took(state, request, envelope, target, target_data, parent):
                _nobody_now(state, request, envelope, pool)
            return
        request.reentrant = True
    request.routed = routed(policy, len(pool))
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    hand_over(state, request, envelope, attachment, parent)


def _elsewhere(state: State, request: Request, envelope: Envelope, target: Target, parent: Lineage | None) -> bool:
    """True if somebody has this message already, or may have it: it is not routed now."""
    if request.inquired:
        return False
    unclaimed = not request.fresh and bool(state.nodes) and not returning.is_held(state, request)
    if unclaimed and once.took(state, request, envelope, target, parent):
        return True
    return returning.took(state, request, envelope, target, parent)


def _nobody_now(state: State, request: Request, envelope: Envelope, pool: Pool) -> None:
    """Nobody can take it at once: it waits if capacity is the reason."""
    if not pool.tiers[FULL].agents:
        settle.fail(state, request, nobody(state, pool, request))
        return
    fault = _deadlock(state, pool, request) if request.ancestors else None
    if fault is not None:
        settle.fail(state, request, fault)
        return
    request.agent_type = pool.selector.agent_type or pool.tiers[FULL].agents[0].agent_type
    waiting.push(state, request, pool, envelope.SerializeToString())


def policy_of(state: State, pool: Pool, target: Target) -> int:
    """The message's policy, else its type's, else LEAST_ACTIVE."""
    policy = int(target.policy)
    if not policy:
        policy = LEAST_ACTIVE
        if state.rules.policies:
            member = next(iter(pool), None)
            agent_type = pool.selector.agent_type or (member.agent_type if member is not None else "")
            name = state.rules.policies.get(agent_type)
            policy = int(pb.RoutingPolicy.Value(name)) if name else LEAST_ACTIVE
    return policy


def choose(
    state: State,
    pool: Pool,
    target: Target,
    session_id: str,
    policy: int,
    exclude: Collection[str] = frozenset(),
    readmit: bool = True,
    request: Request | None = None,
    *,
    of_version: bool = False,
    last_resort: bool = True,
) -> Agent | None:
    """One usable agent of the pool by the policy. `exclude` and `readmit` are those of `balance.choose`.

    `request` is told if it does not get the version that its type's version policy wants. With `of_version` that
    policy has narrowed the pool already; without `last_resort` an agent that ramps and has had its share is left out.
    """
    if state.version_policies and not of_version:
        return _choose_version(state, pool, target, session_id, policy, exclude, readmit, request)
    agent = balance.choose(
        pool,
        policy,
        now=state.now,
        rng=state.rng,
        hash_key=(target.hash_key or session_id) if policy == CONSISTENT_HASH else "",
        warm_up_s=state.rules.warm_up_s,
        exclude=exclude,
        readmit=readmit,
    )
    if agent is None or not agent.suspect or breakers.admits(state, agent):
        return agent
    other = _instead_of(state, pool, target, session_id, policy, exclude, agent)
    return agent if other is None and last_resort else other


def _choose_version(
    state: State,
    pool: Pool,
    target: Target,
    session_id: str,
    policy: int,
    exclude: Collection[str],
    readmit: bool,
    request: Request | None,
) -> Agent | None:
    key = target.hash_key or session_id
    picked = version_policy.pick(
        state.version_policies,
        state.directory,
        pool,
        version_policy.point_of(key) if key else state.rng.random(),
        lambda narrowed, last: choose(
            state,
            narrowed,
            target,
            session_id,
            policy,
            exclude,
            readmit and last,
            of_version=True,
            last_resort=last,
        ),
    )
    if picked.fell_back:
        fell_back(state, picked, request)
    return picked.agent


def fell_back(state: State, picked: version_policy.Picked, request: Request | None) -> None:
    """A version policy wants a version that has nobody usable: count it, and tell the request's trace."""
    assert picked.agent is not None
    state.stats.version_fell_back(picked.agent.agent_type)
    if request is not None:
        request.note("version policy", state.now, picked.told)


def _instead_of(
    state: State, pool: Pool, target: Target, session_id: str, policy: int, exclude: Collection[str], ramping: Agent
) -> Agent | None:
    """A choice fell on an agent that gets a part of its share only, and not this one: another, if there is any."""
    passed = {*exclude, ramping.agent_id}
    key = (target.hash_key or session_id) if policy == CONSISTENT_HASH else ""
    for _ in range(RAMPING_DRAWS):
        other = balance.choose(
            pool,
            policy,
            now=state.now,
            rng=state.rng,
            hash_key=key,
            warm_up_s=state.rules.warm_up_s,
            exclude=passed,
            readmit=False,
        )
        if other is None:
            break
        if not other.suspect or breakers.admits(state, other):
            return other
        passed.add(other.agent_id)
    return None


@lru_cache(maxsize=4096)
def routed(policy: int, candidates: int) -> str:
    """How a request was routed, for its trace."""
    return (
        f"{pb.RoutingPolicy.Name(pb.RoutingPolicy.ValueType(policy))}, {candidates} candidate{'s'[: candidates != 1]}"
    )


def own_slot(state: State, pool: Pool, request: Request) -> Agent | None:
    """A reentrant agent of the pool in which an ancestor of this request runs: its tree may use its own slot again."""
    if not request.ancestors:
        return None
    for agent in pool.tiers[FULL].agents:
        if agent.reentrant and not agent.saturated and not request.ancestors.isdisjoint(_holders(agent, request)):
            return agent
    return None


def _holders(agent: Agent, request: Request) -> set[str]:
    """The message_ids in the agent's slots: those of this node; of an agent elsewhere also what the path tells."""
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    held = {each.message_id for each in attachment.attempts.values()}
    if attachment.remote and request.parent is not None:
        held |= {hop.message_id for hop in request.parent.path if hop.agent_id == agent.agent_id} & request.ancestors
    return held


def hand_over(
    state: State, request: Request, envelope: Envelope, attachment: Attachment, parent: Lineage | None
) -> None:
    """Make an attempt: check the hop, reserve the slot, sign the lineage, and put the envelope on the agent's link."""
    if request.visitor is not None:
        visiting.hand_over(state, request, envelope, attachment)
        return
    agent = attachment.agent
    if envelope.resent and not request.tied:
        envelope.resent = False  # by its caller, to this node; not to this agent
    if parent is not None and parent.hop_count:
        fault = loops.check_hop(parent.path, parent.hop_count, agent.agent_type, envelope.dedup_key, state.loop_limits)
        if fault is not None:
            kind = "hop_limit" if fault.code == codes.HOP_LIMIT else "loop_detected"
            state.stats.loops[kind] += 1
            state.log("warning", "loop cut", request.trace_id, path=fault.details["path"], kind=kind)
            deadletters.bury(state, request, fault, envelope.SerializeToString())
            settle.fail(state, request, fault)
            return
    now = state.now
    request.agent = agent
    request.attachment = attachment
    request.agent_type = agent.agent_type
    if request.type_stats is None:
        request.type_stats = state.stats.began(agent.agent_type)
    if not request.reentrant:
        state.directory.reserve(agent)
        request.holds_slot = True
    attachment.attempts[request.number] = request
    if request.attempt:
        state.stats.retries += 1
        state.budget.began(attachment)
        request.budgeted = attachment
    else:
        state.budget.requested(agent.agent_type, now)
    request.attempt += 1
    request.data = data = writing.delivered(state, request, envelope, attachment.recipient, parent)
    if len(data) > writing.CONTROL_BYTES_MAX and len(data) > state.rules.payload_bytes_max + writing.CONTROL_BYTES_MAX:
        settle.fail(state, request, _oversize(state, len(data)))
        return
    if agent.suspect:
        breakers.began(state, agent)
    if request.idempotent and not request.waits_at_home:
        _limit_attempt(state, request, envelope)
    put_on_link(state, request, attachment)


def put_on_link(state: State, request: Request, attachment: Attachment) -> None:
    """Put the attempt, whose bytes are the request's `data`, into the outbox of the agent's link."""
    now, agent, peer = state.now, attachment.agent, attachment.peer
    request.stage = Stage.DELIVERED
    request.delivered_at = now
    link = peer.link
    request.item = link.put_bytes(request.data, now, request.priority)
    state.woken.add(peer)
    if attachment.look_at > now + health.LOOK_S:
        health.look_soon(state, attachment)
    if link.full and not agent.saturated:
        peer.filled = agent.saturated = True
        state.directory.changed(agent)


def _limit_attempt(state: State, request: Request, envelope: Envelope) -> None:
    """An attempt that may be followed by another has a part of the time left."""
    left_s = request.deadline - state.now
    pinned = request.lane is not None
    limit_s = retry.attempt_timeout_s(int(envelope.profile), request.attempt, left_s, idempotent=True, pinned=pinned)
    if limit_s < left_s:
        request.attempt_until = state.now + limit_s
        deadlines.reschedule(state, request)


def _deadlock(state: State, pool: Pool, request: Request) -> Error | None:
    """The slots it would wait for are held by its own callers, or by those who wait as it would."""
    full = pool.tiers[FULL].agents
    if request.parent is None or not all(agent.max_concurrency and not agent.saturated for agent in full):
        return None
    held = [_holders(agent, request) for agent in full]
    if any(len(ids) < agent.max_concurrency and _is_remote(agent) for agent, ids in zip(full, held, strict=True)):
        return None  # other nodes' callers hold some, and can finish
    holders = [message_id for ids in held for message_id in ids]
    queued = [held.ancestors for held in state.queue.waiting(pool.selector)]
    if not loops.would_deadlock(request.ancestors, holders, queued):
        return None
    state.stats.loops["would_deadlock"] += 1
    return loops.deadlock(request.parent.path, str(pool.selector), "every slot")


def nobody(state: State, pool: Pool, request: Request) -> Error:
    """Why no agent of the pool can take the request: nothing matches, all broke, or nothing is usable."""
    selector = pool.selector
    if not len(pool):
        return lookups.no_match(state, pool, request)
    broken = pool.tiers[BROKEN].agents
    if broken:
        return breakers.all_open(str(selector), broken, _counts(pool), state.now)
    return failure(
        codes.NO_AGENT_AVAILABLE,
        f"{len(pool)} agents match {selector} and none is usable: {pool.why_unusable()}",
        details=_counts(pool),
    )


def attachment_of(agent: Agent) -> Attachment:
    """The agent on its link."""
    assert isinstance(agent.link, Attachment)
    return agent.link


def _oversize(state: State, size: int) -> Error:
    """The payload is within its limit; what stands around it is not."""
    bound = state.rules.payload_bytes_max + writing.CONTROL_BYTES_MAX
    return failure(
        codes.INVALID_ENVELOPE, f"the envelope is {size} bytes as delivered; the limit, payload included, is {bound}"
    )


def _is_remote(agent: Agent) -> bool:
    return isinstance(agent.link, Attachment) and agent.link.remote


def _counts(pool: Pool) -> dict[str, str]:
    return {name: str(count) for name, count in pool.counts().items()}


def incarnation(state: State, key: MessageKey, agent_id: str, incarnation: bytes) -> Attachment | None:
    """The attachment of exactly this process, or None if it is gone."""
    agent = state.directory.get(key[0], key[2], agent_id)
    if agent is None or agent.incarnation != incarnation:
        return None
    attachment = agent.link
    assert isinstance(attachment, Attachment)
    return attachment
