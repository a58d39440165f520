"""The endpoints of an etcd cluster: one channel each, one of them current, the next one when it fails.

A channel per endpoint (and not `ipv4:a,b,c`) keeps DNS names and the verification of each host's certificate. All
calls and streams stay on the current endpoint until it fails; one that gave no answer in time may be frozen, and a
frozen process keeps its streams open in silence, so everything leaves it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from agentreach.aio.options import CLIENT_OPTIONS
from reach.adapters.etcd.address import EtcdTls, credentials

# One revoked lease with 20,000 keys is one watch response of 6 MB: no limit on what we receive from our own store.
# etcd ends a connection that pings while it carries no call (after three pings, "too_many_pings").
_OURS = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    "grpc.keepalive_permit_without_calls": 0,
}
OPTIONS = [(name, _OURS.get(name, value)) for name, value in CLIENT_OPTIONS]

_PAUSE_MIN_S = 0.05  # a restarting etcd is back within a second: look often at first
_PAUSE_MAX_S = 1.0  # gRPC itself redials once a second at most (its reconnect backoff)


class Moveable(Protocol):
    """A stream that can be told to leave its endpoint."""

    def abandon(self) -> None: ...


class Endpoint:
    """One member and its channel, dialled at first use."""

    def __init__(self, name: str, dial: Callable[[str], grpc.aio.Channel]) -> None:
        self.name = name
        self.streams: set[Moveable] = set()
        self._dial = dial
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to this member."""
        if self._channel is None:
            self._channel = self._dial(self.name)
        return self._channel

    @property
    def connected(self) -> bool:
        """True if a request would go out at once."""
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """End the channel and all that runs on it."""
        if self._channel is not None:
            await self._channel.close(None)


class Endpoints:
    """All members, tried in the order given."""

    def __init__(self, names: Sequence[str], tls: EtcdTls | None) -> None:
        if not names:
            raise ValueError("etcd needs at least one endpoint (host:port)")
        secure = credentials(tls) if tls is not None else None

        def dial(name: str) -> grpc.aio.Channel:
            if secure is not None:
                return grpc.aio.secure_channel(name, secure, options=OPTIONS)
            return grpc.aio.insecure_channel(name, options=OPTIONS)

        self._all = [Endpoint(name, dial) for name in names]
        self._current = 0
        self._closing = asyncio.Event()

    @property
    def current(self) -> Endpoint:
        """Where calls go now."""
        return self._all[self._current]

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closing.is_set()

    @property
    def names(self) -> str:
        """All members, for a message."""
        return ", ".join(endpoint.name for endpoint in self._all)

    def leave(self, endpoint: Endpoint, *, frozen: bool = False) -> None:
        """`endpoint` failed: go on with the next one, unless somebody already did. `frozen` takes its streams along."""
        if endpoint is self.current:
            self._current = (self._current + 1) % len(self._all)
        if frozen and endpoint is not self.current:
            for stream in list(endpoint.streams):
                stream.abandon()

    async def pause(self, failures: int, limit_s: float = _PAUSE_MAX_S) -> None:
        """Wait before the next attempt after so many failures in a row: not at all until each member had its turn.

        Ends early after `limit_s`, and when the endpoints are closed.
        """
        rounds = failures // len(self._all)
        if rounds == 0 or self.closed:
            return
        try:
            async with asyncio.timeout(min(limit_s, _PAUSE_MAX_S, _PAUSE_MIN_S * 2 ** min(rounds - 1, 8))):
                await self._closing.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """End all streams and channels."""
        self._closing.set()
        for endpoint in self._all:
            for stream in list(endpoint.streams):
                stream.abandon()
        for endpoint in self._all:
            await endpoint.close()
