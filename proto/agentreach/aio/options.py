"""gRPC channel and server options of both ends, as one matched pair (house.md, traps 7, 9, 13, 18)."""

from __future__ import annotations

from agentreach.wire.limits import GRPC_MESSAGE_BYTES_MAX

_PING_EVERY_MS = 6_000
_PING_ANSWER_MS = 2_000  # a frozen peer is noticed in about 8 s
_PING_ALLOWED_MS = 5_000  # below _PING_EVERY_MS, or the server ends the stream with too_many_pings

Options = list[tuple[str, int | str]]

METADATA_BYTES_MAX = 16 << 10  # of the headers of a call, 32 more for each of them
STREAMS_MAX = 2_000  # calls and streams at once on one connection; a client's further ones wait in the client
HANDSHAKE_MS = 10_000
IDLE_MS = 300_000  # a connection on which nothing was asked for so long gives its place back; clients dial again unseen

_SHARED: Options = [
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", _PING_ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Nothing compressed is taken: 16 MiB of it are 16 GiB, and gRPC 1.76 unpacks all before it looks at the size
    # (measured: 320 MiB for a message of 300 MiB that came as 0.3).
    ("grpc.compression_enabled_algorithms_bitset", 1),
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
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),  # else between the two it is refused at random
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),  # 120 s by default, in which a silent connection is held
]
