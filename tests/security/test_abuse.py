"""Attacks on the transport and on what others need, by clients that no SDK wrote: each is refused, and costs little.

After each of them the node answers everybody else, and has not grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import random
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from agent_sdk import Agent, NoRoute, Overloaded, connect
from agentreach.aio import options
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Payload
from agentreach.v1.frame_pb2 import Frame, Hello, Signal
from agentreach.v1.registry_pb2 import HEALTHY, AgentRecord, GetAgentRequest
from agentreach.wire.framing import ENVELOPES, varint
from reach.adapters.grpc_server import GrpcServer
from reach.adapters.http_server import HttpServer
from tests.support.agents import eventually
from tests.support.api_keys import EVERYTHING, KeysFile
from tests.support.deep import deep
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import RawLink, call, raw_link, raw_stream, request, response, to
from tests.support.switchboard import RuleSwitchboard

MIB = 1 << 20
GROWTH_BYTES_MAX = 20 * MIB
INVOKE, CONNECT = "/agentreach.v1.MeshService/Invoke", "/agentreach.v1.MeshService/Connect"
HEALTH = "/grpc.health.v1.Health/Check"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\x04" + bytes(5)
MAX_CONCURRENT_STREAMS = 3
SILENT = 12
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node(hello_timeout_s=2.0, silent_streams_max=SILENT, principal_silent_streams_max=SILENT) as running:
        yield running


@contextlib.asynccontextmanager
async def unharmed(node: NodeProcess) -> AsyncIterator[RawLink]:
    """An agent on a link of its own that is there before, and answers as before; the node has not grown."""
    async with raw_link(node.grpc, agents=["bystander/1"], taker=lambda asked: response(asked, "still here")) as link:
        message = request(target=to("bystander"))

        async def answers() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return bool(await call(node.grpc, "MeshService/Invoke", message))
            return False

        await eventually(answers, "the bystander answers")
        before = node.rss_bytes()
        yield link
        assert Envelope.FromString(await call(node.grpc, "MeshService/Invoke", message)).payload.text == "still here"
        assert (await asyncio.to_thread(node.get, "/healthz"))[0] == 200
        assert link.reader is not None and not link.reader.done(), "the bystander's link was ended"
        assert node.rss_bytes() - before < GROWTH_BYTES_MAX, "the node has grown"


async def is_healthy(node: NodeProcess, agent_id: str) -> bool:
    asked = GetAgentRequest(agent_id=agent_id).SerializeToString()
    return AgentRecord.FromString(await call(node.grpc, "RegistryService/GetAgent", asked)).status == HEALTHY


async def refused(address: str, method: str, data: bytes = b"", **how: object) -> tuple[grpc.StatusCode, str]:
    """The status of a call that must fail."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            unary: Any = channel.unary_unary(method)
            await unary(data, timeout=LIMIT_S, **how)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError("it was answered")


# ---- gRPC: what comes before a message is looked at ----


def bombs(address: str) -> list[grpc.RpcError]:
    """How a call, and a stream, end that bring 64 KiB which would be 64 MiB."""
    how: dict[str, Any] = {"compression": grpc.Compression.Gzip, "timeout": LIMIT_S}
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        unary: Any = channel.unary_unary(INVOKE)
        stream: Any = channel.stream_stream(CONNECT)
        ends: list[grpc.RpcError] = []
        with pytest.raises(grpc.RpcError) as ended:
            unary(bytes(64 * MIB), **how)
        ends.append(ended.value)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream(iter([bytes(64 * MIB)]), **how))
        return [*ends, ended.value]


async def test_a_compression_bomb_is_not_unpacked(node: NodeProcess) -> None:
    async with unharmed(node):
        for error in await asyncio.to_thread(bombs, node.grpc):
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, error.details()
            assert "gzip" in (error.details() or "")


