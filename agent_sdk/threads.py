"""Where `def` handlers run: each call, and each step of a generator, in a thread of the agent's pool."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_sdk.work import Work

_END = object()


async def in_pool(work: Work, data: Any) -> Any:
    """Run a `def` handler in the pool, with this task's context variables."""
    handler = work.handler
    arguments: tuple[Any, ...] = (data,)
    if handler.wants_context:
        from agent_sdk.context import BlockingContext

        arguments = (data, BlockingContext(work))
    return await _thread(work, handler.fn, *arguments)


async def _thread(work: Work, fn: Any, *arguments: Any) -> Any:
    context = contextvars.copy_context()

    def call() -> tuple[Any, BaseException | None]:
        try:
            return context.run(fn, *arguments), None
        except BaseException as error:  # a future does not carry StopIteration, and SystemExit would end the thread
            return None, error

    result, error = await asyncio.get_running_loop().run_in_executor(work.host.pool, call)
    if error is not None:
        raise error
    return result


def items_of(work: Work, data: Any) -> AsyncIterator[Any]:
    """The generator of a streaming handler, `def` ones included."""
    handler = work.handler
    if handler.sync:
        return _sync_items(work, data)
    if handler.wants_context:
        from agent_sdk.context import Context

        return handler.fn(data, Context(work))  # type: ignore[no-any-return]
    return handler.fn(data)  # type: ignore[no-any-return]


async def _sync_items(work: Work, data: Any) -> AsyncIterator[Any]:
    """The items of a `def` generator, each step in the pool."""
    generator = await in_pool(work, data)
    try:
        while not work.cancelled:
            item = await _thread(work, next, generator, _END)
            if item is _END:
                return
            yield item
        raise asyncio.CancelledError
    finally:
        generator.close()
