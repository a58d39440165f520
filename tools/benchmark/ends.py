"""The two ends of each system: what answers, and what asks. Runs in the workers, in processes of their own.

Each end is the plain way its library offers: nothing is tuned for one system that the others could have too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from .load import Call, Stream
from .rows import ITEMS

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
_CONNECTING_AT_ONCE = 32  # of the idle agents


@dataclass(frozen=True, slots=True)
class Asking:
    """The requester's means: to the one responder, to the crowd, and a streamed reply of the one."""

    call: Call
    call_crowd: Call
    stream: Stream


# ---- Agent-Reach, through the public SDK alone ----


async def reach_responder(url: str, count: int, stack: AsyncExitStack) -> list[str]:
    """`count` agents; more than one have a connection each."""
    from agent_sdk import Agent

    for number in range(count):
        name = f"crowd/agent-{number}" if count > 1 else "echo"
        agent = Agent(name, capabilities=["items"] if count == 1 else [], url=url, own_link=count > 1)

        async def echo(data: bytes) -> bytes:
            return data

        async def repeat(data: bytes) -> AsyncIterator[bytes]:
            for _ in range(ITEMS):
                yield data

        agent.handler(echo)
        if count == 1:
            agent.on("items")(repeat)
        await stack.enter_async_context(agent)
    return []


async def reach_requester(url: str, crowd: Sequence[str], stack: AsyncExitStack) -> Asking:
    """A `connect()` client."""
    from agent_sdk import connect

    mesh = await stack.enter_async_context(connect(url))
    request = mesh.request

    async def call(payload: bytes) -> Any:
        return (await request(payload, agent_type="echo", timeout=TIMEOUT_S)).data

    async def call_crowd(payload: bytes) -> Any:
        return (await request(payload, agent_type="crowd", timeout=TIMEOUT_S)).data

    async def stream(payload: bytes) -> AsyncIterator[Any]:
        async with mesh.stream(payload, capabilities=["items"], timeout=TIMEOUT_S) as items:
            async for item in items:
                yield item

    return Asking(call, call_crowd, stream)


async def reach_idle(urls: Sequence[str], first: int, count: int, stack: AsyncExitStack) -> None:
    """`count` agents that do nothing, each on its own connection; they take the lists of addresses in turn."""
    from agent_sdk import Agent

    async def echo(data: bytes) -> bytes:
        return data

    places = asyncio.Semaphore(_CONNECTING_AT_ONCE)

    async def attach(number: int) -> None:
        url = urls[number % len(urls)]
        agent = Agent(f"idle/agent-{number}", capabilities=["idle"], url=url, own_link=True)
        agent.handler(echo)
        async with places:
            await stack.enter_async_context(agent)

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            group.create_task(attach(number))


# ---- plain grpc.aio, called directly ----

_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


async def direct_responder(url: str, count: int, stack: AsyncExitStack) -> list[str]:
    """`count` servers, a port each; their addresses."""
    import grpc
    import grpc.aio

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def repeat(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(ITEMS):
            yield request

    addresses = []
    for _ in range(count):
        server = grpc.aio.server(options=_OPTIONS)
        methods: dict[str, Any] = {
            "Call": grpc.unary_unary_rpc_method_handler(echo),
            "Items": grpc.unary_stream_rpc_method_handler(repeat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", methods),))
        addresses.append(f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}")
        await server.start()
        stack.push_async_callback(server.stop, 0)
    return addresses


async def direct_requester(url: str, crowd: Sequence[str], stack: AsyncExitStack) -> Asking:
    """A channel to each server; the crowd is asked in turn."""
    import grpc.aio

    channels: list[Any] = []
    for address in (url, *crowd):
        channels.append(await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS)))
    unary, *others = [channel.unary_unary("/bench.Echo/Call") for channel in channels]
    items = channels[0].unary_stream("/bench.Echo/Items")
    turn = 0

    async def call(payload: bytes) -> Any:
        return await unary(payload, timeout=TIMEOUT_S)

    async def call_crowd(payload: bytes) -> Any:
        nonlocal turn
        turn = (turn + 1) % len(others)
        return await others[turn](payload, timeout=TIMEOUT_S)

    def stream(payload: bytes) -> AsyncIterator[Any]:
        return aiter(items(payload, timeout=TIMEOUT_S))

    return Asking(call, call_crowd, stream)


# ---- NATS core, at most once ----


async def nats_responder(url: str, count: int, stack: AsyncExitStack) -> list[str]:
    """`count` members of a queue group, a connection each."""
    import nats

    for _ in range(count):
        client = await nats.connect(url)
        stack.push_async_callback(client.close)

        async def echo(message: Any) -> None:
            await message.respond(message.data)

        async def repeat(message: Any, publish: Any = client.publish) -> None:
            for _ in range(ITEMS):
                await publish(message.reply, message.data)

        await client.subscribe("bench.crowd" if count > 1 else "bench.echo", queue="agents", cb=echo)
        if count == 1:
            await client.subscribe("bench.items", queue="agents", cb=repeat)
        await client.flush()
    return []


async def nats_requester(url: str, crowd: Sequence[str], stack: AsyncExitStack) -> Asking:
    """nats-py's request(); a streamed reply is a number of messages to one inbox."""
    import nats

    client = await nats.connect(url)
    stack.push_async_callback(client.close)

    async def call(payload: bytes) -> Any:
        return (await client.request("bench.echo", payload, timeout=TIMEOUT_S)).data

    async def call_crowd(payload: bytes) -> Any:
        return (await client.request("bench.crowd", payload, timeout=TIMEOUT_S)).data

    async def stream(payload: bytes) -> AsyncIterator[Any]:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, max_msgs=ITEMS)
        await client.publish("bench.items", payload, reply=inbox)
        for _ in range(ITEMS):
            yield (await subscription.next_msg(TIMEOUT_S)).data
        await subscription.unsubscribe()

    return Asking(call, call_crowd, stream)


RESPONDERS = {"reach": reach_responder, "direct": direct_responder, "nats": nats_responder}
REQUESTERS = {"reach": reach_requester, "direct": direct_requester, "nats": nats_requester}