async def test_a_message_above_grpcs_limit_ends_its_call_alone(node: NodeProcess) -> None:
    async with unharmed(node):
        code, _ = await refused(node.grpc, INVOKE, bytes(17 * MIB))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "headers",
    [[("x-long", "v" * 17_000)], [(f"x-{number}", "v") for number in range(10_000)], [("x-many", "v" * 100)] * 2_000],
    ids=["one of 17 kB", "ten thousand", "two thousand of one name"],
)
async def test_headers_beyond_the_limit_are_refused_before_the_method_is(
    node: NodeProcess, headers: list[tuple[str, str]]
) -> None:
    async with unharmed(node):
        code, _ = await refused(node.grpc, HEALTH, metadata=headers)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_headers_below_the_limit_pass_always(node: NodeProcess) -> None:
    async with grpc.aio.insecure_channel(node.grpc) as channel:
        check: Any = channel.unary_unary(HEALTH)
        for _ in range(20):  # between its two limits gRPC would refuse some of them, at random
            await check(b"", metadata=[("x-long", "v" * 15_000)], timeout=LIMIT_S)


async def http2(address: str, *pieces: bytes) -> bytes:
    """What the node says to these bytes until it ends the connection, or says nothing for a while."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    heard = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        while True:
            async with asyncio.timeout(1.0):
                if not (data := await reader.read(65_536)):
                    return heard
            heard += data
    except (TimeoutError, ConnectionError):
        return heard
    finally:
        writer.close()


async def test_random_bytes_instead_of_http2_and_after_its_preface_end_their_connection_alone(
    node: NodeProcess,
) -> None:
    rng = random.Random(7)
    async with unharmed(node):
        for start in (b"", PREFACE, PREFACE + SETTINGS):
            await asyncio.gather(*(http2(node.grpc, start + rng.randbytes(4_000)) for _ in range(20)))


async def test_a_connection_may_hold_a_bounded_number_of_streams(node: NodeProcess) -> None:
    heard = await http2(node.grpc, PREFACE + SETTINGS)
    size = int.from_bytes(heard[:3], "big")
    assert heard[3] == 4, "its first frame is SETTINGS"
    settings = dict(struct.iter_unpack(">HI", heard[9 : 9 + size]))
    assert settings[MAX_CONCURRENT_STREAMS] == options.STREAMS_MAX


@pytest.mark.parametrize(
    ("option", "limit_ms", "said"),
    [
        ("grpc.server_handshake_timeout_ms", options.HANDSHAKE_MS, b""),
        ("grpc.max_connection_idle_ms", options.IDLE_MS, PREFACE + SETTINGS),
    ],
)
async def test_a_connection_that_says_or_asks_nothing_is_ended(
    option: str, limit_ms: int, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = dict(options.SERVER_OPTIONS) | {option: 200}
    monkeypatch.setattr("reach.adapters.grpc_server.server.SERVER_OPTIONS", list(shorter.items()))
    server = GrpcServer(RuleSwitchboard(), listen="127.0.0.1:0")
    await server.start()
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    try:
        async with asyncio.timeout(LIMIT_S):
            while await reader.read(4_096):
                pass
    finally:
        writer.close()
        await server.stop(0)
    assert dict(options.SERVER_OPTIONS)[option] == limit_ms


# ---- streams without a hello ----


async def test_streams_that_say_no_hello_are_few_and_their_places_come_back(node: NodeProcess) -> None:
    async with unharmed(node), contextlib.AsyncExitStack() as silent:
        for _ in range(SILENT):
            await silent.enter_async_context(raw_stream(node.grpc))
        async with grpc.aio.insecure_channel(node.grpc) as channel:
            one_more: Any = channel.stream_stream(CONNECT)()
            assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "principal_silent_streams_max" in await one_more.details()
            assert await retry_after_s(one_more) > 0
        await silent.aclose()
        async with contextlib.AsyncExitStack() as links:  # those that speak take no place for long
            for _ in range(SILENT + 3):
                await links.enter_async_context(raw_link(node.grpc))
    assert await node.metric("reach_quota_refusals_total", kind="silent_streams_max") >= 1


async def test_a_hello_that_comes_too_slowly_gives_its_place_back(node: NodeProcess) -> None:
    async with contextlib.AsyncExitStack() as silent:
        streams = [await silent.enter_async_context(raw_stream(node.grpc)) for _ in range(SILENT)]
        for stream in streams:
            assert "no hello" in (await stream.until("goodbye")).reason
        async with raw_link(node.grpc) as link:
            assert link.welcome.link_id


async def test_an_sdk_that_comes_while_all_places_are_taken_gets_in_when_they_are_free(node: NodeProcess) -> None:
    async with contextlib.AsyncExitStack() as silent:
        for _ in range(SILENT):
            await silent.enter_async_context(raw_stream(node.grpc))
        async with connect(node.grpc, timeout=LIMIT_S) as mesh:  # they end by themselves after two seconds
            with pytest.raises(NoRoute):
                await mesh.request("hi", agent_type="nobody", timeout=LIMIT_S)


async def retry_after_s(of: Any) -> float:
    trailers = dict(await of.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    for detail in status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return 0.0


# ---- one message of many ----


async def test_random_bytes_as_a_frame_end_that_link_alone(node: NodeProcess) -> None:
    rng = random.Random(11)
    async with unharmed(node):
        for _ in range(10):
            async with raw_link(node.grpc, agents=["garbage/1"]) as link:
                await link.write(b"\xff" + rng.randbytes(2_000))
                assert (await link.until("goodbye")).reason == "bytes that are not a Frame"


async def test_a_message_nested_too_deep_fails_alone_on_a_shared_link(node: NodeProcess) -> None:
    async with unharmed(node), raw_link(node.grpc) as link:
        bad = deep(Envelope(message_id="deep", trace_id="t", timeout_ms=5_000, target=to("bystander")), 1_000)
        good = request(message_id="good", target=to("bystander")).SerializeToString()
        await link.write(frame_of(link, good, bad, good.replace(b"good", b"next")))
        answers = {each.correlation_id: each for each in [await link.envelope() for _ in range(3)]}
        assert answers["deep"].error.code == codes.INVALID_ENVELOPE and answers["deep"].trace_id == "t"
        assert answers["good"].payload.text == answers["next"].payload.text == "still here"


async def test_an_answer_nested_too_deep_fails_its_request_and_the_agent_stays(node: NodeProcess) -> None:
    async with unharmed(node), raw_link(node.grpc, agents=["diver/1"], taker=lambda _: None) as agent:
        await eventually(lambda: is_healthy(node, "diver/1"), "its probe was answered")
        asking = asyncio.create_task(refused(node.grpc, INVOKE, request(target=to("diver")).SerializeToString()))
        asked = await agent.envelope()
        await agent.write(frame_of(agent, deep(response(asked), 200)))
        code, text = await asking
        assert code is grpc.StatusCode.UNKNOWN and "cannot be read" in text
        again = asyncio.create_task(call(node.grpc, "MeshService/Invoke", request(target=to("diver"))))
        await agent.send(response(await agent.envelope(), "up again"))
        assert Envelope.FromString(await again).payload.text == "up again"


async def test_no_call_gets_a_message_to_an_agent_that_the_agents_parser_refuses(node: NodeProcess) -> None:
    async with unharmed(node):
        refusals = 0
        for levels in range(44, 54):
            data = deep(request(target=to("bystander")), levels)
            try:
                reply = Envelope.FromString(await call(node.grpc, "MeshService/Invoke", data))
                assert reply.payload.text == "still here"
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
                refusals += 1
        assert 0 < refusals < 10


async def test_payloads_around_the_limit_cost_nothing_but_themselves(node: NodeProcess) -> None:
    async with unharmed(node), raw_link(node.grpc) as link:
        for size in (MIB, MIB + 1, 5 * MIB):
            payload = Payload(content_type="application/octet-stream", body=bytes(size))
            await link.send(request(message_id=str(size), target=to("bystander"), payload=payload))
        answers = {each.correlation_id: each for each in [await link.envelope() for _ in range(3)]}
        assert answers[str(MIB)].payload.text == "still here"
        for size in (MIB + 1, 5 * MIB):
            assert answers[str(size)].error.code == codes.PAYLOAD_TOO_LARGE


def frame_of(link: RawLink, *envelopes: bytes) -> bytes:
    """The next numbered frame of a link, of envelopes that are no protobuf library's."""
    link.seq += 1
    head = Frame(seq=link.seq, ack=link.accepted).SerializeToString()
    return head + b"".join(ENVELOPES + varint(len(each)) + each for each in envelopes)


