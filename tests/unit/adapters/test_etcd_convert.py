"""Prefixes and ranges of keys."""

from hypothesis import given
from hypothesis import strategies as st

from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.convert import Codec, end_of
from reach.core.store import Change, Item


@given(st.binary(), st.binary())
def test_a_range_holds_exactly_the_keys_that_start_with_the_prefix(prefix: bytes, key: bytes) -> None:
    end = end_of(prefix)
    assert (key >= prefix and (end == b"\0" or key < end)) == key.startswith(prefix)


@given(st.text(), st.text())
def test_a_key_survives_the_way_there_and_back(prefix: str, key: str) -> None:
    codec = Codec(prefix)
    assert codec.name(codec.key(key)) == key


def test_everything_is_a_range_that_etcd_takes() -> None:
    assert Codec("").range_of("") == (b"\0", b"\0")
    assert Codec("/p/").range_of("") == (b"/p/", b"/p0")


def test_a_put_and_a_deletion_become_changes() -> None:
    codec = Codec("/p/")
    written = pb.KeyValue(key=b"/p/a", value=b"v", create_revision=3, mod_revision=5, lease=7)
    assert codec.change(pb.Event(kv=written)) == Change("a", 5, Item("a", b"v", 3, 5, 7))
    deleted = pb.KeyValue(key=b"/p/a", mod_revision=6)
    assert codec.change(pb.Event(type=pb.Event.DELETE, kv=deleted)) == Change("a", 6, None)
