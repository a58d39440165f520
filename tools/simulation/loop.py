"""Event loops on virtual time: one for each simulated process, and the scheduler that runs them all on one thread.

Every process has a loop of its own, so `asyncio.get_running_loop()` inside the node or the SDK means that process, a
frozen process is a loop that is not run, and a killed one is a loop that is never run again: no `finally` of it gets
its chance, as after SIGKILL. Time passes only when no loop has anything to do.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, cast

TIMER_LEAST_S = (
    1e-5  # a timer is never sooner: here no time passes while it is read, so "just before" would be for ever
)
_TASKS_LOOK = 512  # new tasks after which the finished ones are let go


class _Handle:
    """A callback that waits, as `asyncio.Handle`, and half as dear."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop", "_when")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._when = when

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        self._cancelled = True
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        """See `asyncio.Handle`."""
        return self._cancelled

    def when(self) -> float:
        """See `asyncio.TimerHandle`."""
        return self._when

    def run(self) -> None:
        """Call it; what it raises is a fault of its process."""
        assert self._callback is not None
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler({"message": f"callback {self._callback!r}", "exception": error})


class _Door(asyncio.Transport):
    """A connection that was opened to see whether it can be."""

    def close(self) -> None:
        """See `asyncio.Transport`."""

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return True


class VirtualLoop(asyncio.AbstractEventLoop):
    """What asyncio needs of a loop, for one process. IO there is none: the network is simulated."""

    def __init__(self, scheduler: Scheduler, name: str, process: object) -> None:
        self.scheduler = scheduler
        self.name = name
        self.process = process
        self.frozen = False
        self.dead = False
        self.asleep_s = 0.0
        """For how long the machine was suspended: timers do not count that time, the boot clock does."""
        self.boot_base_s = 0.0
        """Added to the true time: the boot clock of this process. Clocks need not agree."""
        self.faults: list[str] = []
        """What nobody caught: a callback or a task that ended with an exception."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.knock: Callable[[str], Coroutine[Any, Any, None]]
        """Tries whether somebody listens at an address."""
        self._ready: deque[_Handle] = deque()
        self._closed = False

    # ---- what asyncio asks ----

    def time(self) -> float:
        """The monotonic clock of this process."""
        return self.scheduler.now - self.asleep_s

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """True while it may run at all."""
        return not self.dead

    def is_closed(self) -> bool:
        """True after the world's end: nothing is called any more."""
        return self._closed

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run it in this loop's next turn."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        self.scheduler.has_work(self)
        return cast("asyncio.Handle", handle)

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run it `delay` seconds of this process's monotonic clock from now."""
        return self.call_at(self.scheduler.now - self.asleep_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run it at a time of this process's monotonic clock."""
        handle = _Handle(callback, args, self, context, when)
        self.scheduler.push_timer(max(when + self.asleep_s, self.scheduler.now + TIMER_LEAST_S), handle, self)
        return cast("asyncio.TimerHandle", handle)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """A task of this process."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        if len(self.tasks) % _TASKS_LOOK == 0:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Something inside failed and nobody caught it."""
        if not self._closed:
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def create_connection(self, factory: Callable[[], Any], host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        """Only whether somebody answers: nothing is sent over such a connection. Raises `ConnectionRefusedError`."""
        await self.knock(f"{host}:{port}")
        return _Door(), factory()

    # ---- what the scheduler does ----

    @property
    def runnable(self) -> bool:
        """True when a turn would do something."""
        return bool(self._ready) and not self.frozen and not self.dead

    def due(self, handle: _Handle) -> None:
        """A timer's time has come; a frozen process will see that when it goes on."""
        self._ready.append(handle)

    def turn(self) -> None:
        """Run everything that is ready now; what that makes ready has its turn later."""
        ready = self._ready
        events._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle.run()
        finally:
            events._set_running_loop(None)

    def run_inside(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Start a task from outside. How it ends is looked at: an exception is a fault."""
        task = self.create_task(coroutine, name=name)
        task.add_done_callback(self._task_over)
        return task

    def _task_over(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.faults.append(f"task {task.get_name()}: {task.exception()!r}")

    def end(self) -> None:
        """The world ends: cancel every task; a killed or frozen process is run once more for that."""
        self.dead = self.frozen = False
        for task in self.tasks:
            task.cancel()
        self.scheduler.has_work(self)

    def close(self) -> None:
        """Nothing is called any more."""
        self._closed = self.dead = True
        self._ready.clear()
        self.tasks.clear()


class Scheduler:
    """Virtual time and all loops. `now` is the true time in seconds; processes see it through clocks of their own."""

    def __init__(self, rng: Random) -> None:
        self.now = 0.0
        self.turns = 0
        self.current: VirtualLoop | None = None
        """Whose turn it is."""
        self.after_turn: Callable[[VirtualLoop], None] | None = None
        self._rng = rng
        self._timers: list[tuple[float, int, float, VirtualLoop | None, Any]] = []
        self._count = 0
        self._working: dict[VirtualLoop, None] = {}

    def has_work(self, loop: VirtualLoop) -> None:
        """A loop has something ready."""
        if not loop.frozen:
            self._working[loop] = None

    def push_timer(self, when: float, handle: _Handle, loop: VirtualLoop) -> None:
        """Something of a process is due at a true time, if its machine is not suspended meanwhile."""
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, loop.asleep_s, loop, handle))

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        """Something of the world (network, fault) happens at a true time."""
        self._count += 1
        heapq.heappush(self._timers, (max(when, self.now), self._count, 0.0, None, (act, args)))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """The same, so long from now."""
        self.at(self.now + seconds, act, *args)

    def run(self, until: float) -> None:
        """Let the world go on to a true time."""
        working, timers = self._working, self._timers
        while True:
            while working:
                self._one_turn()
            if not timers or timers[0][0] > until:
                break
            when, _, asleep_s, loop, what = heapq.heappop(timers)
            self.now = max(self.now, when)
            if loop is None:
                act, args = what
                act(*args)
            elif what._cancelled or loop.dead:
                continue
            elif loop.asleep_s > asleep_s:
                self._count += 1
                heapq.heappush(timers, (when + loop.asleep_s - asleep_s, self._count, loop.asleep_s, loop, what))
            else:
                loop.due(what)
                self.has_work(loop)
        self.now = until

    def _one_turn(self) -> None:
        """Let one loop that has work do it; which one is drawn, so that seeds differ in who comes first."""
        working = self._working
        if len(working) == 1:
            loop = next(iter(working))
        else:
            loop = list(working)[self._rng.randrange(len(working))]
        del working[loop]
        if not loop.runnable:
            return
        self.turns += 1
        self.current = loop
        loop.turn()
        if self.after_turn is not None:
            self.after_turn(loop)
        self.current = None
        if loop.runnable:
            working[loop] = None
