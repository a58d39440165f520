"""The mesh without `async`: for scripts, threads and notebooks.

    from agent_sdk.sync import connect

    with connect() as mesh:
        print(mesh.request({"text": "Ada met Alan"}, capabilities=["ner"], timeout=5).data)

Every call may be made from any thread. One event loop, in a thread of its own, serves all of a process's clients.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from agent_sdk import connecting
from agent_sdk.connecting import CONNECT_TIMEOUT_S, ConnectedMesh
from agent_sdk.messages import Acceptance, Event, PublishCounts, Reply
from agent_sdk.settings import Tls
from agent_sdk.streams import ReplyStream
from agent_sdk.topics import Subscription
from agentreach.aio.loop import new_event_loop
from agentreach.aio.transport import Transport

if TYPE_CHECKING:
    from typing import Unpack

    from agent_sdk.context import CallOptions

T = TypeVar("T")


class _LoopThread:
    """The event loop of the synchronous clients."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agent_sdk sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """End the thread; the process is leaving."""
        if self.pid == os.getpid() and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(2.0)


_lock = threading.Lock()
_thread: _LoopThread | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _thread
    with _lock:
        if _thread is None or _thread.pid != os.getpid():
            _thread = _LoopThread()
            atexit.register(_thread.stop)
        return _thread.loop


def _wait(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on the loop and wait here; Ctrl-C cancels it."""
    if _runs_here(loop):
        coroutine.close()
        raise RuntimeError("a synchronous call on the event loop that must serve it would wait for ever")
    future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        future.cancel()
        raise


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class Mesh:
    """The synchronous face of `agent_sdk.Mesh`. Close it, or use it as a context manager."""

    def __init__(self, mesh: ConnectedMesh, loop: asyncio.AbstractEventLoop) -> None:
        self._mesh = mesh
        self._loop = loop
        self._pid = os.getpid()

    def request(self, data: Any, **options: Unpack[CallOptions]) -> Reply:
        """Ask whoever matches the target, and wait for the answer: see `agent_sdk.Mesh.request`."""
        return self._do(self._mesh.request(data, **options))

    def stream(self, data: Any, **options: Unpack[CallOptions]) -> BlockingStream:
        """The same request, its reply item by item: a context manager and an iterator."""
        self._check()

        async def make() -> ReplyStream:
            return self._mesh.stream(data, **options)

        return BlockingStream(self._loop, make)

    def submit(self, data: Any, *, reply_topic: str, **options: Unpack[CallOptions]) -> Acceptance:
        """Hand a request over and go; its outcome is published on `reply_topic`: see `agent_sdk.Mesh.submit`."""
        return self._do(self._mesh.submit(data, reply_topic=reply_topic, **options))

    def cancel(self, message_id: str) -> None:
        """Withdraw a submitted request: see `agent_sdk.Mesh.cancel`."""
        self._do(self._mesh.cancel(message_id))

    def subscribe(self, topic: str) -> BlockingSubscription:
        """The events of a topic: a context manager and an iterator of `agent_sdk.Event`."""
        self._check()

        async def make() -> Subscription:
            return self._mesh.subscribe(topic)

        return BlockingSubscription(self._loop, make)

    def publish(self, topic: str | None, data: Any, **options: Any) -> PublishCounts:
        """Send an event: see `agent_sdk.Mesh.publish`."""
        return self._do(self._mesh.publish(topic, data, **options))

    def close(self) -> None:
        """Leave politely."""
        if self._pid == os.getpid():
            _wait(self._loop, self._mesh.close())

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this mesh client was made before the process forked; call connect() in the child")

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check()
        except RuntimeError:
            coroutine.close()
            raise
        return _wait(self._loop, coroutine)


class _Blocking:
    """An async context manager and iterator, driven from a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[], Awaitable[Any]]) -> None:
        self._loop = loop
        self._make = make
        self._inner: Any = None

    def _enter(self) -> None:
        async def enter() -> Any:
            inner = await self._make()
            await inner.__aenter__()
            return inner

        if self._inner is None:
            self._inner = _wait(self._loop, enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._inner is not None:
            _wait(self._loop, self._inner.aclose())

    def _next(self) -> Any:
        self._enter()
        try:
            return _wait(self._loop, self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class BlockingStream(_Blocking, Iterator[Any]):
    """The items of a streamed reply: see `agent_sdk.ReplyStream`."""

    def __enter__(self) -> BlockingStream:
        self._enter()
        return self

    def __next__(self) -> Any:
        return self._next()

    @property
    def trace_id(self) -> str:
        """Ask the mesh about this request with `reach trace`; empty before entry."""
        return str(self._inner.trace_id) if self._inner is not None else ""

    @property
    def source(self) -> str:
        """The agent_id of who answers; empty before the first item."""
        return str(self._inner.source) if self._inner is not None else ""

    @property
    def session_event(self) -> str | None:
        """None, or what happened to the session."""
        return self._inner.session_event if self._inner is not None else None


class BlockingSubscription(_Blocking, Iterator[Event]):
    """The events of a topic: see `agent_sdk.Subscription`."""

    def __enter__(self) -> BlockingSubscription:
        self._enter()
        return self

    def __next__(self) -> Event:
        event: Event = self._next()
        return event

    @property
    def dropped(self) -> int:
        """Events lost because they were not taken fast enough."""
        return int(self._inner.dropped) if self._inner is not None else 0


def connect(
    url: str | None = None,
    *,
    env: str = "",
    name: str = "",
    api_key: str | None = None,
    tls: Tls | None = None,
    timeout: float | None = CONNECT_TIMEOUT_S,
    own_link: bool = False,
    transport: Transport | None = None,
    signing_secret: str | None = None,
) -> Mesh:
    """Connect to the mesh: see `agent_sdk.connect`. Returns when a node has been reached, or raises `ConnectFailed`."""
    loop = _loop()

    async def reach() -> ConnectedMesh:
        return await connecting.connect(
            url,
            env=env,
            name=name,
            api_key=api_key,
            tls=tls,
            timeout=timeout,
            own_link=own_link,
            transport=transport,
            signing_secret=signing_secret,
        )

    return Mesh(_wait(loop, reach()), loop)
