"""The gRPC server's unary and streaming calls, over real sockets with raw clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.v1 import admin_pb2, registry_pb2
from agentreach.v1.envelope_pb2 import EVENT, Envelope
from agentreach.v1.mesh_pb2 import PublishReply
from reach.adapters.grpc_server import GrpcServer, PortTaken
from reach.core.effects import AuditLine
from tests.support.switchboard import RuleSwitchboard

MESH = "/agentreach.v1.MeshService/"
LIMIT_S = 5.0


class Served:
    """A server with its switchboard and a raw channel to it."""

    def __init__(self, node: RuleSwitchboard, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.node, self.server, self.channel = node, server, channel

    async def unary(self, method: str, data: bytes, timeout: float | None = LIMIT_S) -> bytes:
        """One raw call."""
        return bytes(await self.channel.unary_unary(method)(data, timeout=timeout))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    node = RuleSwitchboard()
    server = GrpcServer(node, listen="127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
        yield Served(node, server, channel)
    await server.stop(0)


def asking(text: str) -> bytes:
    envelope = Envelope(message_id="m1", trace_id="t" * 32)
    envelope.payload.text = text
    return envelope.SerializeToString()


def details_of(error: grpc.aio.AioRpcError) -> tuple[Status, ErrorInfo]:
    trailers = error.trailing_metadata()
    assert trailers is not None
    status = Status.FromString(bytes(trailers["grpc-status-details-bin"]))
    info = ErrorInfo()
    status.details[0].Unpack(info)
    return status, info


async def test_invoke_gives_the_reply(served: Served) -> None:
    reply = Envelope.FromString(await served.unary(MESH + "Invoke", asking("hello")))
    assert (reply.payload.text, reply.correlation_id) == ("hello", "m1")


async def test_the_calls_own_deadline_is_told_to_the_node_and_none_is_none(served: Served) -> None:
    await served.unary(MESH + "Invoke", asking("a"), timeout=3)
    await served.unary(MESH + "Invoke", asking("a"), timeout=None)
    first, second = served.node.deadlines
    assert first is not None and 2 < first <= 3.1  # gRPC rounds up
    assert second is None


async def test_a_failure_becomes_a_status_with_details_that_starts_with_the_code_and_ends_with_the_trace(
    served: Served,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.unary(MESH + "Invoke", asking("refuse"))
    error = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND
    text = error.details() or ""
    assert text.startswith("NO_ROUTE") and text.endswith("t" * 32)
    status, info = details_of(error)
    assert status.message == text
    assert (info.reason, info.domain, info.metadata["trace_id"]) == ("NO_ROUTE", "agentreach", "t" * 32)


async def test_the_largest_error_arrives_whole(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.unary(MESH + "Invoke", asking("verbose"))
    status, info = details_of(caught.value)
    assert status.message == caught.value.details()
    assert status.message.endswith("t" * 32)
    assert info.metadata["hint"] == "ж" * 400


async def test_retry_after_travels_as_retry_info(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.unary(MESH + "Invoke", asking("busy"))
    status, _ = details_of(caught.value)
    retry = RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("method", ["Invoke", "Publish", "InvokeStream"])
async def test_bytes_that_do_not_parse_are_an_invalid_envelope_without_class_names(served: Served, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if method == "InvokeStream":
            async for _ in served.channel.unary_stream(MESH + method)(b"\xff\xfe\xfd", timeout=LIMIT_S):
                pass
        else:
            await served.unary(MESH + method, b"\xff\xfe\xfd")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    text = caught.value.details() or ""
    assert text.startswith("INVALID_ENVELOPE") and "Error" not in text and "class" not in text


@pytest.mark.parametrize(
    "method", ["RegistryService/Resolve", "AdminService/GetTrace", "AdminService/Explain", "RegistryService/GetAgent"]
)
async def test_bytes_that_do_not_parse_are_answered_on_every_service(served: Served, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.unary("/agentreach.v1." + method, b"\xff\xfe\xfd")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_bug_is_internal_with_a_reference_that_is_logged_and_nothing_else(
    served: Served, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        if streaming:
            async for _ in served.channel.unary_stream(MESH + "InvokeStream")(asking("crash"), timeout=LIMIT_S):
                pass
        else:
            await served.unary(MESH + "Invoke", asking("crash"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    _, info = details_of(caught.value)
    assert "hunter2" not in str(caught.value) and "RuntimeError" not in str(caught.value)
    references = {getattr(record, "reference", "") for record in caplog.records}
    assert info.metadata["reference"] in references


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cancellation_inside_the_node_ends_a_call_without_deadline_with_a_status(
    served: Served, streaming: bool
) -> None:
    async def call() -> None:
        if streaming:
            async for _ in served.channel.unary_stream(MESH + "InvokeStream")(asking("cancel")):
                pass
        else:
            await served.unary(MESH + "Invoke", asking("cancel"), timeout=None)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(LIMIT_S):
            await call()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert (caught.value.details() or "").startswith("CANCELLED")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_cancels_cancels_the_request(served: Served, streaming: bool) -> None:
    method = MESH + ("InvokeStream" if streaming else "Invoke")
    stub = served.channel.unary_stream(method) if streaming else served.channel.unary_unary(method)
    call = stub(asking("hang"))
    await asyncio.wait_for(served.node.hanging.wait(), LIMIT_S)
    call.cancel()
    await asyncio.wait_for(served.node.cancelled.wait(), LIMIT_S)


async def test_invoke_stream_gives_every_item_in_order(served: Served) -> None:
    items = [
        Envelope.FromString(data).sequence
        async for data in served.channel.unary_stream(MESH + "InvokeStream")(asking("5"), timeout=LIMIT_S)
    ]
    assert items == [0, 1, 2, 3, 4]


async def test_a_stream_cut_by_an_error_says_after_how_many_items(served: Served) -> None:
    items = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.channel.unary_stream(MESH + "InvokeStream")(asking("-3"), timeout=LIMIT_S):
            items += 1
    _, info = details_of(caught.value)
    assert (items, info.metadata["items"]) == (3, "3")


async def test_a_message_above_grpcs_usual_limit_reaches_the_node_which_answers_it(served: Served) -> None:
    envelope = Envelope()
    envelope.payload.body = b"x" * (5 << 20)
    reply = Envelope.FromString(await served.unary(MESH + "Invoke", envelope.SerializeToString()))
    assert len(reply.payload.body) == 5 << 20


async def test_publish_without_a_type_is_an_event(served: Served) -> None:
    reply = PublishReply.FromString(await served.unary(MESH + "Publish", Envelope().SerializeToString()))
    assert reply.accepted == 1
    assert served.node.published[0].type == EVENT


async def test_registry_and_admin_answer_what_the_node_knows(served: Served) -> None:
    record = await served.unary(
        "/agentreach.v1.RegistryService/GetAgent", registry_pb2.GetAgentRequest(agent_id="echo/1").SerializeToString()
    )
    assert registry_pb2.AgentRecord.FromString(record).agent_type == "echo"
    node = admin_pb2.GetNodeReply.FromString(await served.unary("/agentreach.v1.AdminService/GetNode", b""))
    assert node.node.node_id == "n1"


@pytest.mark.parametrize(
    "method",
    [
        "RegistryService/Register",
        "RegistryService/Heartbeat",
    ],
)
async def test_methods_of_later_issues_say_so(served: Served, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.unary("/agentreach.v1." + method, b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "comes with a later version of Agent-Reach" in (caught.value.details() or "")


async def test_a_watch_is_told_and_ended_as_the_node_says(served: Served) -> None:
    call = served.channel.unary_stream("/agentreach.v1.RegistryService/WatchAgents")(b"", timeout=LIMIT_S)
    replies = [registry_pb2.WatchAgentsReply.FromString(reply) async for reply in call]
    assert [record.agent_id for reply in replies for record in reply.snapshot] == ["echo/1"]
    assert await call.code() is grpc.StatusCode.OK
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.channel.unary_stream("/agentreach.v1.RegistryService/WatchAgents")(b"\xff"):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_server_on_the_port_is_refused_with_one_line(served: Served) -> None:
    with pytest.raises(PortTaken) as caught:
        await GrpcServer(served.node, listen=served.server.address).start()
    assert served.server.address in str(caught.value) and "\n" not in str(caught.value)


async def test_a_hundred_thousand_headers_are_refused_and_the_server_goes_on(served: Served) -> None:
    headers = tuple((f"h{number}", "x") for number in range(100_000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(MESH + "Invoke")(asking("a"), metadata=headers, timeout=LIMIT_S)
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert await served.unary(MESH + "Invoke", asking("a"))


async def test_an_operators_call_that_its_client_gave_up_is_told_as_cancelled(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def for_ever(request: admin_pb2.DrainAgentRequest, *_: object) -> admin_pb2.DrainAgentReply:
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            over.set()

    lines: asyncio.Queue[AuditLine] = asyncio.Queue()
    monkeypatch.setattr(served.node, "everywhere", for_ever)
    monkeypatch.setattr(served.node, "audit", lines.put_nowait)
    call = served.channel.unary_unary("/agentreach.v1.AdminService/DrainAgent")(b"")
    async with asyncio.timeout(LIMIT_S):
        await begun.wait()
        call.cancel()
        line = await lines.get()
    assert over.is_set() and (line.action, line.outcome) == ("admin.DrainAgent", "CANCELLED")
