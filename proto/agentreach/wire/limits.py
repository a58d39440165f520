"""Bounds that both ends must know to interoperate. Sizes in bytes, times in ms unless the name says otherwise."""

from typing import Final

PROTOCOL_VERSION: Final = 1

PAYLOAD_BYTES_MAX: Final = 1 << 20  # inline payload, by default; settable up to PAYLOAD_BYTES_CEILING
PAYLOAD_BYTES_CEILING: Final = 4 << 20
GRPC_MESSAGE_BYTES_MAX: Final = 16 << 20  # gRPC's own limit, above ours, so that oversize is answered by us

MESSAGE_ID_CHARS_MAX: Final = 128
TRACE_ID_CHARS_MAX: Final = 128
SESSION_ID_BYTES_MAX: Final = 256
DEDUP_KEY_CHARS_MAX: Final = 256
HASH_KEY_BYTES_MAX: Final = 256
SESSION_STATE_BYTES_MAX: Final = 256 << 10  # of a session, inline; a larger one is handed over as a BlobRef
SESSION_HANDLED_MAX: Final = 100  # messages that a state names as already in it, with their replies
SESSION_HANDLED_BYTES_MAX: Final = 96 << 10
SNAPSHOT_BYTES_MAX: Final = 384 << 10  # both, and what is around them; etcd takes 1.5 MiB
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 8 << 10
CAPABILITIES_MAX: Final = 64
LABELS_MAX: Final = 64
DESCRIPTION_CHARS_MAX: Final = 4096
TOPICS_PER_SUBSCRIBER_MAX: Final = 1000

TIMEOUT_MS_MIN: Final = 10
TIMEOUT_MS_MAX: Final = 600_000

FRAME_ENVELOPES_MAX: Final = 256
# Who asks puts a quarter of what it has under way into a frame, and at least so many: others work on the first while
# the next are written. With everything in one frame the processes of a chain take turns, and one core does the work of
# two (measured: 1.07 cores busy and 4.4 k requests/s at 64 in flight, against 1.7 cores and 7 k). Everybody else sends
# what waits in one frame, so that what was asked together stays together (at 512: a quarter less processor time).
FRAME_ENVELOPES_ENOUGH: Final = 32
FRAME_BYTES_MAX: Final = 256 << 10  # or one larger envelope; frames of many large envelopes are slower than single ones

OUTBOX_ENVELOPES_MAX: Final = 1024  # waiting; beyond, requests see the peer as full
OUTBOX_BYTES_MAX: Final = 16 << 20  # waiting and unacknowledged together
OUTBOX_BYTES_SHARE: Final = 256 << 10  # of one link that is never refused, however much all links of a node hold
OUTBOX_BYTES_HARD_MAX: Final = 64 << 20  # replies may exceed the bound above up to here; beyond, SLOW_CONSUMER
UNACKED_ENVELOPES_MAX: Final = (
    4096  # given to the transport, not acknowledged: writing pauses (write() itself is no back-pressure)
)
UNACKED_BYTES_MAX: Final = 8 << 20

ACK_DELAY_S: Final = 0.020  # a bare ack is sent after at most this
ACK_ENVELOPES: Final = 512  # or at once when so many envelopes came since the last
STAMP_SKEW_S: Final = 0.020  # envelopes stamped further apart than this never share a frame (they share its age_ms)

HELLO_TIMEOUT_S: Final = 10.0
RESUME_WINDOW_S: Final = 10.0
STREAM_CREDIT_INITIAL: Final = 64
PEERS_MAX: Final = 16  # addresses of other nodes that a process is told and keeps
