"""Where a watch stands, and what each response means for that. Pure.

The rules (etcd-facts 7.2) that lose and repeat nothing: resume after the last event's own revision; only a progress
response may move the position without events; never trust the header of a `created` reply or of a batch of events.
"""

from __future__ import annotations

from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.core.store import Compacted


class WatchRefused(Exception):
    """The server ended the watch, as a normal message: permission, an expired token, a restart."""


class WatchCursor:
    """`next_revision` is the first revision not yet seen."""

    def __init__(self, from_revision: int) -> None:
        self.next_revision = from_revision

    def take(self, response: pb.WatchResponse) -> list[pb.Event]:
        """The events of one response that are new, in order.

        etcd before 3.5.8 may send an event twice; it is dropped here. Raises `Compacted`, `WatchRefused`.
        """
        if response.canceled:
            if response.compact_revision > 0:
                raise Compacted(response.compact_revision)
            raise WatchRefused(response.cancel_reason or "the server ended the watch")
        if response.created:
            return []
        if not response.events:
            self.next_revision = max(self.next_revision, response.header.revision + 1)
            return []
        fresh = [event for event in response.events if event.kv.mod_revision >= self.next_revision]
        if fresh:
            self.next_revision = fresh[-1].kv.mod_revision + 1
        return fresh
