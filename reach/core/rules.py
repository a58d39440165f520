"""The numbers the node's decisions obey. Meaning and bounds stand in the settings table of `reach.node`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentreach.wire import limits, redaction


@dataclass(frozen=True, slots=True)
class Rules:
    """Durations in seconds, sizes in bytes."""

    node_id: str = "node"
    auth: str = "none"
    payload_bytes_max: int = limits.PAYLOAD_BYTES_MAX
    lease_ttl_s: float = 30.0
    heartbeat_interval_s: float = 10.0
    many_agents: int = 500
    """Above so many agents heartbeats and leases stretch by half."""
    resume_window_s: float = 10.0
    registry_grace_s: float = 60.0
    settle_min_s: float = 1.0
    accept_timeout_s: float = 5.0
    cancel_grace_s: float = 5.0
    probe_interval_busy_s: float = 5.0
    probe_interval_idle_s: float = 30.0
    probe_timeout_s: float = 5.0
    warm_up_s: float = 10.0
    slow_consumer_s: float = 30.0
    idle_timeout_s: float = 30.0
    session_ttl_s: float = 1800.0
    lane_max: int = 100
    queue_max: int = 10_000
    queue_selector_max: int = 1_000
    queue_bytes_max: int = 32 << 20
    """Also bounds what waits in lanes."""
    sessions_max: int = 100_000
    session_hook_s: float = 10.0
    """How long an agent may take to hand a session over, or to take one."""
    owner_lost_s: float = 30.0
    """A session's owner that is UNREACHABLE for so long is judged dead."""
    max_hops: int = 10
    max_repeats: int = 2
    replay_s: float = 300.0
    replay_entries_max: int = 100_000
    replay_bytes_max: int = 64 << 20
    dead_letters_max: int = 1_000
    dead_letters_bytes_max: int = 16 << 20
    dead_letters_s: float = 86_400.0
    trace_recent_max: int = 50_000
    trace_kept_max: int = 10_000
    trace_kept_s: float = 900.0
    slow_request_s: float = 10.0
    drain_timeout_s: float = 55.0
    requests_in_flight_max: int = 50_000
    outboxes_bytes_max: int = 256 << 20
    links_max: int = 10_000
    agents_max: int = 20_000
    agents_per_link_max: int = 1_000
    topics_max: int = 100_000
    silent_streams_max: int = 2_000
    principal_silent_streams_max: int = 1_000
    principal_links_max: int = 0
    principal_agents_max: int = 0
    principal_requests_per_s: int = 0
    principal_bytes_per_s: int = 0
    principal_sessions_max: int = 0
    principal_topics_max: int = 0
    principal_streams_max: int = 0
    tenant_links_max: int = 0
    tenant_agents_max: int = 0
    tenant_requests_per_s: int = 0
    tenant_bytes_per_s: int = 0
    tenant_sessions_max: int = 0
    tenant_topics_max: int = 0
    tenant_streams_max: int = 0
    quota_burst_s: float = 2.0
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What is otherwise for one tenant, by its name and the setting's."""
    publish_timeout_s: float = 2.0
    redact: str = ", ".join(redaction.NAMES)
    aliases: Mapping[str, str] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
