"""What a principal with rights of its own can try on others, from raw clients: over the wire, at a node that runs.

Mallory may register, call, publish and subscribe whatever there is in her tenant. Everything else is refused, or is not
hers: who sent what, whose answer, whose agent, whose tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from agent_sdk import Agent
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import CANCEL, EVENT, RESPONSE, Envelope, Hop, Payload, Target
from agentreach.v1.error_pb2 import PERMISSION_DENIED, ErrorCode
from agentreach.v1.frame_pb2 import (
    Attach,
    Frame,
    Goodbye,
    Hello,
    NodeHello,
    SessionRef,
    SessionSnapshot,
    SessionState,
    Signal,
    Subscribe,
)
from agentreach.v1.mesh_pb2 import PublishReply
from tests.security.guarded import Guarded
from tests.security.raw import ask, bearer, channel_to, code_of, knock
from tests.support.api_keys import EVERYTHING, KeysFile
from tests.support.etcd import start_etcd
from tests.support.node import start_node
from tests.support.rawlink import RawLink, raw_link, raw_stream, record, response

LIMIT_S = 5.0
POLL_S = 0.02  # what others do is looked at so often
INVOKE, PUBLISH = "MeshService/Invoke", "MeshService/Publish"


class Scene(Guarded):
    """The guarded node with people in it."""

    def __init__(self, folder: Path) -> None:
        self.states = folder / "states"
        super().__init__(folder, snapshots_dir=str(self.states))
        add = self.keys.add
        self.alice = add("alice", **EVERYTHING)
        self.svc = add("svc", **EVERYTHING)
        self.mallory = add("mallory", **EVERYTHING)
        self.theirs = add("mallory", tenant="elsewhere", **EVERYTHING)
        self.staging = add("staging", envs=["staging"], **EVERYTHING)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("scene"))
    with made.node:
        yield made


@pytest.fixture
async def channel(scene: Scene) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(scene.node.grpc) as channel:
        yield channel


class Taking:
    """An agent by hand that keeps what it is given, and answers with `answer` (None: not yet)."""

    def __init__(self, answer: str | None = "ok") -> None:
        self.answer = answer
        self.came: asyncio.Queue[Envelope] = asyncio.Queue()
        self.cancelled: list[Envelope] = []

    def __call__(self, envelope: Envelope) -> Envelope | None:
        if envelope.type == CANCEL:
            self.cancelled.append(envelope)
            return None
        if envelope.type == RESPONSE:
            return None
        self.came.put_nowait(envelope)
        return response(envelope, self.answer) if self.answer is not None and envelope.type != EVENT else None

    async def next(self) -> Envelope:
        async with asyncio.timeout(LIMIT_S):
            return await self.came.get()


def request(**more: Any) -> Envelope:
    return Envelope(timeout_ms=3_000, **{"payload": Payload(text="x"), **more})


async def eventually(holds: Callable[[], Awaitable[object]], limit_s: float = LIMIT_S) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(limit_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def serving(address: str, agent_id: str | registry.AgentRecord, taking: Taking, key: str, **hello: Any) -> Any:
    """An agent by hand that is given work from now on."""
    async with (
        raw_link(address, agents=[agent_id], taker=taking, key=key, **hello) as link,
        channel_to(address) as channel,
    ):
        (mine,) = link.welcome.agents
        assert mine.generation, mine.error
        asked = registry.ResolveRequest(target=Target(agent_id=mine.agent_id), env=hello.get("env", ""))

        async def is_served() -> bool:
            reply = await ask(channel, "RegistryService/Resolve", asked, key)
            return bool(registry.ResolveReply.FromString(reply).agents)

        await eventually(is_served)
        yield link


async def replies_to(link: RawLink, message_id: str, limit_s: float = LIMIT_S) -> Envelope:
    """The final reply to a message that was sent on a link."""
    async with asyncio.timeout(limit_s):
        while True:
            envelope = await link.envelope(limit_s)
            if envelope.correlation_id == message_id and not envelope.more:
                return envelope


def forged(**more: Any) -> Envelope:
    """An envelope in which everything that nodes write is written already."""
    envelope = request(
        source="victim/1", tenant="elsewhere", principal="system", actors=["alice", "root"], hop_count=7,
        path=[Hop(agent_id="victim/1", message_id="m")], epoch=9, entry=b"x" * 16, recipient="victim/1", attempt=5,
        session_event=3, **more,
    )  # fmt: skip
    envelope.target.among.append("*")
    return envelope


# ---- who one is ----


async def test_what_nodes_write_is_written_by_the_node_whatever_a_sender_writes(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    taking, key, address = Taking(), scene.mallory, scene.node.grpc
    async with serving(address, "forged/1", taking, scene.svc) as agent:
        await agent.send(signals=[Signal(subscribe=Subscribe(topics=["forged"]))])
        await ask(channel, INVOKE, forged(target=Target(agent_type="forged")), key)
        by_call = await taking.next()
        async with raw_link(address, key=key, name="alice") as link:
            await link.send(forged(target=Target(agent_id="forged/1"), message_id="by link"))
            by_link = await taking.next()
            reply = await replies_to(link, "by link")
        for _ in range(50):
            event = forged(target=Target(topic="forged"), message_id="an event")
            event.ClearField("target")
            event.target.topic = "forged"
            counts = PublishReply.FromString(await ask(channel, PUBLISH, event, key))
            if counts.matched:
                break
        by_event = await taking.next()
    for got in (by_call, by_link, by_event):
        assert (got.tenant, got.principal, list(got.actors)) == ("default", "mallory", [])
        assert got.source == "caller/mallory" or got.source.startswith("caller/mallory-")
        assert (got.hop_count, got.epoch, got.session_event) == (1, 0, 0)
        assert got.attempt == (0 if got is by_event else 1)
        assert got.entry != b"x" * 16 and "victim/1" not in (got.recipient, *(hop.agent_id for hop in got.path))
    assert reply.source == "forged/1" and reply.tenant == "" and reply.principal == ""


async def test_another_link_of_the_same_principal_cannot_speak_as_an_agent_that_is_not_its_own(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    taking = Taking()
    async with (
        serving(scene.node.grpc, "own/1", taking, scene.svc),
        raw_link(scene.node.grpc, agents=["evil/1"], key=scene.mallory) as link,
    ):
        for claimed in ("own/1", "caller/alice", "system", "evil/2", "evil/1"):
            await link.send(request(target=Target(agent_id="own/1"), source=claimed))
            got = await taking.next()
            assert got.source == ("evil/1" if claimed == "evil/1" else link.welcome.caller_id), claimed


# ---- what is due from somebody else ----


async def test_nobody_answers_for_another(scene: Scene, channel: grpc.aio.Channel) -> None:
    taking, address = Taking(answer=None), scene.node.grpc
    async with (
        serving(address, "asked/1", taking, scene.svc) as agent,
        raw_link(address, agents=["evil/1", "asked/2"], key=scene.mallory) as evil,
        raw_link(address, agents=["asked/1"], key=scene.theirs) as stranger,
    ):
        asked = asyncio.create_task(ask(channel, INVOKE, request(target=Target(agent_id="asked/1")), scene.alice))
        got = await taking.next()
        guesses = [got.entry, b"", *(got.entry[:8] + number.to_bytes(8, "big") for number in range(50))]
        for thief in (evil, stranger):
            answers = []
            for entry in guesses:
                answer = response(got, "forged")
                answer.entry, answer.tenant, answer.principal = entry, got.tenant, "svc"
                answers.append(answer)
            await thief.send(*answers)
            await thief.send(request(target=Target(agent_type="nobody"), message_id="after"))
            await replies_to(thief, "after")  # the answers before it were looked at
        await agent.send(response(got, "true"))
        assert Envelope.FromString(await asked).payload.text == "true"


async def test_nobody_cancels_for_another(scene: Scene, channel: grpc.aio.Channel) -> None:
    taking, address = Taking(answer=None), scene.node.grpc
    async with serving(address, "kept/1", taking, scene.svc) as agent:
        call = request(target=Target(agent_type="kept"), message_id="to keep")
        asked = asyncio.create_task(ask(channel, INVOKE, call, scene.alice))
        got = await taking.next()
        for key in (scene.mallory, scene.theirs, scene.root):
            async with raw_link(address, key=key) as link:
                cancel = Envelope(
                    type=CANCEL, correlation_id="to keep", entry=got.entry, attempt=1, tenant="default",
                    principal="alice", source="caller/alice",
                )  # fmt: skip
                await link.send(cancel)
                await link.send(request(target=Target(agent_type="nobody"), message_id="after"))
                await replies_to(link, "after")  # the cancel before it was looked at
            for kind in (CANCEL, RESPONSE):
                body = Envelope(type=kind, correlation_id="to keep", timeout_ms=1_000, target=Target(agent_type="kept"))
                assert await code_of(channel, INVOKE, body, key) == "INVALID_ARGUMENT"
        assert not taking.cancelled
        await agent.send(response(got, "kept"))
        assert Envelope.FromString(await asked).payload.text == "kept"


async def test_equal_message_ids_of_two_principals_or_tenants_never_meet(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    mine, other = Taking("from default"), Taking("from elsewhere")
    async with (
        serving(scene.node.grpc, "same/1", mine, scene.svc),
        serving(scene.node.grpc, "same/1", other, scene.theirs),
    ):
        texts = {}
        for name in ("alice", "mallory", "theirs"):
            call = request(target=Target(agent_type="same"), message_id="1", payload=Payload(text=name))
            for _ in range(2):  # the second is replayed, to the one whose it is
                texts[name] = Envelope.FromString(await ask(channel, INVOKE, call, getattr(scene, name))).payload.text
        assert texts == {"alice": "from default", "mallory": "from default", "theirs": "from elsewhere"}
        assert (mine.came.qsize(), other.came.qsize()) == (2, 1)


# ---- whose agent ----


async def test_an_agent_id_is_not_taken_over_by_another_principal_also_while_its_link_is_cut(scene: Scene) -> None:
    address, incarnation = scene.node.grpc, b"i" * 16

    async def try_it() -> int:
        async with raw_link(address, agents=["held/1"], incarnation=incarnation, key=scene.mallory) as thief:
            return int(thief.welcome.agents[0].error.code)

    async with raw_link(address, agents=["held/1"], incarnation=incarnation, key=scene.svc) as holder:
        token = holder.welcome.resume_token
        assert await try_it() == PERMISSION_DENIED
        async with raw_link(address, agents=["held/1"], key=scene.theirs) as stranger:
            assert stranger.welcome.agents[0].generation  # a name of another tenant is another name
    assert await try_it() == PERMISSION_DENIED  # its link is cut now, and may come back
    async with raw_link(address, agents=["held/1"], incarnation=incarnation, key=scene.svc, resume_token=token) as back:
        assert not back.welcome.agents or back.welcome.agents[0].generation


async def test_a_stolen_resume_token_is_of_no_use_to_another_principal(scene: Scene, channel: grpc.aio.Channel) -> None:
    taking, address = Taking(), scene.node.grpc
    async with serving(address, "token/1", taking, scene.svc, incarnation=b"t" * 16) as holder:
        token = holder.welcome.resume_token
        for key in (scene.mallory, scene.theirs):
            async with raw_link(address, resume_token=token, last_seq=0, incarnation=b"t" * 16, key=key) as thief:
                assert not thief.welcome.resumed and thief.welcome.resume_token != token
        await ask(channel, INVOKE, request(target=Target(agent_type="token")), scene.alice)  # the holder lives on


@pytest.mark.parametrize("epoch", [1, (1 << 63), (1 << 64) - 1])
async def test_a_claim_to_a_session_outlasts_neither_its_owner_nor_the_one_who_made_it(
    scene: Scene, channel: grpc.aio.Channel, epoch: int
) -> None:
    true, false, session = Taking("true"), Taking("false"), f"claimed {epoch}"
    kind = f"claim-{epoch}"
    call = request(target=Target(agent_type=kind), session_id=session)
    async with serving(scene.node.grpc, f"{kind}/1", true, scene.svc):
        first = Envelope.FromString(await ask(channel, INVOKE, call, scene.alice))
        async with raw_stream(scene.node.grpc, key=scene.mallory) as thief:
            thief.answering(false)
            claim = Attach(record=record(f"{kind}/2"), sessions=[SessionRef(session_id=session, epoch=epoch)])
            other = SessionRef(session_id=f"{session} too", epoch=epoch)
            claim.sessions.append(other)
            await thief.write(Frame(signals=[Signal(hello=Hello(agents=[claim], protocol_version=1))]))
            await thief.until("welcome")
            held = Envelope.FromString(await ask(channel, INVOKE, call, scene.alice))
            assert (held.payload.text, held.epoch) == ("true", first.epoch)  # its owner is there
            await thief.signal(Signal(goodbye=Goodbye(code=Goodbye.NORMAL)))
            await thief.over()
        for name in (session, f"{session} too"):  # nobody had the second one before
            again = request(target=Target(agent_type=kind), session_id=name)
            assert Envelope.FromString(await ask(channel, INVOKE, again, scene.alice)).payload.text == "true"


@pytest.mark.parametrize("agent_id", ["caller/alice", "caller/1"])
async def test_callers_ids_cannot_be_registered(scene: Scene, agent_id: str) -> None:
    async with raw_link(scene.node.grpc, agents=[agent_id], key=scene.mallory) as link:
        assert link.welcome.agents[0].HasField("error")


async def test_a_principal_is_no_node_whatever_it_says(scene: Scene, channel: grpc.aio.Channel) -> None:
    async with raw_stream(scene.node.grpc, key=scene.root) as link:
        await link.write(Frame(signals=[Signal(node_hello=NodeHello(node_id="n9", incarnation=b"n" * 16))]))
        goodbye: Goodbye = await link.until("goodbye")
        assert goodbye.code == Goodbye.PROTOCOL_ERROR
    async with raw_link(scene.node.grpc, agents=["node/n9"], key=scene.mallory) as link:
        await link.send(signals=[Signal(node_hello=NodeHello(node_id="n9"))])
        sent = request(target=Target(agent_type="nobody"), tenant="elsewhere", principal="rich", message_id="as a node")
        sent.recipient = "nobody/1"
        await link.send(sent)
        assert (await replies_to(link, "as a node")).error.code == ErrorCode.Value("NO_ROUTE")
    told = admin.ListNodesReply.FromString(await ask(channel, "AdminService/ListNodes", b"", scene.root))
    assert len(told.nodes) == 1
    ended = await knock(channel, "/agentreach.v1.PeerService/Link", bearer(scene.root), b"")
    assert ended.code == "PERMISSION_DENIED"


# ---- on whose behalf ----


async def test_a_handler_may_for_its_caller_what_both_may_and_a_stolen_lineage_nothing(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    address, add = scene.node.grpc, scene.keys.add
    to_b, to_both = add("to-b", may_call=["b"]), add("to-both", may_call=["b", "c"])
    b_key = add("b", may_register=["b"], may_call=["c", "d"])
    b, c, d = Taking(answer=None), Taking(), Taking()
    async with (
        serving(address, "b/1", b, b_key) as agent,
        serving(address, "c/1", c, scene.svc),
        serving(address, "d/1", d, scene.svc),
    ):
        assert await code_of(channel, INVOKE, request(target=Target(agent_type="c")), to_b) == "PERMISSION_DENIED"

        async def nested(caller: str, kind: str, name: str) -> str:
            asked = asyncio.create_task(ask(channel, INVOKE, request(target=Target(agent_type="b")), caller))
            handled = await b.next()
            call = request(target=Target(agent_type=kind), lineage=handled.lineage, message_id=name)
            call.actors.append("root")
            await agent.send(call)
            reply = await replies_to(agent, name)
            for thief in (scene.mallory, scene.theirs):
                stolen = request(target=Target(agent_type=kind), lineage=handled.lineage)
                assert await code_of(channel, INVOKE, stolen, thief) == "PERMISSION_DENIED"
            broken = request(target=Target(agent_type=kind), lineage=handled.lineage[:-1] + b"\0")
            assert await code_of(channel, INVOKE, broken, b_key) == "PERMISSION_DENIED"
            await agent.send(response(handled))
            await asked
            return ErrorCode.Name(reply.error.code) if reply.HasField("error") else "OK"

        assert await nested(to_both, "c", "one") == "OK"
        got = await c.next()
        assert (got.principal, list(got.actors)) == ("b", ["to-both"])
        assert await nested(to_b, "c", "two") == "PERMISSION_DENIED"
        assert await nested(to_both, "d", "three") == "PERMISSION_DENIED"
        assert c.came.empty() and d.came.empty()


# ---- other tenants ----


async def test_topics_of_another_tenant_are_neither_heard_nor_spoken_to(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    address, some = scene.node.grpc, scene.keys.add("some", may_subscribe=["open/*"], may_publish=["open/*"])
    heard = Taking()
    async with serving(address, "ear/1", heard, scene.theirs) as ear:
        await ear.send(signals=[Signal(subscribe=Subscribe(topics=["news", "default/news"]))])
        await ask(channel, PUBLISH, Envelope(target=Target(topic="news"), tenant="elsewhere"), scene.alice)
        for topic, code in (("open/1", "OK"), ("news", "PERMISSION_DENIED"), ("openly", "PERMISSION_DENIED")):
            assert await code_of(channel, PUBLISH, Envelope(target=Target(topic=topic)), some) == code, topic
        call = request(target=Target(agent_type="nobody"), reply_topic="news")
        assert await code_of(channel, INVOKE, call, some) == "PERMISSION_DENIED"
        async with raw_link(address, key=some) as link:
            await link.send(signals=[Signal(subscribe=Subscribe(topics=["news", "open/2"]))])
            refused = await link.until("unsubscribed")
            assert list(refused.topics) == ["news"] and refused.error.code == PERMISSION_DENIED
        await ask(channel, PUBLISH, Envelope(target=Target(topic="news"), message_id="theirs"), scene.theirs)
        assert (await heard.next()).message_id == "theirs"
        assert heard.came.empty()


async def test_nothing_of_another_tenant_is_shown_not_even_in_hints_and_counts(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    address, secret = scene.node.grpc, "zebra"
    trace_id = "5" * 32
    taking = Taking()
    agents = [record(f"{secret}/1", f"{secret}_skill", labels={secret: secret}, version="9.9.9", description=secret)]
    async with serving(address, agents[0], taking, scene.theirs):
        call = request(target=Target(agent_type=secret), session_id=f"{secret} session", trace_id=trace_id)
        await ask(channel, INVOKE, call, scene.theirs)
        denied = request(target=Target(agent_type=f"{secret}s"), trace_id=trace_id)
        assert await code_of(channel, INVOKE, denied, scene.theirs) == "NOT_FOUND"
        questions: list[tuple[str, Message]] = [
            ("RegistryService/ListAgents", registry.ListAgentsRequest()),
            ("RegistryService/ListAgents", registry.ListAgentsRequest(target=Target(agent_type=secret))),
            ("RegistryService/Resolve", registry.ResolveRequest(target=Target(agent_type=secret))),
            ("RegistryService/Resolve", registry.ResolveRequest(target=Target(capabilities=[f"{secret}_skill"]))),
            ("RegistryService/ListCapabilities", registry.ListCapabilitiesRequest()),
            ("AdminService/GetTrace", admin.GetTraceRequest(trace_id=trace_id)),
            ("AdminService/ListSessions", admin.ListSessionsRequest()),
            ("AdminService/ListSessions", admin.ListSessionsRequest(agent_type=secret)),
            ("AdminService/ListDeadLetters", admin.ListDeadLettersRequest()),
            ("AdminService/ListBreakers", admin.ListBreakersRequest()),
            ("AdminService/Explain", request(target=Target(agent_type=secret))),
        ]
        for method, question in questions:
            reply = await ask(channel, method, question, scene.root)
            if secret not in str(question):
                assert secret.encode() not in reply, method
            assert f"{secret}/1".encode() not in reply and b"elsewhere" not in reply, method
        await _hints_tell_nothing(channel, scene.rich, secret)
        for method, message in (
            ("RegistryService/GetAgent", registry.GetAgentRequest(agent_id=f"{secret}/1")),
            ("AdminService/DrainAgent", admin.DrainAgentRequest(agent_id=f"{secret}/1")),
            ("AdminService/ResetBreaker", admin.ResetBreakerRequest(agent_id=f"{secret}/1")),
            ("AdminService/ReleaseSession", admin.ReleaseSessionRequest(agent_type=secret, session_id="zebra session")),
        ):
            assert await code_of(channel, method, message, scene.root) == "NOT_FOUND", method
        mine = await ask(
            channel, "AdminService/GetTrace", admin.GetTraceRequest(trace_id=trace_id), scene.root_elsewhere
        )
        assert len(admin.GetTraceReply.FromString(mine).messages) == 2  # the refused one too
        watch: Any = channel.unary_stream("/agentreach.v1.RegistryService/WatchAgents")(
            b"", metadata=bearer(scene.rich)
        )
        async with asyncio.timeout(LIMIT_S):
            first = registry.WatchAgentsReply.FromString(await watch.read())
        watch.cancel()
        assert all(each.tenant == "default" for each in first.snapshot)


async def _hints_tell_nothing(channel: grpc.aio.Channel, key: str, secret: str) -> None:
    """What an error says about names that are nearly, or exactly, those of another tenant."""
    for kind in (secret[:-1], secret, f"{secret}s"):
        skill, agent_id = f"{kind}_skill", f"{kind}/2"
        for target in (Target(agent_type=kind), Target(capabilities=[skill]), Target(agent_id=agent_id)):
            with pytest.raises(grpc.aio.AioRpcError) as missed:
                await ask(channel, INVOKE, request(target=target), key)
            text = missed.value.details() or ""
            for asked_for in (skill, agent_id, kind):
                text = text.replace(asked_for, "")
            assert secret not in text and "elsewhere" not in text and "matches in env" not in text, text


async def test_registry_reads_end_at_the_envs_of_a_principal(scene: Scene, channel: grpc.aio.Channel) -> None:
    address, key = scene.node.grpc, scene.staging
    async with (
        serving(address, record("prod/1", "prod_skill"), Taking(), scene.svc),
        raw_link(
            address, agents=[record("stag/1", "stag_skill", env="staging")], taker=Taking(), key=key, env="staging"
        ),
    ):
        listed = await ask(channel, "RegistryService/ListAgents", b"", key)
        assert [each.agent_id for each in registry.ListAgentsReply.FromString(listed).agents] == ["stag/1"]
        told = await ask(channel, "RegistryService/ListCapabilities", b"", key)
        assert [each.name for each in registry.ListCapabilitiesReply.FromString(told).capabilities] == ["stag_skill"]
        watch: Any = channel.unary_stream("/agentreach.v1.RegistryService/WatchAgents")(b"", metadata=bearer(key))
        async with asyncio.timeout(LIMIT_S):
            first = registry.WatchAgentsReply.FromString(await watch.read())
        assert [each.agent_id for each in first.snapshot] == ["stag/1"]
        watch.cancel()
        for env in ("", "production"):
            for method, message in (
                ("Resolve", registry.ResolveRequest(target=Target(agent_type="prod"), env=env)),
                ("GetAgent", registry.GetAgentRequest(agent_id="prod/1", env=env)),
                ("GetVersionPolicy", registry.GetVersionPolicyRequest(agent_type="prod", env=env)),
            ):
                assert await code_of(channel, f"RegistryService/{method}", message, key) == "PERMISSION_DENIED"
        for method, message in (
            ("ListAgents", registry.ListAgentsRequest(env="production")),
            ("ListCapabilities", registry.ListCapabilitiesRequest(env="production")),
        ):
            assert await code_of(channel, f"RegistryService/{method}", message, key) == "PERMISSION_DENIED"
        ended = await knock(
            channel, "/agentreach.v1.RegistryService/WatchAgents", bearer(key),
            registry.WatchAgentsRequest(env="production").SerializeToString(),
        )  # fmt: skip
        assert ended.code == "PERMISSION_DENIED"
        with pytest.raises(grpc.aio.AioRpcError) as missed:
            await ask(channel, INVOKE, request(target=Target(agent_type="prod"), env="staging"), key)
        assert "production" not in (missed.value.details() or "")


async def test_an_admin_of_one_env_has_no_say_in_another(scene: Scene, channel: grpc.aio.Channel) -> None:
    address, trace_id = scene.node.grpc, "6" * 32
    warden = scene.keys.add("warden", admin=True, envs=["staging"])
    async with (
        serving(address, "prod/9", Taking(), scene.svc),
        serving(address, record("stag/9", env="staging"), Taking(), scene.staging, env="staging"),
    ):
        for kind, env, key in (("prod", "", scene.alice), ("stag", "staging", scene.staging)):
            call = request(target=Target(agent_type=kind), env=env, session_id="of a warden", trace_id=trace_id)
            await ask(channel, INVOKE, call, key)
        told = await ask(channel, "AdminService/GetTrace", admin.GetTraceRequest(trace_id=trace_id), warden)
        assert [each.agent_id for each in admin.GetTraceReply.FromString(told).messages] == ["stag/9"]
        sessions = await ask(channel, "AdminService/ListSessions", b"", warden)
        assert {each.env for each in admin.ListSessionsReply.FromString(sessions).sessions} == {"staging"}
        for method, message in (
            ("Explain", request(target=Target(agent_type="prod"))),
            ("DrainAgent", admin.DrainAgentRequest(agent_id="prod/9")),
            ("ResetBreaker", admin.ResetBreakerRequest(agent_id="prod/9")),
            ("ReleaseSession", admin.ReleaseSessionRequest(agent_type="prod", session_id="of a warden")),
            ("DrainNode", admin.DrainNodeRequest()),
            ("SetConfig", admin.SetConfigRequest(name="prod")),
            ("GetNode", admin.GetNodeRequest()),
        ):
            assert await code_of(channel, f"AdminService/{method}", message, warden) == "PERMISSION_DENIED", method
        why = await ask(channel, "AdminService/Explain", request(target=Target(agent_type="x"), env="staging"), warden)
        assert all(not each.agent_id.startswith("prod") for each in admin.ExplainReply.FromString(why).candidates)
        reset = admin.ResetBreakerRequest(agent_id="stag/9", env="staging")
        assert await code_of(channel, "AdminService/ResetBreaker", reset, warden) == "OK"


# ---- what is no name ----

BAD_NAMES = (
    "../x", "..", "/etc/passwd", "..\\x", "%2e%2e%2fx", "a/../../b", "x" * 5_000, "a\0b", "a\r\nb", "", ".", "-x",
    "x y", "é", "a\u202eb", "//", "a//b",
)  # fmt: skip


TOPICS = {"a/../../b", "a//b"}  # they are compared as they stand, and are no path


async def test_no_id_is_a_path_or_holds_what_is_no_name(scene: Scene, channel: grpc.aio.Channel) -> None:
    before = set(scene.states.parent.rglob("*"))
    wrong: list[object] = []

    async def refused(method: str, message: Message, key: str, what: object) -> None:
        code = await code_of(channel, method, message, key)
        if code not in ("INVALID_ARGUMENT", "NOT_FOUND"):
            wrong.append((method, what, code))

    for name in BAD_NAMES:
        agent = f"x/{name}"
        if name:
            await refused(INVOKE, request(target=Target(agent_type="x"), env=name), scene.alice, ("env", name))
            await refused("RegistryService/ListAgents", registry.ListAgentsRequest(env=name), scene.alice, name)
        if name and name not in TOPICS:
            await refused(INVOKE, request(target=Target(agent_type="x"), reply_topic=name), scene.alice, ("rt", name))
            await refused(PUBLISH, Envelope(target=Target(topic=name)), scene.alice, ("topic", name))
        for bad in (agent, name, f"{name}/1"):
            await refused(INVOKE, request(target=Target(agent_id=bad)), scene.alice, ("agent_id", bad))
            await refused("RegistryService/GetAgent", registry.GetAgentRequest(agent_id=bad), scene.alice, bad)
            await refused("AdminService/DrainAgent", admin.DrainAgentRequest(agent_id=bad), scene.root, bad)
        await refused(INVOKE, request(target=Target(agent_type=name)), scene.alice, ("agent_type", name))
        await refused(INVOKE, request(target=Target(capabilities=[name])), scene.alice, ("capability", name))
        await refused("AdminService/GetConfig", admin.GetConfigRequest(name=name or "?"), scene.root, name)
        await refused("AdminService/SetConfig", admin.SetConfigRequest(name=name or "?"), scene.root, name)
        await refused("AdminService/DrainNode", admin.DrainNodeRequest(node_id=name or "?"), scene.root, name)
        policy = registry.SetVersionPolicyRequest(policy=registry.VersionPolicy(agent_type=name, preferred="1"))
        await refused("RegistryService/SetVersionPolicy", policy, scene.root, name)
        created = admin.CreateKeyRequest(key=admin.KeyInfo(principal="p", tenant=name or "?"))
        await refused("AdminService/CreateKey", created, scene.root, ("tenant", name))
    async with raw_link(scene.node.grpc, key=scene.mallory) as link:
        tried = [registry.AgentRecord(agent_id=f"x/{name}") for name in BAD_NAMES]
        tried += [registry.AgentRecord(agent_id=f"{name}/1") for name in BAD_NAMES]
        tried += [registry.AgentRecord(agent_id="x/1", env=name) for name in BAD_NAMES if name]
        for each in tried:
            await link.send(signals=[Signal(attach=Attach(record=each))])
            answer = await link.until("attached")
            if not answer.HasField("error"):
                wrong.append(each)
        for topic in set(BAD_NAMES) - TOPICS:
            await link.send(signals=[Signal(subscribe=Subscribe(topics=[topic]))])
            assert (await link.until("unsubscribed")).HasField("error")
    assert not wrong, wrong[:10]
    assert set(scene.states.parent.rglob("*")) == before


@pytest.mark.parametrize("session_id", ["../../x", "/etc/x", "..", "a/../../b", "%2e%2e%2fx", "é" * 100, "x" * 256])
async def test_a_state_is_stored_under_no_name_that_anybody_chose(
    scene: Scene, channel: grpc.aio.Channel, session_id: str
) -> None:
    taking = Taking()
    async with serving(scene.node.grpc, "store/1", taking, scene.svc) as agent:
        call = request(target=Target(agent_type="store"), session_id=session_id)
        epoch = Envelope.FromString(await ask(channel, INVOKE, call, scene.alice)).epoch
        snapshot = SessionSnapshot(
            agent_id="store/1", session_id=session_id, epoch=epoch, turn=1, state=SessionState(inline=b"its state")
        )
        await agent.send(signals=[Signal(session_snapshot=snapshot)])

        def stored() -> list[Path]:
            return [path for path in scene.states.rglob("*") if path.is_file() and b"its state" in path.read_bytes()]

        await eventually(lambda: asyncio.to_thread(stored))
        for path in stored():
            assert path.resolve().is_relative_to(scene.states.resolve()) and ".." not in path.name
        outside = [path for path in scene.states.parent.rglob("*") if not path.is_relative_to(scene.states)]
        assert {path.name for path in outside} <= {"keys.json", "keys.json.lock", "keys.json.used", "keys.json.new"}


async def test_control_characters_in_ids_are_refused_and_in_headers_they_stay_what_they_are(
    scene: Scene, channel: grpc.aio.Channel
) -> None:
    taking = Taking()
    async with serving(scene.node.grpc, "odd/1", taking, scene.svc):
        for name in ("message_id", "session_id", "trace_id", "dedup_key"):
            for bad in ("a\r\nb", "a\0b", "a\x1bb"):
                call = request(target=Target(agent_type="odd"), **{name: bad})
                assert await code_of(channel, INVOKE, call, scene.alice) == "INVALID_ARGUMENT", (name, bad)
        call = request(target=Target(agent_type="odd"))
        call.headers["x-authorization\r\nx"] = "Bearer\r\nx-admin: 1\0"
        code = await code_of(channel, INVOKE, call, scene.alice)
        assert code in ("OK", "INVALID_ARGUMENT")
        if code == "OK":
            got = await taking.next()
            assert got.principal == "alice" and dict(got.headers) == dict(call.headers)
        assert await code_of(channel, INVOKE, request(target=Target(agent_type="odd")), scene.alice) == "OK"


async def test_what_nests_deeply_ends_with_its_own_call(scene: Scene, channel: grpc.aio.Channel) -> None:
    deep = Payload(content_type="application/json", body=b"[" * 200_000 + b"]" * 200_000)
    value = b"\x1a\x00"
    for _ in range(2_000):  # a google.protobuf.Value of lists of lists, by hand
        inner = b"\x0a" + _varint(len(value)) + value
        value = b"\x32" + _varint(len(inner)) + inner
    payload = b"\x22" + _varint(len(value)) + value
    envelope = b"\x32" + _varint(len(payload)) + payload + request(target=Target(agent_type="x")).SerializeToString()
    assert await code_of(channel, INVOKE, envelope, scene.alice) == "INVALID_ARGUMENT"
    taking = Taking()
    async with serving(scene.node.grpc, "deep/1", taking, scene.svc):
        await ask(channel, INVOKE, request(target=Target(agent_type="deep"), payload=deep), scene.alice)
        assert (await taking.next()).payload.body == deep.body  # nobody looks into it on the way
    with pytest.raises(RecursionError):
        json.loads(deep.body)
    assert scene.node.get("/readyz")[0] == 200


def _varint(number: int) -> bytes:
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    return bytes((*coded, number))


# ---- several nodes ----


async def test_an_agent_id_is_not_taken_over_and_nothing_is_shared_over_two_nodes(tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    svc, mallory = keys.add("svc", **EVERYTHING), keys.add("mallory", **EVERYTHING)
    alice, theirs = keys.add("alice", **EVERYTHING), keys.add("alice", tenant="elsewhere", **EVERYTHING)
    root, root_elsewhere = keys.add("root", admin=True), keys.add("root", admin=True, tenant="elsewhere")
    async with start_etcd() as etcd:
        settings = {"registry": f"etcd://{etcd.endpoints[0]}", "auth": "keys", "keys_file": str(keys.path)}
        settings["resume_window_s"] = "10"  # a link that is cut may come back for so long
        first, second = start_node(node_id="n1", **settings), start_node(node_id="n2", **settings)
        async with first, second, channel_to(first.grpc) as one, channel_to(second.grpc) as two:
            await _linked(one, root)
            ours, others = _counting("default", first.grpc, svc), _counting("elsewhere", second.grpc, theirs)
            async with ours, others:
                await _served(two, alice)
                await _served(one, theirs)
                asked = registry.GetAgentRequest(agent_id="held/1")
                seen = registry.AgentRecord.FromString(await ask(two, "RegistryService/GetAgent", asked, alice))
                incarnation = seen.incarnation
                async with raw_link(second.grpc, agents=["held/1"], incarnation=incarnation, key=mallory) as thief:
                    assert thief.welcome.agents[0].error.code == PERMISSION_DENIED
                for number, channel in enumerate((one, two, one, two)):
                    call = request(target=Target(agent_type="held"), message_id="1", trace_id="7" * 32)
                    call.payload.text = "of elsewhere" if number > 1 else "of default"
                    reply = Envelope.FromString(await ask(channel, INVOKE, call, theirs if number > 1 else alice))
                    assert reply.payload.text == ("elsewhere 1" if number > 1 else "default 1")
                async with raw_link(first.grpc, agents=["cut/1"], incarnation=incarnation, key=svc) as holder:
                    assert holder.welcome.agents[0].generation
                async with raw_link(second.grpc, agents=["cut/1"], incarnation=incarnation, key=mallory) as thief:
                    assert thief.welcome.agents[0].error.code == PERMISSION_DENIED  # its link is cut, and may come back
                async with raw_link(second.grpc, agents=["cut/1"], incarnation=incarnation, key=svc) as holder:
                    assert holder.welcome.agents[0].generation
                await _nested_over_nodes(keys, first.grpc, second.grpc, one, two)
                trace = admin.GetTraceRequest(trace_id="7" * 32)
                for channel in (one, two):
                    for key in (root, root_elsewhere):
                        told = admin.GetTraceReply.FromString(await ask(channel, "AdminService/GetTrace", trace, key))
                        assert not told.silent_nodes
                        assert {each.message_id for each in told.messages} == {"1"}
                    assert await code_of(channel, "AdminService/GetTrace", trace, alice) == "PERMISSION_DENIED"
            assert "Traceback" not in first.log + second.log


async def _nested_over_nodes(
    keys: KeysFile, first: str, second: str, one: grpc.aio.Channel, two: grpc.aio.Channel
) -> None:
    """A call by one node to a handler at the other, and on from there: on whose behalf is known on both."""
    caller, b_key = keys.add("caller", may_call=["b", "c"]), keys.add("b", may_register=["b"], may_call=["c", "d"])
    thief, c_key = keys.add("thief", **EVERYTHING), keys.add("c", **EVERYTHING)
    b, c, d = Taking(answer=None), Taking(), Taking()
    async with (
        serving(second, "b/1", b, b_key) as agent,
        serving(first, "c/1", c, c_key),
        serving(first, "d/1", d, c_key),
    ):
        for channel in (one, two):
            for kind in ("b", "c", "d"):
                await _served(channel, c_key, kind)
        call = request(target=Target(agent_type="b"), message_id="cancel me not", fresh=True)
        asked = asyncio.create_task(ask(one, INVOKE, call, caller))
        handled = await b.next()
        for kind, outcome in (("c", "OK"), ("d", "PERMISSION_DENIED")):
            nested = request(target=Target(agent_type=kind), lineage=handled.lineage, message_id=kind, fresh=True)
            await agent.send(nested)
            reply = await replies_to(agent, kind)
            assert (ErrorCode.Name(reply.error.code) if reply.HasField("error") else "OK") == outcome
            for channel in (one, two):
                stolen = request(target=Target(agent_type=kind), lineage=handled.lineage)
                assert await code_of(channel, INVOKE, stolen, thief) == "PERMISSION_DENIED"
        got = await c.next()
        assert (got.principal, list(got.actors)) == ("b", ["caller"]) and d.came.empty()
        for node in (first, second):
            async with raw_link(node, agents=[f"evil/{node[-1]}"], key=thief) as evil:
                cancel = Envelope(type=CANCEL, correlation_id="cancel me not", entry=handled.entry, attempt=1)
                forged = response(handled, "forged")
                forged.principal = "b"
                await evil.send(cancel, forged)
                await evil.send(request(target=Target(agent_type="nobody"), message_id="after"))
                await replies_to(evil, "after")
        assert not b.cancelled
        await agent.send(response(handled, "true"))
        assert Envelope.FromString(await asked).payload.text == "true"


def _counting(says: str, address: str, key: str) -> Agent:
    """The agent `held/1` of a tenant, which tells how often it was called with a text of its tenant's."""
    agent, texts = Agent("held/1", url=address, api_key=key), []

    @agent.handler
    async def handle(text: str) -> str:
        texts.append(text)
        return f"{says} {len([each for each in texts if each.startswith('of')])}"

    return agent


async def _served(channel: grpc.aio.Channel, key: str, kind: str = "held") -> None:
    """Until this node knows the agent of this tenant as one that is given work."""
    asked = registry.ResolveRequest(target=Target(agent_type=kind))

    async def is_known() -> bool:
        reply = await ask(channel, "RegistryService/Resolve", asked, key)
        return bool(registry.ResolveReply.FromString(reply).agents)

    await eventually(is_known, 20)


async def _linked(channel: grpc.aio.Channel, root: str) -> None:
    async def both() -> bool:
        told = admin.ListNodesReply.FromString(await ask(channel, "AdminService/ListNodes", b"", root))
        return sum(each.linked for each in told.states) == 2

    await eventually(both, 20)


def test_what_was_tried_left_no_traceback_and_no_key_in_the_log(scene: Scene) -> None:
    log = scene.node.log
    assert "Traceback" not in log
    for key in (scene.mallory, scene.alice, scene.root, scene.theirs):
        assert key not in log and key.split("_", 2)[2] not in log
