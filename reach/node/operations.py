"""What operators order: an agent or this node to drain, a breaker to close, a letter to go again; and what there is.

Orders are carried out in a step; what they begin goes on by itself (`reach.core.drains`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from agentreach.wire.names import agent_id_fault, agent_type_fault, normalise_env, shown
from reach.core import access, breakers, drains, leaving, redriving
from reach.core.agents import Agent
from reach.core.breaker import BreakerState
from reach.core.ports import ANYBODY, Identity, KeyDesk, MeshFailure
from reach.core.requests import Attachment
from reach.core.state import State
from reach.node.key_desk import NodeDesk
from reach.node.queries import Queries

if TYPE_CHECKING:
    from reach.node.everywhere import Everywhere

BREAKERS_MAX = 1_000
DRAIN_TIMEOUT_MS_MAX = 3_600_000

_SEVERITY = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING, BreakerState.CLOSED)


class Operations(Queries):
    """The half of the switchboard that changes something on order."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.leaving = asyncio.Event()
        """Set when the node was ordered to drain: whoever runs it lets it end."""
        self.leave_within_s: float | None = None
        """How long what runs may take then; None: as configured."""
        self.others: Everywhere | None = None
        """How other nodes are asked; None where there are none."""
        self.keys: KeyDesk = NodeDesk(state)

    def step(self) -> AbstractContextManager[State]:
        """Change the state; see `Engine.step`."""
        raise NotImplementedError

    async def everywhere(
        self, method: str, request: Message, own: Callable[[], Message], who: Identity = ANYBODY
    ) -> Message:
        """See `Switchboard.everywhere`."""
        return own() if self.others is None else await self.others.ask(method, request, own, who)

    # ---- draining ----

    def drain_agent(self, request: admin.DrainAgentRequest, who: Identity) -> admin.DrainAgentReply:
        """No new work for this agent; what runs there may end within the time; then it leaves."""
        limit_s = self._limit_s(request.timeout_ms)
        with self.step() as state:
            attachment = self._agent(who, request.env, request.agent_id).link
            assert isinstance(attachment, Attachment)
            if attachment.remote:
                raise _at_home(attachment.agent)
            drains.agent(state, attachment, limit_s, request.reason)
            return admin.DrainAgentReply(
                in_flight=len(attachment.attempts),
                sessions=len(attachment.pinned),
                timeout_ms=int(limit_s * 1000),
                incarnation=attachment.agent.incarnation,
            )

    def drain_node(self, request: admin.DrainNodeRequest, who: Identity) -> admin.DrainNodeReply:
        """No new requests for this node; what runs may end within the time; then its process ends."""
        node_id = self._state.rules.node_id
        if request.node_id not in ("", node_id):
            raise MeshFailure(
                failure(codes.NO_ROUTE, f"this is node {node_id}, and it knows no node {request.node_id[:100]}")
            )
        limit_s = self._limit_s(request.timeout_ms)
        with self.step() as state:
            state.log("info", "node drains", limit_s=limit_s, why=request.reason[: drains.REASON_CHARS_MAX])
            drains.node(state, limit_s)
            left_s = max(0.0, state.leaves_at - state.now)  # it may have been leaving already
            if not self.leaving.is_set():
                self.leave_within_s = left_s
                self.leaving.set()
            return admin.DrainNodeReply(node_id=node_id, in_flight=state.unsettled, timeout_ms=round(left_s * 1000))

    def _limit_s(self, timeout_ms: int) -> float:
        if timeout_ms > DRAIN_TIMEOUT_MS_MAX:
            raise MeshFailure(
                failure(codes.INVALID_ENVELOPE, f"timeout_ms {timeout_ms}: at most {DRAIN_TIMEOUT_MS_MAX}")
            )
        return timeout_ms / 1000 or self._state.rules.drain_timeout_s

    # ---- sessions ----

    def release_session(self, request: admin.ReleaseSessionRequest, who: Identity) -> admin.ReleaseSessionReply:
        """Have a session move to another agent of its type. Answers when the move has begun."""
        agent_type, env = request.agent_type.lower(), normalise_env(request.env)
        if why := agent_type_fault(agent_type):
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, f"agent_type: {why}"))
        if not request.session_id:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, "session_id: it is empty, and names no session"))
        self.check_env(who, env)
        with self.step() as state:
            lane = state.lanes.get((who.tenant, env, agent_type, request.session_id))
            owner = lane.owner if lane is not None else None
            if lane is None or owner is None or owner.remote:
                raise MeshFailure(_no_session(request.session_id, agent_type, env, owner))
            epoch = lane.epoch
            state.log("info", "session released by an operator", agent=owner.agent.agent_id)
            fault = leaving.release(state, lane)
            if fault is not None:
                raise MeshFailure(fault)
            return admin.ReleaseSessionReply(agent_id=owner.agent.agent_id, epoch=epoch)

    # ---- dead letters ----

    def list_dead_letters(self, request: admin.ListDeadLettersRequest, who: Identity) -> admin.ListDeadLettersReply:
        """The requests that this node gave up and keeps, without their payloads."""
        with self.step() as state:
            return redriving.listed(state, who, request)

    def redrive_dead_letter(
        self, request: admin.RedriveDeadLetterRequest, who: Identity
    ) -> admin.RedriveDeadLetterReply:
        """Send one of them once more; answers when it is taken in, and raises `MeshFailure` if it is not."""
        with self.step() as state:
            made = redriving.redrive(state, who, request)
        if isinstance(made, Error):
            raise MeshFailure(made)
        return admin.RedriveDeadLetterReply(message_id=made.message_id, trace_id=made.trace_id)

    # ---- breakers ----

    def list_breakers(self, request: admin.ListBreakersRequest, who: Identity) -> admin.ListBreakersReply:
        """Breakers that are not closed, or have tripped lately; the worst first."""
        with self.step() as state:
            now = state.now
            found = [
                (_SEVERITY.index(breaker.state(now)), agent.agent_id, agent)
                for agent in state.directory
                if agent.tenant == who.tenant
                and access.sees(who.rights, agent.env)
                and (breaker := agent.breaker) is not None
                and (breaker.state(now) is not BreakerState.CLOSED or breaker.trips(now))
            ]
        found.sort(key=lambda each: each[:2])
        limit = min(request.limit or BREAKERS_MAX, BREAKERS_MAX)
        return admin.ListBreakersReply(
            breakers=[_told(agent, now, self._state.rules.node_id) for _, _, agent in found[:limit]]
        )

    def reset_breaker(self, request: admin.ResetBreakerRequest, who: Identity) -> admin.ResetBreakerReply:
        """Close an agent's breaker and forget its trips."""
        with self.step() as state:
            agent = self._agent(who, request.env, request.agent_id)
            state.log("info", "breaker reset by an operator", agent=agent.agent_id)
            breakers.reset(state, agent)
            return admin.ResetBreakerReply()

    def _agent(self, who: Identity, env: str, agent_id: str) -> Agent:
        """The agent of this name. Raises INVALID_ENVELOPE for what is no agent_id, else NO_ROUTE."""
        if why := agent_id_fault(agent_id):
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, f"agent_id: {why}"))
        env = normalise_env(env)
        self.check_env(who, env)
        agent = self._state.directory.get(who.tenant, env, agent_id)
        if agent is None:
            raise MeshFailure(
                failure(codes.NO_ROUTE, f"no agent {shown(agent_id)} in env {env[:100]}; see: reach agents")
            )
        return agent


def _at_home(agent: Agent) -> MeshFailure:
    """It is another node's to do."""
    text = f"{agent.agent_id} is attached to node {agent.node_id}"
    return MeshFailure(failure(codes.NO_ROUTE, text, agent_id=agent.agent_id, details={"node_id": agent.node_id}))


def _no_session(session_id: str, agent_type: str, env: str, owner: Attachment | None) -> codes.Error:
    if owner is not None:
        return _at_home(owner.agent).error
    text = f"no agent of type {shown(agent_type)} holds session {shown(session_id)} in env {env[:100]}"
    return failure(codes.NO_ROUTE, f"{text}; see: reach sessions")


def _told(agent: Agent, now: float, node_id: str) -> admin.BreakerInfo:
    breaker = agent.breaker
    assert breaker is not None
    return admin.BreakerInfo(
        agent_id=agent.agent_id,
        state=breaker.state(now).value,
        trips=breaker.trips(now),
        next_probe_ms=int(breaker.next_probe_s(now) * 1000),
        env=agent.env,
        node_id=node_id,
    )
