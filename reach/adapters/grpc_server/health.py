"""grpc.health.v1, overall and per service, whose watches end when the node stops.

The library's asyncio servicer leaves its watches open, so that one `grpcurl … Watch` holds up every graceful stop for
its whole grace, and it never ends those on unknown services; this one writes the final NOT_SERVING and returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2

from reach.adapters.grpc_server.calls import Handler
from reach.adapters.grpc_server.outcome import Context, parse
from reach.core.ports import MeshFailure

SERVICE = "grpc.health.v1.Health"
WATCHES_MAX = 1000  # each is an open stream that somebody else decides to hold

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
        self._waiters: set[asyncio.Future[None]] = set()
        self.watches = 0

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

    async def watch(self, service: str) -> AsyncIterator[Status]:
        """The status now and after each change, until `close`. Changes in quick succession may be seen as one."""
        last: Status | None = None
        while True:
            status = self.status(service)
            if status != last:
                last = status
                yield status
                continue  # it may have changed while it was being written
            if self._closed:
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

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
        if health.watches >= WATCHES_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHES_MAX} watches are open already")
        health.watches += 1
        look()
        try:
            async for status in health.watch(service):
                await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
        finally:
            health.watches -= 1

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
