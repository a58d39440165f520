"""Asking other nodes what each knows for itself: unary calls over one channel a node, kept from one to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from agentreach.aio.options import CLIENT_OPTIONS
from reach.adapters.told import told
from reach.core.ports import ASKED_ALONE, Identity, Introduce, NoAnswer, nothing_to_show

M = TypeVar("M", bound=Message)


class PeerQueries:
    """Calls to nodes by their addresses; implements `reach.node.everywhere.Peers`."""

    def __init__(self, introduce: Introduce = nothing_to_show) -> None:
        self._introduce = introduce
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(
        self, address: str, method: str, request: Message, reply_type: type[M], limit_s: float, who: Identity
    ) -> M:
        """What the node at `address` answers for itself alone.

        Raises `MeshFailure` for what it refused, `NoAnswer` if it said nothing within the limit.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
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

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the channels to all others: those nodes are gone."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close every channel."""
        await self.keep_only(())