# ---- HTTP ----


async def http(address: str, *pieces: bytes, every_s: float = 0.0) -> bytes:
    """The node's answer to these bytes; it may come, and end the connection, before all are sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(every_s)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(LIMIT_S):
            return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


HEAD = b"POST /metrics HTTP/1.1\r\nHost: node\r\n"
CHUNK = b"100000\r\n" + bytes(MIB) + b"\r\n"
BODIES = {
    "200 MiB in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[CHUNK] * 200),
    "200 MiB with their length": (HEAD + b"Content-Length: 209715200\r\n\r\n", *[bytes(MIB)] * 200),
    "more than it says": (HEAD + b"Content-Length: 10\r\n\r\n", bytes(MIB)),
    "spaces without end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 1_000),
    "a bomb": (
        HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"%x\r\n" % len(bomb := gzip.compress(bytes(50 * MIB), 9)) + bomb + b"\r\n0\r\n\r\n",
    ),
}
"""What is sent as the body of a request to pages that take none."""


@pytest.mark.parametrize("body", BODIES)
async def test_a_body_is_refused_and_not_kept(node: NodeProcess, body: str) -> None:
    async with unharmed(node):
        answer = (await http(node.http, *BODIES[body])).split(b" ")
        assert answer[1] in (b"413", b"400"), "400: what comes after the length that it gave is no request"


@pytest.mark.parametrize(
    ("head", "answers"),
    [
        (b"".join(b"X-%d: v\r\n" % number for number in range(10_000)), (b"400", b"431")),
        (b"X-Long: " + b"v" * 200_000 + b"\r\n", (b"400", b"431")),
        (b"X-Endless: " + b"v" * 40 * MIB, (b"400", b"431")),
    ],
    ids=["ten thousand headers", "one of 200 kB", "one of 40 MiB without an end"],
)
async def test_long_heads_are_refused(node: NodeProcess, head: bytes, answers: tuple[bytes, ...]) -> None:
    async with unharmed(node):
        start = b"GET /healthz HTTP/1.1\r\nHost: node\r\n" + head + b"\r\n"
        answer = await http(node.http, *[start[at : at + 65_536] for at in range(0, len(start), 65_536)])
        assert answer.split(b" ")[1] in answers, answer


@pytest.fixture
async def pages() -> AsyncIterator[HttpServer]:
    server = HttpServer(
        listen="127.0.0.1:0", metrics=lambda: (b"", "text/plain"), unready_reason=lambda: "", head_s=0.3
    )
    await server.start()
    yield server
    await server.stop()


async def test_a_head_that_comes_slowly_is_ended_and_so_is_silence(pages: HttpServer) -> None:
    drip = [bytes((octet,)) for octet in b"GET /healthz HTTP/1.1\r\nHost: " + b"n" * 1_000]
    assert (await http(pages.address, *drip, every_s=0.02)).startswith(b"HTTP/1.1 408 ")
    assert (await http(pages.address)).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_asks_again_and_again_goes_on(pages: HttpServer) -> None:
    host, _, port = pages.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(400):  # more than one head may have, together
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: node\r\nX-Pad: " + b"v" * 100 + b"\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(3) == b"ok\n"
    writer.close()


HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n"


async def test_who_holds_connections_and_asks_nothing_keeps_nobody_out(
    pages: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: who held them all kept a supervisor out, which would have ended a node that was well."""
    monkeypatch.setattr("reach.adapters.http_guard.CONNECTIONS_MAX", 5)
    host, _, port = pages.address.rpartition(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
    held[0][1].write(HEALTHZ)  # and then it is silent
    async with asyncio.timeout(LIMIT_S):
        await held[0][0].readuntil(b"ok\n")
        assert (await http(pages.address, HEALTHZ)).startswith(b"HTTP/1.1 200 ")
        assert await held[0][0].read() == b"", "the eldest has given way"
        held[4][1].write(HEALTHZ)
        assert (await held[4][0].readline()).startswith(b"HTTP/1.1 200 ")
    for _, writer in held:
        writer.close()


async def test_connections_beyond_the_limit_are_closed_at_once_where_all_have_asked(
    pages: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reach.adapters.http_guard.CONNECTIONS_MAX", 2)
    asked, let_go = asyncio.Semaphore(0), asyncio.Event()

    async def slowly(authorization: object, certificate: bytes) -> None:
        asked.release()
        await let_go.wait()

    pages.may_scrape = slowly
    get = HEALTHZ.replace(b"healthz", b"metrics")
    answers = [asyncio.create_task(http(pages.address, get)) for _ in range(2)]
    async with asyncio.timeout(LIMIT_S):
        for _ in answers:
            await asked.acquire()
        assert await http(pages.address, HEALTHZ) == b""
        let_go.set()
        assert all([(await answer).startswith(b"HTTP/1.1 200 ") for answer in answers])


# ---- limits of principals ----


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeysFile:
    return KeysFile(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def principals(keys: KeysFile) -> dict[str, str]:
    return {name: keys.add(name, tenant="acme", **EVERYTHING) for name in ("agents", "flood", "calm", "bulky")}


@pytest.fixture(scope="module")
def limited(keys: KeysFile, principals: dict[str, str]) -> Iterator[NodeProcess]:
    with start_node(
        auth="keys", metrics_access="open", keys_file=str(keys.path), principal_requests_per_s=50, quota_burst_s=1.0,
        principal_bytes_per_s=4 * MIB, principal_links_max=4, principal_streams_max=3,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
async def echo(limited: NodeProcess, principals: dict[str, str]) -> AsyncIterator[None]:
    agent = Agent("echo", url=limited.grpc, api_key=principals["agents"])

    @agent.handler
    async def answer(data: Any) -> Any:
        return data

    async with agent:
        yield


async def test_one_principal_at_its_limit_is_told_so_and_another_is_not_touched(
    limited: NodeProcess, principals: dict[str, str], echo: None
) -> None:
    async with (
        connect(limited.grpc, api_key=principals["flood"]) as flood,
        connect(limited.grpc, api_key=principals["calm"]) as calm,
    ):
        flooding = [asyncio.create_task(flood.request("hi", agent_type="echo", timeout=20)) for _ in range(400)]
        answers = [await calm.request("hi", agent_type="echo", timeout=20) for _ in range(40)]
        assert len(answers) == 40
        ended = await asyncio.gather(*flooding, return_exceptions=True)
    failures = [each for each in ended if isinstance(each, BaseException)]
    assert failures and len(failures) < 400
    assert all(isinstance(each, Overloaded) for each in failures), failures[0]
    assert all("principal flood" in str(each) for each in failures)
    assert await limited.metric("reach_quota_refusals_total", kind="requests_per_s") >= len(failures)


async def test_bytes_of_links_and_of_calls_count_as_they_came(limited: NodeProcess, principals: dict[str, str]) -> None:
    before = await limited.metric("reach_quota_refusals_total", kind="bytes_per_s")
    async with connect(limited.grpc, api_key=principals["bulky"]) as bulky:
        sent = [bulky.request(os.urandom(900_000), agent_type="nobody", timeout=5) for _ in range(30)]
        await asyncio.gather(*sent, return_exceptions=True)
    assert await limited.metric("reach_quota_refusals_total", kind="bytes_per_s") > before


async def test_queries_count_too_and_are_told_when_to_come_again(
    limited: NodeProcess, principals: dict[str, str]
) -> None:
    metadata = [("authorization", f"Bearer {principals['calm']}")]
    async with grpc.aio.insecure_channel(limited.grpc) as channel:
        listing: Any = channel.unary_unary("/agentreach.v1.RegistryService/ListAgents")
        asked = [listing(b"", metadata=metadata, timeout=LIMIT_S) for _ in range(200)]
        found = [(await each.code(), each) for each in asked]
        late = [each for code, each in found if code is grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert late and any(code is grpc.StatusCode.OK for code, _ in found)
        assert 0 < await retry_after_s(late[-1]) < 1
        assert "principal calm" in await late[-1].details()


async def test_a_link_too_many_hears_why(limited: NodeProcess, principals: dict[str, str]) -> None:
    async with contextlib.AsyncExitStack() as links:
        for _ in range(4):
            await links.enter_async_context(raw_link(limited.grpc, key=principals["flood"]))
        stream = await links.enter_async_context(raw_stream(limited.grpc, key=principals["flood"]))
        await stream.write(Frame(signals=[Signal(hello=Hello(protocol_version=1))]))
        assert "principal_links_max" in (await stream.until("goodbye")).reason
        other = await links.enter_async_context(raw_link(limited.grpc, key=principals["calm"]))
        assert other.welcome.link_id
