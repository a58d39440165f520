"""gRPC channel and server options of both ends, as one matched pair (house.md, traps 7, 9, 13, 18)."""

from __future__ import annotations

from agentreach.wire.limits import GRPC_MESSAGE_BYTES_MAX

_PING_EVERY_MS = 6_000
_PING_ANSWER_MS = 2_000  # a frozen peer is noticed in about 8 s
_PING_ALLOWED_MS = 5_000  # below _PING_EVERY_MS, or the server ends the stream with too_many_pings

Options = list[tuple[str, int | str]]

_SHARED: Options = [
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", _PING_ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: Options = [
    *_SHARED,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # in truth: how long one attempt may take to its first SETTINGS frame
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: Options = [
    *_SHARED,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_ALLOWED_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_ALLOWED_MS),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_metadata_size", 16 << 10),
]
