"""Asking other nodes what each knows for itself: unary calls over one channel a node, kept from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.aio.tls import Credentials, Tls
from reach.adapters.told import told
from reach.core.ports import ASKED_ALONE, Identity, Introduce, NoAnswer, nothing_to_show

M = TypeVar("M", bound=Message)


class PeerQueries:
    """Calls to nodes by their addresses; implements `reach.node.everywhere.Peers`."""

    def __init__(self, introduce: Introduce = nothing_to_show, tls: Callable[[], Tls] | None = None) -> None:
        """`tls` is asked at each question: with other certificates nodes are dialled anew. None: in the clear."""
        self._introduce = introduce
        self._credentials = Credentials(tls) if tls is not None else None
        self._dialled_by: Tls | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(
        self, address: str, method: str, request: Message, reply_type: type[M], limit_s: float, who: Identity
    ) -> M:
        """What the node at `address` answers for itself alone.

        Raises `MeshFailure` for what it refused, `NoAnswer` if it said nothing within the limit.
        """
        channel = self._channel(address)
        call = channel.unary_unary(
            f"/agentreach.v1.AdminService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        try:
            return await call(request, timeout=limit_s, metadata=(ASKED_ALONE, *self._introduce(address, who)))
        except grpc.aio.AioRpcError as error:
            refused = told(error)
            if refused is not None:
                raise refused from error
            raise NoAnswer(f"{address}: {error.details()}") from error

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            if address not in self._channels:
                self._channels[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            return self._channels[address]
        credentials, tls = self._credentials.current()
        if tls != self._dialled_by:
            self._channels.clear()  # a channel ends with the last question that waits on it
            self._dialled_by = tls
        if address not in self._channels:
            self._channels[address] = grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS)
        return self._channels[address]

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the channels to all others: those nodes are gone."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close every channel."""
        await self.keep_only(())
