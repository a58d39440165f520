"""The audit log of a node with keys: who did what, from where, how it ended; and no more lines than a disk can take."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent_sdk import Agent, PermissionDenied, connect
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.admin_pb2_grpc import AdminServiceStub
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.mesh_pb2_grpc import MeshServiceStub
from agentreach.v1.registry_pb2_grpc import RegistryServiceStub
from reach.core.auditing import LINES_PER_S
from tests.support.api_keys import EVERYTHING, KeysFile, key_id
from tests.support.node import Node, config, running, start_node

LIMIT_S = 10.0
SECRET = "ghp_0123456789abcdefghijABCDEFGHIJ012345"


class Mesh:
    """A node with keys, and what it has written to its audit log."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "audit.jsonl"
        self.keys = KeysFile(directory / "keys.json")
        self.ops = self.keys.add("ops", admin=True)
        self.acme = self.keys.add("acme", **EVERYTHING)
        self.poor = self.keys.add("poor", may_call=["nothing"], envs=["production"])
        self.node: Node

    def lines(self, action: str = "") -> list[dict[str, Any]]:
        """Those of one action, or all."""
        every = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in every if action in ("", line["action"])]

    async def line(self, action: str) -> dict[str, Any]:
        """The last of an action, as soon as there is one."""
        async with asyncio.timeout(LIMIT_S):
            while not self.lines(action):  # noqa: ASYNC110 - a file tells nobody that it grew
                await asyncio.sleep(0.01)
        return self.lines(action)[-1]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path)
    settings = config(auth="keys", keys_file=str(mesh.keys.path), audit_log=str(mesh.path), node_id="n1")
    async with running(settings) as mesh.node:
        yield mesh


async def echo(data: object) -> object:
    return data


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_an_agents_coming_and_going_are_told_with_whose_they_are(mesh: Mesh) -> None:
    agent = Agent("extractor", capabilities=["ner"], url=mesh.node.grpc_address, api_key=mesh.acme)
    agent.handler(echo)
    async with agent:
        line = await mesh.line("agent.attached")
        assert (line["tenant"], line["principal"], line["key_id"]) == ("default", "acme", key_id(mesh.acme))
        assert line["outcome"] == "OK" and line["node"] == "n1" and re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", line["peer"])
        assert line["about"] == {"agent": agent.agent_id, "env": "production", "capabilities": "ner"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["at"])
    line = await mesh.line("agent.detached")
    assert line["principal"] == "acme" and line["about"]["agent"] == agent.agent_id and line["why"]


async def test_what_operators_call_is_told_with_what_it_is_about_and_how_it_ended(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.node.grpc_address) as channel:
        stub = AdminServiceStub(channel)
        await stub.ListSessions(admin.ListSessionsRequest(agent_type="planner"), metadata=shown(mesh.ops))
        line = await mesh.line("admin.ListSessions")
        assert line["principal"] == "ops" and line["key_id"] == key_id(mesh.ops) and line["outcome"] == "OK"
        assert line["about"] == {"agent_type": "planner"} and re.fullmatch("[0-9a-f]{32}", line["trace_id"])
        with pytest.raises(grpc.aio.AioRpcError):
            drain = admin.DrainAgentRequest(agent_id="nobody/1", reason=f"has {SECRET}")
            await stub.DrainAgent(drain, metadata=shown(mesh.ops))
        line = await mesh.line("admin.DrainAgent")
        assert line["outcome"] == "NO_ROUTE" and line["about"] == {"agent_id": "nobody/1", "reason": "has (withheld)"}
        settings = {"prompt": "what agents are told", "model_password": "hunter22"}
        await stub.SetConfig(admin.SetConfigRequest(name="agents/planner", settings=settings), metadata=shown(mesh.ops))
        line = await mesh.line("admin.SetConfig")
        assert line["about"] == {"name": "agents/planner", "settings": "model_password,prompt"}
        policy = registry.VersionPolicy(agent_type="planner", weights={"1.0": 90, "2.0": 10})
        await RegistryServiceStub(channel).SetVersionPolicy(
            registry.SetVersionPolicyRequest(policy=policy), metadata=shown(mesh.ops)
        )
        line = await mesh.line("registry.SetVersionPolicy")
        assert line["about"] == {"agent_type": "planner", "weights": "1.0=90,2.0=10"}
    assert "hunter22" not in mesh.path.read_text() and "what agents are told" not in mesh.path.read_text()


