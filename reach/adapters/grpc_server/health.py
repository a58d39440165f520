"""grpc.health.v1, overall and per service, whose watches end when the node stops.

The library's asyncio servicer leaves its watches open, so that one `grpcurl … Watch` holds up every graceful stop for
its whole grace, and it never ends those on unknown services; this one writes the final NOT_SERVING and returns.

Where health is closed, so that it is known who watches, a watch ends with the key that opened it, and tenants leave
each other room: one that has as many as are left gets no more, so there is always something left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2

from reach.adapters.grpc_server.calls import Handler
from reach.adapters.grpc_server.gating import identify, still_admitted
from reach.adapters.grpc_server.outcome import Context, end_with, parse
from reach.core.ports import Identity, MeshFailure

SERVICE = "grpc.health.v1.Health"
WATCHES_MAX = 2000  # each is an open stream that somebody else decides to hold; one tenant has half of them at most

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Status = int  # a number of HealthCheckResponse.ServingStatus


class Health:
    """The status of this node's services; they share one."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._serving = False
        self._closed = False
        self._waiters: dict[asyncio.Future[None], Callable[[], None]] = {}
        self._watches: Counter[str] = Counter()
        """By tenant; those of whom nobody knows who they are are one."""

    def set_serving(self, serving: bool) -> None:
        """Tell whether the node takes new work; every watch hears of a change. After `close` it stays False."""
        serving = serving and not self._closed
        if serving != self._serving:
            self._serving = serving
            self._tell()

    def close(self) -> None:
        """NOT_SERVING for good; every watch ends after saying so."""
        self._closed = True
        self._serving = False
        self._tell()

    def status(self, service: str) -> Status:
        """The status of a service, SERVICE_UNKNOWN if there is none of that name."""
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._serving else _NOT_SERVING

    def look_at_watchers(self) -> None:
        """Wake those that may watch no more."""
        for waiter, check in self._waiters.items():
            try:
                check()
            except MeshFailure:
                if not waiter.done():
                    waiter.set_result(None)

    def full_for(self, who: Identity) -> bool:
        """Whether there is no place for one more watch of this caller's."""
        left = WATCHES_MAX - self._watches.total()
        return left <= (self._watches[who.tenant] if who.rights is not None else 0)

    @contextlib.contextmanager
    def place(self, who: Identity) -> Iterator[None]:
        """Count a watch as long as the context is open."""
        tenant = who.tenant if who.rights is not None else ""
        self._watches[tenant] += 1
        try:
            yield
        finally:
            self._watches[tenant] -= 1
            if not self._watches[tenant]:
                del self._watches[tenant]

    async def watch(self, service: str, check: Callable[[], None] = lambda: None) -> AsyncIterator[Status]:
        """The status now and after each change, until `close`. Changes in quick succession may be seen as one.

        `check` raises `MeshFailure` once it may not be watched any more.
        """
        last: Status | None = None
        while True:
            check()
            status = self.status(service)
            if status != last:
                last = status
                yield status
                continue  # it may have changed while it was being written
            if self._closed:
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = check
            try:
                await waiter
            finally:
                del self._waiters[waiter]

    def _tell(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def handlers(health: Health, look: Callable[[], None]) -> dict[str, Handler]:
    """Check and Watch. `look` brings `health` up to date: who asks is told what holds now, as by the HTTP side."""

    async def check(data: bytes, context: Context) -> bytes:
        service = await _service_of(data, context)
        look()
        status = health.status(service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service named {service!r} here")
        return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    async def watch(data: bytes, context: Context) -> None:
        service = await _service_of(data, context)
        who = identify()
        if health.full_for(who):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no place left for another watch of yours")
        look()
        try:
            with health.place(who):
                async for status in health.watch(service, still_admitted()):
                    await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
        except MeshFailure as ended:
            await end_with(context, ended)

    return {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }


async def _service_of(data: bytes, context: Context) -> str:
    try:
        return parse(health_pb2.HealthCheckRequest, data).service
    except MeshFailure as failure:
        text = failure.error.message
    return await _refuse(context, text)


async def _refuse(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
