"""API keys with real processes: nodes that refuse to start, strangers, and what ends with a key, on every node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent_sdk import Agent, PermissionDenied, Unauthenticated, connect
from agentreach.v1.admin_pb2 import CreateKeyRequest
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.registry_pb2 import ListAgentsRequest, WatchAgentsReply, WatchAgentsRequest
from tests.support.agents import eventually
from tests.support.api_keys import EVERYTHING, KeysFile, info, key_id
from tests.support.cluster import node_cluster
from tests.support.etcd import EtcdCluster, free_port, start_etcd
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import CONNECT, Goodbye, bearer, raw_link, raw_stream, request, to

LIMIT_S = 30.0
REVOKED_S = 5.0
"""What is open ends within this, on every node."""
LIST, STREAM, WATCH = "RegistryService/ListAgents", "MeshService/InvokeStream", "RegistryService/WatchAgents"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


@contextlib.contextmanager
def guarded(keys: KeysFile, **settings: Any) -> Iterator[NodeProcess]:
    """A node whose keys are in this file; whatever it was shown, none of it stands in its log."""
    with start_node(auth="keys", keys_file=str(keys.path), **settings) as node:
        yield node
        assert "reach_" not in node.log.replace("reach_sign", "").replace("reach_insecure", ""), "a key was logged"


def reach(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without REACH_ variables but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=clean | environment, input="", check=False,
    )  # fmt: skip


# ---- a node that would stand open does not start ----


def _revoked(path: Path) -> None:
    made = KeysFile(path)
    made.revoke(made.add("alice", admin=True))


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_text(""),
    "blank": lambda path: path.write_text("  \n\t\n"),
    "a line end alone": lambda path: path.write_text("\n"),
    "a placeholder": lambda path: path.write_text("changeme\n"),
    "no keys in it": lambda path: path.write_text(json.dumps({"format": 1, "lookup_key": "00" * 32, "keys": []})),
    "all of them revoked": _revoked,
}


@pytest.mark.parametrize("what", UNUSABLE)
async def test_a_node_without_a_key_that_holds_refuses_to_start_in_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    UNUSABLE[what](path)
    if path.exists():
        path.chmod(0o600)
    listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    done = await asyncio.to_thread(
        reach, "serve", "--auth", "keys", "--keys-file", str(path), "--listen", listen, "--http", http
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]  # those are the log's
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("reach: "), done.stderr


@pytest.mark.parametrize("value", [None, "", "   ", "\n"])
async def test_a_variable_that_names_no_file_is_no_way_to_an_open_node(value: str | None) -> None:
    environment = {"REACH_AUTH": "keys", "REACH_LISTEN": "127.0.0.1:0", "REACH_HTTP": "127.0.0.1:0"}
    if value is not None:
        environment["REACH_KEYS_FILE"] = value
    done = await asyncio.to_thread(lambda: reach("serve", **environment))
    assert done.returncode == 2 and "say where the keys are" in done.stderr, done.stderr


async def test_a_file_that_others_may_read_is_refused_with_the_cure(keys: KeysFile) -> None:
    keys.add("alice")
    keys.path.chmod(0o644)
    done = await asyncio.to_thread(reach, "serve", "--auth", "keys", "--keys-file", str(keys.path))
    assert done.returncode == 2 and f"chmod 600 {keys.path}" in done.stderr


async def test_without_a_key_in_etcd_the_node_says_how_to_make_the_first(etcd: EtcdCluster) -> None:
    url = f"etcd://{etcd.endpoints[0]}"
    registry = ("--registry", url, "--registry-prefix", f"/first/{os.urandom(4).hex()}/")
    serve = ("serve", "--auth", "keys", "--keys", "etcd", "--listen", "127.0.0.1:0", "--http", "")
    done = await asyncio.to_thread(reach, *serve, *registry)
    assert done.returncode == 2 and "reach keys create" in done.stderr, done.stderr
    made = await asyncio.to_thread(reach, "keys", "create", *registry, "--principal", "ops", "--admin")
    assert made.returncode == 0 and made.stdout.startswith("reach_"), made.stderr
    listed = await asyncio.to_thread(reach, "keys", "list", *registry)
    assert key_id(made.stdout.strip()) in listed.stdout and made.stdout.strip() not in listed.stdout


# ---- who shows nothing that holds ----


def strangers(key: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """Headers that let nobody in, by what is wrong with them."""
    name = "authorization"
    return {
        "none": (),
        "empty": ((name, ""),),
        "blank": ((name, "   "),),
        "scheme alone": ((name, "Bearer"),),
        "scheme and blanks": ((name, "Bearer   "),),
        "no scheme": ((name, key),),
        "another scheme": ((name, f"Basic {key}"),),
        "a wrong key": ((name, f"Bearer {key[:-4]}AAAA"),),
        "in capitals": ((name, f"Bearer {key.upper()}"),),
        "a part": ((name, f"Bearer {key[:-1]}"),),
        "twice": ((name, f"Bearer {key}"), (name, f"Bearer {key}")),
        "in another header": (("x-api-key", key),),
        "as a node": ((name, f"Node node-1 {'0' * 64}"),),
        "very long": ((name, f"Bearer {'A' * 5_000}"),),
    }


async def status(call: Any) -> str:
    """The gRPC status with which a call ends, past what it is answered with."""
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
        return (await call.code()).name  # type: ignore[no-any-return]


def pages(http: str, headers: tuple[tuple[str, str], ...]) -> dict[str, tuple[int, str]]:
    """(status, WWW-Authenticate) of each page, asked with these headers."""
    found = {}
    for page in ("/metrics", "/healthz", "/readyz"):
        asked = urllib.request.Request(f"http://{http}{page}")
        for name, value in headers:
            asked.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                found[page] = (answer.status, "")
        except urllib.error.HTTPError as error:
            with error:
                found[page] = (error.code, error.headers.get("WWW-Authenticate", ""))
    return found


async def test_with_a_valid_key_there_strangers_get_in_by_no_header_on_any_server(keys: KeysFile) -> None:
    key = keys.add("ops", admin=True, **EVERYTHING)
    with guarded(keys) as node:
        async with grpc.aio.insecure_channel(node.grpc) as channel:
            for what, headers in strangers(key).items():
                unary = channel.unary_unary(f"/agentreach.v1.{LIST}")(b"", metadata=headers)
                assert await status(unary) == "UNAUTHENTICATED", what
                began = time.monotonic()
                silent = channel.stream_stream(CONNECT)(metadata=headers)
                assert await status(silent) == "UNAUTHENTICATED", what
                assert time.monotonic() - began < 1.0, "a stream that says nothing is refused at once"
                if what != "twice":  # urllib sends one of a name
                    told = await asyncio.to_thread(pages, node.http, headers)
                    assert told["/metrics"] == (401, 'Bearer realm="agent-reach"'), what
                    assert told["/healthz"][0] == told["/readyz"][0] == 200, what
            let_in = channel.unary_unary(f"/agentreach.v1.{LIST}")(b"", metadata=bearer(key))
            assert await status(let_in) == "OK"
            assert (await asyncio.to_thread(pages, node.http, bearer(key)))["/metrics"] == (200, "")


async def test_metrics_are_for_keys_that_may_scrape_and_for_admins(keys: KeysFile) -> None:
    known = {"nothing": keys.add("a"), "scrape": keys.add("b", scrape=True), "admin": keys.add("c", admin=True)}
    with guarded(keys) as node:
        told = {name: (await asyncio.to_thread(pages, node.http, bearer(key)))["/metrics"][0]
                for name, key in known.items()}  # fmt: skip
    assert told == {"nothing": 403, "scrape": 200, "admin": 200}


# ---- what ends with a key ----


class Streaming:
    """An agent that sends one item and never ends."""

    def __init__(self, url: str, key: str) -> None:
        self.agent = Agent("slow", capabilities=["count"], url=url, api_key=key)
        self.stopped = asyncio.Event()
        self.runs = 0

        @self.agent.handler
        async def count(data: Any) -> AsyncIterator[Any]:
            self.runs += 1
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                self.stopped.set()


class Open:
    """What a key has opened at one node: a link, a stream that has said nothing yet, a streamed reply, a watch."""

    def __init__(self, node: str, key: str) -> None:
        self._node, self._key = node, key
        self.ends: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Open:
        works: list[Callable[[asyncio.Event], Awaitable[None]]] = [
            self._link, self._silent, self._stream, self._watch,
        ]  # fmt: skip
        opened = [asyncio.Event() for _ in works]
        self._tasks = [asyncio.create_task(work(event)) for work, event in zip(works, opened, strict=True)]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(event.wait() for event in opened))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_ended(self) -> None:
        """Wait until everything has."""
        async with asyncio.timeout(REVOKED_S):
            await asyncio.gather(*self._tasks)

    async def _link(self, opened: asyncio.Event) -> None:
        async with raw_link(self._node, key=self._key) as link:
            opened.set()
            goodbye = await link.until("goodbye", LIMIT_S)
            self.ends["link"] = Goodbye.Code.Name(goodbye.code)

    async def _silent(self, opened: asyncio.Event) -> None:
        async with raw_stream(self._node, key=self._key) as link:
            opened.set()
            goodbye = await link.until("goodbye", LIMIT_S)
            self.ends["silent"] = Goodbye.Code.Name(goodbye.code)

    async def _stream(self, opened: asyncio.Event) -> None:
        envelope = request(target=to("slow"), timeout_ms=60_000)
        await self._follow("stream", STREAM, envelope.SerializeToString(), Envelope.FromString, opened)

    async def _watch(self, opened: asyncio.Event) -> None:
        data = WatchAgentsRequest().SerializeToString()
        await self._follow("watch", WATCH, data, WatchAgentsReply.FromString, opened)

    async def _follow(
        self, name: str, method: str, data: bytes, parse: Callable[[bytes], Any], opened: asyncio.Event
    ) -> None:
        async with grpc.aio.insecure_channel(self._node) as channel:
            while name not in self.ends:
                call = channel.unary_stream(f"/agentreach.v1.{method}")(data, metadata=bearer(self._key))
                try:
                    async for item in call:
                        assert parse(item) is not None
                        opened.set()
                except grpc.aio.AioRpcError as error:
                    if opened.is_set():  # else this node has not heard of the agent yet
                        self.ends[name] = error.code().name


ALL_ENDED = dict.fromkeys(("link", "silent", "stream", "watch"), "UNAUTHENTICATED")


async def test_what_a_revoked_key_has_open_ends_within_five_seconds_down_to_the_handler(keys: KeysFile) -> None:
    agents, caller, other = (keys.add(name, **EVERYTHING) for name in ("agents", "caller", "other"))
    with guarded(keys) as node:
        streaming = Streaming(node.grpc, agents)
        async with streaming.agent, Open(node.grpc, caller) as mine, Open(node.grpc, other) as others:
            keys.revoke(caller)
            await mine.all_ended()
            assert mine.ends == ALL_ENDED
            async with asyncio.timeout(REVOKED_S):
                await streaming.stopped.wait()
            assert others.ends == {}, "whoever came with another key goes on"
        assert "API keys" in node.log


async def test_a_call_begun_before_its_key_was_revoked_does_nothing_when_its_body_comes(keys: KeysFile) -> None:
    agents, ops = keys.add("agents", **EVERYTHING), keys.add("ops", admin=True, **EVERYTHING)
    bodies = {
        "AdminService/CreateKey": CreateKeyRequest(key=info("mine", admin=True)),
        LIST: ListAgentsRequest(),
        "MeshService/Invoke": request(target=to("slow")),
        STREAM: request(target=to("slow")),
        "MeshService/Publish": request(target=to(topic="news")),
    }
    with guarded(keys) as node:
        streaming = Streaming(node.grpc, agents)
        async with streaming.agent, grpc.aio.insecure_channel(node.grpc) as channel:
            revoked = asyncio.Event()

            async def late(body: Any) -> AsyncIterator[bytes]:
                await revoked.wait()
                yield body.SerializeToString()

            parked = {
                method: channel.stream_stream(f"/agentreach.v1.{method}")(late(body), metadata=bearer(ops))
                for method, body in bodies.items()
            }
            async with Open(node.grpc, ops) as mine:  # came later, so those have passed the gate
                keys.revoke(ops)
                await mine.all_ended()
            revoked.set()
            assert {method: await status(call) for method, call in parked.items()} == dict.fromkeys(
                bodies, "UNAUTHENTICATED"
            )
    assert {record.info.principal for record in keys.file.read().records} == {"agents", "ops"}
    assert streaming.runs == 1, "but for the stream that was open"


async def test_an_expired_key_ends_what_it_opened_also_while_its_file_cannot_be_read(keys: KeysFile) -> None:
    agents = keys.add("agents", **EVERYTHING)
    with guarded(keys) as node:
        caller = keys.add("caller", **EVERYTHING, expires_in_s=3.0)
        ops = keys.add("ops", admin=True)
        streaming = Streaming(node.grpc, agents)
        async with streaming.agent, Open(node.grpc, caller) as mine:
            kept = keys.path.read_bytes()
            keys.path.write_bytes(b"")
            await eventually(lambda: metric(node, ops, "reach_keys_stale", 1), "the node has noticed")
            await mine.all_ended()
            assert mine.ends == ALL_ENDED
            async with grpc.aio.insecure_channel(node.grpc) as channel:
                known = channel.unary_unary(f"/agentreach.v1.{LIST}")(b"", metadata=bearer(agents))
                assert await status(known) == "OK", "those that are known go on"
            keys.path.write_bytes(kept)
            await eventually(lambda: metric(node, ops, "reach_keys_stale", 0), "the node can read them again")
        assert "the keys cannot be read" in node.log


async def metric(node: NodeProcess, key: str, name: str, value: float) -> bool:
    """Whether a metric without labels has this value."""

    def ask() -> str:
        asked = urllib.request.Request(f"http://{node.http}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    return f"{name} {value}" in await asyncio.to_thread(ask)


async def test_a_key_revoked_at_one_node_ends_at_every_node(etcd: EtcdCluster) -> None:
    prefix = f"/revoked/{os.urandom(4).hex()}/"
    registry = ("--registry", f"etcd://{etcd.endpoints[0]}", "--registry-prefix", prefix)
    everything = ("--may-register", "*", "--may-call", "*")

    async def made(*arguments: str) -> str:
        done = await asyncio.to_thread(reach, "keys", "create", *registry, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    ops, agents = await made("--principal", "ops", "--admin"), await made("--principal", "agents", *everything)
    caller = await made("--principal", "caller", *everything)
    async with node_cluster(etcd, size=2, auth="keys", keys="etcd", registry_prefix=prefix) as nodes:
        streaming = Streaming(nodes[0].grpc, agents)
        opened = Open(nodes[0].grpc, caller), Open(nodes[1].grpc, caller)
        async with streaming.agent, opened[0] as here, opened[1] as there:
            revoke = ("keys", "revoke", "--url", nodes[0].grpc, key_id(caller))
            done = await asyncio.to_thread(lambda: reach(*revoke, REACH_API_KEY=ops))
            assert done.returncode == 0, done.stderr
            await asyncio.gather(here.all_ended(), there.all_ended())
            assert here.ends == there.ends == ALL_ENDED


# ---- the SDK and the command line ----


async def test_whoever_has_a_key_that_allows_something_else_comes_back_with_that(keys: KeysFile) -> None:
    """The page said so, and the SDK took it for a key that was revoked and never came again."""
    agents, caller = keys.add("agents", **EVERYTHING), keys.add("caller", may_call=["x"])
    with guarded(keys) as node:
        agent = Agent("y", url=node.grpc, api_key=agents, own_link=True)

        @agent.handler
        async def echo(data: object) -> object:
            return data

        async with agent, connect(node.grpc, api_key=caller, own_link=True) as mesh:
            with pytest.raises(PermissionDenied):
                await mesh.request("hi", agent_type="y", timeout=5)
            keys.change(caller, may_call=["y"])

            async def answered() -> bool:
                with contextlib.suppress(PermissionDenied, Unauthenticated):
                    return (await mesh.request("hi", agent_type="y", timeout=5)).data == "hi"
                return False

            await eventually(answered, "it may call what its key allows now", REVOKED_S)
            with pytest.raises(PermissionDenied):
                await mesh.request("hi", agent_type="x", timeout=5)


async def test_a_refused_key_ends_callers_and_agents_of_the_sdk_at_once(keys: KeysFile) -> None:
    good = keys.add("alice", **EVERYTHING)
    wrong = f"{good[:-4]}AAAA"
    with guarded(keys) as node:
        for key in (wrong, ""):
            began = time.monotonic()
            with pytest.raises(Unauthenticated):
                async with connect(node.grpc, api_key=key, timeout=20):
                    pass
            assert time.monotonic() - began < 5.0, "no use in trying again"
        done = await asyncio.to_thread(lambda: reach("test-agent", "--url", node.grpc, REACH_API_KEY=wrong))
        assert done.returncode != 0 and "UNAUTHENTICATED" in done.stderr + done.stdout
        for command in (["agents"], ["nodes"], ["call", "--type", "x", '"x"']):
            told = await asyncio.to_thread(lambda c=command: reach(*c, "--url", node.grpc, REACH_API_KEY=wrong))  # type: ignore[misc]
            assert told.returncode == 1 and "UNAUTHENTICATED" in told.stderr, (command, told.stderr)
            assert wrong not in told.stderr and "Traceback" not in told.stderr


# ---- those who write the file ----


async def test_processes_that_write_the_file_at_once_lose_nothing_and_killed_ones_neither(keys: KeysFile) -> None:
    keys.add("first")
    script = (
        "import sys; from pathlib import Path; from tests.support.api_keys import KeysFile\n"
        "keys = KeysFile(Path(sys.argv[1]))\n"
        "for n in range(int(sys.argv[3])):\n"
        "    print(keys.add(f'{sys.argv[2]}-{n}'), flush=True)\n"
    )

    def start(name: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(keys.path), name, str(count)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    lasting, killed = [start(f"lasting{n}", 10) for n in range(2)], start("killed", 1_000)
    told: list[str] = []
    try:
        assert killed.stdout is not None
        for _ in range(5):
            told.append((await asyncio.to_thread(killed.stdout.readline)).strip())
        killed.kill()
        told += (await asyncio.to_thread(killed.communicate))[0].split()
        for each in lasting:
            told += (await asyncio.to_thread(each.communicate))[0].split()
    finally:
        for each in (*lasting, killed):
            if each.poll() is None:
                each.kill()
                each.wait(10)
    there = {record.info.key_id for record in keys.file.read().records}
    assert len(told) >= 25 and {key_id(key) for key in told} <= there
    keys.add("last")
