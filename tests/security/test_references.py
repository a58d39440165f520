"""What a payload says of an address is a name for whoever reads it: neither node nor SDK dials or opens it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from agent_sdk import Agent, Blob, Context, Session, connect
from tests.support.node import config, running

FORMS = (
    "http://127.0.0.1:{port}/latest/meta-data", "https://localhost:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
    "http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://user@127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/",
    "127.0.0.1:{port}", "etcd://127.0.0.1:{port}", "file://{file}", "{file}", "../{file}",
)  # fmt: skip


async def test_nothing_connects_to_what_a_payload_names_and_nothing_opens_it(tmp_path: Path) -> None:
    """In a request, an answer, an event, a conversation's state, and in headers: each comes out as it went in."""
    dialled: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(writer.get_extra_info("peername"))
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port, file = listener.sockets[0].getsockname()[1], tmp_path / "not there"
    uris = [form.format(port=port, file=file) for form in FORMS]
    async with listener, running(config()) as node:
        agent, heard = Agent("mirror/one", url=node.grpc_address), asyncio.Queue[Any]()

        @agent.handler
        async def mirror(data: Any, ctx: Context) -> Any:
            if ctx.session_id:
                await ctx.session.checkpoint(data)
            return data

        @agent.on_session_release
        async def release(session: Session) -> Any:
            return Blob(uris[0], 1 << 30, b"s" * 32)

        @agent.on_session_restore
        async def restore(session: Session, state: Any) -> None: ...

        @agent.on_event("news")
        async def hear(data: Any) -> None:
            heard.put_nowait(data)

        async with agent, connect(node.grpc_address) as mesh:
            for number, uri in enumerate(uris):
                blob = Blob(uri, 1 << 30, b"s" * 32)
                for session in (None, f"s{number}"):
                    reply = await mesh.request(blob, agent_type="mirror", session=session, timeout=10)
                    assert reply.data == blob
                await mesh.publish("news", blob)
                assert await heard.get() == blob
    assert dialled == []
    assert os.listdir(tmp_path) == []
