"""What a link needs of whatever carries it: a stream of byte messages in both directions.

Two implementations: `agentreach.aio.grpc_transport`, and the in-process one of `agent_sdk.testing`. The rules that
grpc.aio forces on us (house.md, traps 1, 2, 4) are rules of this shape: one reader, one writer, no limit around a
`read` or `write` — who must not wait longer calls `cancel`, which ends the whole stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Refused(Exception):
    """A stream that was not admitted: nobody listens there, or the node said no at the door.

    `fatal` is True where trying again cannot help (bad credentials).
    """

    def __init__(self, code: str, details: str, fatal: bool) -> None:
        details = details.removeprefix(f"{code}: ")  # nodes put it before what they say, for those who read no status
        super().__init__(f"{code}: {details}" if details else code)
        self.code = code
        self.details = details
        self.fatal = fatal


class StreamBroken(Exception):
    """The stream ended while something was being written to it."""


class Stream(Protocol):
    """One admitted stream. Only one task may read it and only one may write it."""

    async def write(self, data: bytes) -> None:
        """Give one message to the transport. Raises `StreamBroken` when the stream has ended."""
        ...

    async def read(self) -> bytes | None:
        """The peer's next message; None when there will be no more, for whatever reason (see `why_ended`)."""
        ...

    async def half_close(self) -> None:
        """Say that nothing more will be written. Never raises."""
        ...

    def cancel(self) -> None:
        """End the stream at once, both ways: a pending `read` gives None, a pending `write` raises."""
        ...

    async def close(self) -> None:
        """Give everything back. Ends the stream if it still runs."""
        ...

    @property
    def why_ended(self) -> str:
        """What the transport knows of the end; empty after an orderly one."""
        ...


class Transport(Protocol):
    """Opens streams to nodes."""

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> Stream:
        """Open a stream and wait until it is admitted. Raises `Refused`. Cancelling it leaves nothing open."""
        ...
