"""Every bound of the mesh, as people meet it: what is bounded, where its number stands, what happens at it.

The numbers are not written here: they are read from the code by name, and a name that is gone is an error.
`NOT_SHOWN` lists the bounds that nobody meets, so that a new constant must be put into one list or the other
(tests/tidy/test_generated.py).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields

from reach.core.rules import Rules
from reach.node.config import describe


@dataclass(frozen=True, slots=True)
class Bound:
    """One row. `where` is a setting's name, a field of `Rules` after "rules.", or a constant by its full name."""

    what: str
    where: str
    at_it: str
    unit: str = ""

    def value(self) -> float:
        """The number in force by default. Raises `LookupError` for a name that is gone."""
        if self.where.startswith("rules."):
            name = self.where.removeprefix("rules.")
            found = {each.name: each.default for each in fields(Rules)}[name]
        elif "." not in self.where:
            found = {each.name: each.default for each in describe()}[self.where]
        else:
            module, _, name = self.where.rpartition(".")
            try:
                found = getattr(importlib.import_module(module), name)
            except AttributeError as error:
                raise LookupError(self.where) from error
        if not isinstance(found, int | float):
            raise LookupError(f"{self.where} is no number")
        return found


_WIRE = "agentreach.wire.limits."
_CHECKS = "agentreach.wire.checks."
_FIELD = "INVALID_ENVELOPE naming the field"
_RECORD = "the agent is refused: INVALID_ENVELOPE naming the field"

