"""The SDK's gRPC transport over TLS, against a real server: who is trusted, and who is let in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme

from agent_sdk import Agent, ConnectFailed, connect
from agent_sdk.settings import Tls
from agent_sdk.testing import InProcessNode
from agentreach.aio.options import SERVER_OPTIONS
from reach.adapters.grpc_server import services
from tests.support.node import config


class Certificates:
    """A certificate authority, and files of a caller that it knows."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.node = self.ca.issue_cert("127.0.0.1", "localhost")
        caller = self.ca.issue_cert("caller.example")
        folder.mkdir()
        self.files = Tls(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
        assert self.files.ca and self.files.cert and self.files.key
        self.ca.cert_pem.write_to_path(self.files.ca)
        Path(self.files.cert).write_bytes(b"".join(pem.bytes() for pem in caller.cert_chain_pems))
        caller.private_key_pem.write_to_path(self.files.key)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "known")


@pytest.fixture
async def url(certificates: Certificates) -> AsyncIterator[str]:
    """A node behind TLS that asks its peers for a certificate."""
    node = InProcessNode(config())
    await node.start()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((services.mesh(node.engine),))
    chain = b"".join(pem.bytes() for pem in certificates.node.cert_chain_pems)
    credentials = grpc.ssl_server_credentials(
        [(certificates.node.private_key_pem.bytes(), chain)], certificates.ca.cert_pem.bytes(), True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await node.stop()


async def test_an_agent_and_a_caller_with_certificates_reach_each_other(url: str, certificates: Certificates) -> None:
    agent = Agent("secret", url=url, tls=certificates.files)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    async with agent, connect(url, tls=certificates.files, own_link=True) as mesh:
        data = b"x" * 300_000
        assert (await mesh.request(data, agent_type="secret", timeout=10)).data == data


@pytest.mark.parametrize("who", ["nobody", "without a certificate", "certified by a stranger", "in the clear"])
async def test_others_are_not_let_in(url: str, certificates: Certificates, tmp_path: Path, who: str) -> None:
    tls = {
        "nobody": Tls(),
        "without a certificate": Tls(ca=certificates.files.ca),
        "certified by a stranger": Certificates(tmp_path / "stranger").files,
        "in the clear": None,
    }[who]
    with pytest.raises(ConnectFailed, match=url):
        await connect(url, tls=tls, timeout=1.0, own_link=True)


async def test_a_node_that_the_caller_does_not_trust_is_not_talked_to(
    url: str, certificates: Certificates, tmp_path: Path
) -> None:
    stranger = Certificates(tmp_path / "stranger").files
    with pytest.raises(ConnectFailed):
        await connect(
            url, tls=Tls(stranger.ca, certificates.files.cert, certificates.files.key), timeout=1.0, own_link=True
        )


async def test_files_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectFailed, match=r"missing\.pem"):
        await connect("127.0.0.1:1", tls=Tls(ca=str(tmp_path / "missing.pem")))
