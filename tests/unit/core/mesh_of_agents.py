"""Agents, directories and chance for the resolver's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Target
from agentreach.v1.registry_pb2 import AgentRecord, AgentStatus
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, STARTING, UNREACHABLE, Agent
from reach.core.selector import Aliases

STATUSES = (STARTING, HEALTHY, DEGRADED, DRAINING, UNREACHABLE)


def agent(
    agent_id: str,
    *,
    tenant: str = "t",
    env: str = "production",
    capabilities: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    version: str = "1.0",
    status: int = HEALTHY,
    max_concurrency: int = 0,
    weight: int = 100,
    priority: int = 0,
) -> Agent:
    """A registered agent, healthy unless said otherwise."""
    return Agent.from_record(
        AgentRecord(
            agent_id=agent_id,
            tenant=tenant,
            env=env,
            capabilities=capabilities,
            labels=labels or {},
            version=version,
            status=AgentStatus.ValueType(status),
            max_concurrency=max_concurrency,
            weight=weight,
            priority=priority,
        )
    )


class CountingChance:
    """A stream of chance that counts how often it is asked."""

    def __init__(self, seed: int) -> None:
        self._source = Random(seed)
        self.draws = 0

    def random(self) -> float:
        """The next number."""
        self.draws += 1
        return self._source.random()


CAPABILITIES = ("ner", "text_summarize", "translate")

targets_drawn = st.one_of(
    st.builds(
        Target,
        agent_type=st.sampled_from(("", "extractor", "Writer")),
        capabilities=st.lists(st.sampled_from(("NER", "summarize", "text-summarize")), min_size=1, max_size=2),
        labels=st.sampled_from(({}, {"zone": "a"})),
        version=st.sampled_from(("", "", ">=2", "2.1", "nightly-7")),
    ),
    st.builds(Target, agent_type=st.sampled_from(("extractor", "writer", "nobody"))),
    st.builds(Target, agent_id=st.sampled_from(("extractor/0", "Writer/1"))),
)
ALIASES = Aliases({"summarize": "text_summarize"})

agents_drawn = st.builds(
    lambda number, kind, tenant, env, capabilities, zone, version, status, slots, weight, priority: agent(
        f"{kind}/{number}",
        tenant=tenant,
        env=env,
        capabilities=capabilities,
        labels={"zone": zone} if zone else {},
        version=version,
        status=status,
        max_concurrency=slots,
        weight=weight,
        priority=priority,
    ),
    number=st.integers(0, 5),
    kind=st.sampled_from(("extractor", "writer")),
    tenant=st.sampled_from(("t", "other")),
    env=st.sampled_from(("production", "staging")),
    capabilities=st.lists(st.sampled_from((*CAPABILITIES, "Summarize", "Text-Summarize")), max_size=3),
    zone=st.sampled_from(("", "a", "b")),
    version=st.sampled_from(("1.0", "2.1.0", "2.2rc1", "nightly-7", "")),
    status=st.sampled_from((HEALTHY, HEALTHY, *STATUSES)),
    slots=st.integers(0, 2),
    weight=st.sampled_from((1, 100, 300)),
    priority=st.integers(0, 2),
)
