"""What operators set for agents and watch of them: version policies, settings, and who is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.wire.checks import target_fault
from agentreach.wire.errors import failure
from reach.core import access, configs, version_policy
from reach.core.ports import Identity, MeshFailure
from reach.core.selector import Selector, SelectorError, parse_selector
from reach.core.state import State
from reach.core.watching import Watcher
from reach.node.operations import Operations
from reach.node.policies import CONFIG, VERSIONS, Policies

WATCHERS_MAX = 1_000
PRINCIPAL_WATCHERS_MAX = 100  # where principals are known: one of them leaves the others room


class Steering(Operations):
    """The part of the switchboard that follows and sets what is the same on all nodes."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.policies: Policies | None = None
        self._watchers: dict[asyncio.Event, Identity] = {}
        self._watched_revision = 0

    # ---- version policies ----

    async def set_version_policy(
        self, request: registry.SetVersionPolicyRequest, who: Identity
    ) -> registry.SetVersionPolicyReply:
        """Prefer a version of an agent type, or give its versions weights; without either the policy ends."""
        why = version_policy.fault(request.policy)
        if why is not None:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, why))
        return await self._policies.set_version_policy(request)

    def get_version_policy(
        self, request: registry.GetVersionPolicyRequest, who: Identity
    ) -> registry.GetVersionPolicyReply:
        """The policy in force on this node; version 0: none."""
        asked = registry.VersionPolicy(agent_type=request.agent_type, env=request.env)
        why = version_policy.fault(asked)
        if why is not None:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, why.replace("policy.", "")))
        env, agent_type = version_policy.key_of(asked)
        self.check_env(who, env)
        reply = registry.VersionPolicy(agent_type=agent_type, env=env)
        policy = self._state.version_policies.get((env, agent_type))
        if policy is not None:
            reply.version = policy.version
            if policy.preferred:
                reply.preferred = policy.shares[0][0]
            else:
                reply.weights.update(policy.shares)
        reply.version = self._to_replace(f"{VERSIONS}{env}/{agent_type}", reply.version)
        return registry.GetVersionPolicyReply(policy=reply)

    # ---- agents' settings ----

    async def set_config(self, request: admin.SetConfigRequest, who: Identity) -> admin.SetConfigReply:
        """Set what agents, or those of one type, are to have; every one attached is told at once."""
        why = configs.fault(request.name, request.settings)
        if why is not None:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, why))
        return await self._policies.set_config(request)

    def get_config(self, request: admin.GetConfigRequest, who: Identity) -> admin.GetConfigReply:
        """What is set under a name; version 0: nothing ever was."""
        why = configs.name_fault(request.name)
        if why is not None:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, why))
        settings = self._state.configs.get(request.name)
        version = self._to_replace(CONFIG + request.name, settings.version)
        return admin.GetConfigReply(settings=settings.values, version=version)

    def _to_replace(self, key: str, known: int) -> int:
        return known if self.policies is None else self.policies.version_of(key, known)

    @property
    def _policies(self) -> Policies:
        if self.policies is None:
            raise MeshFailure(failure(codes.REGISTRY_UNAVAILABLE, "this node is starting", retry_after_ms=1_000))
        return self.policies

    # ---- watching agents ----

    async def watch_agents(
        self, request: registry.WatchAgentsRequest, who: Identity
    ) -> AsyncGenerator[registry.WatchAgentsReply, None]:
        """All agents once, or what has changed since a revision, then every change until the node drains."""
        wanted = self._wanted(request, who)
        if len(self._watchers) >= WATCHERS_MAX:
            text = f"{WATCHERS_MAX} watch this node's agents already, its limit"
            raise MeshFailure(failure(codes.OVERLOADED, text, retry_after_ms=5_000))
        own = sum(each == who for each in self._watchers.values()) if who.rights is not None else 0
        if own >= PRINCIPAL_WATCHERS_MAX:
            text = f"principal {who.principal} watches this node's agents {own} times already, its limit"
            raise MeshFailure(failure(codes.OVERLOADED, text, retry_after_ms=5_000))
        news = asyncio.Event()
        self._watchers[news] = who
        try:
            within = access.within(who.rights)
            watcher = Watcher(self._state, who.tenant, request.env, wanted, request.revision, within)
            while not self._state.draining:
                self.holders.check(who)
                news.clear()
                reply = watcher.take()
                if reply is not None:
                    yield reply
                elif watcher.waits:
                    with self.holders.hold(who, news):
                        await news.wait()
        finally:
            del self._watchers[news]
        text = f"node {self._state.rules.node_id} is leaving: watch at another node"
        raise MeshFailure(failure(codes.SHUTTING_DOWN, text))

    def _wanted(self, request: registry.WatchAgentsRequest, who: Identity) -> Selector | None:
        fault = target_fault(request.target, request.env)
        if fault is not None:
            raise MeshFailure(fault)
        self.check_env(who, request.env)
        if not request.target.ListFields():
            return None
        try:
            return parse_selector(request.target, who.tenant, request.env, self._state.directory.aliases)
        except SelectorError as error:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, str(error))) from error

    def _wake_watchers(self) -> None:
        """At the end of a step: tell those who watch that there may be something for them."""
        state = self._state
        if state.directory.revision != self._watched_revision or state.draining:
            self._watched_revision = state.directory.revision
            for news in self._watchers:
                news.set()