LIMITS: dict[str, tuple[Bound, ...]] = {
    "One message": (
        Bound("inline payload", "payload_bytes_max",
              "PAYLOAD_TOO_LARGE, before anything is sent and again at the node; only that message fails", "bytes"),
        Bound("what the setting above can be raised to", _WIRE + "PAYLOAD_BYTES_CEILING",
              "the node does not start", "bytes"),
        Bound("one gRPC message", _WIRE + "GRPC_MESSAGE_BYTES_MAX", "gRPC itself ends the call or stream", "bytes"),
        Bound("`timeout_ms`, least", _WIRE + "TIMEOUT_MS_MIN",
              f"{_FIELD} and the bounds; a nested call with less left: TIMEOUT", "ms"),
        Bound("`timeout_ms`, most", _WIRE + "TIMEOUT_MS_MAX", f"{_FIELD} and the bounds", "ms"),
        Bound("`message_id`, in characters", _WIRE + "MESSAGE_ID_CHARS_MAX", _FIELD),
        Bound("`trace_id`, in characters", _WIRE + "TRACE_ID_CHARS_MAX", _FIELD),
        Bound("`span_id`, `parent_span_id`, in characters", _CHECKS + "SPAN_ID_CHARS_MAX", _FIELD),
        Bound("`session_id`, in UTF-8", _WIRE + "SESSION_ID_BYTES_MAX", _FIELD, "bytes"),
        Bound("`dedup_key`, in characters", _WIRE + "DEDUP_KEY_CHARS_MAX", _FIELD),
        Bound("`hash_key`", _WIRE + "HASH_KEY_BYTES_MAX", _FIELD, "bytes"),
        Bound("all of an envelope but its payload, as delivered", "reach.core.writing.CONTROL_BYTES_MAX",
              "INVALID_ENVELOPE with the size and the limit; of a reply: PAYLOAD_TOO_LARGE", "bytes"),
        Bound("headers", _WIRE + "HEADERS_MAX", _FIELD),
        Bound("headers together", _WIRE + "HEADERS_BYTES_MAX", _FIELD, "bytes"),
        Bound("`content_type`, in characters", _CHECKS + "CONTENT_TYPE_CHARS_MAX", _FIELD),
        Bound("capabilities of a target or an agent", _WIRE + "CAPABILITIES_MAX", _FIELD),
        Bound("labels of a target or an agent", _WIRE + "LABELS_MAX", _FIELD),
        Bound("a label's value, in characters", _CHECKS + "LABEL_VALUE_CHARS_MAX", _FIELD),
        Bound("names: types, instances, capabilities, label keys, env, node ids, in characters",
              "agentreach.wire.names.NAME_CHARS_MAX", _FIELD),
        Bound("a topic, in characters", "agentreach.wire.names.TOPIC_CHARS_MAX", _FIELD),
        Bound("nesting of JSON data, in levels", "agentreach.wire.payload.DEPTH_MAX",
              "an error before sending; REJECTED at a handler"),
        Bound("text of an error, in characters", "agentreach.wire.errors.MESSAGE_CHARS_MAX", "cut, '…' marks it"),
        Bound("details of an error", "agentreach.wire.errors.DETAILS_MAX", "further ones are left out"),
        Bound("agents a call tree passes through", "max_hops", "HOP_LIMIT with the path"),
        Bound("the same step in one path", "max_repeats", "LOOP_DETECTED with the path"),
    ),
    "One agent": (
        Bound("description, in characters", _WIRE + "DESCRIPTION_CHARS_MAX", _RECORD),
        Bound("version, in characters", _CHECKS + "VERSION_CHARS_MAX", _RECORD),
        Bound("endpoints", _CHECKS + "ENDPOINTS_MAX", _RECORD),
        Bound("an endpoint, in characters", _CHECKS + "ENDPOINT_CHARS_MAX", _RECORD),
        Bound("weight", _CHECKS + "WEIGHT_MAX", _RECORD),
        Bound("`max_concurrency`, `session_concurrency`", _CHECKS + "CONCURRENCY_MAX", _RECORD),
        Bound("threads of `def` handlers where `max_concurrency` is 0", "agent_sdk.standing.POOL_THREADS",
              "further calls wait for a thread"),
        Bound("messages that wait inside an agent", "agent_sdk.host.QUEUED_MAX", "OVERLOADED"),
        Bound("replies an agent keeps for copies, of fresh ids and of others each", "agent_sdk.replies.ENTRIES_MAX",
              "the oldest go"),
        Bound("bytes of these", "agent_sdk.replies.BYTES_MAX", "the oldest go", "bytes"),
        Bound("how long they are kept", "agent_sdk.replies.AGE_S", "they go", "s"),
    ),
    "One link": (
        Bound("envelopes in a frame", _WIRE + "FRAME_ENVELOPES_MAX", "the rest goes into the next frame"),
        Bound("bytes in a frame (or one larger envelope)", _WIRE + "FRAME_BYTES_MAX",
              "the rest goes into the next frame", "bytes"),
        Bound("envelopes that wait in the outbox", _WIRE + "OUTBOX_ENVELOPES_MAX",
              "the agent counts as full; events are dropped, oldest first, with `gap`; an SDK caller waits"),
        Bound("bytes that wait or are not acknowledged", _WIRE + "OUTBOX_BYTES_MAX", "the same", "bytes"),
        Bound("the same, replies included", _WIRE + "OUTBOX_BYTES_HARD_MAX",
              "the link ends: goodbye SLOW_CONSUMER", "bytes"),
        Bound("the same of all links of a node", "outboxes_bytes_max",
              "links that hold more than the next row are full; those above their own bound end", "bytes"),
        Bound("of one link, whatever all hold together", _WIRE + "OUTBOX_BYTES_SHARE", "see above", "bytes"),
        Bound("envelopes given to the transport and not acknowledged", _WIRE + "UNACKED_ENVELOPES_MAX",
              "writing pauses"),
        Bound("bytes of these", _WIRE + "UNACKED_BYTES_MAX", "writing pauses", "bytes"),
        Bound("answers to a peer's signals that it does not read", "reach.core.mesh.SIGNALS_WAITING_MAX",
              "the link ends: goodbye SLOW_CONSUMER"),
        Bound("a full outbox without progress", "slow_consumer_s", "the link ends: goodbye SLOW_CONSUMER", "s"),
        Bound("until hello", "hello_timeout_s", "the stream ends: goodbye PROTOCOL_ERROR", "s"),
        Bound("how long a cut link can be resumed", "resume_window_s", "its agents are unregistered", "s"),
        Bound("agents of one process", "agents_per_link_max", "further ones: OVERLOADED"),
        Bound("topics of one process", _WIRE + "TOPICS_PER_SUBSCRIBER_MAX",
              "the subscription is refused, in the node's log"),
        Bound("items of a streamed reply under way, at the start", _WIRE + "STREAM_CREDIT_INITIAL",
              "the handler's generator waits"),
        Bound("gap between two items", "idle_timeout_s", "the stream ends with an error", "s"),
        Bound("events that wait for a subscription's reader", "agent_sdk.topics._EVENTS_MAX",
              "the oldest go; `subscription.dropped` counts"),
    ),
    "One principal, one tenant (0: no limit)": (
        *(
            Bound(f"{what} of one {whose}", f"{whose}_{name}", at_it, unit)
            for whose in ("principal", "tenant")
            for what, name, at_it, unit in (
                ("links to a node", "links_max", "the stream ends: goodbye PROTOCOL_ERROR, which says why", ""),
                ("agents in the mesh", "agents_max", "the agent is refused: OVERLOADED", ""),
                ("requests, events and queries a second", "requests_per_s",
                 "OVERLOADED with `retry_after_ms`; copies sent again may come to twice as many in a burst", ""),
                ("bytes a second, to a node", "bytes_per_s",
                 "requests and events are OVERLOADED until what came is paid for; answers go through", "bytes"),
                ("conversations, on a node", "sessions_max", "new ones: OVERLOADED", ""),
                ("subscriptions, on a node", "topics_max", "`unsubscribed` with OVERLOADED", ""),
                ("streamed replies under way, on a node", "streams_max",
                 "OVERLOADED; over a link with its first item, which ends the handler", ""),
            )
        ),
        Bound("of the limits per second, what may come at once", "quota_burst_s", "see above", "s"),
        Bound("streams of one principal without a hello, on a node", "principal_silent_streams_max",
              "the stream is refused: OVERLOADED"),
        Bound("principals with an account on a node on which there are limits", "reach.core.quotas.ACCOUNTS_MAX",
              "those that have nothing, and did nothing for a while, are forgotten"),
    ),
    "One node": (
        Bound("streams without a hello", "silent_streams_max", "the stream is refused: OVERLOADED"),
        Bound("headers of a call, 32 more for each", "agentreach.aio.options.METADATA_BYTES_MAX",
              "gRPC refuses the call: RESOURCE_EXHAUSTED", "bytes"),
        Bound("calls and streams on one connection", "agentreach.aio.options.STREAMS_MAX",
              "further ones wait in the client"),
        Bound("connections to the HTTP address", "reach.adapters.http_guard.CONNECTIONS_MAX", "closed at once"),
        Bound("head of an HTTP request", "reach.adapters.http_guard.HEAD_BYTES_MAX", "400 or 431", "bytes"),
        Bound("entries of `principals`", "reach.node.principals.PRINCIPALS_MAX", "the node does not start"),
        Bound("processes connected", "links_max", "the stream ends: goodbye PROTOCOL_ERROR"),
        Bound("addresses of other nodes that a process is told and keeps", _WIRE + "PEERS_MAX",
              "of a larger mesh each is told others, drawn at random"),
        Bound("agents registered in the mesh", "agents_max", "the agent is refused: OVERLOADED"),
        Bound("requests under way", "requests_in_flight_max", "OVERLOADED"),
        Bound("requests sent again that wait for their agents after a start", "reach.core.returning.PARKED_MAX",
              "NO_ROUTE, as for any other"),
        Bound("agents of which the registry is asked at once, because the view is old",
              "reach.core.lookups.LOOKUPS_MAX", "requests are answered by the old view"),
        Bound("requests that wait for one of these answers", "reach.core.lookups.PARKED_MAX", "the same"),
        Bound("messages that agents said they hold when they attached", "reach.core.brought.HELD_MAX",
              "the oldest are forgotten, and their slots given back"),
        Bound("other nodes", "reach.core.nodes.NODES_MAX", "the stream ends: goodbye PROTOCOL_ERROR"),
        Bound("messages sent before, of which other nodes are asked", "reach.core.once.INQUIRIES_MAX",
              "AGENT_LOST: it cannot be known whether it ran"),
        Bound("questions of other nodes about such messages", "reach.core.claims.ASKING_MAX",
              "no answer; the node asks again"),
        Bound("processes remembered that are gone together with their nodes", "reach.core.vanished.VANISHED_MAX",
              "the oldest is forgotten: what it had may run again"),
        Bound("selectors for which one other node waits here", "reach.core.wants.WANTS_PER_NODE_MAX",
              "it hears of free slots half a second later"),
        Bound("refusals of homes, of one request, that count as no attempt", "reach.core.refusals.REFUSALS_MAX",
              "the next is a failed attempt: CONNECT_FAILED"),
        Bound("wishes of other nodes that the leading one works on", "reach.node.forwarding.ASKED_MAX",
              "REGISTRY_UNAVAILABLE with `retry_after_ms`"),
        Bound("messages of one session that wait", "lane_max", "OVERLOADED"),
        Bound("requests that wait for a slot", "queue_max",
              "OVERLOADED with `retry_after_ms`: for the newcomer, or for the youngest of who has most there"),
        Bound("the same for one selector", "queue_selector_max", "the same"),
        Bound("bytes of all that waits, in lanes too", "queue_bytes_max", "the same", "bytes"),
        Bound("until a waiting request goes up a level, at most", "reach.core.waitqueue.AGE_S_MAX",
              "a quarter of its time, if that is less", "s"),
        Bound("who gives way to one newcomer, by bytes", "reach.core.waitqueue.DISPLACED_MAX",
              "the newcomer is OVERLOADED"),
        Bound("`retry_after` that the queue tells, at most", "reach.core.shelves.RETRY_AFTER_S_MAX", "", "s"),
        Bound("retries under way at one agent", "reach.core.budget.IN_FLIGHT_MAX",
              "the first failure is the outcome; `reach_retries_suppressed_total`"),
        Bound("target types with a retry budget of their own", "reach.core.budget.TYPES_MAX",
              "further ones share one"),
        Bound("failures in a row", "reach.core.breaker.IN_A_ROW_MAX", "the breaker of the agent opens"),
        Bound("how long a breaker stays open, at most", "reach.core.breaker.OPEN_S_MAX",
              "a real request is the probe", "s"),
        Bound("breakers kept of agents that left", "reach.core.breakers.LEFT_MAX", "the oldest are forgotten"),
        Bound("sessions", "sessions_max", "new ones: OVERLOADED"),
        Bound("idle time of a session", "session_ttl_s", "it is forgotten", "s"),
        Bound("subscriptions", "topics_max", "the subscription is refused, in the node's log"),
        Bound("outcomes kept for copies", "replay_entries_max", "the oldest go"),
        Bound("bytes of these", "replay_bytes_max", "the oldest go", "bytes"),
        Bound("how long they are kept", "replay_s", "they go", "s"),
        Bound("one outcome", "reach.core.replay.OUTCOME_BYTES_MAX",
              "the node keeps only who has it: the agent's own table", "bytes"),
        Bound("messages whose stages are kept", "trace_recent_max", "the oldest go"),
        Bound("failed and slow ones kept besides", "trace_kept_max", "the oldest go"),
        Bound("how long these are kept", "trace_kept_s", "they go", "s"),
        Bound("stages of one message besides the usual ones", "reach.core.requests.NOTES_MAX",
              "further ones are left out"),
        Bound("messages in one answer of GetTrace", "reach.core.trace.FOUND_MAX", "the newest are shown"),
        Bound("candidates in one answer of Explain", "reach.core.explain.ROWS_MAX",
              "those that came furthest are shown"),
        Bound("agents on one page of ListAgents", "reach.node.queries.PAGE_SIZE", "`next_page_token`"),
        Bound("a session's state, inline", _WIRE + "SESSION_STATE_BYTES_MAX",
              "PayloadTooLarge at whoever hands it over; a Blob says where a larger one is", "bytes"),
        Bound("messages that a state names as handled", _WIRE + "SESSION_HANDLED_MAX",
              "older ones may run again after a move if they are sent again"),
        Bound("their answers together", _WIRE + "SESSION_HANDLED_BYTES_MAX", "the same", "bytes"),
        Bound("all that is kept of a session", _WIRE + "SNAPSHOT_BYTES_MAX", "it is not taken", "bytes"),
        Bound("states that are being stored at one moment", "reach.core.moves.HELD_BYTES_MAX",
              "a checkpoint is dropped (`reach_session_moves_total`), a move waits", "bytes"),
        Bound("states kept in memory", "reach.adapters.snapshots.MEMORY_BYTES_MAX",
              "those that were not used for longest go", "bytes"),
        Bound("states kept in `snapshots_dir`", "reach.adapters.snapshots.DIRECTORY_BYTES_MAX",
              "nothing new is kept until older ones have gone", "bytes"),
        Bound("candidates for a session that moves", "reach.core.moving.CANDIDATES_MAX", "LOST"),
        Bound("an agent's conversations whose turns are counted", "agent_sdk.sessions.TRACKED_MAX",
              "those used longest ago begin to count anew"),
        Bound("messages noted for them together", "agent_sdk.sessions.KEYS_MAX",
              "further ones may run again after a move if they are sent again"),
        Bound("sessions in one answer of ListSessions", "reach.node.queries.SESSIONS_MAX", "the rest is left out"),
        Bound("breakers in one answer of ListBreakers", "reach.node.operations.BREAKERS_MAX",
              "the rest is left out: the worst come first"),
        Bound("time that a drain may be given", "reach.node.operations.DRAIN_TIMEOUT_MS_MAX", _FIELD, "ms"),
        Bound("`reason` of a drain, in characters", "reach.core.drains.REASON_CHARS_MAX", "the rest is left out"),
        Bound("items of streamed replies held for callbacks", "reach.core.callback_book.GATHERED_BYTES_MAX",
              "PAYLOAD_TOO_LARGE for the request whose item is one too many", "bytes"),
        Bound("dead letters kept", "dead_letters_max", "the oldest go"),
        Bound("bytes of these", "dead_letters_bytes_max", "the oldest go", "bytes"),
        Bound("how long they are kept", "dead_letters_s", "they go", "s"),
        Bound("dead letters in one answer of ListDeadLetters", "reach.core.redriving.LISTED_MAX",
              "the youngest are shown; `kept` says how many there are"),
        Bound("bytes of that answer", "reach.core.redriving.LISTED_BYTES_MAX", "the same", "bytes"),
        Bound("versions that one version policy names", "reach.core.version_policy.VERSIONS_MAX", _FIELD),
        Bound("weight of one of them", "reach.core.version_policy.VERSION_WEIGHT_MAX", _FIELD),
        Bound("settings of agents under one name", "reach.core.configs.SETTINGS_MAX", _FIELD),
        Bound("bytes of these, keys and values", "reach.core.configs.SETTINGS_BYTES_MAX", _FIELD, "bytes"),
        Bound("version policies; names of settings of agents", "reach.node.policies.POLICIES_MAX", "OVERLOADED"),
        Bound("open calls of WatchAgents", "reach.node.steering.WATCHERS_MAX", "OVERLOADED"),
        Bound("of them of one principal, where principals are known", "reach.node.steering.PRINCIPAL_WATCHERS_MAX",
              "OVERLOADED"),
        Bound("changes that somebody who watches agents may have missed", "reach.core.directory.CHANGES_MAX",
              "a new snapshot"),
        Bound("agents in one reply of WatchAgents", "reach.core.watching.AGENTS_A_REPLY_MAX",
              "the snapshot goes on with the next reply"),
        Bound("API keys in one file, or in one mesh's registry", "reach.core.keyring.KEYS_MAX",
              "OVERLOADED; those that ended 30 days ago do not count"),
        Bound("the same of one tenant, made by its own admins", "reach.core.key_orders.TENANT_KEYS_MAX", "OVERLOADED"),
        Bound("patterns of one kind in one API key", "reach.core.keyring.PATTERNS_MAX", _FIELD),
        Bound("one of these patterns", "reach.core.access.PATTERN_CHARS_MAX", _FIELD, "characters"),
        Bound("the header that shows a key", "reach.core.doors.KEY_CHARS_MAX", "UNAUTHENTICATED", "characters"),
        Bound("all that is said about one API key", "reach.core.keyring.INFO_BYTES_MAX", _FIELD, "bytes"),
        Bound("the file of API keys", "reach.adapters.key_file.FILE_BYTES_MAX",
              "OVERLOADED for the key that is one too many; a larger file is refused", "bytes"),
        Bound("until a new API key ends, at most", "reach.core.key_orders.LASTS_S_MAX", _FIELD, "s"),
        Bound("overlap of a key and the one in its place", "reach.core.key_orders.OVERLAP_S_MAX", _FIELD, "s"),
        Bound("signatures remembered of one principal", "reach.core.signed.NONCES_MAX",
              "the oldest go, and what is as old counts as seen: PERMISSION_DENIED"),
        Bound("names in `redact`", "reach.node.config.REDACTED_NAMES_MAX", "the node does not start"),
        Bound("principals that ExplainAccess asks for at once", "reach.core.access_explained.ACTORS_MAX", _FIELD),
        Bound("open health watches", "reach.adapters.grpc_server.health.WATCHES_MAX", "RESOURCE_EXHAUSTED"),
        Bound("agent types with numbers of their own in the metrics", "reach.core.stats.TYPES_MAX",
              "counted as `unknown`"),
        Bound("series of one metric with an `agent_id`", "reach.adapters.metrics.AGENT_SERIES_MAX",
              "those with the highest values are shown"),
    ),
}  # fmt: skip

