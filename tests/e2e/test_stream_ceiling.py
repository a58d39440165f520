"""A12 through a proxy: no connection may carry more than a hundred streams, as deployed proxies have it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from agent_sdk import connect
from agentreach.aio.options import CLIENT_OPTIONS, SERVER_OPTIONS
from agentreach.v1 import envelope_pb2 as pb
from tests.support.agents import BUSY_S, make, name, usable
from tests.support.node import start_node
from tests.support.rawlink import request

STREAMS_MAX = 100


class _Relay(grpc.GenericRpcHandler):
    """Passes every call on as it is, messages unread."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        method = details.method

        async def relay(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            passed_on: Any = self._channel.stream_stream(method)
            call = passed_on(messages)
            await context.send_initial_metadata(await call.initial_metadata())
            try:
                async for message in call:
                    yield message
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)


@contextlib.asynccontextmanager
async def proxy(address: str) -> AsyncIterator[str]:
    """A proxy in front of a node that admits so many streams on one connection."""
    async with grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS]) as channel:
        server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.max_concurrent_streams", STREAMS_MAX)])
        server.add_generic_rpc_handlers((_Relay(channel),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def test_300_conversations_of_one_process_share_a_stream_and_hold_up_neither_health_nor_calls() -> None:
    async with start_node() as node, proxy(node.grpc) as address:
        agent = make(name("far"), address, own_link=True)
        async with agent, connect(address, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            asked = [
                asyncio.create_task(mesh.request({"n": n, "sleep": 3}, agent_id=agent.agent_id, timeout=60))
                for n in range(300)
            ]
            async with grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS]) as channel:
                waiting = request(target=pb.Target(agent_id=agent.agent_id), timeout_ms=60_000)
                waiting.payload.json.struct_value.update({"forever": True})
                stream: Any = channel.unary_stream("/agentreach.v1.MeshService/InvokeStream")
                calls = [stream(waiting.SerializeToString()) for _ in range(STREAMS_MAX)]
                one_too_many = stream(waiting.SerializeToString(), timeout=2)
                async with grpc.aio.insecure_channel(
                    address, options=[*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
                ) as another:
                    began = time.monotonic()
                    check: Any = another.unary_unary("/grpc.health.v1.Health/Check")
                    status = health_pb2.HealthCheckResponse.FromString(await check(b"", timeout=10)).status
                    assert status == health_pb2.HealthCheckResponse.SERVING
                    assert (await mesh.request("x", agent_id=agent.agent_id, timeout=10)).data == "x"
                    assert time.monotonic() - began < 1 + BUSY_S
                code = await one_too_many.code()
                assert code is grpc.StatusCode.DEADLINE_EXCEEDED, "told clearly, by its own deadline"
                for call in calls:
                    call.cancel()
            assert sorted(reply.data for reply in await asyncio.gather(*asked)) == list(range(300))
