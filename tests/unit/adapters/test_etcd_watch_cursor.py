"""Where a watch stands after each kind of response."""

import pytest

from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.watch_cursor import WatchCursor, WatchRefused
from reach.core.store import Compacted


def events(*revisions: int, header: int = 0) -> pb.WatchResponse:
    """A batch of events with these revisions."""
    return pb.WatchResponse(
        header=pb.ResponseHeader(revision=header),
        events=[pb.Event(kv=pb.KeyValue(key=b"k", mod_revision=revision)) for revision in revisions],
    )


def test_a_batch_moves_it_past_its_last_event_and_not_to_the_header() -> None:
    cursor = WatchCursor(5)
    assert len(cursor.take(events(5, 7, 7, header=90))) == 3
    assert cursor.next_revision == 8


def test_what_was_seen_already_is_dropped() -> None:
    cursor = WatchCursor(5)
    cursor.take(events(5, 6))
    assert [event.kv.mod_revision for event in cursor.take(events(5, 6, 7))] == [7]
    assert cursor.take(events(6)) == []
    assert cursor.next_revision == 8


def test_the_header_of_a_created_reply_says_nothing() -> None:
    cursor = WatchCursor(5)
    assert cursor.take(pb.WatchResponse(created=True, header=pb.ResponseHeader(revision=90))) == []
    assert cursor.next_revision == 5


def test_progress_moves_it_but_never_back() -> None:
    cursor = WatchCursor(5)
    cursor.take(events(header=20))
    assert cursor.next_revision == 21
    cursor.take(events(header=10))
    assert cursor.next_revision == 21


def test_a_compacted_start_raises_compacted() -> None:
    with pytest.raises(Compacted) as caught:
        WatchCursor(5).take(pb.WatchResponse(canceled=True, compact_revision=9))
    assert caught.value.revision == 9


def test_a_creation_that_is_refused_in_the_same_message_is_no_success() -> None:
    with pytest.raises(WatchRefused, match="permission denied"):
        WatchCursor(5).take(pb.WatchResponse(created=True, canceled=True, cancel_reason="permission denied"))
