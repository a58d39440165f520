"""What the metrics ask a node when somebody scrapes it."""

from __future__ import annotations

from collections import Counter

from agentreach.aio.clock import boot_time
from agentreach.v1.registry_pb2 import AgentStatus
from reach.adapters.metrics import BREAKER_STATES, Gauges
from reach.core.requests import Attachment
from reach.core.stats import Stats
from reach.node.encryption import Encryption
from reach.node.engine import Engine
from reach.node.keys import ApiKeys

STATUS_NAMES = {int(number): name for name, number in AgentStatus.items()}


class NodeGauges:
    """What metrics ask the node."""

    def __init__(
        self,
        engine: Engine,
        *,
        insecure: bool = False,
        encryption: Encryption | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._insecure = insecure
        self._encryption = encryption

    @property
    def stats(self) -> Stats:
        return self._engine.state.stats

    def gauges(self) -> Gauges:
        state, now, leader = self._engine.state, boot_time(), self._engine.leader()
        agents: Counter[tuple[str, str]] = Counter()
        outboxes: Counter[str] = Counter()
        breakers: dict[str, str] = {}
        for agent in state.directory:
            if agent.breaker is not None:
                breakers[agent.agent_id] = _worse(agent.breaker.state(now).value, breakers.get(agent.agent_id))
            if isinstance(agent.link, Attachment) and not agent.link.remote:
                agents[agent.agent_type, STATUS_NAMES.get(agent.status, "UNKNOWN")] += 1
                outboxes[agent.agent_id] += agent.link.peer.link.waiting
        linked = sum(node.connected for node in state.nodes.values())
        waiting = [lane for lane in state.lanes.values() if lane.waiting]
        oldest_s = max([now - lane.waiting[0].received for lane in waiting], default=0.0)
        return Gauges(
            agents=agents,
            dead_letters=len(state.dead_letters),
            queue_depth=sum(len(lane.waiting) for lane in waiting) + len(state.queue),
            queue_oldest_s=max(oldest_s, state.queue.oldest_s(now)),
            outbox_envelopes=outboxes,
            breakers=breakers,
            registry_age_s=self._engine.registry_age(),
            leader=leader is not None and leader.node_id == state.rules.node_id,
            insecure=self._insecure,
            certificate_expires_at=self._encryption.expires_at if self._encryption is not None else 0.0,
            tls_reloads_failed=self._encryption.reloads_failed if self._encryption is not None else 0,
            keys=self._keys.usable if self._keys is not None else 0,
            keys_stale=self._keys is not None and self._keys.stale,
            nodes_linked=linked,
            nodes_not_linked=sum(bool(node.address) for node in state.nodes.values() if not node.connected),
        )


def _worse(state: str, other: str | None) -> str:
    """Of two agents of one name, in two environments, the one that gets less is shown."""
    return state if other is None or BREAKER_STATES[state] >= BREAKER_STATES[other] else other
