"""The SDK against a real node in a process of its own: agents, callers, signals, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sdk import (
    Agent,
    AgentLost,
    ConnectedMesh,
    ConnectFailed,
    Context,
    NoAgentAvailable,
    NoRoute,
    Timeout,
    connect,
)
from agent_sdk.sync import connect as connect_sync

AGENT = """
import asyncio, sys
from agent_sdk import Agent
agent = Agent(sys.argv[2], capabilities=["slow", "ner"], url=sys.argv[1])

@agent.handler
async def work(request, ctx):
    if "sleep" in request:
        await asyncio.sleep(request["sleep"])
        return "slept"
    return {"entities": [word for word in request["text"].split() if word.istitle()]}

agent.run()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    listen, http = free_port(), free_port()
    node = subprocess.Popen(
        [
            *(sys.executable, "-m", "reach.cli", "serve", "--log-level", "warning"),
            *("--listen", f"127.0.0.1:{listen}", "--http", f"127.0.0.1:{http}"),
        ]
    )
    try:
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/readyz", timeout=1):
                    break
            except OSError:
                assert node.poll() is None, "the node did not start"
                time.sleep(0.1)
        yield f"127.0.0.1:{listen}"
    finally:
        node.terminate()
        node.wait(10)


def start_agent(path: Path, url: str, name: str) -> subprocess.Popen[str]:
    script = path / "agent.py"
    script.write_text(AGENT)
    return subprocess.Popen([sys.executable, str(script), url, name], stderr=subprocess.PIPE, text=True)


def wait_for(url: str, agent_type: str) -> None:
    with connect_sync(url) as mesh:
        for _ in range(100):
            try:
                mesh.request({"text": "A"}, agent_type=agent_type, timeout=5)
                return
            except (NoRoute, NoAgentAvailable):  # it is not there, or is starting
                time.sleep(0.1)
    raise AssertionError("the agent did not come up")


async def test_requests_streams_events_and_nested_calls(url: str) -> None:
    agent = Agent("grpc", capabilities=["grpc-echo"], url=url)

    @agent.handler
    async def echo(data: object) -> object:
        return data

    @agent.on("grpc-nest")
    async def nest(data: object, ctx: Context) -> list[object]:
        inner = await ctx.request(data, capabilities=["grpc-echo"])
        return [inner.data, inner.trace_id == ctx.trace_id]

    async with agent, connect(url) as mesh:
        assert (await mesh.request(b"x" * 1_000_000, capabilities=["grpc-echo"], timeout=10)).data == b"x" * 1_000_000
        assert (await mesh.request(5, capabilities=["grpc-nest"], timeout=10)).data == [5, True]
        async with mesh.subscribe("grpc/topic") as events:
            assert (await mesh.publish("grpc/topic", "x")).accepted == 1
            assert (await anext(events)).data == "x"
        replies = await asyncio.gather(*(mesh.request(n, capabilities=["grpc-echo"], timeout=20) for n in range(500)))
        assert [reply.data for reply in replies] == list(range(500))


async def test_a_handler_too_slow_is_a_timeout_at_the_deadline(url: str) -> None:
    agent = Agent("tardy", capabilities=["tardy"], url=url)

    @agent.handler
    async def wait(data: object) -> None:
        await asyncio.sleep(30)

    async with agent, connect(url) as mesh:
        before = time.monotonic()
        with pytest.raises(Timeout, match="handled") as caught:
            await mesh.request(1, capabilities=["tardy"], timeout=0.5)
        assert time.monotonic() - before < 2
        assert caught.value.may_have_executed


