"""A node that speaks TLS: which versions, whom it lets in and as whom, and certificates that change while it runs.

Clients in this file are as they come: the SDK, the command line's client, raw sockets, raw gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from agent_sdk import (
    Agent,
    ConnectFailed,
    NoAgentAvailable,
    NoRoute,
    PermissionDenied,
    Timeout,
    Tls,
    Unauthenticated,
    connect,
)
from agent_sdk import sync as sdk_sync
from agentreach.v1 import registry_pb2
from reach.adapters.admin_client import AdminClient, NodeUnreached
from reach.adapters.dev_certificates import Authority
from reach.core.agents import HEALTHY
from reach.core.ports import MeshFailure
from reach.node import encryption
from reach.node.app import Node, running
from tests.support.certificates import Folder
from tests.support.node import config
from tests.support.tls import PRINCIPALS, Issuer, files_of, nobody
from tools.faultproxy import FaultProxy

ENDED_S = 5.0  # a certificate's end reaches an open stream within so long


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "certs")


@pytest.fixture
async def node(issuer: Issuer) -> AsyncIterator[Node]:
    async with running(config(**issuer.settings())) as node:
        yield node


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the node logs, a line each."""
    lines: list[str] = []

    def keep(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        lines.append(str(event))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    yield lines
    structlog.configure(**before)


def echoing(kind: str, url: str, tls: Tls) -> Agent:
    agent = Agent(kind, url=url, tls=tls, own_link=True)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    return agent


# ---- what is spoken ----


def handshake(address: str, version: ssl.TLSVersion, tls: Tls) -> str:
    """The TLS version that comes about with a client that speaks this one only; empty: none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(str(tls.cert), str(tls.key))
    context.check_hostname = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of old versions: that is what is tried here
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 5) as raw, context.wrap_socket(raw) as wrapped:
            return wrapped.version() or ""
    except OSError:
        return ""


async def test_nothing_older_than_tls_1_2_is_spoken(node: Node, issuer: Issuer) -> None:
    tls = issuer.client("a")
    spoken = {
        version.name: await asyncio.to_thread(handshake, node.grpc_address, version, tls)
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    }
    assert spoken == {"TLSv1": "", "TLSv1_1": "", "TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}


async def test_without_mtls_no_certificate_is_asked_for(issuer: Issuer) -> None:
    settings = {"tls_cert": str(issuer.path / "node.pem"), "tls_key": str(issuer.path / "node-key.pem")}
    async with (
        running(config(**settings)) as node,
        AdminClient([node.grpc_address], tls=files_of(Tls(issuer.ca))) as client,
    ):
        assert (await client.get_node()).node.node_id


# ---- who gets in, and as whom ----


async def test_everybody_is_who_the_certificate_says(node: Node, issuer: Issuer) -> None:
    url = node.grpc_address
    async with echoing("a", url, issuer.client("a")):
        async with connect(url, tls=issuer.client("b"), own_link=True) as mesh:
            assert (await mesh.request("hi", agent_type="a", timeout=5)).data == "hi"
        async with AdminClient([url], tls=files_of(issuer.client("b"))) as client:
            agents = await client.list_agents(registry_pb2.ListAgentsRequest())
            assert [each.agent_type for each in agents] == ["a"]
            with pytest.raises(MeshFailure, match="no admin"):
                await client.list_nodes()
        async with AdminClient([url], tls=files_of(issuer.client("root"))) as client:
            assert len((await client.list_nodes()).nodes) == 1


async def test_the_variables_of_the_environment_do_as_well(
    node: Node, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = issuer.client("a")
    for name, value in (("CA", tls.ca), ("CERT", tls.cert), ("KEY", tls.key)):
        monkeypatch.setenv(f"REACH_CLIENT_TLS_{name}", str(value))
    monkeypatch.setenv("REACH_URL", node.grpc_address)

    def ask() -> object:
        with sdk_sync.connect(own_link=True) as mesh:
            return mesh.request("hi", agent_type="a", timeout=5).data

    agent = Agent("a", own_link=True)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    async with agent:
        assert await asyncio.to_thread(ask) == "hi"


async def test_a_may_not_register_as_b(node: Node, issuer: Issuer) -> None:
    """O4: the right authority is not enough."""
    with pytest.raises(PermissionDenied, match="a may not register agents of type b"):
        async with echoing("b", node.grpc_address, issuer.client("a")):
            pytest.fail("it was let in")


@pytest.mark.parametrize("who", ["unmapped", "nameless", "node"])
async def test_a_certificate_that_stands_for_nobody_is_refused_at_once(
    node: Node, issuer: Issuer, told: list[str], who: str
) -> None:
    match who:
        case "unmapped":
            tls = issuer.client("stranger")
        case "nameless":
            tls = issuer.put("nameless", nobody(issuer))
        case _:
            tls = issuer.node("other", uri="spiffe://test/node")
    url = node.grpc_address
    with pytest.raises(Unauthenticated, match="stands for no principal") as refused:
        await connect(url, tls=tls, own_link=True)
    assert "spiffe" not in str(refused.value), "who may come in is nobody's business"
    async with AdminClient([url], tls=files_of(tls)) as client:
        with pytest.raises(MeshFailure, match="stands for no principal"):
            await client.get_node()
    named = {"unmapped": "spiffe://test/stranger", "nameless": "none", "node": "spiffe://test/node, localhost"}[who]
    assert any("no entry of principals" in line and named in line for line in told)


@pytest.mark.parametrize("who", ["no certificate", "other CA", "expired", "a server's"])
async def test_who_does_not_get_through_the_handshake_makes_no_call(
    node: Node, issuer: Issuer, tmp_path: Path, who: str
) -> None:
    match who:
        case "no certificate":
            tls = Tls(issuer.ca)
        case "other CA":
            theirs = Folder(tmp_path / "theirs").client("a")
            tls = Tls(issuer.ca, theirs.cert, theirs.key)
        case "expired":
            tls = issuer.client("a", lasts_s=-1)
        case _:
            tls = issuer.node("server", uri="spiffe://test/a", server_only=True)
    with pytest.raises(ConnectFailed, match="ended the TLS handshake"):
        await connect(node.grpc_address, tls=tls, own_link=True, timeout=0.5)
    async with AdminClient([node.grpc_address], tls=files_of(tls)) as client:
        with pytest.raises(NodeUnreached, match="ended the TLS handshake"):
            await client.get_node()


async def test_a_key_shown_beside_a_strange_certificate_opens_nothing(node: Node, issuer: Issuer) -> None:
    tls = files_of(issuer.client("stranger"))
    async with AdminClient([node.grpc_address], tls=tls, api_key="anything") as client:
        with pytest.raises(MeshFailure, match="stands for no principal"):
            await client.get_node()


async def test_a_one_shot_refusal_of_a_silent_stream_comes_at_once(node: Node, issuer: Issuer) -> None:
    tls = files_of(issuer.client("stranger"))
    assert tls is not None
    read = tls.read()
    credentials = grpc.ssl_channel_credentials(read.ca, read.key, read.cert)
    async with grpc.aio.secure_channel(node.grpc_address, credentials) as channel:
        call = channel.stream_stream("/agentreach.v1.MeshService/Connect")()
        async with asyncio.timeout(1.0):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- certificates end ----


async def test_an_expired_certificate_ends_its_open_streams(node: Node, issuer: Issuer, told: list[str]) -> None:
    url = node.grpc_address
    async with contextlib.AsyncExitStack() as stack:
        ends = await stack.enter_async_context(connect(url, tls=issuer.client("a", lasts_s=3.0), own_link=True))
        stays = await stack.enter_async_context(connect(url, tls=issuer.client("b"), own_link=True))
        links = node.engine.state.peers.values()
        assert sum(link.connected for link in links) == 2
        await _eventually(lambda: any("it has expired" in line for line in told), 3.0 + ENDED_S)
        await _eventually(lambda: [link.who.principal for link in links if link.connected] == ["b"])
        with pytest.raises((ConnectFailed, Timeout)):
            await ends.request("hi", agent_type="a", timeout=1.0)
        with pytest.raises(NoRoute):
            await stays.request("hi", agent_type="a", timeout=1.0)


async def test_whoever_renews_in_time_goes_on_when_the_former_certificate_ends(node: Node, issuer: Issuer) -> None:
    """Its stream ends with the certificate that it was opened with, and its link goes on."""
    url = node.grpc_address
    async with (
        echoing("a", url, issuer.client("a", lasts_s=3.0)),
        connect(url, tls=issuer.client("b"), own_link=True) as mesh,
    ):
        issuer.client("a")
        stats = node.engine.state.stats
        await _eventually(lambda: stats.link_resumes == 1, 3.0 + ENDED_S)
        assert (await mesh.request("hi", agent_type="a", timeout=5)).data == "hi"


async def test_when_an_authority_is_trusted_no_more_its_peers_are_out_and_others_stay(
    node: Node, issuer: Issuer, told: list[str]
) -> None:
    url, old, new = node.grpc_address, issuer.authority, Authority.made("new CA", 0, 4e9)
    apart = Issuer(issuer.path / "new", new)
    apart.trust(old, new)
    issuer.trust(old, new)
    await _eventually(lambda: any("other authorities" in line for line in told))
    async with contextlib.AsyncExitStack() as stack:
        stays = await stack.enter_async_context(connect(url, tls=apart_files(apart, "b"), own_link=True))
        goes = await stack.enter_async_context(connect(url, tls=issuer.client("a"), own_link=True))
        async with AdminClient([url], tls=files_of(issuer.client("root"))) as client:
            await client.get_node()
            issuer.trust(new)
            await _eventually(lambda: any("a certificate has ended" in line for line in told))
            with pytest.raises(MeshFailure, match="stands for no principal"):  # its connection stands still
                await client.get_node()
        with pytest.raises((ConnectFailed, Timeout)):
            await goes.request("hi", agent_type="a", timeout=1.0)
        async with echoing("a", url, apart_files(apart, "a")):
            assert (await stays.request("hi", agent_type="a", timeout=5)).data == "hi"
        with pytest.raises(ConnectFailed, match="ended the TLS handshake"):
            old_one = issuer.files("root")
            await connect(url, tls=Tls(apart.ca, old_one.cert, old_one.key), own_link=True, timeout=0.5)


def apart_files(apart: Issuer, name: str) -> Tls:
    """Of a client that the new authority vouches for, and that trusts the old node as well."""
    made = apart.client(name)
    return Tls(apart.ca, made.cert, made.key)


async def _eventually(true: Callable[[], bool], limit_s: float = ENDED_S) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what becomes true elsewhere has no event
            await asyncio.sleep(0.02)


# ---- entries change ----


async def test_who_is_taken_out_of_the_configuration_is_out_and_others_stay(issuer: Issuer, tmp_path: Path) -> None:
    file = Entries(tmp_path / "reach.toml")
    ended = asyncio.Event()
    async with running(config(**issuer.settings()), file.path) as node, contextlib.AsyncExitStack() as stack:
        url = node.grpc_address
        slow = Agent("b", url=url, tls=issuer.client("b"), own_link=True)

        @slow.handler
        async def work(data: object) -> object:
            if data == "long":
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
            return data

        await stack.enter_async_context(slow)
        goes = await stack.enter_async_context(connect(url, tls=issuer.client("a"), own_link=True))
        stays = await stack.enter_async_context(
            connect(url, tls=issuer.client("team-x", "spiffe://test/team/x"), own_link=True)
        )
        under_way = asyncio.create_task(goes.request("long", agent_type="b", timeout=60))
        await _eventually(lambda: node.engine.state.unsettled == 1)
        links = {peer.link_id for peer in node.engine.state.peers.values() if peer.who.principal != "a"}
        file.put({name: entry for name, entry in PRINCIPALS.items() if name != "spiffe://test/a"})
        async with asyncio.timeout(ENDED_S):
            await ended.wait()
            with pytest.raises(Unauthenticated):
                await under_way
        with pytest.raises((Unauthenticated, ConnectFailed, Timeout)):
            await goes.request("hi", agent_type="b", timeout=1.0)
        assert (await stays.request("hi", agent_type="b", timeout=5)).data == "hi"
        assert {peer.link_id for peer in node.engine.state.peers.values()} == links, "nobody else had to come anew"
        file.put(PRINCIPALS)
        await _eventually(lambda: node.engine.state.principals.get(("default", "a")) is not None)
        async with connect(url, tls=issuer.client("a"), own_link=True) as again:
            assert (await again.request("hi", agent_type="b", timeout=5)).data == "hi"


async def test_who_may_less_by_the_configuration_comes_back_with_what_is_left(issuer: Issuer, tmp_path: Path) -> None:
    file = Entries(tmp_path / "reach.toml")
    async with running(config(**issuer.settings()), file.path) as node, contextlib.AsyncExitStack() as stack:
        url = node.grpc_address
        await stack.enter_async_context(echoing("b", url, issuer.client("b")))
        await stack.enter_async_context(echoing("a", url, issuer.client("a")))
        mesh = await stack.enter_async_context(connect(url, tls=issuer.client("b"), own_link=True))
        assert (await mesh.request("hi", agent_type="a", timeout=5)).data == "hi"
        admin = await stack.enter_async_context(AdminClient([url], tls=files_of(issuer.client("root"))))
        await admin.get_node()
        less = {"spiffe://test/b": {"principal": "b", "may_register": ["b"], "may_call": ["b"]},
                "spiffe://test/root": {"principal": "root"}}  # fmt: skip
        links = {peer.link_id for peer in node.engine.state.peers.values() if peer.who.principal == "b"}
        file.put(PRINCIPALS | less)
        peers = node.engine.state.peers
        await _eventually(lambda: links.isdisjoint(peers) and len(peers) == 3 and "b" in at_work(node))
        assert (await mesh.request("hi", agent_type="b", timeout=5)).data == "hi", "the agent and the caller are back"
        with pytest.raises(PermissionDenied):
            await mesh.request("hi", agent_type="a", timeout=5)
        with pytest.raises(MeshFailure, match="no admin"):  # its connection stands still
            await admin.get_node()
        file.put(PRINCIPALS | less | {"spiffe://test/b": {"principal": "b", "may_call": ["*"]}})
        await _eventually(lambda: at_work(node) == {"a"})


async def test_what_cannot_be_used_leaves_the_former_entries_in_place(
    issuer: Issuer, tmp_path: Path, told: list[str]
) -> None:
    file = Entries(tmp_path / "reach.toml")
    async with (
        running(config(**issuer.settings()), file.path) as node,
        connect(node.grpc_address, tls=issuer.client("b"), own_link=True) as mesh,
    ):
        file.put({})
        await _eventually(lambda: any("principals are not exchanged" in line for line in told))
        assert node.encryption is not None and node.encryption.reloads_failed == 1
        with pytest.raises(NoRoute):
            await mesh.request("hi", agent_type="a", timeout=5)


def at_work(node: Node) -> set[str]:
    """The types of the agents that can be given work."""
    agents = node.engine.state.directory.agents_in("default", "production")
    return {agent.agent_type for agent in agents if agent.status == HEALTHY}


class Entries:
    """A configuration file with the table `principals`, to be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.put(PRINCIPALS)

    def put(self, table: Mapping[str, Mapping[str, Any]]) -> None:
        lines: list[str] = []
        for name, entry in table.items():
            # What JSON writes of texts, lists of them and switches is TOML.
            lines += [
                f"[principals.{json.dumps(name)}]",
                *(f"{key} = {json.dumps(each)}" for key, each in entry.items()),
            ]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.replace(self.path)


# ---- certificates change ----


async def test_what_cannot_be_used_leaves_the_former_certificate_in_place(
    node: Node, issuer: Issuer, told: list[str]
) -> None:
    good = (issuer.path / "node.pem").read_bytes()
    issuer.write("node.pem", b"-----BEGIN rubbish-----\n")
    await _eventually(lambda: any("not exchanged" in line and "node.pem" in line for line in told))
    async with connect(node.grpc_address, tls=issuer.client("b"), own_link=True):
        pass
    metrics = await asyncio.to_thread(_get, f"http://{node.http_address}/healthz")
    assert metrics == "ok\n", "on loopback the HTTP side stays plain"
    issuer.write("node.pem", good)
    issuer.renew("node", issuer.authority, 7200)
    await _eventually(lambda: any("certificate exchanged" in line for line in told))


def _get(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


async def _rotation(issuer: Issuer, *, lasts_s: float, renew_every_s: float, cut_every_s: float, rounds: int) -> None:
    """O5: certificates far shorter than the run, and a relay that cuts every link again and again."""
    failed: list[str] = []

    class Failures(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no node reached" in record.getMessage() or "refuses" in record.getMessage():
                failed.append(record.getMessage())

    names = ("node", "a", "b")
    for name in names:
        issuer.renew(name, issuer.authority, lasts_s)
    heard = Failures()
    logging.getLogger("agent_sdk").addHandler(heard)
    try:
        async with (
            running(config(**issuer.settings(resume_window_s=10.0))) as node,
            FaultProxy(node.grpc_address) as proxy,
            echoing("a", proxy.address, issuer.files("a")),
            connect(proxy.address, tls=issuer.files("b"), own_link=True) as mesh,
        ):

            async def cut() -> None:
                while True:
                    await asyncio.sleep(cut_every_s)
                    proxy.reset()

            async def renew() -> None:
                while True:
                    await asyncio.sleep(renew_every_s)
                    for name in names:
                        issuer.renew(name, issuer.authority, lasts_s)

            faults = [asyncio.create_task(cut()), asyncio.create_task(renew())]
            loop = asyncio.get_running_loop()
            ends = loop.time() + rounds * renew_every_s
            asked = 0
            while loop.time() < ends:
                with contextlib.suppress(NoAgentAvailable):  # what comes just when a link is cut is told so at once
                    reply = await mesh.request(asked, agent_type="a", timeout=10, idempotent=True)
                    assert reply.data == asked
                    asked += 1
                await asyncio.sleep(0.02)
            for fault in faults:
                fault.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
            assert proxy.connections > rounds and asked > rounds, "nothing was cut, or little answered"
    finally:
        logging.getLogger("agent_sdk").removeHandler(heard)
    assert not failed, failed[:3]


async def test_links_that_are_cut_come_back_while_certificates_are_renewed(issuer: Issuer) -> None:
    await _rotation(issuer, lasts_s=8.0, renew_every_s=2.0, cut_every_s=1.0, rounds=5)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_ten_minutes_of_certificates_of_a_minute(issuer: Issuer) -> None:
    await _rotation(issuer, lasts_s=60.0, renew_every_s=30.0, cut_every_s=20.0, rounds=20)


def test_the_http_side_is_encrypted_only_where_others_reach_it(issuer: Issuer) -> None:
    for address, encrypted in (("127.0.0.1:0", False), ("[::1]:0", False), ("0.0.0.0:0", True)):
        made = encryption.Encryption(config(**issuer.settings(http=address)))
        assert (made.http is not None) == encrypted
