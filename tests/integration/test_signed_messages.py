"""Signed messages over real sockets: what the SDK signs is believed, and captured bytes are worth nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from agent_sdk import Agent, ConnectFailed, Context, PermissionDenied, connect, sync
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.mesh_pb2_grpc import MeshServiceStub
from agentreach.wire import signing
from tests.support.api_keys import EVERYTHING, KeysFile, key_id
from tests.support.node import Node, config, running, start_node

LIMIT_S = 20.0


class Secured:
    """Two nodes with the same keys, an agent at the first, and a key whose messages must be signed."""

    def __init__(self, keys: KeysFile) -> None:
        self.keys = keys
        self.agents = keys.add("agents", **EVERYTHING)
        self.key = keys.add("signer", signs=True, **EVERYTHING)
        self.secret = keys.signing[self.key]
        self.node: Node
        self.other: Node

    def settings(self, node_id: str) -> dict[str, object]:
        """Of a node."""
        return {"auth": "keys", "keys_file": str(self.keys.path), "node_id": node_id}

    def agent(self, url: str) -> Agent:
        """One that answers with what it was asked."""
        agent = Agent("echo", url=url, api_key=self.agents, signing_secret="")

        @agent.handler
        async def echo(data: object) -> object:
            return data

        return agent

    def captured(self, message_id: str = "m-1", audience: str = "n1") -> Envelope:
        """A message as somebody on the way sees it: signed by its sender, now."""
        envelope = Envelope(
            message_id=message_id,
            target=Target(agent_type="echo"),
            payload=Payload(text="hi"),
            timeout_ms=5000,
            fresh=True,
        )
        secret, now_ms = signing.secret_of(self.secret), int(time.time() * 1000)
        envelope.signature = signing.sign(envelope, secret, key_id(self.key), audience, now_ms, os.urandom(16))
        return envelope

    async def invoke(self, envelope: Envelope, node: Node | None = None) -> str:
        """What a raw client is told by a node: the text of the reply, or the status."""
        async with grpc.aio.insecure_channel((node or self.node).grpc_address) as channel:
            try:
                reply = await MeshServiceStub(channel).Invoke(
                    envelope, metadata=(("authorization", f"Bearer {self.key}"),), timeout=LIMIT_S
                )
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name} {error.details()}"
            text: str = reply.payload.text
            return text


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Secured]:
    secured = Secured(KeysFile(tmp_path / "keys.json"))
    async with (
        running(config(**secured.settings("n1"))) as secured.node,
        running(config(**secured.settings("n2"))) as secured.other,
        secured.agent(secured.node.grpc_address),
    ):
        yield secured


async def test_what_the_sdk_sends_with_the_secret_is_believed_and_without_it_is_not(mesh: Secured) -> None:
    url = mesh.node.grpc_address
    async with connect(url, api_key=mesh.key, signing_secret=mesh.secret) as caller:
        for number in range(20):
            assert (await caller.request(number, agent_type="echo", timeout=5)).data == number
        reply = await caller.request(
            {"n": [1, 2.5, None], "z": "ü"}, capabilities=[], agent_type="echo", labels={}, timeout=5, session="s",
            priority="HIGH", headers={"b": "1", "a": "2"}, idempotent=True, message_id="mine", dedup_key="k",
        )  # fmt: skip
        assert reply.data == {"n": [1, 2.5, None], "z": "ü"}
        assert (await caller.publish("orders/created", {"n": 1})).matched == 0
    async with connect(url, api_key=mesh.key, signing_secret="") as caller:
        with pytest.raises(PermissionDenied, match="there is none, and what this key sends must be signed"):
            await caller.request("x", agent_type="echo", timeout=5)
    async with connect(url, api_key=mesh.key, signing_secret=signing.text_of(bytes(32))) as caller:
        with pytest.raises(PermissionDenied, match="does not fit"):
            await caller.request("x", agent_type="echo", timeout=5)


async def test_what_a_handler_sends_on_is_signed_with_its_agents_own_secret(mesh: Secured) -> None:
    relay = Agent("relay", url=mesh.node.grpc_address, api_key=mesh.key, signing_secret=mesh.secret)

    @relay.handler
    async def pass_on(data: str, ctx: Context) -> str:
        return str((await ctx.request(data, agent_type="echo")).data)

    async with relay, connect(mesh.node.grpc_address, api_key=mesh.key, signing_secret=mesh.secret) as caller:
        assert (await caller.request("on", agent_type="relay", timeout=5)).data == "on"


async def test_the_sync_client_signs_as_well_and_so_does_the_environment(
    mesh: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REACH_SIGNING_SECRET", mesh.secret)

    def ask() -> object:
        with sync.connect(mesh.node.grpc_address, api_key=mesh.key) as caller:
            return caller.request("hi", agent_type="echo", timeout=5).data

    assert await asyncio.to_thread(ask) == "hi"


def test_a_secret_that_cannot_be_used_is_refused_before_anything_is_dialled() -> None:
    for secret, key in (("nonsense", "reach_0a1b2c3d_x"), (signing.text_of(bytes(32)), "")):
        with pytest.raises(ConnectFailed, match="signing secret") as refused:
            connect("127.0.0.1:1", api_key=key, signing_secret=secret)
        assert "nonsense" not in str(refused.value)


# ---- with bytes that were captured ----


async def test_captured_bytes_are_taken_once(mesh: Secured) -> None:
    captured = mesh.captured()
    assert await mesh.invoke(captured) == "hi"
    assert "PERMISSION_DENIED" in (told := await mesh.invoke(captured)) and "seen before" in told


async def test_at_another_node_they_are_not_taken_at_all(mesh: Secured) -> None:
    told = await mesh.invoke(mesh.captured(), mesh.other)
    assert "PERMISSION_DENIED" in told and "it is for 'n1', and this is node n2" in told


@pytest.mark.parametrize(
    "change",
    [
        pb.Envelope(payload=Payload(text="other")),
        pb.Envelope(target=Target(agent_type="other")),
        pb.Envelope(headers={"a": "b"}),
        pb.Envelope(message_id="other"),
        pb.Envelope(reply_topic="mine"),
    ],
    ids=lambda change: change.ListFields()[0][0].name,
)
async def test_changed_they_are_not_believed(mesh: Secured, change: Envelope) -> None:
    captured = mesh.captured()
    captured.MergeFrom(change)
    assert "does not fit" in await mesh.invoke(captured)


async def test_with_another_time_or_none_they_are_not_believed(mesh: Secured) -> None:
    captured = mesh.captured()
    head = len(captured.signature) - 32 - 16 - 8
    for at in (b"\x00" * 8, b"\xff" * 8, int(time.time() * 1000 + 60_000).to_bytes(8, "big"), b""):
        forged = Envelope()
        forged.CopyFrom(captured)
        forged.signature = captured.signature[:head] + at + captured.signature[head + 8 :]
        told = await mesh.invoke(forged)
        assert "PERMISSION_DENIED" in told and ("does not fit" in told or "malformed" in told)


async def test_signatures_of_any_bytes_are_refused_cleanly_and_the_node_goes_on(mesh: Secured) -> None:
    for data in (b"\x01", b"\x01\xff", bytes(59), os.urandom(1_000), b"\xff" * 100_000):
        captured = mesh.captured()
        captured.signature = data
        assert "PERMISSION_DENIED" in await mesh.invoke(captured)
    assert await mesh.invoke(mesh.captured("m-2")) == "hi"


# ---- sent again ----


async def test_a_request_that_outlives_its_node_is_signed_anew_for_the_next_life(tmp_path: Path) -> None:
    secured = Secured(KeysFile(tmp_path / "keys.json"))
    started, go_on = asyncio.Event(), asyncio.Event()
    with start_node(**secured.settings("n1"), resume_window_s=10.0) as node:
        agent = Agent("slow", url=node.grpc, api_key=secured.agents, signing_secret="")

        @agent.handler
        async def wait(data: str) -> str:
            started.set()
            await go_on.wait()
            return data

        async with agent, connect(node.grpc, api_key=secured.key, signing_secret=secured.secret) as caller:
            asked = asyncio.create_task(caller.request("kept", agent_type="slow", timeout=LIMIT_S))
            await asyncio.wait_for(started.wait(), LIMIT_S)
            node.process.kill()
            await asyncio.to_thread(node.process.wait, LIMIT_S)
            await node.restart()
            go_on.set()
            assert (await asked).data == "kept"
