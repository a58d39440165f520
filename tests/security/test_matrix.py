"""Every door of a node that runs, found by its own reflection, with everything that one may show at it.

What is right for a method is written down here once more, and not asked of the code. All refusals are looked at from a
client that never sends a byte of its message: they must come all the same, within a second.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.frame_pb2 import Goodbye
from agentreach.v1.registry_pb2 import WatchAgentsRequest
from tests.security.guarded import Guarded
from tests.security.raw import Ended, ask, bearer, by_hand, channel_to, code_of, knock, reflected
from tests.support.api_keys import EVERYTHING
from tests.support.rawlink import raw_link, response

REFUSED_S = 1.0
ENDED_S = 5.0

HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection."
ADMIN, REGISTRY, MESH, PEER = (f"/agentreach.v1.{each}Service/" for each in ("Admin", "Registry", "Mesh", "Peer"))
HIDDEN = (f"{PEER}Link", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
          "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")  # fmt: skip
"""What reflection does not tell of, and is served all the same."""
NOWHERE = (f"{ADMIN}Nothing", f"{MESH}Nothing", "/no.such.Service/Method", "/nothing", f"{ADMIN}../MeshService/Invoke")

OF_ALL_TENANTS = {f"{ADMIN}{each}" for each in ("GetNode", "ListNodes", "DrainNode", "SetConfig")} | {
    f"{REGISTRY}SetVersionPolicy"
}
READS = {
    f"{REGISTRY}{each}"
    for each in ("Resolve", "GetAgent", "ListAgents", "ListCapabilities", "WatchAgents", "GetVersionPolicy")
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("keys"))
    with made.node:
        yield made


@pytest.fixture
async def channel(guarded: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(guarded.node.grpc) as channel:
        yield channel


async def methods_of(channel: grpc.aio.Channel) -> list[str]:
    """All of a node's doors, and some that are none."""
    found = await reflected(channel)
    shapes = set(found.values())
    assert shapes >= {"unary_unary", "unary_stream", "stream_stream"}
    assert set(found) >= OF_ALL_TENANTS | READS
    return sorted({*found, *HIDDEN, *NOWHERE})


def is_open(method: str) -> bool:
    return method.startswith((HEALTH, REFLECTION))


def expected(method: str, *, admin: bool, owner: bool) -> str:
    """How a call with garbage for a message ends, for a principal without any right but perhaps an admin's."""
    if method == f"{PEER}Link":
        return "PERMISSION_DENIED"
    if method.startswith(MESH) or method in READS:
        return "in"
    if method in OF_ALL_TENANTS:
        return "in" if owner else "PERMISSION_DENIED"
    return "in" if admin else "PERMISSION_DENIED"


def is_in(ended: Ended) -> bool:
    """Whether the message was looked at: it is garbage, or the method is none, and that was said."""
    return ended.answered or ended.code in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED")


async def test_a_stranger_is_refused_at_every_door_at_once_and_never_sends_a_byte(
    guarded: Guarded, channel: grpc.aio.Channel
) -> None:
    wrong: list[object] = []
    secret = guarded.root.split("_", 2)[2]
    for method in await methods_of(channel):
        if is_open(method):
            continue
        for what, metadata in guarded.strangers.items():
            ended = await knock(channel, method, metadata)
            if ended.code != "UNAUTHENTICATED" or ended.after_s > REFUSED_S or secret in ended.text:
                wrong.append((method, what, ended))
    assert not wrong, wrong[:10]
    assert secret not in guarded.node.log and "Traceback" not in guarded.node.log


async def test_health_and_reflection_are_open_on_loopback_also_to_whoever_shows_nonsense(
    guarded: Guarded, channel: grpc.aio.Channel
) -> None:
    for metadata in guarded.strangers.values():
        health = await knock(channel, f"{HEALTH}Check", metadata, b"")
        assert health.answered, health
    assert await reflected(channel)


@pytest.mark.parametrize("who", ["poor", "root_elsewhere", "root"])
async def test_a_principal_passes_the_doors_that_its_rights_open_and_no_other(
    guarded: Guarded, channel: grpc.aio.Channel, who: str
) -> None:
    wrong: list[object] = []
    for method in await methods_of(channel):
        if is_open(method):
            continue
        admin, owner = who != "poor", who == "root"
        right = expected(method, admin=admin, owner=owner)
        refused = right != "in"
        ended = await knock(
            channel, method, bearer(getattr(guarded, who)), None if refused or method in NOWHERE else b"\xff\xff"
        )
        if (refused and (ended.code != right or ended.after_s > REFUSED_S)) or (not refused and not is_in(ended)):
            wrong.append((method, right, ended))
    assert not wrong, wrong[:10]


