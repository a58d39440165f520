"""A streamed reply, as its consumer sees it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agent_sdk.calls import Calls
from agent_sdk.messages import session_event
from agent_sdk.pending import Call, StreamReader

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class ReplyStream:
    """The items of a reply while they are made. An async context manager and an iterator.

        async with mesh.stream("tell me", capabilities=["story"], timeout=60) as words:
            async for word in words:
                print(word)

    The request is sent on entry. Leaving early, or losing the last reference, cancels it down to the handler.
    Iterating raises the request's `ReachError` where the reply broke off; `details["items"]` says after how many.
    """

    def __init__(self, calls: Callable[[], Calls], start: Callable[[StreamReader], Awaitable[Call]]) -> None:
        self._calls = calls
        self._start = start
        self._reader = StreamReader()
        self._call: Call | None = None
        self._taken = 0
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> ReplyStream:
        if self._call is None:
            self._call = await self._start(self._reader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()

    async def aclose(self) -> None:
        """Cancel the request if its reply has not ended."""
        self._cancel()

    def _cancel(self) -> None:
        reader = self._reader
        if self._call is not None and not reader.ended:
            reader.ended = True
            self._calls().cancel(self._call)

    def __del__(self) -> None:
        call = self._call
        if call is not None and not self._reader.ended and not self._loop.is_closed():
            self._reader.ended = True
            self._loop.call_soon_threadsafe(self._calls().cancel, call)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> Any:
        """The next item. Cancelling the wait loses nothing."""
        if self._call is None:
            await self.__aenter__()
        reader = self._reader
        while not reader.items:
            if reader.ended:
                if reader.error is not None:
                    raise reader.error
                raise StopAsyncIteration
            reader.waiter = self._loop.create_future()
            try:
                await reader.waiter
            finally:
                reader.waiter = None
        item = reader.items.popleft()
        self._taken += 1
        if not reader.ended and self._call is not None:
            self._calls().grant(self._call, self._taken)
        return item

    @property
    def trace_id(self) -> str:
        """Ask the mesh about this request with `reach trace`; empty before entry."""
        return self._call.trace_id if self._call is not None else ""

    @property
    def message_id(self) -> str:
        """The message_id of the request; empty before entry."""
        return self._call.message_id if self._call is not None else ""

    @property
    def source(self) -> str:
        """The agent_id of who answers; empty before the first item."""
        return self._reader.last.source if self._reader.last is not None else ""

    @property
    def session_event(self) -> str | None:
        """None, or what happened to the session; known with the first item."""
        return session_event(self._reader.last) if self._reader.last is not None else None
