"""Takes secrets out of the errors that leave the node: an agent's handler, or a caller's input, may have put one in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.error_pb2 import Error

if TYPE_CHECKING:
    from reach.core.state import State


def redact(state: State, error: Error) -> Error:
    """The same error, its texts without what is recognised as a secret."""
    redaction = state.redaction
    message = redaction.text(error.message)
    if message != error.message:
        error.message = message
    for name, value in list(error.details.items()):
        shown = redaction.field(name, value)
        if shown != value:
            error.details[name] = shown
    return error
