"""What waits to be sent: envelopes in three priorities, taken by the frame, withdrawn one by one.

Envelopes are serialised once, when they are put: their size is known, and retention is cheap. Decides what goes next
and how much of it makes a frame; whether anything may go now, and what became of it, is the link's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire import framing, limits

HIGH: Final = 0
NORMAL: Final = 1
LOW: Final = 2


class Item:
    """One envelope on its way to the peer."""

    __slots__ = (
        "accepted",
        "accepted_at",
        "data",
        "doubtful",
        "owner",
        "priority",
        "sent_at",
        "seq",
        "stamped",
        "waits",
    )

    def __init__(self, data: bytes, priority: int, stamped: float) -> None:
        self.data: bytes | None = data
        self.priority = priority
        self.stamped = stamped
        self.seq = 0
        """Number of the frame that carried it last; 0 while it was never given to the transport."""
        self.sent_at = 0.0
        """When that frame was taken, by the clock given to `next_frame`."""
        self.waits = True
        """True while it is in the outbox; after a restart also what was sent before waits again."""
        self.doubtful = False
        """True once a restart cut its numbering off: the peer may have it, and no later ack can prove otherwise."""
        self.accepted = False
        """True once the peer acknowledged that frame."""
        self.accepted_at = 0.0
        """When that acknowledgement came, by the clock given to `receive`."""
        self.owner: object = None
        """Who wants to know of the acknowledgement; such items come out in `Link.confirmed`."""


class Shared:
    """What all links of a process hold together: many slow peers must not take what one may."""

    __slots__ = ("bytes_held", "bytes_max")

    def __init__(self, bytes_max: int = 1 << 62) -> None:
        self.bytes_held = 0
        """Bytes of envelopes that wait or are not acknowledged."""
        self.bytes_max = bytes_max

    @property
    def full(self) -> bool:
        """True when links that hold much of it take nothing more."""
        return self.bytes_held >= self.bytes_max


class Outbox:
    """The sending half of a link, up to the moment at which an envelope gets a number."""

    def __init__(self, shared: Shared | None = None) -> None:
        self.shared = shared or Shared()
        self._lanes: tuple[deque[Item], deque[Item], deque[Item]] = (deque(), deque(), deque())
        self._withdrawn = 0
        self.waiting = 0
        """Envelopes in the outbox, not yet given to the transport."""
        self.waiting_bytes = 0

    def put(self, envelope: Envelope, now: float, priority: int = NORMAL) -> Item:
        """Queue an envelope, as it is now (later changes to it do not travel). Bounds are the caller's to check."""
        return self.put_bytes(envelope.SerializeToString(), now, priority)

    def put_bytes(self, data: bytes, now: float, priority: int = NORMAL) -> Item:
        """Queue an envelope that is serialised already."""
        item = Item(data, priority, now)
        self._lanes[priority].append(item)
        size = len(data)
        self.waiting += 1
        self.waiting_bytes += size
        self.shared.bytes_held += size
        return item

    def withdraw(self, item: Item) -> bool:
        """Take an envelope back. Returns True if it had never been given to the transport.

        One that was sent and not accepted is blanked: a resume sends its frame without it.
        """
        data = item.data
        if data is None or item.accepted:
            return False
        item.data = None
        if item.waits:
            item.waits = False
            self.waiting -= 1
            self.waiting_bytes -= len(data)
            self.shared.bytes_held -= len(data)
            self._withdrawn += 1
            if self._withdrawn > limits.FRAME_ENVELOPES_MAX and self._withdrawn > self.waiting:
                self._sweep()
        return item.seq == 0

    def _sweep(self) -> None:
        """Let go of withdrawn items in the lanes: while no frame is taken, nothing else would."""
        for lane in self._lanes:
            still = [item for item in lane if item.data is not None]
            lane.clear()
            lane.extend(still)
        self._withdrawn = 0

    def drop_oldest(self, items: deque[Item]) -> Item | None:
        """Withdraw the oldest of `items` that still waits (events of a slow subscriber); None if none does."""
        while items:
            item = items.popleft()
            if item.waits:
                self.withdraw(item)
                return item
        return None

    def _take(self, enough: int) -> tuple[list[Item], int]:
        items: list[Item] = []
        held, first = 0, 0.0
        most = min(enough, limits.FRAME_ENVELOPES_MAX)
        for lane in self._lanes:
            while lane:
                item = lane[0]
                data = item.data
                if data is None:
                    lane.popleft()
                    self._withdrawn -= 1
                    continue
                if not items:
                    first = item.stamped
                elif (
                    held + len(data) > limits.FRAME_BYTES_MAX
                    or len(items) >= most
                    or abs(item.stamped - first) > limits.STAMP_SKEW_S
                ):
                    return items, held
                lane.popleft()
                items.append(item)
                held += len(data)
        return items, held

    def _wait_again(self, sent: Iterable[Item]) -> None:
        """Put what was sent and not accepted before all that waits, in order, without its `fresh` mark."""
        lanes: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
        for item in sent:
            item.doubtful = True
            if item.data is not None:
                lanes[item.priority].append(item)
        for lane, again in zip(self._lanes, lanes, strict=True):
            for item in again:
                assert item.data is not None
                item.data += framing.NOT_FRESH
                item.waits = True
                self.waiting += 1
                self.waiting_bytes += len(item.data)
                self.shared.bytes_held += len(item.data)
            lane.extendleft(reversed(again))