NOT_SHOWN: dict[str, str] = {
    "reach.core.certificates.SPIFFE_CHARS_MAX": "by the standard; a longer name of a certificate is nobody's",
    "reach.core.certificates.DNS_CHARS_MAX": "by the standard, for names of `principals`",
    "reach.adapters.certificates.PARSED_MAX": "a cache",
    "reach.adapters.certificates.WAY_MAX": "longer than any chain of certificates in use",
    "agent_sdk.sessions.ANSWERS_MAX": "kept for a node that asks once more after its link began anew",
    "reach.core.vanished.SELECTORS_MAX": "what is looked for again costs time only",
    "reach.core.wants.WANTED_MAX": "queue_max again, as another node tells it",
    "reach.core.waitqueue.ENTRIES_MAX": "the default of queue_max",
    "reach.core.waitqueue.SELECTOR_MAX": "the default of queue_selector_max",
    "reach.core.waitqueue.BYTES_MAX": "the default of queue_bytes_max",
    "reach.core.fair.IDLE_MAX": "how long the turns of principals that do not wait are remembered",
    "reach.core.latency.BUCKET_MAX": "a part of an estimate",
    "agentreach.wire.signing.NAME_BYTES_MAX": "by the layout of a signature; ids are shorter",
    "agentreach.wire.limits.PAYLOAD_BYTES_MAX": "the default of payload_bytes_max",
    "agentreach.wire.errors.DETAIL_KEY_CHARS_MAX": "a part of an error's text",
    "agentreach.wire.errors.ID_CHARS_MAX": "message_id and trace_id again",
    "agentreach.wire.payload.WHOLE_NUMBER_MAX": "where whole numbers end, no bound on what is sent",
    "reach.core.admit.ECHOED_CHARS_MAX": "a part of an error",
    "reach.core.balance.SCAN_MAX": "how a choice is made, not what can be chosen from",
    "reach.core.directory.POOLS_MAX": "a cache",
    "reach.core.directory.RAW_TARGETS_MAX": "a cache",
    "reach.core.directory.HINTS_MAX": "a cache",
    "reach.core.watching.LOG_A_REPLY_MAX": "how much of the log is read at a time; the rest comes with the next reply",
    "reach.core.replay.CLOCK_AHEAD_MS_MAX": "how far an id's clock is believed",
    "reach.core.ring.POINTS_MAX": "how a ring is made",
    "reach.core.ring.WALK_MAX": "how a choice is made",
    "reach.core.replies.AVOID_S_MAX": "how far an agent's retry_after is believed",
    "reach.core.state.ORIGINS_MAX": "a cache",
    "reach.core.store.TXN_OPERATIONS_MAX": "between the node and its store",
    "reach.node.admission.AGENTS_PER_FORWARD_MAX": "between nodes; the rest follows in the next",
    "reach.node.newcomers.FORWARD_BYTES_MAX": "between nodes; the rest follows in the next",
    "reach.core.store.TXN_BYTES_MAX": "between the node and its store",
    "reach.adapters.memory_keyspace.HISTORY_MAX": "between the node and its store",
    "reach.adapters.etcd.lease_schedule.IN_FLIGHT_MAX": "between the node and etcd",
}