async def test_no_shape_of_call_lets_a_message_through_without_the_right_to_send_it(
    guarded: Guarded, channel: grpc.aio.Channel
) -> None:
    envelope = Envelope(target=Target(agent_type="x"), timeout_ms=500, payload=Payload(text="x"))
    event = Envelope(target=Target(topic="t"), payload=Payload(text="x"))
    for key, code in ((guarded.poor, "PERMISSION_DENIED"), (guarded.rich, "NOT_FOUND")):
        assert await code_of(channel, "MeshService/Invoke", envelope, key) == code
        streamed = await knock(channel, f"{MESH}InvokeStream", bearer(key), envelope.SerializeToString())
        assert streamed.code == code
    assert await code_of(channel, "MeshService/Publish", event, guarded.poor) == "PERMISSION_DENIED"
    assert await code_of(channel, "MeshService/Publish", event, guarded.rich) == "OK"


async def test_headers_that_no_grpc_client_would_send_open_nothing(guarded: Guarded) -> None:
    key = guarded.root.encode()
    odd = [
        b"Bearer " + key + b"\r\n",
        b"Bearer " + key + b"\r\nx-more: 1",
        b"Bearer " + key + b"\0",
        b"\0Bearer " + key,
        b"Bearer \xff\xfe" + key,
        "Bearer ключ".encode(),
        b"Bearer\t" + key,
        b"Bearer " + b"k" * 100_000,
    ]
    address = guarded.node.grpc
    for value in odd:
        seen = await by_hand(address, f"{ADMIN}GetNode", [(b"authorization", value)], b"", 2.0)
        assert seen.ended and not seen.data and seen.after_s < REFUSED_S, value[:40]
    for name in (b"Authorization", b"AUTHORIZATION", b"authorization ", b"\0authorization", b"author\nization"):
        seen = await by_hand(address, f"{ADMIN}GetNode", [(name, b"Bearer " + key)], b"", 2.0)
        assert seen.ended and not seen.data and seen.after_s < REFUSED_S, name
    two = [(b"authorization", b"Bearer " + key), (b"authorization", b"Bearer wrong")]
    assert not (await by_hand(address, f"{ADMIN}GetNode", two)).data
    right = await by_hand(address, f"{REGISTRY}ListAgents", [(b"authorization", b"Bearer " + key)], b"\x0a\x00")
    assert right.data  # by hand it goes as well, if it is right


async def test_a_stranger_that_sends_its_headers_and_then_nothing_is_ended_within_a_second(guarded: Guarded) -> None:
    for method in (f"{MESH}Invoke", f"{MESH}Connect", f"{PEER}Link", f"{ADMIN}GetNode", f"{REGISTRY}WatchAgents"):
        seen = await by_hand(guarded.node.grpc, method, [], b"")
        assert seen.ended and seen.after_s < REFUSED_S, method


# ---- the HTTP side ----


async def fetched(address: str, page: str, *authorization: str) -> int:
    """The status of a page."""

    def fetch() -> int:
        request = urllib.request.Request(f"http://{address}{page}")
        for value in authorization:
            request.add_header("Authorization", value)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    return await asyncio.to_thread(fetch)


LIMIT = 5.0


async def test_metrics_are_for_scrapers_and_admins_and_the_checks_for_everybody(guarded: Guarded) -> None:
    http = guarded.node.http
    assert await fetched(http, "/healthz") == 200
    assert await fetched(http, "/readyz") == 200
    for shown in ("", "   ", "Bearer", "Bearer wrong", f"Basic {guarded.root}", guarded.root):
        assert await fetched(http, "/metrics", shown) == 401, shown
    assert await fetched(http, "/metrics") == 401
    for ended in (guarded.expired, guarded.revoked):
        assert await fetched(http, "/metrics", f"Bearer {ended}") == 401
    for other in (guarded.poor, guarded.rich, guarded.root_elsewhere):  # they tell of all tenants
        assert await fetched(http, "/metrics", f"Bearer {other}") == 403
    assert await fetched(http, "/metrics", f"Bearer {guarded.scraper}") == 200
    assert await fetched(http, "/metrics", f"Bearer {guarded.root}") == 200


