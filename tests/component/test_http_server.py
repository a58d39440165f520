"""The HTTP side over real sockets."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator

import aiohttp
import pytest

from reach.adapters.binding import PortTaken
from reach.adapters.http_server import HttpServer

REASON: list[str] = []


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    REASON.clear()
    running = HttpServer(
        listen="127.0.0.1:0",
        metrics=lambda: (b"reach_agents 1\n", "text/plain; version=0.0.4; charset=utf-8"),
        unready_reason=lambda: "".join(REASON),
    )
    await running.start()
    yield running
    await running.stop()


async def fetch(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.request(method, f"http://{server.address}{path}") as reply,
    ):
        return reply.status, reply.headers.get("Content-Type", ""), await reply.text()


async def test_metrics_are_served_with_their_content_type(server: HttpServer) -> None:
    status, content_type, text = await fetch(server, "/metrics")
    assert (status, text) == (200, "reach_agents 1\n")
    assert content_type.startswith("text/plain; version=0.0.4")


async def test_healthz_is_narrow_and_readyz_says_why_not(server: HttpServer) -> None:
    assert (await fetch(server, "/readyz"))[0] == 200
    REASON.append("draining")
    assert await fetch(server, "/readyz") == (503, "text/plain; charset=utf-8", "draining\n")
    assert (await fetch(server, "/healthz"))[0] == 200


async def test_head_works(server: HttpServer) -> None:
    for path in ("/metrics", "/healthz", "/readyz"):
        assert (await fetch(server, path, "HEAD"))[0] == 200


@pytest.mark.parametrize(("path", "method"), [("/", "GET"), ("/nope/x", "GET"), ("/other", "POST")])
async def test_anything_else_is_a_404_that_lists_what_there_is(server: HttpServer, path: str, method: str) -> None:
    status, _, text = await fetch(server, path, method)
    assert status == 404
    assert all(page in text for page in ("/metrics", "/healthz", "/readyz"))


async def test_a_taken_port_is_one_line(server: HttpServer) -> None:
    other = HttpServer(listen=server.address, metrics=lambda: (b"", "text/plain"), unready_reason=lambda: "")
    with pytest.raises(PortTaken) as caught:
        await other.start()
    assert server.address in str(caught.value) and "--http" in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_stops_leaves_no_socket_open() -> None:
    """A connection that had asked nothing, and one that was refused, were left to the garbage collector."""

    async def play() -> None:
        server = HttpServer(listen="127.0.0.1:0", metrics=lambda: (b"", ""), unready_reason=lambda: "", head_s=0.05)
        await server.start()
        host, _, port = server.address.rpartition(":")
        ends = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        ends[0][1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await ends[0][0].readline()
        assert b"408" in await ends[1][0].readline()
        ends.append(await asyncio.open_connection(host, int(port)))
        await server.stop()
        for _, writer in ends:
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(play())
        gc.collect()
    assert [str(each.message) for each in heard if "unclosed" in str(each.message)] == []
