"""TLS as people meet it: what does not start, who is refused with which words, and what the node's log says of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sdk import Tls
from tests.support.agents import eventually
from tests.support.certificates import Folder
from tests.support.etcd import free_port
from tests.support.node import NodeProcess, start_node
from tests.support.tls import Issuer

TOLD_S = 5.0
MARGIN_S = 3.0  # for the start of a process on a busy machine

ENTRIES = """
[principals."spiffe://test/a"]
principal = "a"
may_register = ["a"]
may_call = ["*"]
"""


def reach(*arguments: str, tls: Tls | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command, with nothing of ours in its environment but these."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    for name, value in (("CA", tls.ca), ("CERT", tls.cert), ("KEY", tls.key)) if tls is not None else ():
        if value:
            clean[f"REACH_CLIENT_TLS_{name}"] = value
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    made = Issuer(tmp_path / "certs")
    (made.path / "principals.toml").write_text(ENTRIES)
    return made


def flags(issuer: Issuer, **changed: str) -> list[str]:
    """The options of a node with mTLS on free ports of loopback."""
    settings = {
        "listen": f"127.0.0.1:{free_port()}",
        "http": f"127.0.0.1:{free_port()}",
        "auth": "mtls",
        "tls_cert": str(issuer.path / "node.pem"),
        "tls_key": str(issuer.path / "node-key.pem"),
        "tls_ca": issuer.ca,
        "config": str(issuer.path / "principals.toml"),
    } | changed
    return [part for name, value in settings.items() if value for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tls_ca": ""}, "auth is mtls: tls_cert, tls_key and tls_ca are needed"),
        ({"tls_key": ""}, "tls_cert and tls_key go together"),
        ({"config": ""}, "nobody could get in"),
        ({"tls_cert": "/nowhere/node.pem"}, "cannot read the TLS file /nowhere/node.pem"),
        ({"tls_cert": "other.pem"}, "does not belong to the certificate"),
        ({"tls_cert": "expired.pem", "tls_key": "expired-key.pem"}, "has expired"),
        ({"tls_cert": "principals.toml"}, "nothing in PEM form"),
        ({"listen": "0.0.0.0:7999", "auth": "none", "config": ""}, "without auth"),
        (
            {"listen": "0.0.0.0:7999", "auth": "none", "config": "", "tls_ca": "", "tls_cert": "", "tls_key": ""},
            "without auth and tls_cert",
        ),
    ],
)
def test_what_would_be_open_or_broken_does_not_start(issuer: Issuer, changed: dict[str, str], told: str) -> None:
    issuer.node("other")
    issuer.node("expired", lasts_s=-1)
    here = {
        name: str(issuer.path / file) if file.endswith((".pem", ".toml")) else file for name, file in changed.items()
    }
    done = reach("serve", *flags(issuer, **here))
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert told in line


@pytest.fixture
async def node(issuer: Issuer) -> AsyncIterator[NodeProcess]:
    settings = {name: value for name, value in issuer.settings().items() if name != "principals"}
    async with start_node(**settings, config=str(issuer.path / "principals.toml")) as node:
        yield node


def _client(issuer: Issuer, tmp_path: Path, who: str) -> Tls | None:
    match who:
        case "in the clear":
            return None
        case "no certificate":
            return Tls(issuer.ca)
        case "another authority":
            theirs = Folder(tmp_path / "theirs").client("a")
            return Tls(issuer.ca, theirs.cert, theirs.key)
        case "expired":
            return issuer.client("a", lasts_s=-1)
        case "a server's":
            return issuer.node("server", uri="spiffe://test/a", server_only=True)
    return issuer.client("stranger")


@pytest.mark.parametrize(
    ("who", "code", "told", "logged"),
    [
        ("in the clear", 3, "the node speaks TLS and this connection does not", "WRONG_VERSION_NUMBER"),
        ("no certificate", 3, "ask for a client's certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("another authority", 3, "does not take this client's certificate", "unable to get local issuer certificate"),
        ("expired", 3, "does not take this client's certificate", "certificate has expired"),
        ("a server's", 3, "does not take this client's certificate", "unsupported certificate purpose"),
        ("unmapped", 1, "its certificate stands for no principal here", "spiffe://test/stranger"),
    ],
)
async def test_who_is_refused_is_told_in_time_and_the_log_says_why(
    node: NodeProcess, issuer: Issuer, tmp_path: Path, who: str, code: int, told: str, logged: str
) -> None:
    tls = _client(issuer, tmp_path, who)
    called = [("call", "-c", "echo", '"hi"')] if who in ("no certificate", "unmapped") else []
    for command in (("agents",), *called):
        began = time.monotonic()
        done = await asyncio.to_thread(reach, *command, tls=tls, REACH_URL=node.grpc)
        assert time.monotonic() - began < TOLD_S + MARGIN_S
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("reach: ")]
        assert done.returncode == code and told in line, done.stderr
    assert logged in node.log


async def test_a_name_alone_is_worth_nothing(node: NodeProcess, issuer: Issuer) -> None:
    """SAN "a" registers as "b"."""
    done = await asyncio.to_thread(reach, "test-agent", "--type", "b", tls=issuer.client("a"), REACH_URL=node.grpc)
    assert done.returncode == 2 and "principal a may not register agents of type b" in done.stderr


async def test_insecure_is_said_aloud() -> None:
    async with start_node(insecure=True) as node:
        assert await node.metric("reach_insecure") == 1
        assert "insecure: whoever reaches this node may do anything" in node.log
    async with start_node() as node:
        assert await node.metric("reach_insecure") == 0


async def test_an_entry_that_is_taken_out_of_the_file_is_out_without_a_restart(
    node: NodeProcess, issuer: Issuer
) -> None:
    file = issuer.path / "principals.toml"
    a = issuer.client("a")

    async def listed(wanted: int) -> bool:
        return (await asyncio.to_thread(reach, "agents", tls=a, REACH_URL=node.grpc)).returncode == wanted

    await eventually(lambda: listed(0), "it is let in")
    new = file.with_suffix(".new")
    new.write_text(ENTRIES.replace("spiffe://test/a", "spiffe://test/somebody-else"))
    new.replace(file)
    await eventually(lambda: listed(1), "it is out", TOLD_S + MARGIN_S)
    assert (
        "principals exchanged" in node.log
        and "stands for no principal" in (await asyncio.to_thread(reach, "agents", tls=a, REACH_URL=node.grpc)).stderr
    )
