"""A secret that somebody put where it should not be is shown to nobody: one that is marked, through every way out.

The marks are looked for in what callers are told, in traces, dead letters, metrics, the node's log and its audit log.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent_sdk import Agent, AgentError, Context, ReachError, Rejected, connect
from agentreach.v1 import admin_pb2 as admin
from agentreach.v1.admin_pb2_grpc import AdminServiceStub
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.mesh_pb2_grpc import MeshServiceStub
from tests.security.guarded import Guarded
from tests.security.raw import bearer

MARK = "hunter2M4rk7f3a9c"
SHOWN_AS = {
    "a field": f"login failed: password={MARK}",
    "json": f'{{"api_key": "{MARK}"}}',
    "a repr": f"{{'db_password': '{MARK}'}}",
    "a url": f"cannot reach postgres://app:{MARK}@db.internal/x",
    "a header": f"Authorization: Bearer {MARK}",
    "a bearer token": f"sent Bearer {MARK} to it",
    "a key of this mesh": f"reach_0a1b2c3d_{MARK}",
    "an OpenAI key": f"sk-proj-{MARK}AAAA",
    "an Anthropic key": f"sk-ant-api03-{MARK}AAAA",
    "a GitHub token": f"ghp_{MARK}AAAAAAAAAAAAAAAAAAA",
    "a Slack token": f"xoxb-1234-{MARK}",
    "a JWT": f"eyJhbGciOiJIUzI1NiJ9.{MARK}.{MARK}",
    "a private key": f"-----BEGIN PRIVATE KEY-----\n{MARK}\n-----END PRIVATE KEY-----",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("secrets")
    settings = {"audit_log": str(folder / "audit.jsonl"), "log_level": "debug", "max_hops": 2, "slow_request_s": 0}
    guarded = Guarded(folder, **settings)
    with guarded.node:
        yield guarded


@pytest.fixture
async def agent(guarded: Guarded) -> AsyncIterator[Agent]:
    """It fails in the way that it is asked for, with the text that it is given."""
    agent = Agent("leaky", url=guarded.node.grpc, api_key=guarded.rich)

    @agent.handler
    async def leak(asked: dict[str, Any], ctx: Context) -> str:
        text = SHOWN_AS[asked["shown_as"]]
        match asked["how"]:
            case "rejected":
                raise Rejected(text)
            case "agent error":
                raise AgentError(text, details={"password": MARK, "context": text})
            case "crash":
                raise RuntimeError(text)
            case "progress":
                await ctx.progress(0.5, text)
                raise Rejected("no")
            case "loop":
                return str(await ctx.request(asked, agent_type="leaky", dedup_key=text[:60], hash_key=text[:60]))
        return "nothing leaked"

    async with agent:
        yield agent


async def everything_shown(guarded: Guarded, trace_ids: list[str]) -> dict[str, str]:
    """What people can see of the node and its messages, by where."""
    async with grpc.aio.insecure_channel(guarded.node.grpc) as channel:
        stub, ops = AdminServiceStub(channel), bearer(guarded.root)
        traces = [await stub.GetTrace(admin.GetTraceRequest(trace_id=each), metadata=ops) for each in trace_ids]
        letters = await stub.ListDeadLetters(admin.ListDeadLettersRequest(), metadata=ops)
    return {
        "traces": "\n".join(map(str, traces)),
        "dead letters": str(letters),
        "metrics": await metrics(guarded),
        "log": guarded.node.log,
        "audit log": (guarded.keys.path.parent / "audit.jsonl").read_text(),
    }


async def metrics(guarded: Guarded) -> str:
    asked = urllib.request.Request(f"http://{guarded.node.http}/metrics")
    asked.add_header("Authorization", f"Bearer {guarded.scraper}")
    return await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=5).read().decode())


def assert_nowhere(shown: dict[str, str]) -> None:
    for where, text in shown.items():
        at = text.find(MARK)
        assert at < 0, f"{where}: …{text[max(0, at - 200) : at + 60]}…"


@pytest.mark.parametrize("how", ["rejected", "agent error", "crash", "progress", "loop"])
async def test_what_a_handler_says_is_shown_without_its_secrets(guarded: Guarded, agent: Agent, how: str) -> None:
    told, trace_ids = {}, []
    async with connect(guarded.node.grpc, api_key=guarded.rich) as caller:
        for shown_as in SHOWN_AS:
            with pytest.raises(ReachError) as failed:
                await caller.request({"how": how, "shown_as": shown_as}, agent_type="leaky", timeout=10)
            told[shown_as] = f"{failed.value!r} {failed.value} {failed.value.details}"
            trace_ids.append(failed.value.trace_id)
    assert_nowhere(told)
    shown = await everything_shown(guarded, trace_ids)
    assert how in ("progress", "crash", "loop") or "(withheld)" in str(told)
    assert how != "progress" or "(withheld)" in shown["traces"]
    assert how != "loop" or "(withheld)" in shown["dead letters"]
    assert_nowhere(shown)


async def test_what_a_caller_sends_is_shown_without_its_secrets(guarded: Guarded) -> None:
    """Headers that arrive, headers that are refused, ids and names that hold one, and a key that is none."""
    told, trace_ids = {}, []
    envelopes = {
        "header": Envelope(headers={"authorization": f"Bearer {MARK}", "cookie": MARK}),
        "refused header": Envelope(headers={f"password={MARK}\r\n": "x"}),
        "a header too many": Envelope(headers={f"x{n}": f"password={MARK}" for n in range(65)}),
        "target": Envelope(target=Target(agent_type="nobody", labels={"token": MARK}, hash_key=f"password={MARK}")),
        "capability": Envelope(target=Target(capabilities=[f"password={MARK}"])),
        "session": Envelope(session_id=f"ghp_{MARK}AAAAAAAAAAAAAAAAAAA"),
        "source": Envelope(source=f"Bearer {MARK}"),
        "topic": Envelope(reply_topic=f"password={MARK}"),
    }
    async with grpc.aio.insecure_channel(guarded.node.grpc) as channel:
        stub = MeshServiceStub(channel)
        for name, sent in envelopes.items():
            envelope = Envelope(target=Target(agent_type="nobody"), timeout_ms=1_000, payload=Payload(text=MARK))
            envelope.trace_id = f"secret-{name}"
            envelope.MergeFrom(sent)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Invoke(envelope, metadata=bearer(guarded.rich))
            told[name] = f"{failed.value.details()} {failed.value.trailing_metadata()}"
            trace_ids.append(envelope.trace_id)
        for key in (MARK, f"reach_0a1b2c3d_{MARK}", f"sk-{MARK}AAAAAAAAAAAA"):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await AdminServiceStub(channel).GetNode(admin.GetNodeRequest(), metadata=bearer(key))
            told[key] = f"{failed.value.details()} {failed.value.trailing_metadata()}"
    assert_nowhere(told)
    assert_nowhere(await everything_shown(guarded, trace_ids))


@pytest.mark.parametrize("command", ["serve", "check-config"])
@pytest.mark.parametrize(
    "setting",
    [f"registry=etcd://root:{MARK}@127.0.0.1:1", f"registry_prefix=password={MARK}", f"lane_max=token={MARK}"],
)
def test_a_start_that_fails_tells_no_secret_of_its_configuration(command: str, setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    environment = {each: text for each, text in os.environ.items() if not each.startswith("REACH_")}
    environment |= {f"REACH_{name.upper()}": value, "REACH_LISTEN": "127.0.0.1:0", "REACH_LOG_LEVEL": "loud"}
    ended = subprocess.run(
        [sys.executable, "-m", "reach.cli", command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2 and ended.stderr
    assert MARK not in ended.stderr + ended.stdout


def test_an_ordinary_configuration_is_shown_without_the_password_in_its_urls(tmp_path: Path) -> None:
    environment = {each: text for each, text in os.environ.items() if not each.startswith("REACH_")}
    environment |= {"REACH_REGISTRY_PREFIX": f"x://u:{MARK}@h/", "REACH_REGISTRY_PASSWORD": MARK}
    environment["REACH_REGISTRY_USER"] = "u"
    command = [sys.executable, "-m", "reach.cli", "check-config"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ended.returncode == 0 and "x://(withheld)@h/" in ended.stdout
    assert MARK not in ended.stderr + ended.stdout


async def test_a_name_that_the_operator_gave_is_withheld_too(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, redact="iban", audit_log=str(tmp_path / "audit.jsonl"))
    with guarded.node:
        agent = Agent("bank", url=guarded.node.grpc, api_key=guarded.rich)

        @agent.handler
        async def pay(_: str) -> str:
            raise Rejected(f"no account has iban: {MARK}")

        async with agent, connect(guarded.node.grpc, api_key=guarded.rich) as caller:
            with pytest.raises(Rejected) as failed:
                await caller.request("pay", agent_type="bank", timeout=10)
        assert "no account has iban: (withheld)" in failed.value.message
        assert_nowhere({"log": guarded.node.log})
