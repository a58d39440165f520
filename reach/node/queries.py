"""What the node answers about itself: explain, traces, agents, capabilities, sessions, nodes. It changes nothing."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Awaitable, Callable

from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire.checks import request_fault, target_fault
from agentreach.wire.errors import failure
from agentreach.wire.names import normalise_env, shown
from reach.core import access, actors, lookups, route, sessions, settle
from reach.core.agents import FULL
from reach.core.effects import AuditLine
from reach.core.explain import explain
from reach.core.nodes import NodePeer
from reach.core.pool import Pool
from reach.core.ports import OWNERS_TENANT, Identity, Introduce, MeshFailure, nothing_to_show
from reach.core.requests import Stage
from reach.core.state import State
from reach.core.store import StoreUnavailable
from reach.core.trace import to_proto
from reach.node.election import Leader
from reach.node.holders import Holders

PAGE_SIZE = 1_000
SESSIONS_MAX = 1_000


def not_audited(line: AuditLine) -> None:
    """Where there is no audit log."""


class Queries:
    """The read-only half of the switchboard."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.holders = Holders()
        self.introduce: Introduce = nothing_to_show
        self.audit: Callable[[AuditLine], None] = not_audited
        """Where lines of the audit log go."""
        self.reopen_audit: Callable[[], None] = lambda: None
        """The audit log's file was rotated."""
        self.starting = False
        """True until the registry knows this node."""
        self.node = admin.NodeRecord(node_id=state.rules.node_id)
        self.registry_name = "memory"
        self.registry_age: Callable[[], float] = lambda: 0.0
        self.registry_grace_s = 60.0
        self.registry_revision: Callable[[], int] = lambda: state.directory.revision
        """Of the store, of which the view is a true picture."""
        self.look_up: Callable[[str, str, str], Awaitable[bool]] | None = None
        """Read one agent's record in the store (tenant, env, agent_id): `View.look_up`."""
        self.leader: Callable[[], Leader | None] = lambda: None
        """Who leads, as far as this node knows."""
        self.started_at = state.now

    @property
    def state(self) -> State:
        """For the composition root, metrics and tests."""
        return self._state

    # ---- readiness ----

    @property
    def ready(self) -> bool:
        """See `Switchboard.ready`."""
        return not self.unready_reason

    @property
    def unready_reason(self) -> str:
        """See `Switchboard.unready_reason`."""
        if self.starting:
            return "starting: not yet in the registry"
        if self._state.draining:
            return "draining: this node is leaving"
        age_s = self.registry_age()
        if age_s > self.registry_grace_s:
            return f"the registry has not answered for {age_s:.0f} s"
        return ""

    # ---- registry ----

    def check_env(self, who: Identity, env: str) -> None:
        """Raise PERMISSION_DENIED if this env is none of the principal's."""
        decision = access.may_read(who.rights, env, who=f"principal {who.principal}")
        if not decision.allowed:
            raise MeshFailure(actors.denied(self._state, decision))

    def resolve(self, request: registry.ResolveRequest, who: Identity) -> registry.ResolveReply:
        """The agents that match a target and can be given work now."""
        fault = target_fault(request.target, request.env)
        if fault is not None:
            raise MeshFailure(fault)
        self.check_env(who, normalise_env(request.env))
        pool = self._state.directory.pool_for(request.target, who.tenant, normalise_env(request.env))
        found = [agent for tier in pool.tiers[: FULL + 1] for agent in tier.agents]
        found.sort(key=lambda agent: agent.agent_id)
        return registry.ResolveReply(
            agents=[agent.to_record() for agent in found[:PAGE_SIZE]], revision=self._revision(), age_ms=self._age_ms()
        )

    async def get_agent(self, request: registry.GetAgentRequest, who: Identity) -> registry.AgentRecord:
        """One agent's record. If the view is old, the store is asked for those that are not this node's own."""
        state, key = self._state, (who.tenant, normalise_env(request.env), request.agent_id)
        self.check_env(who, key[1])
        agent, age_s, looked_up = state.directory.get(*key), self.registry_age(), False
        own = agent is not None and agent.node_id == state.rules.node_id
        if age_s > lookups.OLD_S and not own and self.look_up is not None:
            with contextlib.suppress(StoreUnavailable):
                agent = state.directory.get(*key) if await self.look_up(*key) else None
                looked_up = True
        if agent is None:
            said = f"no agent {shown(request.agent_id)} in env {key[1][:100]}"
            raise MeshFailure(lookups.unknown(state, said, "see: reach agents", age_s=0.0 if looked_up else age_s))
        return agent.to_record()

    def list_agents(self, request: registry.ListAgentsRequest, who: Identity) -> registry.ListAgentsReply:
        """A page of agents; an empty request shows every env (that its sender has rights in) and status."""
        fault = target_fault(request.target, request.env)
        if fault is not None:
            raise MeshFailure(fault)
        self.check_env(who, request.env)
        size = min(request.page_size or PAGE_SIZE, PAGE_SIZE)
        found = self._state.directory.listing(
            who.tenant,
            env=request.env,
            status=int(request.status),
            target=request.target,
            after=_token_read(request.page_token),
            limit=size + 1,
            within=access.within(who.rights),
        )
        page = found[:size]
        return registry.ListAgentsReply(
            agents=[agent.to_record() for agent in page],
            next_page_token=_token((page[-1].env, page[-1].agent_id)) if len(found) > size else "",
            revision=self._revision(),
            age_ms=self._age_ms(),
        )

    def list_capabilities(
        self, request: registry.ListCapabilitiesRequest, who: Identity
    ) -> registry.ListCapabilitiesReply:
        """The inventory."""
        self.check_env(who, request.env)
        within = access.within(who.rights)
        return registry.ListCapabilitiesReply(
            capabilities=[
                registry.Capability(name=each.name, aliases=each.aliases, agents=each.agents)
                for each in self._state.directory.capabilities(who.tenant, request.env, within)
            ]
        )

    # ---- admin ----

    def explain(self, envelope: Envelope, who: Identity) -> admin.ExplainReply:
        """Each candidate with the stage that removed it, and the choice; nothing is sent."""
        if not envelope.timeout_ms and not envelope.profile:
            envelope.timeout_ms = 1_000
        fault = request_fault(envelope, self._state.rules.payload_bytes_max)
        if fault is not None:
            raise MeshFailure(fault, envelope.trace_id)
        state = self._state
        env = normalise_env(envelope.env)
        self.check_env(who, env)
        pool = state.directory.pool_for(envelope.target, who.tenant, env)
        pin = self._pin(envelope, pool, who.tenant, env)
        found = explain(
            state.directory,
            envelope.target,
            who.tenant,
            env,
            policy=route.policy_of(state, pool, envelope.target),
            pin=pin,
            session_id=envelope.session_id,
            now=state.now,
            rng=state.rng,
            hash_key=envelope.target.hash_key or envelope.session_id,
            warm_up_s=state.rules.warm_up_s,
            version_policies=state.version_policies,
            within=access.within(who.rights),
        )
        reply = found.to_reply(self._age_ms())
        reply.revision = self._revision()
        return reply

    def _pin(self, envelope: Envelope, pool: Pool, tenant: str, env: str) -> str | None:
        """The owner of the message's session; as a side effect the target names the type that the session is for."""
        session_id, target = envelope.session_id, envelope.target
        if not session_id:
            return None
        agent_type = target.agent_type.lower() or sessions.type_of(self._state, pool, session_id, target.agent_id)
        if not target.agent_id:
            target.agent_type = agent_type
        lane = self._state.lanes.get((tenant, env, agent_type, session_id))
        return lane.owner.agent.agent_id if lane is not None and lane.owner is not None else None

    def get_trace(self, trace_id: str, who: Identity) -> admin.GetTraceReply:
        """The stages of every message of a trace."""
        state = self._state
        found = state.traces.find(trace_id)
        found += [
            settle.traced(state, request)
            for request in state.requests.values()
            if request.trace_id == trace_id and request.stage is not Stage.SETTLED
        ]
        found = [
            traced
            for traced in found
            if (traced.tenant or OWNERS_TENANT) == who.tenant and access.sees(who.rights, traced.env)
        ]
        return to_proto(found, self._state.rules.node_id)

    def get_node(self) -> admin.GetNodeReply:
        """This node in numbers."""
        state = self._state
        return admin.GetNodeReply(
            node=self.node,
            links=len(state.peers),
            agents=len(state.directory) - state.remote_agents,
            requests_in_flight=state.unsettled,
            queued=sum(len(lane.waiting) for lane in state.lanes.values()),
            registry=self.registry_name,
            registry_age_ms=self._age_ms(),
            draining=state.draining,
            uptime_s=state.now - self.started_at,
            revision=self._revision(),
        )

    def list_nodes(self) -> admin.ListNodesReply:
        """The nodes of the mesh as this one sees them: itself, and every other that is registered or linked, by id."""
        state, leader = self._state, self.leader()
        found = [(self.node, self._own_state())]
        found += [
            (node.record, _state_of(node, state.now)) for node in state.nodes.values() if node.address or node.connected
        ]
        found.sort(key=lambda each: each[0].node_id)
        return admin.ListNodesReply(
            nodes=[record for record, _ in found],
            states=[told for _, told in found],
            leader_id=leader.node_id if leader is not None else "",
            leader_since=stamp(leader.since) if leader is not None else None,
        )

    def _own_state(self) -> admin.NodeState:
        state = self._state
        return admin.NodeState(
            node_id=state.rules.node_id,
            linked=True,
            draining=state.draining,
            agents=len(state.directory) - state.remote_agents,
            since_s=state.now - self.started_at,
        )

    def list_sessions(self, request: admin.ListSessionsRequest, who: Identity) -> admin.ListSessionsReply:
        """Sessions with an owner, here or at another node as this one knows it; longest idle last."""
        state = self._state
        agent_type = request.agent_type.lower()
        lanes = [
            lane
            for lane in state.lanes.values()
            if lane.owner is not None
            and lane.key[0] == who.tenant
            and access.sees(who.rights, lane.key[1])
            and request.session_id in ("", lane.key[3])
            and (not agent_type or lane.key[2] == agent_type)
            and (not request.agent_id or lane.owner_id[0] == request.agent_id)
        ]
        lanes.sort(key=lambda lane: -lane.used_at)
        return admin.ListSessionsReply(
            sessions=[
                admin.SessionInfo(
                    session_id=lane.key[3],
                    agent_id=lane.owner_id[0],
                    epoch=lane.epoch,
                    idle_s=round(state.now - lane.used_at, 3),
                    env=lane.key[1],
                    node_id=lane.owner.agent.node_id if lane.owner is not None else "",
                    turn=lane.turn,
                    waiting=len(lane.waiting),
                    moving=lane.move is not None,
                )
                for lane in lanes[: min(request.limit or SESSIONS_MAX, SESSIONS_MAX)]
            ]
        )

    def _revision(self) -> int:
        return self.registry_revision()

    def _age_ms(self) -> int:
        return int(self.registry_age() * 1000)


def _token(after: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode("\0".join(after).encode()).decode()


def _token_read(token: str) -> tuple[str, str]:
    if not token:
        return "", ""
    try:
        env, _, agent_id = (
            base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode().partition("\0")
        )
    except (ValueError, binascii.Error):
        raise MeshFailure(failure(codes.INVALID_ENVELOPE, "page_token is not one that this node gave")) from None
    return env, agent_id


def _state_of(node: NodePeer, now: float) -> admin.NodeState:
    why = node.why_down or ("" if node.address else "its key in the registry is gone")
    return admin.NodeState(
        node_id=node.node_id,
        linked=node.connected,
        draining=node.draining,
        agents=len(node.agents),
        since_s=now - node.since,
        why=why,
    )


def stamp(unix: float) -> Timestamp:
    """A time of the wall clock as Timestamp."""
    return Timestamp(seconds=int(unix), nanos=int(unix % 1 * 1e9))