# ---- closed doors ----


async def test_health_and_reflection_can_be_closed(tmp_path: Path) -> None:
    closed = Guarded(tmp_path, health_access="closed", reflection_access="closed")
    with closed.node:
        async with channel_to(closed.node.grpc) as channel:
            for method in (f"{HEALTH}Check", f"{HEALTH}Watch", *HIDDEN[1:]):
                for metadata in ((), bearer("wrong"), bearer(closed.revoked)):
                    ended = await knock(channel, method, metadata)
                    assert ended.code == "UNAUTHENTICATED" and ended.after_s < REFUSED_S, (method, ended)
            assert (await knock(channel, f"{HEALTH}Check", bearer(closed.poor), b"")).answered
            for method in HIDDEN[1:]:
                assert (await knock(channel, method, bearer(closed.poor))).code == "PERMISSION_DENIED"
                asked = b"\x3a\x00"  # list_services
                assert (await knock(channel, method, bearer(closed.root), asked)).answered


# ---- while a key ends ----


async def test_a_key_that_is_revoked_ends_every_stream_that_it_opened(guarded: Guarded) -> None:
    address = guarded.node.grpc
    key = guarded.keys.add("short", **EVERYTHING)
    started: list[Envelope] = []
    ended: list[Envelope] = []
    all_started, all_ended = asyncio.Event(), asyncio.Event()

    def never(envelope: Envelope) -> Envelope | None:
        if envelope.type == 5:
            ended.append(envelope)
            if len(ended) == 3:
                all_ended.set()
            held = next(each for each in started if each.entry == envelope.entry)
            return response(held, "cancelled")
        started.append(envelope)
        if len(started) == 3:
            all_started.set()
        return None

    async with raw_link(address, agents=["slow/1"], taker=never, key=guarded.rich) as agent:
        async with channel_to(address) as channel, raw_link(address, key=key, name="c") as link:
            watch: Any = channel.unary_stream("/agentreach.v1.RegistryService/WatchAgents")(
                WatchAgentsRequest().SerializeToString(), metadata=bearer(key)
            )
            await watch.read()
            call = Envelope(target=Target(agent_type="slow"), timeout_ms=60_000, payload=Payload(text="x"))
            asked = asyncio.create_task(end_of_invoke(channel, call, key))
            streamed = asyncio.create_task(
                knock(channel, f"{MESH}InvokeStream", bearer(key), call.SerializeToString(), 30)
            )
            await link.send(Envelope(message_id="by link", target=call.target, timeout_ms=60_000))
            async with asyncio.timeout(LIMIT):
                await all_started.wait()
            guarded.keys.revoke(key)
            async with asyncio.timeout(ENDED_S):
                goodbye: Goodbye = await link.until("goodbye", ENDED_S)
                assert goodbye.code == Goodbye.UNAUTHENTICATED
                assert await asked == ("UNAUTHENTICATED", "true"), "and its handler had begun"
                assert (await streamed).code == "UNAUTHENTICATED"
                with pytest.raises(grpc.aio.AioRpcError) as gone:
                    while await watch.read() is not grpc.aio.EOF:
                        pass
                assert gone.value.code() is grpc.StatusCode.UNAUTHENTICATED
                await all_ended.wait()  # down to the handlers
            assert await code_of(channel, "RegistryService/ListAgents", b"", key) == "UNAUTHENTICATED"
        assert agent.welcome.agents[0].generation


async def end_of_invoke(channel: grpc.aio.Channel, envelope: Envelope, key: str) -> tuple[str, str]:
    """How a request ends that may take long, and whether it may have run."""
    call: Any = channel.unary_unary(f"{MESH}Invoke")
    try:
        await call(envelope.SerializeToString(), metadata=bearer(key))
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        info = ErrorInfo()
        assert Status.FromString(bytes(trailers["grpc-status-details-bin"])).details[0].Unpack(info)
        return error.code().name, info.metadata["may_have_executed"]
    return "OK", "true"


async def test_a_key_that_was_made_just_now_opens_at_once(guarded: Guarded, channel: grpc.aio.Channel) -> None:
    await ask(channel, "RegistryService/ListAgents", b"", guarded.keys.add("new"))
