"""What the metrics ask a node when somebody scrapes it."""

from __future__ import annotations

from collections import Counter

from agentreach.aio.clock import boot_time
from agentreach.v1.registry_pb2 import AgentStatus
from reach.adapters.metrics import Gauges
from reach.core.requests import Attachment
from reach.core.stats import Stats
from reach.node.engine import Engine

STATUS_NAMES = {int(number): name for name, number in AgentStatus.items()}


class NodeGauges:
    """What metrics ask the node."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def stats(self) -> Stats:
        return self._engine.state.stats

    def gauges(self) -> Gauges:
        state = self._engine.state
        agents: Counter[tuple[str, str]] = Counter()
        outboxes: Counter[str] = Counter()
        for agent in state.directory:
            agents[agent.agent_type, STATUS_NAMES.get(agent.status, "UNKNOWN")] += 1
            if isinstance(agent.link, Attachment):
                outboxes[agent.agent_id] += agent.link.peer.link.waiting
        queued = [lane.waiting[0].received for lane in state.lanes.values() if lane.waiting]
        return Gauges(
            agents=agents,
            queue_depth=sum(len(lane.waiting) for lane in state.lanes.values()),
            queue_oldest_s=boot_time() - min(queued) if queued else 0.0,
            outbox_envelopes=outboxes,
            registry_age_s=self._engine.registry_age(),
            leader=True,
        )
