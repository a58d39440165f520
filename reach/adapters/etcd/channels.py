"""The endpoints of an etcd cluster: one channel each, one of them current, the next one when it fails.

A channel per endpoint (and not `ipv4:a,b,c`) keeps DNS names and the verification of each host's certificate. All
calls and streams stay on the current endpoint until it fails; one that gave no answer in time may be frozen, and a
frozen process keeps its streams open in silence, so everything leaves it at once. One that failed is dialled with the
certificates that are in the files then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.aio.tls import Credentials, Tls, TlsFileError

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


class Dialler:
    """Makes channels: in the clear without `tls`, which is asked each time and may raise `TlsFileError`."""

    def __init__(self, tls: Callable[[], Tls] | None) -> None:
        self._credentials = Credentials(tls) if tls is not None else None
        self.tls: Tls | None = None
        """What was used last; None: in the clear."""
        self.current()

    def current(self) -> grpc.ChannelCredentials | None:
        """What the files say now; another object when that is something else. Raises `TlsFileError`."""
        if self._credentials is None:
            return None
        made, self.tls = self._credentials.current()
        return made

    def dial(self, name: str, made: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        """A channel by these."""
        if made is not None:
            return grpc.aio.secure_channel(name, made, options=OPTIONS)
        return grpc.aio.insecure_channel(name, options=OPTIONS)


class Endpoint:
    """One member and its channel, dialled at first use."""

    def __init__(self, name: str, dialler: Dialler) -> None:
        self.name = name
        self.streams: set[Moveable] = set()
        self._dialler = dialler
        self._channel: grpc.aio.Channel | None = None
        self._made = dialler.current()
        self._former: list[grpc.aio.Channel] = []

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to this member."""
        if self._channel is None:
            self._channel = self._dialler.dial(self.name, self._made)
        return self._channel

    def renew(self) -> None:
        """Dial anew at the next use if other certificates are in the files: gRPC takes them once for each channel.

        What cannot be read is half of a renewal, or a mistake: those of before stay.
        """
        try:
            now = self._dialler.current()
        except TlsFileError:
            return
        if now is self._made:
            return
        self._made = now
        if self._channel is not None:
            self._former.append(self._channel)
            self._channel = None

    async def close_former(self) -> None:
        """End channels by certificates of before, and all that runs on them."""
        while self._former:
            await self._former.pop().close(None)

    @property
    def connected(self) -> bool:
        """True if a request would go out at once."""
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """End the channel and all that runs on it."""
        await self.close_former()
        if self._channel is not None:
            await self._channel.close(None)


class Endpoints:
    """All members, tried in the order given. Raises `TlsFileError` if certificates cannot be read now."""

    def __init__(self, names: Sequence[str], tls: Callable[[], Tls] | None) -> None:
        if not names:
            raise ValueError("etcd needs at least one endpoint (host:port)")
        self._dialler = Dialler(tls)
        self._all = [Endpoint(name, self._dialler) for name in names]
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
    def tls(self) -> Tls | None:
        """By what it is dialled; None: in the clear."""
        return self._dialler.tls

    @property
    def names(self) -> str:
        """All members, for a message."""
        return ", ".join(endpoint.name for endpoint in self._all)

    def leave(self, endpoint: Endpoint, *, frozen: bool = False) -> None:
        """`endpoint` failed: go on with the next one, unless somebody already did. `frozen` takes its streams along."""
        endpoint.renew()
        if endpoint is self.current:
            self._current = (self._current + 1) % len(self._all)
        if frozen and endpoint is not self.current:
            for stream in list(endpoint.streams):
                stream.abandon()

    async def pause(self, failures: int, limit_s: float = _PAUSE_MAX_S) -> None:
        """Wait before the next attempt after so many failures in a row: not at all until each member had its turn.

        Ends early after `limit_s`, and when the endpoints are closed.
        """
        for endpoint in self._all:
            await endpoint.close_former()
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
