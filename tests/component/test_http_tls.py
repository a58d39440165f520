"""The HTTP side by TLS: which versions, certificates that are exchanged, and clients' certificates."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agent_sdk import Tls
from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.adapters.certificates import parsed
from reach.adapters.dev_certificates import Authority
from reach.adapters.http_server import HttpServer
from reach.adapters.http_tls import HttpTls
from reach.core.ports import MeshFailure
from tests.support.tls import Issuer, files_of


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "certs")


@pytest.fixture
def tls(issuer: Issuer) -> HttpTls:
    files = files_of(issuer.files("node"))
    assert files is not None
    return HttpTls(files, ask_clients=True)


@pytest.fixture
async def server(tls: HttpTls) -> AsyncIterator[HttpServer]:
    """It lets `a` read metrics."""

    async def may_scrape(_: Sequence[str], certificate: bytes) -> None:
        if parsed(certificate).uris != ("spiffe://test/a",):
            raise MeshFailure(failure(codes.UNAUTHENTICATED, "no certificate that counts"))

    served = HttpServer(
        listen="127.0.0.1:0",
        metrics=lambda: (b"reach_agents 1\n", "text/plain; version=0.0.4; charset=utf-8"),
        unready_reason=lambda: "",
        tls=tls.context,
    )
    served.may_scrape = may_scrape
    await served.start()
    yield served
    await served.stop()


def context_of(tls: Tls, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    if tls.cert and tls.key:
        context.load_cert_chain(tls.cert, tls.key)
    if version is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


async def get(server: HttpServer, page: str, context: ssl.SSLContext) -> int:
    """The status of a page; 0 if no connection comes about."""
    host, _, port = server.address.rpartition(":")

    def ask() -> int:
        connection = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
        try:
            connection.request("GET", page)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_pages_are_open_without_a_certificate_and_metrics_are_for_whom_one_names(
    server: HttpServer, issuer: Issuer
) -> None:
    nobody = context_of(Tls(issuer.ca))
    assert await get(server, "/readyz", nobody) == 200
    assert await get(server, "/metrics", nobody) == 401
    assert await get(server, "/metrics", context_of(issuer.client("b"))) == 401
    assert await get(server, "/metrics", context_of(issuer.client("a"))) == 200


async def test_a_certificate_of_another_authority_gets_nowhere(
    server: HttpServer, issuer: Issuer, tmp_path: Path
) -> None:
    theirs = Issuer(tmp_path / "theirs").client("a")
    assert await get(server, "/metrics", context_of(Tls(issuer.ca, theirs.cert, theirs.key))) == 0


async def test_nothing_older_than_tls_1_2_is_spoken(server: HttpServer, issuer: Issuer) -> None:
    versions = (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    assert [await get(server, "/readyz", context_of(Tls(issuer.ca), each)) for each in versions] == [0, 200, 200]


async def test_certificate_and_authorities_are_exchanged_while_it_serves(
    server: HttpServer, tls: HttpTls, issuer: Issuer, tmp_path: Path
) -> None:
    old, new = context_of(issuer.client("a")), Authority.made("new CA", time.time(), 3600)
    apart = Issuer(tmp_path / "new", new)
    renewed = context_of(apart.client("a"))
    assert (await get(server, "/metrics", old), await get(server, "/metrics", renewed)) == (200, 0)
    issuer.trust(new)
    issuer.renew("node", new)
    tls.renew()
    assert (await get(server, "/metrics", old), await get(server, "/metrics", renewed)) == (0, 200)
    half_old = context_of(Tls(apart.ca, *(str(issuer.path / name) for name in ("a.pem", "a-key.pem"))))
    assert await get(server, "/readyz", half_old) == 0, "the former authority vouches for nobody any more"


async def test_files_that_do_not_belong_together_leave_it_as_it_is(
    server: HttpServer, tls: HttpTls, issuer: Issuer
) -> None:
    issuer.node("other")
    issuer.write("node-key.pem", (issuer.path / "other-key.pem").read_bytes())
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        tls.renew()
    assert await get(server, "/readyz", context_of(Tls(issuer.ca))) == 200
