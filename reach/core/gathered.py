"""A streamed reply as one: its items as a list, for whoever wants one answer (Invoke, a callback)."""

from __future__ import annotations

from collections.abc import Sequence

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from agentreach.wire.payload import Form, PayloadError, decode, encode


def as_list(items: Sequence[Envelope], last: Envelope, form: Form, instead: str) -> Error | None:
    """Make `last`, the final RESPONSE, the whole reply: its payload becomes the list of all `items`.

    Returns why that cannot be, with `instead`, what to do then.
    """
    try:
        values = [decode(item.payload) for item in items]
        if any(isinstance(value, bytes) for value in values):
            raise PayloadError("an item is bytes, which a JSON list cannot hold")
        last.payload.CopyFrom(encode(values, form))
    except PayloadError as error:
        return failure(codes.REJECTED, f"the agent streams its reply and {error}; {instead}", may_have_executed=True)
    last.ClearField("sequence")
    last.ClearField("more")
    return None


def too_large(items: int, bound: int, instead: str) -> Error:
    """The items together are over the limit of one payload."""
    return failure(
        codes.PAYLOAD_TOO_LARGE,
        f"the agent streams its reply; after {items} items it is larger than {bound} bytes; {instead}",
        may_have_executed=True,
        details={"items": str(items)},
    )