def test_the_agent_of_the_readme_drains_on_sigterm_and_exits_with_0(url: str, tmp_path: Path) -> None:
    process = start_agent(tmp_path, url, "extractor")
    try:
        wait_for(url, "extractor")
        with connect_sync(url) as mesh:
            reply = mesh.request({"text": "Ada met Alan"}, agent_type="extractor", timeout=5)
            assert reply.data == {"entities": ["Ada", "Alan"]}

            async def under_way() -> object:
                async with connect(url) as caller:
                    call = asyncio.create_task(caller.request({"sleep": 1}, agent_type="extractor", timeout=10))
                    await asyncio.sleep(0.3)
                    process.send_signal(signal.SIGTERM)
                    return (await call).data

            assert asyncio.run(under_way()) == "slept"
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_exits_at_once(url: str, tmp_path: Path) -> None:
    process = start_agent(tmp_path, url, "hasty")
    try:
        wait_for(url, "hasty")

        async def under_way() -> float:
            async with connect(url) as caller:
                call = asyncio.create_task(caller.request({"sleep": 20}, agent_type="hasty", timeout=30))
                await asyncio.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                before = time.monotonic()
                await asyncio.to_thread(process.wait, 10)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                return time.monotonic() - before

        assert asyncio.run(under_way()) < 2
    finally:
        process.kill()
        process.communicate()


def test_a_process_whose_agent_is_taken_over_exits_with_4_and_one_line(url: str, tmp_path: Path) -> None:
    first = start_agent(tmp_path, url, "fixed/one")
    second: subprocess.Popen[str] | None = None
    try:
        wait_for(url, "fixed")
        second = start_agent(tmp_path, url, "fixed/one")
        assert first.wait(10) == 4
        last = (first.stderr.read() if first.stderr else "").strip().splitlines()[-1]
        assert "fixed/one" in last and "replaced" in last
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


async def test_nobody_listening_is_connect_failed_within_the_wait() -> None:
    before = time.monotonic()
    with pytest.raises(ConnectFailed, match="reach serve"):
        await connect(f"127.0.0.1:{free_port()}", timeout=1.0)
    assert time.monotonic() - before < 3


async def test_the_second_address_is_taken_when_the_first_does_not_answer(url: str) -> None:
    async with connect(f"127.0.0.1:{free_port()},{url}", timeout=10) as mesh:
        with pytest.raises(NoRoute):
            await mesh.request(1, capabilities=["nobody"], timeout=5)


STUCK = """
import sys, threading
from agent_sdk import Agent
import agent_sdk.draining
agent_sdk.draining._CANCEL_GRACE_S = 0.3
agent = Agent("stuck", url=sys.argv[1], drain_timeout=0.3)

@agent.handler
def work(request):
    print("at work", flush=True)
    print("unflushed", end="")
    threading.Event().wait()

agent.run()
"""


async def test_a_living_node_at_the_end_of_a_list_of_dead_ones_is_reached_within_the_wait(url: str) -> None:
    dead = ",".join(f"127.0.0.1:{free_port()}" for _ in range(4))
    for _ in range(3):
        began = time.monotonic()
        async with connect(f"{dead},{url}", own_link=True):
            assert time.monotonic() - began < 3


def test_a_def_handler_that_never_ends_does_not_keep_the_process(url: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK, url], stdout=subprocess.PIPE, text=True)
    try:

        async def lost() -> None:
            async with connect(url) as caller:
                call = asyncio.create_task(ask_when_there(caller))
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "at work\n"
                process.send_signal(signal.SIGTERM)
                with pytest.raises(AgentLost):
                    await asyncio.wait_for(call, 10)

        asyncio.run(lost())
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "unflushed"
    finally:
        process.kill()
        process.communicate()


async def ask_when_there(caller: ConnectedMesh) -> object:
    """Ask the stuck agent as soon as it is registered."""
    while True:
        try:
            return (await caller.request({}, agent_type="stuck", timeout=20)).data
        except (NoRoute, NoAgentAvailable):
            await asyncio.sleep(0.05)


FORKING = """
import os, sys
from agent_sdk import NoRoute
from agent_sdk.sync import connect

def ask(mesh):
    try:
        mesh.request(1, capabilities=["nobody"], timeout=20)
    except NoRoute:
        return 0
    except RuntimeError as error:
        return 7 if "fork" in str(error) else 1
    return 1

with connect(sys.argv[1], timeout=20) as mesh:
    assert ask(mesh) == 0
    child = os.fork()
    if child == 0:
        os._exit(ask(mesh))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ask(mesh) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_at_once_and_the_parent_still_works(url: str) -> None:
    forking = [sys.executable, "-c", FORKING, url]
    found = subprocess.run(forking, timeout=60, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
