"""Every setting of a node: one table, from which files, variables, flags, checks and the reference page are derived.

A field of `Config` is a setting. Its default, unit, bounds and meaning stand in the field itself, so that nothing
can be configurable without being documented, nor documented without being there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from agentreach.wire.redaction import NAMES as REDACTED_NAMES
from reach.node.setting import Setting, Table, number, pairs, quota, setting_of, switch, tables, text

__all__ = ["Config", "Setting", "Table", "settings"]

_BURSTS: Final = "bursts are refused: OVERLOADED with retry_after"


@dataclass(frozen=True, slots=True)
class Config:
    """A node's settings, checked. Made by `reach.node.config.load`; the defaults alone are valid too."""

    # Where it is reached
    listen: str = text("127.0.0.1:7070", "Address of the gRPC server, HOST:PORT; port 0 takes a free one.")
    http: str = text("127.0.0.1:7071", "Address of /metrics, /healthz and /readyz, HOST:PORT; empty: none.")
    advertise: str = text(
        "",
        "HOST:PORT at which other nodes, agents and callers reach the gRPC server where that is another address than "
        "listen: behind a mapped port, or with listen at 0.0.0.0; empty: listen.",
    )
    insecure: bool = switch(
        False,
        "Listen on an address that other machines reach without TLS or authentication: whoever reaches it may do "
        "anything.",
    )
    auth: str = text(
        "none",
        "Who gets in. none: anybody; keys: who shows an API key; mtls: who shows a certificate of tls_ca.",
    )
    keys_file: str = text("", "File with the API keys, made by `reach keys create`; read again when it changes.")
    keys: str = text("", "etcd: the API keys are in the registry, for all nodes; empty: in keys_file.")
    tls_cert: str = text("", "File with this node's certificate (PEM), and those that lead to its authority's.")
    tls_key: str = text("", "File with that certificate's key.")
    tls_ca: str = text("", "File with the certificates of the authorities that vouch for clients and for other nodes.")
    principals: Mapping[str, Mapping[str, Any]] = tables(
        "Whom certificates stand for when auth is mtls, and what they may do: a table for each name in a certificate, "
        "as docs/howto/tls.md shows; read again when the file changes. A certificate without one is refused."
    )
    health_access: str = text("open", "grpc.health.v1 answers: open, anybody; closed, who is let in by auth.")
    reflection_access: str = text(
        "auto",
        "gRPC reflection answers: open, anybody; closed, admins; auto: open if listen is loopback, else closed.",
    )
    metrics_access: str = text(
        "auto",
        "/metrics answers: open, anybody; closed, keys that may scrape; auto: open if auth is none, else closed.",
    )
    node_id: str = text("", "Name of this node, unique in the mesh; empty: the host's name and a random part.")

    # The registry
    registry: str = text(
        "memory",
        "Where agents are registered: memory, or etcd://HOST:PORT[,HOST:PORT…]; etcds:// by TLS, as etcd:// where a "
        "file of the following three is given. Beyond this machine TLS is needed, or insecure.",
    )
    registry_prefix: str = text("/agentreach/v1/", "Start of every key in etcd; meshes with different ones never meet.")
    registry_tls_ca: str = text(
        "", "File with the CAs by which etcd's certificate is checked; system: those that this machine knows."
    )
    registry_tls_cert: str = text(
        "", "File with this node's certificate for etcd; its CN is the user, where etcd has users and this gives none."
    )
    registry_tls_key: str = text("", "File with that certificate's key.")
    registry_user: str = text("", "User for etcd, with a password.")
    registry_password: str = text(
        "", "Password for etcd. Not an option of the command: everybody on the machine can read those.", secret=True
    )
    registry_password_file: str = text("", "File whose first line is that password.")
    node_lease_ttl_s: float = number(
        20.0, "s", 2, 600, "How long etcd keeps a dead node's keys.",
        "a pause of the node or of etcd drops all its agents", "agents of a killed node linger as long",
    )  # fmt: skip
    election_ttl_s: float = number(
        5.0, "s", 2, 600, "How long a dead leader is waited for; meanwhile no new agent_id is registered.",
        "a pause of the node or of etcd makes another node lead", "new agents wait longer when the leader dies",
    )  # fmt: skip
    register_wait_s: float = number(
        10.0, "s", 0.1, 600, "How long a new agent waits for a registry that does not answer; then it is refused.",
        "a change of etcd's leader turns new agents away", "whoever starts an agent learns late that etcd is away",
    )  # fmt: skip
    registry_grace_s: float = number(
        60.0, "s", 0, 3600, "How long a node without etcd calls itself ready, and takes what it knew for all there is.",
        "a short outage of etcd takes every node out of service", "callers are sent to agents long gone",
    )  # fmt: skip

    # What is logged
    log_level: str = text("info", "debug, info, warning or error. Payloads are logged at none of them.")
    log_format: str = text("auto", "console, json, or auto: console on a terminal, json elsewhere.")

    redact: str = text(
        ", ".join(REDACTED_NAMES),
        "Names of fields whose values are shown nowhere: not in logs, traces, errors, dead letters or the audit log. A "
        "name stands for all that end with it; the list given here takes the place of this one.",
    )
    audit_log: str = text(
        "",
        "File to which it is added who did what, as JSON lines; opened again when it was rotated, and on SIGHUP. "
        "Empty: into the node's log, under the logger reach.audit.",
    )

    # Agents and their health
    lease_ttl_s: float = number(
        30.0, "s", 0.2, 600, "How long an agent counts as registered after its process was last heard.",
        "a short stall of a process unregisters its agents", "dead agents are listed as long",
    )  # fmt: skip
    heartbeat_interval_s: float = number(
        10.0, "s", 0.05, 200, "How often processes report; at most half of lease_ttl_s.",
        "traffic and work that tell nothing new", "one lost report is a lost agent; proxies cut idle streams",
    )  # fmt: skip
    many_agents: int = number(
        500, "", 1, 1_000_000, "Above so many agents heartbeats and leases are half as long again.",
        "a dead process of a small mesh is noticed later", "heartbeats of many agents cost more than they tell",
    )  # fmt: skip
    resume_window_s: float = number(
        10.0, "s", 0, 600, "How long a cut link can be resumed, and its agents stay registered.",
        "a redial comes too late: what was in flight is settled as lost", "dead agents hold their place as long",
    )  # fmt: skip
    hello_timeout_s: float = number(
        10.0, "s", 0.05, 120, "How long a new stream may take to say hello.",
        "slow starters are cut off", "silent streams hold memory",
    )  # fmt: skip
    probe_interval_busy_s: float = number(
        5.0, "s", 0.05, 300, "How often an agent with work is asked whether its handlers' loop turns.",
        "probes cost more than they tell", "a stuck agent gets work for longer",
    )  # fmt: skip
    probe_interval_idle_s: float = number(
        30.0, "s", 0.05, 3600, "The same for an idle agent.", "traffic that tells nothing new",
        "the first request finds out that the agent is stuck",
    )  # fmt: skip
    probe_timeout_s: float = number(
        5.0, "s", 0.05, 120, "How long an answer to a probe may take; one missed: DEGRADED, two: UNREACHABLE.",
        "a busy loop is taken for a stuck one", "a stuck agent gets work for longer",
    )  # fmt: skip
    warm_up_s: float = number(
        10.0, "s", 0, 3600, "Time in which a new agent's weight grows from a tenth to the whole; 0: at once.",
        "a cold instance is buried in requests", "new instances help late",
    )  # fmt: skip

    # Requests
    payload_bytes_max: int = number(
        1 << 20, "bytes", 1024, 4 << 20, "Largest inline payload; beyond, PAYLOAD_TOO_LARGE.",
        "ordinary messages are refused", "one message delays the small ones on its link",
    )  # fmt: skip
    accept_timeout_s: float = number(
        5.0, "s", 0.02, 120,
        "How long a process may take to acknowledge a delivery (at most a quarter of the time left).",
        "a pause of garbage collection counts as a failed delivery", "a frozen agent is noticed late",
    )  # fmt: skip
    settle_min_s: float = number(
        1.0, "s", 0, 120, "Least time for which a request waits for its agent's cut link to come back.",
        "a mere redial is reported as a lost agent", "callers wait for agents that are dead",
    )  # fmt: skip
    cancel_grace_s: float = number(
        5.0, "s", 0.02, 300, "How long an agent may take to end a cancelled handler before its slot is taken back.",
        "slots are given out while old handlers still run", "handlers that ignore cancellation block their agent",
    )  # fmt: skip
    idle_timeout_s: float = number(
        30.0, "s", 0.05, 3600, "Longest gap between two items of a streamed reply, and for granting no credit.",
        "streams that think are cut", "dead streams hold their slot",
    )  # fmt: skip
    slow_consumer_s: float = number(
        30.0, "s", 0.1, 600, "How long a link with a full outbox may make no progress before it is ended.",
        "a short stall cuts a link", "a frozen process holds its memory here for longer",
    )  # fmt: skip
    requests_in_flight_max: int = number(
        50_000, "", 1, 10_000_000, "Requests under way on this node; beyond, OVERLOADED.",
        "callers are refused under ordinary load", "memory: about 5 KiB each and their payloads",
    )  # fmt: skip
    publish_timeout_s: float = number(
        2.0, "s", 0.01, 600, "How long an event's publisher waits for subscribers' acknowledgements by default.",
        "subscribers a moment away count as unknown", "publishers wait for subscribers that are dead",
    )  # fmt: skip
    slow_request_s: float = number(
        10.0, "s", 0, 3600, "From here on a request's trace is kept with the failed ones.",
        "ordinary traces push the interesting ones out", "slow requests leave no trace",
    )  # fmt: skip
    drain_timeout_s: float = number(
        55.0, "s", 0, 3600, "How long a node that is told to stop waits for what is under way.",
        "requests are cut at every restart", "a supervisor kills the node before it has finished",
    )  # fmt: skip

    # Loops
    max_hops: int = number(
        10, "", 1, 100, "Agents one call tree may pass through; beyond, HOP_LIMIT.",
        "honest chains are cut", "a loop costs more before it is cut",
    )  # fmt: skip
    max_repeats: int = number(
        2, "", 1, 100, "How often the same step may stand in the path; beyond, LOOP_DETECTED.",
        "an honest second try is taken for a loop", "a loop costs more before it is cut",
    )  # fmt: skip

    # Sessions
    session_ttl_s: float = number(
        1800.0, "s", 0.2, 2_592_000, "How long an idle conversation stays with its agent.",
        "people who pause lose their conversation's state", "pins pile up, and scale-out takes effect late",
    )  # fmt: skip
    owner_lost_s: float = number(
        30.0, "s", 0.1, 3600, "How long a conversation's agent may be UNREACHABLE before another one takes over.",
        "a pause of the agent loses conversations their state", "conversations wait for agents that are dead",
    )  # fmt: skip
    session_hook_s: float = number(
        10.0, "s", 0.1, 600, "How long an agent may take to hand a conversation over, or to take one up.",
        "conversations whose state is slow to write lose it when they move", "callers wait for hooks that hang",
    )  # fmt: skip
    snapshots: str = text(
        "auto",
        "Where conversations' states are kept: memory, directory, etcd; auto: etcd if the registry is etcd, else "
        "directory if snapshots_dir is set, else memory.",
    )
    snapshots_dir: str = text("", "Directory for those states; made if it is not there.")
    snapshots_shared: bool = switch(
        False, "All nodes of the mesh see the same snapshots_dir: only then it may be used with etcd."
    )
    sessions_max: int = number(
        100_000, "", 1, 10_000_000, "Conversations known here at once; beyond, OVERLOADED for new ones.",
        "new conversations are refused", "memory: about 1 KiB each",
    )  # fmt: skip
    lane_max: int = number(
        100, "", 1, 100_000, "Messages of one session that may wait; beyond, OVERLOADED.",
        "bursts of one conversation are refused", "one conversation fills the node's memory",
    )  # fmt: skip

    # The wait for a slot
    queue_max: int = number(
        10_000, "", 0, 1_000_000, "Requests that may wait for a free slot; beyond, OVERLOADED.",
        "bursts are refused that would have been served", "memory, and answers that come too late to matter",
    )  # fmt: skip
    queue_selector_max: int = number(
        1_000, "", 0, 1_000_000, "The same for one selector.",
        "bursts are refused that would have been served", "one busy type takes the whole queue",
    )  # fmt: skip
    queue_bytes_max: int = number(
        32 << 20, "bytes", 0, 16 << 30, "Bytes of all that waits, in sessions' lanes too; beyond, OVERLOADED.",
        "bursts of large messages are refused", "memory",
    )  # fmt: skip

    # Once means once
    replay_s: float = number(
        300.0, "s", 0, 86_400, "How long an outcome is kept for copies of its message.",
        "a late copy finds nothing", "memory",
    )  # fmt: skip
    replay_entries_max: int = number(
        100_000, "", 0, 10_000_000, "Outcomes kept.", "copies under load find nothing", "memory: about 1 KiB each",
    )  # fmt: skip
    replay_bytes_max: int = number(
        64 << 20, "bytes", 0, 16 << 30, "Bytes of outcomes kept.", "copies under load find nothing", "memory",
    )  # fmt: skip

    # Dead letters
    dead_letters_max: int = number(
        1_000, "", 0, 1_000_000, "Requests that the mesh gave up kept for `reach dead`; 0: none.",
        "a burst of failures pushes out what nobody has looked at", "memory: about 2 KiB each and their payloads",
    )  # fmt: skip
    dead_letters_bytes_max: int = number(
        16 << 20, "bytes", 0, 16 << 30, "Bytes of these, payloads included; the oldest give way.",
        "requests with large payloads are not kept", "memory",
    )  # fmt: skip
    dead_letters_s: float = number(
        86_400.0, "s", 1, 31_536_000, "How long they are kept.",
        "they are gone before anybody looks", "payloads that should be forgotten are kept",
    )  # fmt: skip

    # Traces
    trace_recent_max: int = number(
        50_000, "", 0, 5_000_000, "Messages whose stages are kept.", "`reach trace` finds nothing under load",
        "memory: about 1 KiB each",
    )  # fmt: skip
    trace_kept_max: int = number(
        10_000, "", 0, 5_000_000, "Failed and slow messages kept besides.", "failures of an hour ago leave no trace",
        "memory: about 1 KiB each",
    )  # fmt: skip
    trace_kept_s: float = number(
        900.0, "s", 0, 604_800, "How long those are kept.", "failures are gone before anybody looks", "memory",
    )  # fmt: skip

    # Bounds of what peers can grow
    outboxes_bytes_max: int = number(
        256 << 20, "bytes", 1 << 20, 1 << 40, "What the outboxes of all links hold together.",
        "a few slow peers are refused work, and lose events, early", "memory: many slow peers may take twice as much",
    )  # fmt: skip
    links_max: int = number(
        10_000, "", 1, 1_000_000, "Processes connected at once.", "new processes are refused",
        "memory: about 60 KiB each",
    )  # fmt: skip
    agents_max: int = number(
        20_000, "", 1, 1_000_000, "Agents registered in the mesh at once.",
        "new agents are refused", "memory, and slower changes",
    )  # fmt: skip
    agents_per_link_max: int = number(
        1_000, "", 1, 100_000, "Agents of one process; beyond, OVERLOADED for further ones.",
        "large processes are refused", "one process can fill the node",
    )  # fmt: skip
    topics_max: int = number(
        100_000, "", 1, 10_000_000, "Subscriptions on this node.", "subscribers are refused", "memory",
    )  # fmt: skip
    silent_streams_max: int = number(
        2_000, "", 10, 1_000_000, "Streams at once on which hello was not said yet; beyond, refused with OVERLOADED.",
        "processes that all come at once are told to come again", "memory: about 60 KiB each, held for hello_timeout_s",
    )  # fmt: skip

    # What one principal, and one tenant, may have and do; on each node, but for agents
    principal_silent_streams_max: int = number(
        1_000, "", 10, 1_000_000, "The same of one principal.",
        "processes that all come at once are told to come again", "one principal keeps all others from connecting",
    )  # fmt: skip
    principal_links_max: int = quota("Links of one principal to this node", "its processes are refused")
    principal_agents_max: int = quota("Agents of one principal in the mesh", "its agents are refused: OVERLOADED")
    principal_requests_per_s: int = quota("Requests, events and queries of one principal", _BURSTS, "/s")
    principal_bytes_per_s: int = quota("Bytes that come from one principal", _BURSTS, "bytes/s")
    principal_sessions_max: int = quota("Conversations that one principal began", "new ones: OVERLOADED")
    principal_topics_max: int = quota("Subscriptions of one principal", "further ones are refused")
    principal_streams_max: int = quota("Streamed replies to one principal under way", "further ones: OVERLOADED")
    tenant_links_max: int = quota("Links of one tenant's principals to this node", "its processes are refused")
    tenant_agents_max: int = quota("Agents of one tenant in the mesh", "its agents are refused: OVERLOADED")
    tenant_requests_per_s: int = quota("Requests, events and queries of one tenant", _BURSTS, "/s")
    tenant_bytes_per_s: int = quota("Bytes that come from one tenant", _BURSTS, "bytes/s")
    tenant_sessions_max: int = quota("Conversations that one tenant's principals began", "new ones: OVERLOADED")
    tenant_topics_max: int = quota("Subscriptions of one tenant", "further ones are refused")
    tenant_streams_max: int = quota("Streamed replies to one tenant under way", "further ones: OVERLOADED")
    quota_burst_s: float = number(
        2.0, "s", 0.1, 3600, "So many seconds' worth of the limits per second may come at once, after a rest.",
        "whoever sends in bursts is refused below its limit", "a burst takes what others need",
    )  # fmt: skip
    quotas: Mapping[str, Mapping[str, int]] = tables(
        "What is otherwise for one tenant: a table by its name with the limits above that begin with principal_ and "
        "tenant_, as docs/howto/limits.md shows."
    )

    # Routing
    aliases: Mapping[str, str] = pairs('Other names of capabilities: summarize = "text_summarize".')
    policies: Mapping[str, str] = pairs('How to choose among the instances of a type: planner = "LEAST_LOAD".')


def settings() -> tuple[Setting, ...]:
    """All settings in the order of the table."""
    return tuple(setting_of(each) for each in fields(Config))