async def test_who_is_turned_away_is_told_with_the_method_and_never_with_what_it_showed(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.node.grpc_address) as channel:
        for metadata in ((), shown(SECRET)):
            with pytest.raises(grpc.aio.AioRpcError):
                await AdminServiceStub(channel).GetNode(admin.GetNodeRequest(), metadata=metadata)
            line = await mesh.line("gate.refused")
            assert line["outcome"] == "UNAUTHENTICATED" and "principal" not in line
            assert line["about"] == {"method": "/agentreach.v1.AdminService/GetNode"} and line["peer"]
        with pytest.raises(grpc.aio.AioRpcError):
            await AdminServiceStub(channel).GetNode(admin.GetNodeRequest(), metadata=shown(mesh.poor))
        line = mesh.lines("gate.refused")[-1]
        assert line["outcome"] == "PERMISSION_DENIED" and line["principal"] == "poor"
    assert SECRET not in mesh.path.read_text()


async def test_a_stranger_cannot_fill_the_disk(mesh: Mesh) -> None:
    knocks = 5 * LINES_PER_S
    async with grpc.aio.insecure_channel(mesh.node.grpc_address) as channel:
        stub = AdminServiceStub(channel)
        answers = await asyncio.gather(
            *(stub.GetNode(admin.GetNodeRequest()) for _ in range(knocks)), return_exceptions=True
        )
    assert all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
    mesh.node.engine.audit._sum_up()  # type: ignore[attr-defined]  # what comes by itself after ten seconds
    lines = mesh.lines("gate.refused")
    written = [line for line in lines if "count" not in line["about"]]
    assert len(written) < knocks
    assert sum(int(line["about"].get("count", 1)) for line in lines) == knocks


