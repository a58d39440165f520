"""Two nodes on real etcd that speak TLS with each other, each with a certificate of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, Context, Mesh, NoAgentAvailable, NoRoute, Tls, connect
from agentreach.v1 import admin_pb2 as admin
from reach.adapters.admin_client import AdminClient
from reach.adapters.dev_certificates import Authority
from reach.node.app import Node, running
from tests.support.etcd import EtcdCluster, start_etcd
from tests.support.node import config
from tests.support.tls import Issuer, files_of

LINKED_S = 10.0

_prefixes = count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture
def issuers(tmp_path: Path) -> tuple[Issuer, Issuer]:
    """One authority, the files of two nodes."""
    first = Issuer(tmp_path / "one")
    return first, Issuer(tmp_path / "two", first.authority)


@pytest.fixture
async def nodes(etcd: EtcdCluster, issuers: tuple[Issuer, Issuer]) -> AsyncIterator[tuple[Node, Node]]:
    shared = {"registry": f"etcd://{','.join(etcd.endpoints)}", "registry_prefix": f"/tls-{next(_prefixes)}/"}
    async with contextlib.AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(running(config(**issuer.settings(**shared, node_id=name))))
            for issuer, name in zip(issuers, ("one", "two"), strict=True)
        ]
        await _until(lambda: linked(one) and linked(two))
        yield one, two


def linked(node: Node) -> bool:
    return any(other.connected for other in node.engine.state.nodes.values())


async def _until(true: Callable[[], bool], limit_s: float = LINKED_S) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what becomes true in a node has no event
            await asyncio.sleep(0.02)


def echoing(url: str, tls: Tls) -> Agent:
    agent = Agent("a", url=url, tls=tls, own_link=True)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    return agent


async def asked(mesh: Mesh, data: Any, agent_type: str = "a") -> Any:
    """The answer, also when the agent is not seen here yet, or the link between the nodes is just being made anew."""
    async with asyncio.timeout(LINKED_S):
        while True:
            try:
                return (await mesh.request(data, agent_type=agent_type, timeout=5, idempotent=True)).data
            except (NoAgentAvailable, NoRoute):
                await asyncio.sleep(0.05)


async def test_requests_and_questions_cross_between_nodes_by_tls(
    nodes: tuple[Node, Node], issuers: tuple[Issuer, Issuer]
) -> None:
    one, two = nodes
    issuer = issuers[0]
    async with (
        echoing(one.grpc_address, issuer.client("a")),
        connect(two.grpc_address, tls=issuer.client("b"), own_link=True) as mesh,
    ):
        assert await asked(mesh, "over there") == "over there"
    async with AdminClient([two.grpc_address], tls=files_of(issuer.client("root"))) as client:
        assert not (await client.list_sessions(admin.ListSessionsRequest())).silent_nodes


async def test_who_is_named_by_its_certificate_is_called_for_at_nodes_that_never_saw_it(
    nodes: tuple[Node, Node], issuers: tuple[Issuer, Issuer]
) -> None:
    """Found by reading: an agent's calls on its behalf were refused at every node but the one that it came to."""
    one, two = nodes
    issuer = issuers[0]
    between = Agent("b", url=one.grpc_address, tls=issuer.client("b"), own_link=True)

    @between.handler
    async def ask_on(data: object, ctx: Context) -> object:
        return (await ctx.request(data, agent_type="a", timeout=5)).data

    async with (
        echoing(one.grpc_address, issuer.client("a")),
        between,
        connect(two.grpc_address, tls=issuer.client("x", "spiffe://test/team/x"), own_link=True) as mesh,
    ):
        assert await asked(mesh, "there", "a") == "there"
        assert await asked(mesh, "on behalf", "b") == "on behalf"


async def test_nodes_change_to_another_authority_one_after_another_and_stay_linked(
    nodes: tuple[Node, Node], issuers: tuple[Issuer, Issuer]
) -> None:
    """As an operator does it: trust both, renew, trust the new one alone."""
    one, two = nodes
    old, new = issuers[0].authority, Authority.made("new CA", 0, 4e9)
    clients = Issuer(issuers[0].path / "clients", new)
    async with contextlib.AsyncExitStack() as stack:
        for issuer in issuers:
            issuer.trust(old, new)
        clients.trust(old, new)
        await _until(lambda: _trusts(one, issuers[0]) and _trusts(two, issuers[1]))
        for issuer in issuers:
            issuer.renew("node", new)
        await _until(lambda: _shows(one, issuers[0]) and _shows(two, issuers[1]))
        for issuer in issuers:
            issuer.trust(new)
        await _until(lambda: _trusts(one, issuers[0]) and _trusts(two, issuers[1]))
        await _until(lambda: linked(one) and linked(two))
        clients.trust(new)
        await stack.enter_async_context(echoing(one.grpc_address, clients.client("a")))
        mesh = await stack.enter_async_context(connect(two.grpc_address, tls=clients.client("b"), own_link=True))
        assert await asked(mesh, "as before") == "as before"


async def test_a_node_whose_authority_is_trusted_no_more_is_out(
    nodes: tuple[Node, Node], issuers: tuple[Issuer, Issuer]
) -> None:
    """Also while its link stands: O4, O5."""
    one, two = nodes
    new = Authority.made("new CA", 0, 4e9)
    issuers[0].renew("node", new)
    issuers[0].trust(new)
    others = [other for node in (one, two) for other in node.engine.state.nodes.values()]
    await _until(lambda: any("TLS handshake" in other.why_down or "not signed" in other.why_down for other in others))
    assert not linked(one) and not linked(two)


def _trusts(node: Node, issuer: Issuer) -> bool:
    assert node.encryption is not None
    return node.encryption.tls.ca == Path(issuer.ca).read_bytes()


def _shows(node: Node, issuer: Issuer) -> bool:
    assert node.encryption is not None
    return node.encryption.tls.cert == (issuer.path / "node.pem").read_bytes()


async def test_where_no_certificate_is_asked_for_nodes_link_by_tls_as_well(
    etcd: EtcdCluster, issuers: tuple[Issuer, Issuer], tmp_path: Path
) -> None:
    """Each checks the other's by its `tls_ca`: a node of a stranger's authority is not linked with."""
    shared = {
        "registry": f"etcd://{','.join(etcd.endpoints)}",
        "registry_prefix": f"/tls-{next(_prefixes)}/",
        "auth": "none",
        "principals": {},
    }
    stranger = Issuer(tmp_path / "stranger")
    async with contextlib.AsyncExitStack() as stack:
        one, two, three = [
            await stack.enter_async_context(running(config(**issuer.settings(**shared, node_id=name))))
            for issuer, name in zip((*issuers, stranger), ("one", "two", "three"), strict=True)
        ]
        await _until(lambda: linked(one) and linked(two))
        dialled = (one.engine.state.nodes["three"], three.engine.state.nodes["two"])  # by the smaller name
        await _until(lambda: all("not signed" in other.why_down for other in dialled))
        assert not linked(three)
