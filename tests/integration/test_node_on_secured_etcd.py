"""Nodes on an etcd that asks who they are and lets them at one prefix: all they do works with that.

By certificate the CN is the user, as docs/howto/secure-etcd.md says; by password tokens live 2 s, so that they expire
all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, Mesh, ReachError, connect
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from reach.adapters.admin_client import AdminClient
from reach.adapters.dev_certificates import Subject
from tests.support.agents import eventually, usable
from tests.support.certificates import HOSTS, Folder
from tests.support.etcd import EtcdCluster, ServerTls, free_port, start_etcd
from tests.support.node import Node, config, running, start_node
from tests.support.notetakers import make
from tests.support.rawlink import raw_link

PREFIX = "/agentreach/v1/"
PASSWORD = "correct-horse-battery"
LIMIT_S = 30.0
REFUSED_S = 10.0  # what a node may take to say that it cannot be, from the start of its process
BUSY_S = 10.0  # what a machine whose cores are all taken adds to that
LASTS_S = 4.0  # of a certificate that ends during its test


async def secure(etcd: EtcdCluster, *, passwords: bool) -> None:
    """Users and roles, then authentication. What is not of the mesh is there too."""
    await etcd.ctl("put", "/others/key", "theirs")
    for role, rights in (("agentreach", "readwrite"), ("agentreach-reader", "read")):
        await etcd.ctl("role", "add", role)
        await etcd.ctl("role", "grant-permission", role, "--prefix=true", rights, PREFIX)
    for user, role in (("root", "root"), ("reach-node", "agentreach"), ("reader", "agentreach-reader")):
        await etcd.ctl("user", "add", *([f"{user}:{PASSWORD}"] if passwords else ["--no-password", user]))
        await etcd.ctl("user", "grant-role", user, role)
    await etcd.ctl("auth", "enable")


@dataclass(frozen=True)
class Secured:
    """An etcd that asks, and what a node says to it."""

    etcd: EtcdCluster
    settings: Mapping[str, Any]
    root: str | None = None

    async def keys(self) -> list[str]:
        """All keys there are, as its administrator sees them."""
        text = await self.etcd.ctl("get", "", "--prefix", "--keys-only", user=self.root)
        return [line for line in text.splitlines() if line]

    async def contents(self) -> list[bytes]:
        """Keys and values of all there is."""
        rows = json.loads(await self.etcd.ctl("get", "", "--prefix", "--write-out=json", user=self.root))["kvs"]
        return [b64decode(row["key"]) + b" " + b64decode(row.get("value", "")) for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def by_certificate(folder: Folder) -> Iterator[Secured]:
    """TLS; the CN of a client's certificate is the user. Its own certificate is root's, with which etcdctl comes."""
    own = folder.put("root", folder.authority.issue("root", Subject(HOSTS), time.time(), 3600))
    tls = ServerTls(Path(own.ca or ""), Path(own.cert or ""), Path(own.key or ""))
    node = folder.client("reach-node")
    with start_etcd(tls=tls) as etcd:
        asyncio.run(secure(etcd, passwords=False))
        files = {"registry_tls_ca": node.ca, "registry_tls_cert": node.cert, "registry_tls_key": node.key}
        yield Secured(etcd, {"registry": f"etcd://{etcd.endpoints[0]}", **files})


@pytest.fixture(scope="module")
def by_password() -> Iterator[Secured]:
    with start_etcd(flags=["--auth-token-ttl=2", "--bcrypt-cost=4"]) as etcd:
        asyncio.run(secure(etcd, passwords=True))
        user = {"registry_user": "reach-node", "registry_password": PASSWORD}
        yield Secured(etcd, {"registry": f"etcd://{etcd.endpoints[0]}", **user}, root=f"root:{PASSWORD}")


@pytest.fixture(params=["by_certificate", "by_password"])
def secured(request: pytest.FixtureRequest) -> Secured:
    found: Secured = request.getfixturevalue(request.param)
    return found


@contextlib.asynccontextmanager
async def pair(settings: Mapping[str, Any]) -> AsyncIterator[tuple[Node, Node]]:
    """The leading node and another one, linked."""
    async with running(config(node_id="a", **settings)) as a, running(config(node_id="b", **settings)) as b:

        async def agreed() -> bool:
            leaders = {leader.node_id for node in (a, b) if (leader := node.engine.leader()) is not None}
            return len(leaders) == 1 and all(
                any(one.connected for one in node.engine.state.nodes.values()) for node in (a, b)
            )

        await eventually(agreed, "the nodes are linked, and one leads")
        leader = a.engine.leader()
        assert leader is not None
        yield (a, b) if leader.node_id == "a" else (b, a)


class TestOnePrefix:
    async def test_all_that_nodes_do_works_with_rights_for_the_prefix_alone(
        self, secured: Secured, tmp_path: Path
    ) -> None:
        written = tmp_path / "written"
        async with pair(secured.settings) as (leader, other), asyncio.timeout(LIMIT_S):
            one, two = (
                make(node.grpc_address, name, written, hooks=True, checkpoints=True, pace_s=0.0)
                for name, node in (("notes/one", leader), ("notes/two", other))
            )
            async with one, two, connect(leader.grpc_address) as mesh, AdminClient([other.grpc_address]) as client:
                for name in ("notes/one", "notes/two"):
                    await usable(mesh, agent_id=name)
                first = await mesh.request("a", agent_type="notes", session="s", timeout=20)
                await client.set_config("agents/notes", {"model": "large"})
                await client.set_version_policy(registry.VersionPolicy(agent_type="echo", preferred="2"))
                await token_expired(secured)
                await client.release_session(admin.ReleaseSessionRequest(agent_type="notes", session_id="s"))
                second = await mesh.request("b", agent_type="notes", session="s", timeout=20)
                assert (first.data["notes"], second.data["notes"]) == (["a"], ["a", "b"])
                kinds = {key.removeprefix(PREFIX).split("/")[0] for key in await secured.keys() if key != "/others/key"}
                assert kinds >= {"nodes", "agents", "pins", "election", "config", "versions", "snapshots"}
        assert [key for key in await secured.keys() if not key.startswith(PREFIX)] == ["/others/key"]

    async def test_another_node_leads_when_the_one_that_led_is_gone(self, secured: Secured) -> None:
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(start_node(node_id=name, **secured.settings)) for name in ("c", "d")
            ]

            async def led(node: Any) -> bool:
                found: float = await node.metric("reach_leader")
                return found == 1.0

            async def one_leads() -> bool:
                return [await led(node) for node in nodes].count(True) == 1

            await eventually(one_leads, "one leads")
            first = 0 if await led(nodes[0]) else 1
            nodes[first].process.kill()

            async def other_leads() -> bool:
                return await led(nodes[1 - first])

            await eventually(other_leads, "the other one leads")
            gone = f"{PREFIX}nodes/{'cd'[first]}"

            async def swept() -> bool:
                return gone not in await secured.keys()

            await eventually(swept, "the lease of the one that was killed has ended")

    async def test_a_node_of_another_prefix_is_refused_and_that_is_said(self, secured: Secured) -> None:
        said = await refused({**secured.settings, "registry_prefix": "/others/"})
        assert "permission denied" in said
        assert await secured.etcd.ctl("get", "/others/key", "--print-value-only", user=secured.root) == "theirs\n"

    async def test_a_user_who_may_only_read_is_refused_and_that_is_said(
        self, by_password: Secured, by_certificate: Secured, folder: Folder
    ) -> None:
        reader = folder.client("reader")
        certificate = {"registry_tls_cert": reader.cert, "registry_tls_key": reader.key}
        for said in await asyncio.gather(
            refused({**by_password.settings, "registry_user": "reader"}),
            refused({**by_certificate.settings, **certificate}),
        ):
            assert "permission denied" in said


class TestRightsTaken:
    @pytest.mark.parametrize("how", ["role revoked", "user deleted"])
    async def test_a_node_whose_rights_are_taken_registers_nobody_and_its_keys_end_with_its_process(
        self, by_certificate: Secured, folder: Folder, how: str
    ) -> None:
        """etcd 3.5 keeps a lease alive for whoever asks: until then what it has registered stays."""
        user, etcd = f"leaver-{how.partition(' ')[0]}", by_certificate.etcd
        await etcd.ctl("user", "add", "--no-password", user)
        await etcd.ctl("user", "grant-role", user, "agentreach")
        own = folder.client(user)
        settings = {**by_certificate.settings, "registry_tls_cert": own.cert, "registry_tls_key": own.key}
        async with start_node(node_id=user, registry_grace_s=1.0, register_wait_s=1.0, **settings) as node:
            assert f"{PREFIX}nodes/{user}" in await by_certificate.keys()
            if how == "role revoked":
                await etcd.ctl("user", "revoke-role", user, "agentreach")
            else:
                await etcd.ctl("user", "delete", user)
            await node.unready()
            async with raw_link(node.grpc, agents=["late/one"]) as link:
                assert link.welcome.agents[0].error.code == codes.REGISTRY_UNAVAILABLE
            node.process.kill()

            async def gone() -> bool:
                return f"{PREFIX}nodes/{user}" not in await by_certificate.keys()

            await eventually(gone, "its key has ended with its lease")
            assert not [key for key in await by_certificate.keys() if "late/one" in key]


async def token_expired(secured: Secured) -> None:
    """Longer than a token lives without use; nothing tells."""
    if secured.root is not None:
        await asyncio.sleep(2.5)


class TestRefused:
    """A mistake ends the start with one line and exit code 2, in time, and no line holds the password."""

    async def test_wrong_files_are_named(self, by_certificate: Secured, folder: Folder, tmp_path: Path) -> None:
        theirs = Folder(tmp_path / "theirs").client("reach-node")
        expired = folder.client("late", lasts_s=-1.0)
        for name, text in (("empty", ""), ("garbage", "not a certificate\n"), ("broken", broken_pem())):
            (tmp_path / name).write_text(text)
        wrong: dict[str, tuple[dict[str, Any], str]] = {
            "wrong CA": ({"registry_tls_ca": theirs.ca}, "etcd's certificate is not signed by the CA that was given"),
            "no certificate": (
                {"registry_tls_cert": "", "registry_tls_key": ""},
                "it may ask for a client's certificate, and none was given",
            ),
            "certificate of another CA": (
                {"registry_tls_cert": theirs.cert, "registry_tls_key": theirs.key},
                "it does not take this client's certificate",
            ),
            "key of another certificate": (
                {"registry_tls_key": theirs.key},
                f"the key {theirs.key} does not belong to the certificate",
            ),
            "expired": (
                {"registry_tls_cert": expired.cert, "registry_tls_key": expired.key},
                f"the certificate {expired.cert} has expired",
            ),
            "no TLS": (dict.fromkeys(("registry_tls_ca", "registry_tls_cert", "registry_tls_key"), ""), "speaks TLS"),
            "no CA of ours": ({"registry_tls_ca": "system"}, "not signed by a CA that this machine knows"),
            "folder": ({"registry_tls_ca": str(tmp_path)}, f"{tmp_path}: Is a directory"),
            "nowhere": ({"registry_tls_ca": "/nowhere"}, "registry_tls_ca is '/nowhere', which cannot be read"),
            "no key": ({"registry_tls_key": ""}, "registry_tls_cert and registry_tls_key go together"),
        }
        for setting in ("registry_tls_ca", "registry_tls_cert", "registry_tls_key"):
            for name in ("empty", "garbage", "broken"):
                wrong[f"{setting} {name}"] = ({setting: str(tmp_path / name)}, f"{tmp_path / name} holds no")
        await all_refused(by_certificate.settings, wrong)

    async def test_a_broken_file_of_cas_is_named_also_without_a_certificate(
        self, by_certificate: Secured, tmp_path: Path
    ) -> None:
        (tmp_path / "broken").write_text(broken_pem())
        alone = {"registry": by_certificate.settings["registry"], "registry_tls_ca": str(tmp_path / "broken")}
        assert f"{tmp_path / 'broken'} holds no certificate that can be read" in await refused(alone)

    async def test_wrong_passwords_are_said(self, by_password: Secured, tmp_path: Path) -> None:
        (tmp_path / "empty").write_text("\n")
        wrong: dict[str, tuple[dict[str, Any], str]] = {
            "wrong password": ({"registry_password": f"not-{PASSWORD}"}, "does not let in user 'reach-node'"),
            "unknown user": ({"registry_user": "nobody"}, "does not let in user 'nobody'"),
            "no user": ({"registry_user": "", "registry_password": ""}, "a caller without a user"),
            "no password": ({"registry_password": ""}, "registry_user and registry_password"),
            "two passwords": ({"registry_password_file": str(tmp_path / "empty")}, "one of them is enough"),
            "no file": (
                {"registry_password": "", "registry_password_file": "/nowhere"},
                "registry_password_file is '/nowhere', which cannot be read: No such file",
            ),
            "empty file": (
                {"registry_password": "", "registry_password_file": str(tmp_path / "empty")},
                "whose first line is empty",
            ),
            "in the address": (
                {"registry": f"etcd://reach-node:{PASSWORD}@{by_password.etcd.endpoints[0]}"},
                "registry_password_file",
            ),
            "TLS where there is none": ({"registry_tls_ca": "system"}, "etcd does not speak TLS"),
        }
        await all_refused(by_password.settings, wrong)

    async def test_nobody_at_the_address_is_said(self) -> None:
        nobody = f"127.0.0.1:{free_port()}"
        said = await refused({"registry": f"etcds://{nobody}", "registry_tls_ca": "system"})
        assert f"etcd cannot be reached at {nobody}" in said
        assert "onnection refused" in said


def broken_pem() -> str:
    """What begins like a certificate and a key, and is neither."""
    return "".join(f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n" for kind in ("CERTIFICATE", "PRIVATE KEY"))


async def all_refused(settings: Mapping[str, Any], wrong: Mapping[str, tuple[dict[str, Any], str]]) -> None:
    """Each of these mistakes is said in these words. Three nodes at a time: they share two cores."""
    turns = asyncio.Semaphore(3)

    async def one(what: str) -> str:
        mistake, expected = wrong[what]
        async with turns:
            said = await refused({**settings, **mistake})
        return "" if expected in said else f"{what}: {said}"

    assert [fault for fault in await asyncio.gather(*map(one, wrong)) if fault] == []


async def refused(settings: Mapping[str, Any]) -> str:
    """The one line with which a node does not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    environment |= {f"REACH_{name.upper()}": str(value) for name, value in settings.items() if value != ""}
    environment |= {"REACH_LISTEN": "127.0.0.1:0", "REACH_HTTP": "127.0.0.1:0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "reach.cli", "serve",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip
    try:
        async with asyncio.timeout(REFUSED_S + BUSY_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 2, text
    assert text.count("\n") == 1, text
    assert PASSWORD not in text
    return text


class TestSecrecy:
    async def test_the_password_is_in_no_log_no_option_and_no_environment_of_a_node_that_reads_it_from_a_file(
        self, by_password: Secured, tmp_path: Path
    ) -> None:
        file = tmp_path / "password"
        file.write_text(f"{PASSWORD}\n")
        settings = {name: value for name, value in by_password.settings.items() if name != "registry_password"}
        async with start_node(**settings, registry_password_file=str(file), log_level="debug") as node:
            await token_expired(by_password)
            if sys.platform == "linux":
                assert PASSWORD not in shown_by_the_system(node.process.pid)
            assert await node.end() == 0
            assert '"ready"' in node.log
            assert PASSWORD not in node.log

    async def test_no_message_and_no_answer_is_ever_written_to_etcd(self, by_certificate: Secured) -> None:
        marker, heard = "zanzibar-4711", asyncio.Queue[Any]()
        async with pair(by_certificate.settings) as (leader, other), asyncio.timeout(LIMIT_S):
            agent = Agent("parrot/one", url=other.grpc_address)

            @agent.handler
            async def repeat(data: Any) -> Any:
                if data == f"{marker}-bad":
                    raise RuntimeError(data)
                return data

            @agent.on_event("news")
            async def hear(data: Any) -> None:
                heard.put_nowait(data)

            async with agent, connect(leader.grpc_address) as mesh:
                await usable(mesh, agent_id="parrot/one")
                for session in (None, "s"):
                    reply = await mesh.request(marker, agent_type="parrot", session=session, timeout=20)
                    assert reply.data == marker
                with pytest.raises(ReachError):
                    await mesh.request(f"{marker}-bad", agent_type="parrot", session="s", timeout=20)
                await eventually(lambda: published(mesh, marker, heard), "the event was heard", every_s=0.2)
                held = await by_certificate.contents()
        assert any(b"parrot/one" in each for each in held)
        assert not [each for each in held if marker.encode() in each]

    @pytest.mark.parametrize("command", ["serve", "check-config", "keys list --registry etcd://127.0.0.1:1"])
    def test_the_password_is_no_option_because_those_are_everybodys_to_read(self, command: str) -> None:
        done = run_reach(*command.split(), "--registry-password", PASSWORD)
        assert done.returncode == 2
        assert "--registry-password" in done.stderr
        assert PASSWORD not in done.stdout + done.stderr

    def test_keys_are_made_by_certificate_and_by_a_password_from_the_variable(self, secured: Secured) -> None:
        settings = {f"REACH_{name.upper()}": str(value) for name, value in secured.settings.items()}
        made = run_reach("keys", "create", "--registry", settings.pop("REACH_REGISTRY"), "--principal", "p", **settings)
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith("reach_")

    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_check_config_shows_that_there_is_a_password_and_not_which(
        self, tmp_path: Path, form: tuple[str, ...]
    ) -> None:
        file = tmp_path / "password"
        file.write_text(PASSWORD)
        done = run_reach("check-config", *form, "--registry-user", "reach-node", "--registry-password-file", str(file))
        assert done.returncode == 0, done.stderr
        assert "(secret)" in done.stdout
        assert PASSWORD not in done.stdout + done.stderr


async def published(mesh: Mesh, data: str, heard: asyncio.Queue[Any]) -> bool:
    """Whether an event arrives: who subscribes is told to other nodes a moment later."""
    await mesh.publish("news", data)
    return not heard.empty()


def shown_by_the_system(pid: int) -> str:
    """What `ps` and its like show of a process."""
    proc = Path(f"/proc/{pid}")
    return (proc / "environ").read_text() + (proc / "cmdline").read_text()


def run_reach(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")} | variables
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments], env=clean, capture_output=True, text=True, timeout=30
    )


class TestRenewal:
    async def test_a_renewed_certificate_is_used_when_etcd_is_dialled_anew(
        self, by_certificate: Secured, tmp_path: Path, folder: Folder
    ) -> None:
        """The old one has expired by then: whoever held on to it would be refused for ever."""
        own = Folder(tmp_path / "own", folder.authority)
        short = own.put("node", own.authority.issue("reach-node", Subject(server=False), time.time(), LASTS_S))
        files = {"registry_tls_ca": short.ca, "registry_tls_cert": short.cert, "registry_tls_key": short.key}
        (member,) = by_certificate.etcd.members
        async with running(config(node_id="renewed", **{**by_certificate.settings, **files})) as node:
            own.put("node", own.authority.issue("reach-node", Subject(server=False), time.time(), 3600))
            await asyncio.sleep(LASTS_S + 0.5)  # until it has expired
            member.kill()
            await member.restart()

            async def registered() -> bool:
                record = await by_certificate.etcd.ctl("get", f"{PREFIX}nodes/renewed", "--keys-only")
                return bool(record) and node.engine.unready_reason == ""

            await eventually(registered, "the node is in the registry again")
            agent = make(
                node.grpc_address, "notes/late", tmp_path / "written", hooks=False, checkpoints=False, pace_s=0
            )
            async with agent, connect(node.grpc_address) as mesh:
                await usable(mesh, agent_id="notes/late")