async def test_an_agent_that_comes_and_goes_all_the_time_is_summed_up_with_whose_it_is(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reach.core.auditing.LINES_PER_S", 0.1)
    monkeypatch.setattr("reach.core.auditing.FLEET_LINES", 2)
    for _ in range(6):
        agent = Agent("extractor", url=mesh.node.grpc_address, api_key=mesh.acme, own_link=True)
        agent.handler(echo)
        async with agent:
            pass
    mesh.node.engine.audit._sum_up()  # type: ignore[attr-defined]  # what comes by itself after ten seconds
    lines = mesh.lines("agent.attached")
    assert len(lines) < 6 and {line["principal"] for line in lines} == {"acme"}
    assert sum(int(line["about"].get("count", 1)) for line in lines) == 6


async def test_a_call_without_the_right_is_told_with_its_trace(mesh: Mesh) -> None:
    async with connect(mesh.node.grpc_address, api_key=mesh.poor) as caller:
        with pytest.raises(PermissionDenied) as refused:
            await caller.request("x", agent_type="extractor", timeout=5)
    line = await mesh.line("message.denied")
    assert line["principal"] == "poor" and line["outcome"] == "PERMISSION_DENIED" and line["peer"]
    assert line["about"]["to"] == "extractor" and line["trace_id"] == refused.value.trace_id


async def test_a_call_of_its_own_is_told_with_where_it_came_from_too(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.node.grpc_address) as channel:
        envelope = Envelope(target=Target(agent_type="extractor"), timeout_ms=1_000, trace_id="t-1")
        with pytest.raises(grpc.aio.AioRpcError):
            await MeshServiceStub(channel).Invoke(envelope, metadata=shown(mesh.poor))
    line = await mesh.line("message.denied")
    assert line["trace_id"] == "t-1" and re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", line["peer"])


async def test_what_is_done_to_keys_is_told_with_their_ids_and_without_the_keys(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.node.grpc_address) as channel:
        stub, ops = AdminServiceStub(channel), shown(mesh.ops)
        wanted = admin.KeyInfo(principal="new", may_call=["extractor"], signs=True)
        made = await stub.CreateKey(admin.CreateKeyRequest(key=wanted), metadata=ops)
        line = await mesh.line("admin.CreateKey")
        assert line["about"]["made"] == made.key.key_id and line["about"]["principal"] == "new"
        assert line["about"]["may_call"] == "extractor" and line["about"]["signs"] == "True"
        rotated = await stub.RotateKey(admin.RotateKeyRequest(key_id=made.key.key_id), metadata=ops)
        line = await mesh.line("admin.RotateKey")
        assert line["about"] == {"key_id": made.key.key_id, "made": rotated.key.key_id}
        await stub.RevokeKey(admin.RevokeKeyRequest(key_id=rotated.key.key_id), metadata=ops)
        line = await mesh.line("admin.RevokeKey")
        assert line["about"] == {"key_id": rotated.key.key_id} and line["principal"] == "ops"
    written = mesh.path.read_text()
    for secret in (made.secret, made.signing_secret, rotated.secret, rotated.signing_secret):
        assert secret and secret not in written


async def test_the_nodes_log_lines_of_an_operators_call_have_the_trace_id_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with start_node(audit_log=str(path)) as node:
        async with grpc.aio.insecure_channel(node.grpc) as channel:
            await AdminServiceStub(channel).DrainNode(admin.DrainNodeRequest(reason="told to", timeout_ms=10))
        await asyncio.to_thread(node.process.wait, LIMIT_S)
        drained = next(line for line in map(json.loads, path.read_text().splitlines()) if "Drain" in line["action"])
        logged = [json.loads(line) for line in node.log.splitlines() if '"node drains"' in line]
    assert [line["trace_id"] for line in logged] == [drained["trace_id"]]


async def test_a_revoked_key_is_told_once_it_has_ended(mesh: Mesh) -> None:
    mesh.keys.revoke(mesh.acme)
    line = await mesh.line("key.ended")
    assert line["about"] == {"key_id": key_id(mesh.acme)} and "revoked" in line["why"]
    assert (line["tenant"], line["principal"], line["key_id"]) == ("default", "acme", key_id(mesh.acme))


async def test_a_key_that_was_made_in_the_file_is_told_by_whoever_follows_it(mesh: Mesh) -> None:
    """Who has the file in hands asks no node: the first that was heard of such a key was what it did."""
    made = mesh.keys.add("mallory", admin=True)
    line = await mesh.line("key.begun")
    assert (line["tenant"], line["principal"], line["key_id"]) == ("default", "mallory", key_id(made))
    mesh.keys.change(made, may_call=["*"])
    ended = await mesh.line("key.ended")
    assert ended["key_id"] == key_id(made) and "has changed" in ended["why"]
    assert [line["principal"] for line in mesh.lines("key.begun")] == ["mallory"] * 2
    assert made not in mesh.path.read_text()


async def test_a_rotated_file_is_left_for_a_new_one_on_sighup_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with start_node(audit_log=str(path)) as node:
        path.rename(tmp_path / "audit.jsonl.1")
        node.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(LIMIT_S):
            while not path.exists():  # noqa: ASYNC110 - a file tells nobody that it is there
                await asyncio.sleep(0.01)
        assert await node.end() == 0
    first, second = ((tmp_path / name).read_text() for name in ("audit.jsonl.1", "audit.jsonl"))
    assert json.loads(first.splitlines()[0])["action"] == "node.started"
    assert json.loads(second.splitlines()[-1])["action"] == "node.stopped"


async def test_a_disk_that_is_full_costs_the_node_nothing_but_lines_which_it_counts() -> None:
    with start_node(audit_log="/dev/full") as node:
        async with grpc.aio.insecure_channel(node.grpc) as channel:
            for _ in range(3):
                await AdminServiceStub(channel).GetNode(admin.GetNodeRequest())
        assert await node.metric("reach_audit_lines_total", kind="lost") == 4
        said = [line for line in node.log.splitlines() if "the audit log cannot be written" in line]
        assert len(said) == 1 and "No space left on device" in said[0]


def test_a_node_that_cannot_write_its_audit_log_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "audit.jsonl"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    command = [sys.executable, "-m", "reach.cli", "serve", "--audit-log", str(path), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"reach: audit_log {path}: No such file or directory\n"
