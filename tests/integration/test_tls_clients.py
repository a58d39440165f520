"""What people and programs are told when TLS does not come about, by the SDK and by the command line's client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent_sdk import Agent, ConnectFailed, Tls, connect
from agent_sdk.testing import InProcessNode
from agentreach.aio.options import SERVER_OPTIONS
from agentreach.aio.tls import TlsFiles
from agentreach.aio.transport import Refused
from reach.adapters.admin_client import AdminClient, NodeUnreached
from reach.adapters.dev_certificates import Subject
from reach.adapters.grpc_server import services
from tests.support.certificates import Folder
from tests.support.node import config


@contextlib.asynccontextmanager
async def served(own: Tls | None, ca: str = "", port: int = 0) -> AsyncIterator[str]:
    """A node at an address: in the clear, with a certificate, and with one of its clients too if there is a `ca`."""
    node = InProcessNode(config())
    await node.start()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((services.mesh(node.engine), services.admin(node.engine)))
    if own is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        read = TlsFiles(ca, own.cert or "", own.key or "").read()
        credentials = grpc.ssl_server_credentials([(read.key, read.cert)], read.ca or None, bool(ca))
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await node.stop()


@dataclass(frozen=True, slots=True)
class Case:
    """A node, a client, and what the client is told."""

    node: str
    client: str
    told: str


CASES = (
    Case("tls", "clear", "the node speaks TLS and this connection does not"),
    Case("clear", "tls", "the node does not speak TLS and this connection does"),
    Case("tls", "other CA", "not signed by the CA that was given"),
    Case("tls", "system", "not signed by a CA that this machine knows"),
    Case("other name", "tls", "not made for 127.0.0.1"),
    Case("expired", "tls", "has expired"),
    Case("mtls", "no certificate", "may ask for a client's certificate, and none was given"),
    Case("mtls", "expired", "does not take this client's certificate"),
    Case("mtls", "stranger", "does not take this client's certificate"),
    Case("mtls", "server's", "does not take this client's certificate"),
    Case("mtls", "another's key", "the key does not belong to the certificate"),
)


def _node_of(folder: Folder, kind: str) -> tuple[Tls | None, str]:
    match kind:
        case "clear":
            return None, ""
        case "other name":
            issued = folder.authority.issue("other", Subject(("other.example",)), time.time(), 3600)
            return folder.put("other", issued), ""
        case "expired":
            return folder.node("expired", lasts_s=-1.0), ""
    return folder.node(), folder.ca if kind == "mtls" else ""


def _client_of(folder: Folder, stranger: Folder, kind: str) -> Tls | None:
    match kind:
        case "clear":
            return None
        case "other CA":
            return Tls(stranger.ca)
        case "system":
            return Tls("system")
        case "expired":
            return folder.client("late", lasts_s=-1.0)
        case "stranger":
            theirs = stranger.client("stranger")
            return Tls(folder.ca, theirs.cert, theirs.key)
        case "server's":
            return folder.node("server", server_only=True)
        case "another's key":
            return Tls(folder.ca, folder.client("one").cert, folder.client("another").key)
    return Tls(folder.ca)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.client} to {case.node}")
async def test_whoever_cannot_get_in_is_told_why_within_five_seconds(tmp_path: Path, case: Case) -> None:
    folder, stranger = Folder(tmp_path / "ours"), Folder(tmp_path / "theirs")
    own, ca = _node_of(folder, case.node)
    tls = _client_of(folder, stranger, case.client)
    async with served(own, ca) as url:
        began = time.monotonic()
        with pytest.raises(ConnectFailed, match=case.told):
            await connect(url, tls=tls, timeout=0.7, own_link=True)
        files = TlsFiles(tls.ca or "", tls.cert or "", tls.key or "") if tls else None
        async with AdminClient([url], tls=files) as client:
            with pytest.raises(NodeUnreached, match=case.told):
                await client.get_node()
        assert time.monotonic() - began < 5.0


async def test_renewed_certificates_of_both_ends_are_used_at_the_next_dial(tmp_path: Path) -> None:
    """Same paths, other authority: an agent that was started before comes back without a restart."""
    old, new = Folder(tmp_path / "old"), Folder(tmp_path / "new")
    before = old.client("agent")
    calm = Folder(tmp_path / "calm", old.authority)
    tls = calm.put("agent", old.authority.issue("agent", Subject(uris=("spiffe://test/agent",)), time.time(), 3600))
    assert before.ca
    agent = Agent("renewed", tls=tls, own_link=True)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(served(old.node(), old.ca))
        agent._url = url  # the port is known only now
        async with agent:
            issued = new.authority.issue("agent", Subject(uris=("spiffe://test/agent",)), time.time(), 3600)
            calm.put("agent", issued)
            calm.write("ca.pem", new.authority.pem.cert)
            await first.aclose()
            async with served(new.node(), new.ca, int(url.rpartition(":")[2])):
                caller = new.client("caller")
                async with connect(url, tls=caller, own_link=True, timeout=10) as mesh:
                    reply = await _answered(mesh)
    assert reply == "still here"


async def _answered(mesh: object) -> object:
    from agent_sdk import NoAgentAvailable, NoRoute

    async with asyncio.timeout(20):
        while True:
            try:
                reply = await mesh.request("still here", agent_type="renewed", timeout=5)  # type: ignore[attr-defined]
                return reply.data
            except (NoRoute, NoAgentAvailable):  # not there yet, or starting
                await asyncio.sleep(0.05)


async def test_a_file_that_is_not_readable_at_a_redial_is_a_failed_dial_and_not_the_end(tmp_path: Path) -> None:
    from agentreach.aio.grpc_transport import GrpcTransport

    folder = Folder(tmp_path / "ours")
    tls = folder.client("agent")
    assert tls.ca and tls.cert and tls.key
    transport = GrpcTransport(TlsFiles(tls.ca, tls.cert, tls.key).read)
    async with served(folder.node(), folder.ca) as url:
        await (await transport.open(url, ())).close()
        os.rename(tls.key, tmp_path / "away")
        with pytest.raises(Refused, match=r"agent-key\.pem") as refused:
            await transport.open(url, ())
        assert not refused.value.fatal
        os.rename(tmp_path / "away", tls.key)
        await (await transport.open(url, ())).close()
