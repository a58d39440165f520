"""The numbers of the design are the defaults of the code.

The reference pages are written from the code, so they would follow a number that somebody changes by mistake. Here the
numbers stand a second time, as docs/design has them.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from agent_sdk import agent, connecting, redial, replies, standing, watch
from agent_sdk.run import IDLE_TIMEOUT_S
from agentreach.aio.options import CLIENT_OPTIONS, SERVER_OPTIONS
from agentreach.v1 import envelope_pb2 as pb
from agentreach.wire import limits
from reach.core import agents, balance, drains, lineage
from reach.core.profiles import PROFILES
from reach.core.rules import Rules
from reach.core.stats import BUCKETS_S
from reach.node.settings import Config, settings

MIB = 1 << 20

CONTRACT = {
    "PROTOCOL_VERSION": 1, "ACK_DELAY_S": 0.020, "HELLO_TIMEOUT_S": 10.0, "STREAM_CREDIT_INITIAL": 64,
    "FRAME_ENVELOPES_MAX": 256, "FRAME_BYTES_MAX": 256 << 10, "MESSAGE_ID_CHARS_MAX": 128, "TRACE_ID_CHARS_MAX": 128,
    "SESSION_ID_BYTES_MAX": 256, "HEADERS_MAX": 64, "HEADERS_BYTES_MAX": 8 << 10, "GRPC_MESSAGE_BYTES_MAX": 16 * MIB,
    "PAYLOAD_BYTES_MAX": MIB, "PAYLOAD_BYTES_CEILING": 4 * MIB, "TIMEOUT_MS_MIN": 10, "TIMEOUT_MS_MAX": 600_000,
    "OUTBOX_ENVELOPES_MAX": 1024, "OUTBOX_BYTES_MAX": 16 * MIB, "RESUME_WINDOW_S": 10.0,
}  # fmt: skip

BEHAVIOUR = {
    "lease_ttl_s": 30, "heartbeat_interval_s": 10, "many_agents": 500, "resume_window_s": 10, "settle_min_s": 1,
    "accept_timeout_s": 5, "cancel_grace_s": 5, "probe_timeout_s": 5, "probe_interval_busy_s": 5,
    "probe_interval_idle_s": 30, "warm_up_s": 10, "slow_consumer_s": 30, "idle_timeout_s": 30, "session_ttl_s": 1800,
    "lane_max": 100, "owner_lost_s": 30, "max_hops": 10, "max_repeats": 2, "replay_s": 300,
    "replay_entries_max": 100_000, "replay_bytes_max": 64 * MIB, "trace_recent_max": 50_000, "trace_kept_max": 10_000,
    "trace_kept_s": 900, "payload_bytes_max": MIB, "publish_timeout_s": 2,
}  # fmt: skip

KEEPALIVE = {
    "grpc.keepalive_time_ms": 6_000, "grpc.keepalive_timeout_ms": 2_000, "grpc.http2.ping_timeout_ms": 2_000,
    "grpc.keepalive_permit_without_calls": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contracts_number_is_the_one_both_ends_use(name: str) -> None:
    assert getattr(limits, name) == CONTRACT[name]


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_the_behaviours_number_is_the_default(name: str) -> None:
    assert getattr(Rules(), name) == BEHAVIOUR[name]


def test_what_a_node_is_started_with_is_what_the_core_is_tested_with() -> None:
    rules = {each.name: getattr(Rules(), each.name) for each in fields(Rules)}
    config = {each.name: getattr(Config(), each.name) for each in fields(Config)}
    assert rules.keys() - config.keys() == set(), "every number of the core is a setting"
    shared = rules.keys() - {"node_id"}
    assert {name: rules[name] for name in shared} == {name: config[name] for name in shared}
    assert Config().hello_timeout_s == 10
    assert Config().drain_timeout_s == 55
    assert (Config().listen, Config().http) == ("127.0.0.1:7070", "127.0.0.1:7071")
    assert all(each.meaning for each in settings())


def test_both_ends_ping_as_a_matched_pair() -> None:
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    assert {name: client[name] for name in KEEPALIVE} == KEEPALIVE
    assert {name: server[name] for name in KEEPALIVE} == KEEPALIVE
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] == 5_000
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.enable_http_proxy"] == 0


def test_the_profiles_are_those_of_the_table() -> None:
    table = {pb.CACHE: (0.5, 1), pb.RPC: (5, 2), pb.LLM: (120, 1), pb.EXTERNAL: (30, 1), pb.TASK: (60, 4)}
    assert {kind: (each.attempt_timeout_s, each.attempts - 1) for kind, each in PROFILES.items()} == table


def test_the_numbers_of_routing_sessions_and_lineage() -> None:
    assert (balance.SCAN_MAX, balance.DRAWS) == (32, 4)
    assert agents.WARMTH_MIN == 0.1
    assert lineage.LINGER_MS == 15 * 60 * 1000
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (0.001, 300.0)


def test_the_sdks_numbers() -> None:
    assert replies.AGE_S == 600
    assert connecting.CONNECT_TIMEOUT_S == 5
    assert agent.DRAIN_TIMEOUT_S == 55
    assert IDLE_TIMEOUT_S == 30
    assert (redial.SAME_NODE_S, redial.SPREAD_S, redial.CAP_S) == (1, 2.5, 4.8)
    assert drains.MOVE_S == 2 * redial.SPREAD_S, "the node waits for all who come spread over time"
    assert standing.POOL_THREADS == 32
    assert watch.SLOW_S == 0.1
