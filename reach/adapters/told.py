"""What a node said in the status of a call that failed, for those who ask nodes."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from agentreach.v1.error_pb2 import INTERNAL, Error
from agentreach.wire import errors
from reach.core.ports import MeshFailure

_DETAILS_KEY = "grpc-status-details-bin"
_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # a server that stops says so of the calls that it has just got
)


def told(error: grpc.aio.AioRpcError) -> MeshFailure | None:
    """What a node said, or None if nobody there said anything."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                found = errors.from_status(Status.FromString(value))
            except DecodeError:
                continue
            if found is not None:
                return MeshFailure(found)
    if error.code() in _NO_ANSWER:
        return None
    text = f"the server there is no Agent-Reach node of this version ({error.code().name}: {error.details()})"
    return MeshFailure(Error(code=INTERNAL, message=text))
