"""The link: numbering, acknowledgement, batching and resume of frames, the same at both ends. No I/O, no clock.

A `Link` outlives the gRPC streams that carry it. What is put on it waits in an outbox of three priorities, is taken
in frames by the one writer of the current stream, and is kept until the peer acknowledges the frame. After a cut
the peers tell each other the last frame they accepted; what was not accepted is sent again under its old number.

The link knows nothing of requests; an `Item` is the handle by which its owner withdraws an envelope and reads how far
it came, which is what tells CONNECT, UNKNOWN and LOST apart (behaviour.md §4). What waits and goes next is `Outbox`'s,
what a frame looks like is `framing`'s: here it is numbered, kept and accounted for. A link is its outbox, rather than
has one, because every message is put by the node and by the SDK, and a call more for each can be measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from agentreach.v1.frame_pb2 import Frame, Signal
from agentreach.wire import framing, limits
from agentreach.wire.outbox import Item, Outbox, Shared

UNNUMBERED_SIGNALS: Final = frozenset(
    {"hello", "node_hello", "welcome", "heartbeat", "heartbeat_ack", "probe", "probe_reply", "goodbye"}
)


class LinkError(Exception):
    """The peer broke the numbering; the stream ends with goodbye PROTOCOL_ERROR."""


class _SentFrame:
    __slots__ = ("bytes_held", "items", "seq", "signals")

    def __init__(self, seq: int, items: list[Item], signals: list[bytes], bytes_held: int) -> None:
        self.seq = seq
        self.items = items
        self.signals = signals
        self.bytes_held = bytes_held


class Link(Outbox):
    """One end of a link. All times are seconds of the caller's monotonic clock."""

    def __init__(self, shared: Shared | None = None) -> None:
        super().__init__(shared)
        self._signals: deque[list[bytes]] = deque()
        self._last_signals_bytes = 0  # of the last of these groups; each goes into a frame of its own
        self._unnumbered: deque[bytes] = deque()
        self._goodbye: bytes | None = None
        """Goes when all else has gone, or cannot: a peer that has read it reads no more."""
        self._kept: deque[_SentFrame] = deque()
        self._resend: deque[_SentFrame] = deque()
        self._next_seq = 1
        self._ack_sent = 0
        self._envelopes_since_ack = 0
        self._broken = False
        self.last_accepted = 0
        """Number of the last frame of the peer that was accepted: `last_seq` of hello and welcome."""
        self.acknowledged = 0
        """Number of the last frame of ours that the peer accepted."""
        self.confirmed: list[Item] = []
        """Items with an owner that were acknowledged; whoever reads them empties it."""
        self.unacked = 0
        """Envelopes given to the transport and not acknowledged."""
        self.unacked_bytes = 0
        self.enough = limits.FRAME_ENVELOPES_MAX
        """How many envelopes make a frame: all that wait, unless who owns the link wants them in several."""

    # ---- sending ----

    @property
    def full(self) -> bool:
        """True when requests must see this peer as full."""
        return (
            self.waiting >= limits.OUTBOX_ENVELOPES_MAX
            or self.waiting_bytes + self.unacked_bytes >= limits.OUTBOX_BYTES_MAX
            or (self.waiting_bytes + self.unacked_bytes >= limits.OUTBOX_BYTES_SHARE and self.shared.full)
        )

    @property
    def overrun(self) -> bool:
        """True when even replies no longer fit: the link must end with SLOW_CONSUMER."""
        return self.waiting_bytes + self.unacked_bytes >= limits.OUTBOX_BYTES_HARD_MAX

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing is unacknowledged."""
        return not (self.waiting or self._kept or self._signals or self._unnumbered or self._goodbye)

    @property
    def signals_waiting(self) -> int:
        """Signals that were not given to the transport; the owner's to bound."""
        return sum(map(len, self._signals)) + len(self._unnumbered)

    @property
    def ready(self) -> bool:
        """True when `next_frame` has something to give besides a bare ack."""
        if self._unnumbered or self._resend or self._goodbye:
            return True
        return bool(self._signals or self.waiting) and not (self._broken or self._window_full)

    @property
    def _window_full(self) -> bool:
        return (
            self.unacked >= limits.UNACKED_ENVELOPES_MAX
            or self.unacked_bytes >= limits.UNACKED_BYTES_MAX
            or len(self._kept) >= limits.UNACKED_ENVELOPES_MAX
            or (self.unacked_bytes >= limits.OUTBOX_BYTES_SHARE and self.shared.full)
        )

    def signal(self, signal: Signal) -> int:
        """Queue a signal; it goes before waiting envelopes.

        Returns the number of the frame that will carry it (until a `restart`), 0 if it is not of the numbered kind.
        """
        data = signal.SerializeToString()
        kind = signal.WhichOneof("kind")
        if kind == "goodbye":
            self._goodbye = data
            return 0
        if kind in UNNUMBERED_SIGNALS:
            self._unnumbered.append(data)
            return 0
        if not self._signals or self._last_signals_bytes + len(data) > limits.FRAME_BYTES_MAX:
            self._signals.append([])
            self._last_signals_bytes = 0
        self._signals[-1].append(data)
        self._last_signals_bytes += len(data)
        return self._next_seq + len(self._signals) - 1

    def last_words(self) -> bytes | None:
        """A frame with the unnumbered signals that wait (goodbye), whatever else does; None if there are none."""
        self._say_goodbye()
        return self._signal_frame() if self._unnumbered else None

    def next_frame(self, now: float) -> bytes | None:
        """The next frame for the transport, or None when there is nothing to say. It carries the current ack.

        Between `cut` and `resume` or `restart` only unnumbered signals are given, without an ack: the handshake.
        """
        if self._unnumbered:
            return self._signal_frame()
        if self._broken:
            return self.last_words()
        if self._resend:
            return self._numbered(self._resend.popleft(), now)
        if self._window_full:
            return self.last_words() or self._bare_ack()
        signals = self._signals.popleft() if self._signals else []
        items, held = self._take(self.enough) if self.waiting and not self._signals else ([], 0)
        if not items and not signals:
            return self.last_words() or self._bare_ack()
        frame = _SentFrame(self._next_seq, items, signals, held)
        self._next_seq += 1
        for item in items:
            item.seq = frame.seq
            item.sent_at = now
            item.waits = False
        count = len(items)
        self.waiting -= count
        self.waiting_bytes -= held
        self.unacked += count
        self.unacked_bytes += held
        self._kept.append(frame)
        return self._numbered(frame, now)

    def _say_goodbye(self) -> None:
        if self._goodbye is not None:
            self._unnumbered.append(self._goodbye)
            self._goodbye = None

    def _numbered(self, frame: _SentFrame, now: float) -> bytes:
        return framing.frame(frame.seq, self._ack(), frame.items, frame.signals, now)

    def _signal_frame(self) -> bytes:
        data = framing.frame(0, 0 if self._broken else self._ack(), (), self._unnumbered, 0.0)
        self._unnumbered.clear()
        return data

    def _bare_ack(self) -> bytes | None:
        return None if self._ack_sent == self.last_accepted else self._signal_frame()

    def _ack(self) -> int:
        """The ack for a frame that goes out now."""
        self._ack_sent = self.last_accepted
        self._envelopes_since_ack = 0
        return self.last_accepted

    # ---- receiving ----

    @property
    def ack_owed(self) -> bool:
        """True when the peer waits for an ack that nothing has carried yet."""
        return self._ack_sent != self.last_accepted and not self._broken

    @property
    def ack_urgent(self) -> bool:
        """True when so much was accepted since the last ack that it must not wait for its delay."""
        return self._envelopes_since_ack >= limits.ACK_ENVELOPES

    def receive(self, frame: Frame, now: float = 0.0) -> bool:
        """Take note of a frame. True: act on it; False: it was seen before and must be dropped.

        A frame without a number is always acted on, for its signals. Raises `LinkError` on a gap, on an ack of
        something never sent, or on envelopes in a frame without a number.
        """
        if frame.ack:
            self._acknowledge(frame.ack, now)
        seq = frame.seq
        if seq == 0:
            if frame.envelopes:
                raise LinkError("envelopes in a frame without seq")
            return True
        if seq <= self.last_accepted:
            return False
        if seq != self.last_accepted + 1:
            raise LinkError(f"frame {seq} came after frame {self.last_accepted}")
        self.last_accepted = seq
        self._envelopes_since_ack += len(frame.envelopes)
        return True

    def _acknowledge(self, ack: int, now: float = 0.0) -> None:
        if ack <= self.acknowledged:
            return
        if ack >= self._next_seq:
            raise LinkError(f"ack {ack} for a frame that was never sent (last sent: {self._next_seq - 1})")
        self.acknowledged = ack
        while self._kept and self._kept[0].seq <= ack:
            frame = self._kept.popleft()
            for item in frame.items:
                item.accepted = True
                item.accepted_at = now
                if item.owner is not None:
                    self.confirmed.append(item)
                item.data = None
            self.unacked -= len(frame.items)
            self.unacked_bytes -= frame.bytes_held
            self.shared.bytes_held -= frame.bytes_held

    # ---- resume ----

    def cut(self) -> None:
        """The stream has ended: nothing unnumbered survives it, and the ack must be told anew."""
        self._unnumbered.clear()
        self._goodbye = None
        self._resend.clear()
        self._ack_sent = -1 if self.last_accepted else 0
        self._broken = True

    def resume(self, peer_last_seq: int) -> bool:
        """Go on after a cut, given the last frame the peer accepted. False: it does not fit, `restart` instead."""
        if not self.fits(peer_last_seq):
            return False
        self._acknowledge(peer_last_seq)
        self._resend = deque(self._kept)
        self._broken = False
        return True

    def fits(self, peer_last_seq: int) -> bool:
        """True when what the peer says it accepted continues what is kept here."""
        return self.acknowledged <= peer_last_seq < self._next_seq

    def restart(self) -> None:
        """Number from 1 again in both directions. All that the peer had not accepted waits again, in order, first.

        Each such envelope loses its `fresh` mark: the peer may have it. Numbered signals are dropped: state is
        declared anew.
        """
        self._wait_again(item for frame in self._kept for item in frame.items)
        self.shared.bytes_held -= self.unacked_bytes
        self.unacked = self.unacked_bytes = 0
        self._kept.clear()
        self._resend.clear()
        self._signals.clear()
        self._unnumbered.clear()
        self._goodbye = None
        self._broken = False
        self._next_seq = 1
        self.acknowledged = self.last_accepted = self._ack_sent = self._envelopes_since_ack = 0

    def give_up(self) -> None:
        """The link is over: what it holds counts no longer. Nothing may be put on it afterwards."""
        self.shared.bytes_held -= self.waiting_bytes + self.unacked_bytes
        self.shared = Shared()

    def outstanding(self) -> Iterator[Item]:
        """Every envelope that the peer has not accepted, sent or not, oldest first within a priority."""
        for frame in self._kept:
            yield from (item for item in frame.items if item.data is not None)
        for lane in self._lanes:
            yield from (item for item in lane if item.data is not None)
