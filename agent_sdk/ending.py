"""What the end of a stream means for the next one."""

from __future__ import annotations

from enum import Enum

from agentreach.v1.frame_pb2 import Goodbye


class Ended(Enum):
    """How a stream ended, as far as the next one is concerned."""

    CUT = "resume"
    SCRATCH = "start anew"
    MOVED = "start anew, elsewhere"
    REFUSED = "never again"


def by_goodbye(goodbye: Goodbye, elsewhere: bool, own: bytes) -> Ended | None:
    """What a node's goodbye means; `elsewhere`: there is another node, `own`: this process's incarnation.

    None where it changes nothing: the same node is tried again.
    """
    match goodbye.code:
        case Goodbye.UNAUTHENTICATED:
            return Ended.REFUSED
        case Goodbye.PROTOCOL_ERROR:
            return Ended.SCRATCH
        case Goodbye.REPLACED if goodbye.incarnation != own:
            return Ended.SCRATCH  # the token is another process's by now: resuming would take its place in turn
        case Goodbye.SHUTDOWN | Goodbye.DRAINED if elsewhere:
            return Ended.MOVED
        case _:
            return None
