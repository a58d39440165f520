"""Between the store's words and etcd's messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.core.store import Change, Compare, Delete, Field, Get, Item, Op, Operation, Put, TxnResult

_RESULT = {
    Op.EQUAL: pb.Compare.EQUAL,
    Op.NOT_EQUAL: pb.Compare.NOT_EQUAL,
    Op.LESS: pb.Compare.LESS,
    Op.GREATER: pb.Compare.GREATER,
}


def end_of(prefix: bytes) -> bytes:
    """The smallest key above all that start with `prefix`; a zero byte, which is etcd's "no end", if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


class Codec:
    """Keys are text relative to `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def key(self, key: str) -> bytes:
        """The key as etcd knows it."""
        return self._prefix + key.encode()

    def range_of(self, prefix: str) -> tuple[bytes, bytes]:
        """First key and end of all that start with `prefix`; etcd takes no empty first key."""
        start = self.key(prefix)
        return start or b"\0", end_of(start)

    def name(self, key: bytes) -> str:
        """The key as the store's user knows it; what is no UTF-8 was written by somebody else and stays readable."""
        return key[len(self._prefix) :].decode(errors="backslashreplace")

    def item(self, kv: pb.KeyValue) -> Item:
        """One stored key."""
        return Item(self.name(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)

    def change(self, event: pb.Event) -> Change:
        """One event of a watch."""
        item = None if event.type == pb.Event.DELETE else self.item(event.kv)
        return Change(self.name(event.kv.key), event.kv.mod_revision, item)

    def compare(self, compare: Compare) -> pb.Compare:
        """One condition; `check_txn` has seen that operand and field fit."""
        message = pb.Compare(key=self.key(compare.key), result=_RESULT[compare.op])
        match compare.field, compare.operand:
            case Field.CREATE, int(revision):
                message.target, message.create_revision = pb.Compare.CREATE, revision
            case Field.MOD, int(revision):
                message.target, message.mod_revision = pb.Compare.MOD, revision
            case Field.VALUE, bytes(value):
                message.target, message.value = pb.Compare.VALUE, value
            case _:
                raise ValueError(f"cannot compare {compare.field.value} with {compare.operand!r}")
        return message

    def operation(self, operation: Operation) -> pb.RequestOp:
        """One operation of a transaction."""
        match operation:
            case Put(key, value, lease):
                return pb.RequestOp(request_put=pb.PutRequest(key=self.key(key), value=value, lease=lease))
            case Delete(key, prefix):
                start, end = self.range_of(key) if prefix else (self.key(key), b"")
                return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=start, range_end=end))
            case Get(key, prefix):
                start, end = self.range_of(key) if prefix else (self.key(key), b"")
                return pb.RequestOp(request_range=pb.RangeRequest(key=start, range_end=end))

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]
    ) -> pb.TxnRequest:
        """A whole transaction."""
        return pb.TxnRequest(
            compare=[self.compare(compare) for compare in compares],
            success=[self.operation(operation) for operation in then],
            failure=[self.operation(operation) for operation in otherwise],
        )

    def result(self, response: pb.TxnResponse) -> TxnResult:
        """What a transaction did."""
        reads = tuple(tuple(self.item(kv) for kv in part.response_range.kvs) for part in response.responses)
        return TxnResult(response.succeeded, response.header.revision, reads)
