"""What somebody who watches the agents is told: all of them once, then who came, left, or changed its status or weight.

Nothing is kept for a watcher but its place in the directory's log: when it takes its next reply it is told how those
stand now whom the log has named since. One that is too slow, or was away for too long, finds its place overwritten and
is told all again. So a watcher costs the same, however many changes it has not taken.

A revision that is told carries a mark of this start of the node: another node's, or that of a former start, is no place
in this log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.registry_pb2 import AgentChange, AgentRecord, WatchAgentsReply

if TYPE_CHECKING:
    from reach.core.agents import Agent
    from reach.core.selector import Selector
    from reach.core.state import State

AGENTS_A_REPLY_MAX = 500  # ≈ 150 KiB
LOG_A_REPLY_MAX = 1_000
TOLD_EVERY = 1_000  # revisions without a change for this watcher until it is told how far it is all the same

_MARK_BITS = 40  # the lower ones count changes: more than 30 years at a thousand a second


class Watcher:
    """One who watches some of the agents; empty filters let all pass. Call it within a step."""

    def __init__(
        self,
        state: State,
        tenant: str,
        env: str,
        wanted: Selector | None,
        revision: int,
        within: frozenset[str] | None = None,
    ) -> None:
        """`revision` is where to go on, as it was told; any other than one of this node's still known begins anew.

        Without an env it is told of all, or of those of `within`.
        """
        self._state = state
        self._tenant = tenant
        self._env = env
        self._wanted = wanted
        self._within = within
        self._at = 0
        """The revision up to which all is told."""
        self._told = -1
        self._snapshot: list[Agent] | None = None
        """Those of a snapshot that are still to be told."""
        mark, at = revision >> _MARK_BITS, revision & (1 << _MARK_BITS) - 1
        if mark == _mark(state) and self._known(at):
            self._at = at
        else:
            self._begin()

    @property
    def waits(self) -> bool:
        """True while there is nothing for it to take."""
        return self._snapshot is None and self._told >= 0 and self._at == self._state.directory.revision

    def take(self) -> WatchAgentsReply | None:
        """The next reply; None if nothing that concerns it has changed."""
        if self._snapshot is None and not self._known(self._at):
            self._begin()
        if self._snapshot is not None:
            return self._some_of_all(self._snapshot)
        changes = self._changes()
        if not changes and self._told >= 0 and self._at - self._told < TOLD_EVERY:
            return None
        self._told = self._at
        return WatchAgentsReply(changes=changes, revision=self._marked(self._at))

    # ---- all of them ----

    def _begin(self) -> None:
        directory = self._state.directory
        self._at = directory.revision  # what changes while it is told will be told after it
        self._told = -1
        envs = [self._env] if self._env else directory.envs(self._tenant, self._within)
        self._snapshot = [
            agent for env in envs for agent in directory.agents_in(self._tenant, env) if self._wants(agent)
        ]

    def _some_of_all(self, agents: list[Agent]) -> WatchAgentsReply:
        reply = WatchAgentsReply(begins=self._told < 0)
        while agents and len(reply.snapshot) < AGENTS_A_REPLY_MAX:
            agent = agents.pop()
            if self._state.directory.get(agent.tenant, agent.env, agent.agent_id) is agent:
                reply.snapshot.append(agent.to_record())
        self._told = self._at
        if not agents:
            self._snapshot = None
            reply.revision = self._marked(self._at)
        return reply

    # ---- what has changed ----

    def _known(self, at: int) -> bool:
        """Whether the log still has all that came after this revision."""
        directory = self._state.directory
        return directory.revision - len(directory.log) <= at <= directory.revision

    def _changes(self) -> list[AgentChange]:
        directory = self._state.directory
        log = directory.log
        first = len(log) - (directory.revision - self._at)
        left: dict[tuple[str, str], bool] = {}
        for place in range(first, min(first + LOG_A_REPLY_MAX, len(log))):
            tenant, env, agent_id, gone = log[place]
            self._at += 1
            if tenant == self._tenant and (env == self._env if self._env else self._may_know(env)):
                left[env, agent_id] = left.get((env, agent_id), False) or gone
        found = (self._change(env, agent_id, gone) for (env, agent_id), gone in left.items())
        return [change for change in found if change is not None]

    def _change(self, env: str, agent_id: str, left: bool) -> AgentChange | None:
        agent = self._state.directory.get(self._tenant, env, agent_id)
        if agent is not None and self._wants(agent):
            return AgentChange(agent=agent.to_record())
        if left and self._may_have_wanted(agent_id):
            agent_type = agent_id.partition("/")[0]
            record = AgentRecord(agent_id=agent_id, agent_type=agent_type, tenant=self._tenant, env=env)
            return AgentChange(agent=record, removed=True)
        return None

    def _may_know(self, env: str) -> bool:
        return self._within is None or env in self._within

    def _wants(self, agent: Agent) -> bool:
        return self._wanted is None or self._wanted.describes(agent)

    def _may_have_wanted(self, agent_id: str) -> bool:
        """What else an agent that left could do is not known any more."""
        wanted = self._wanted
        if wanted is None:
            return True
        if wanted.agent_id:
            return wanted.agent_id == agent_id
        return not wanted.agent_type or agent_id.startswith(wanted.agent_type + "/")

    def _marked(self, at: int) -> int:
        return _mark(self._state) << _MARK_BITS | at


def _mark(state: State) -> int:
    return int.from_bytes(state.nonce[:3], "big") or 1
