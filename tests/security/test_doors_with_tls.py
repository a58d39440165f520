"""The same doors where a node speaks TLS: strangers with a certificate, or with none, and no byte of a message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent_sdk import Tls
from agentreach.aio.options import CLIENT_OPTIONS
from reach.node.app import Node, running
from tests.security.raw import bearer, knock
from tests.support.api_keys import KeysFile
from tests.support.node import config
from tests.support.tls import Issuer, nobody

REFUSED_S = 1.0
METHODS = (
    "/agentreach.v1.MeshService/Invoke",
    "/agentreach.v1.MeshService/InvokeStream",
    "/agentreach.v1.MeshService/Connect",
    "/agentreach.v1.RegistryService/WatchAgents",
    "/agentreach.v1.AdminService/GetNode",
    "/agentreach.v1.PeerService/Link",
    "/agentreach.v1.AdminService/Nothing",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
CLOSED = {"health_access": "closed", "reflection_access": "closed"}


def channel_by(node: Node, tls: Tls) -> grpc.aio.Channel:
    """A channel that shows a certificate if there is one."""
    assert tls.ca
    pair = (Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()) if tls.key and tls.cert else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(tls.ca).read_bytes(), *pair)
    return grpc.aio.secure_channel(node.grpc_address, credentials, options=[*CLIENT_OPTIONS])


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    made = Issuer(tmp_path / "certs")
    made.put("nameless", nobody(made))
    for name in ("a", "root"):
        made.renew(name, made.authority)
    return made


class TestCertificates:
    @pytest.fixture
    async def node(self, issuer: Issuer) -> AsyncIterator[Node]:
        async with running(config(**issuer.settings(**CLOSED))) as node:
            yield node

    async def test_one_that_stands_for_nobody_is_refused_before_its_message_has_come(
        self, issuer: Issuer, node: Node
    ) -> None:
        async with channel_by(node, issuer.files("nameless")) as channel:
            for method in METHODS:
                for metadata in ((), bearer("wrong"), (("authorization", "Node n1 00"),)):
                    ended = await knock(channel, method, metadata)
                    assert ended.code == "UNAUTHENTICATED" and ended.after_s < REFUSED_S, (method, ended)

    async def test_one_without_the_right_is_refused_so_too_and_one_with_it_is_answered(
        self, issuer: Issuer, node: Node
    ) -> None:
        async with channel_by(node, issuer.files("a")) as channel:
            for method in ("/agentreach.v1.AdminService/GetNode", "/agentreach.v1.PeerService/Link", METHODS[-1]):
                ended = await knock(channel, method)
                assert ended.code == "PERMISSION_DENIED" and ended.after_s < REFUSED_S, (method, ended)
            assert (await knock(channel, "/grpc.health.v1.Health/Check", (), b"")).answered
            assert (await knock(channel, "/agentreach.v1.RegistryService/ListAgents", (), b"")).answered
            assert (await knock(channel, "/agentreach.v1.RegistryService/WatchAgents", (), b"")).answered
        async with channel_by(node, issuer.files("root")) as channel:
            assert (await knock(channel, "/agentreach.v1.AdminService/GetNode", (), b"")).answered
            listed = await knock(channel, METHODS[-1], (), b"\x3a\x00")
            assert listed.answered, listed
            nothing = await knock(channel, "/agentreach.v1.AdminService/Nothing", (), b"")
            assert nothing.code == "UNIMPLEMENTED"


async def test_who_shows_no_key_where_keys_are_asked_for_is_told_so_before_its_message_has_come(
    issuer: Issuer, tmp_path: Path
) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    key = keys.add("root", admin=True)
    settings = issuer.settings(auth="keys", keys_file=str(keys.path), **CLOSED)
    del settings["principals"]
    async with running(config(**settings)) as node:
        for name in ("", "nameless"):
            files = issuer.files(name) if name else Tls(issuer.ca)
            async with channel_by(node, files) as channel:
                for method in METHODS:
                    ended = await knock(channel, method)
                    assert ended.code == "UNAUTHENTICATED" and ended.after_s < REFUSED_S, (method, ended)
                    assert "API key" in ended.text
                assert (await knock(channel, "/agentreach.v1.AdminService/GetNode", bearer(key), b"")).answered
