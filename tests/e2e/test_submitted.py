"""Callbacks and dead letters as a person meets them: a real node, the SDK, grpcurl, and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, AgentLost, Context, Event, HopLimit, Subscription, connect
from tests.support.agents import agent_process, eventually, usable
from tests.support.node import config, running, start_node

_BESIDE_PYTHON = Path(sys.executable).with_name("grpcurl")
GRPCURL = str(_BESIDE_PYTHON) if _BESIDE_PYTHON.exists() else shutil.which("grpcurl")
LIMIT_S = 30.0
TOPIC = "results/mine"


async def ran(*command: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, out.decode(), err.decode()


async def reach(*arguments: str) -> tuple[int, str, str]:
    """The real `reach`."""
    return await ran(sys.executable, "-m", "reach.cli", *arguments)


async def reach_json(*arguments: str) -> Any:
    """What `reach … --json` prints."""
    code, out, err = await reach(*arguments, "--json")
    assert code == 0, (out, err)
    return json.loads(out)


async def next_event(events: Subscription) -> Event:
    """The next one, or a failed test."""
    async with asyncio.timeout(LIMIT_S):
        return await anext(events)


def doubler(url: str) -> Agent:
    """Doubles numbers."""
    agent = Agent("doubler", capabilities=["double"], url=url, drain_timeout=1.0)

    @agent.handler
    async def double(n: int) -> int:
        return 2 * n

    return agent


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl for this platform")
async def test_a_person_submits_with_grpcurl_and_with_reach_and_a_subscriber_gets_both_results() -> None:
    async with (
        running(config()) as node,
        doubler(node.grpc_address),
        connect(node.grpc_address) as mesh,
        mesh.subscribe(TOPIC) as events,
    ):
        url = node.grpc_address
        call = {
            "target": {"capabilities": ["double"]},
            "timeoutMs": 5000,
            "replyTopic": TOPIC,
            "payload": {"json": 21},
        }
        for method in ("Invoke", "InvokeStream"):
            code, out, err = await ran(
                *(str(GRPCURL), "-plaintext", "-max-time", "3", "-d", json.dumps(call), url),
                f"agentreach.v1.MeshService/{method}",
            )
            assert code == 0, err
            reply = json.loads(out)
            said = reply["payload"]["json"]
            assert said["message_id"] == reply["correlationId"] and reply["replyTopic"] == TOPIC
            event = await next_event(events)
            assert (event.data, event.correlation_id) == (42, said["message_id"])
        asked = ("call", "--url", url, "--reply-topic", TOPIC, "--timeout", "5")
        found = await reach_json(*asked, "-c", "double", "4")
        event = await next_event(events)
        assert (event.data, event.correlation_id) == (8, found["message_id"])
        code, out, err = await reach(*asked, "-c", "double", "5")
        assert code == 0 and "accepted" in err
        assert (await next_event(events)).correlation_id == out.strip()
        code, _, err = await reach(*asked, "-c", "nothing", "5")
        assert code == 1 and "NO_ROUTE" in err


async def test_a_worker_killed_under_a_submitted_request_is_told_to_the_topic_though_its_submitter_is_gone() -> None:
    with start_node() as node, agent_process(node.grpc, "worker") as worker:
        async with connect(node.grpc, own_link=True) as mesh, mesh.subscribe(TOPIC) as events:
            await usable(mesh, agent_type="worker")
            async with connect(node.grpc, own_link=True) as submitter:
                accepted = await submitter.submit(
                    {"n": 7, "forever": True}, agent_type="worker", reply_topic=TOPIC, timeout=60
                )

            async def started() -> bool:
                return worker.runs() == ["7"]

            await eventually(started, "the handler runs")
            worker.process.kill()
            event = await next_event(events)
            assert isinstance(event.error, AgentLost) and event.correlation_id == accepted.message_id
            assert await node.metric("reach_requests_in_flight") == 0
            assert await node.metric("reach_callbacks_total", kind="published") == 1


async def test_a_cut_loop_is_listed_shown_and_redriven_once_from_the_command_line() -> None:
    async with running(config(max_hops=1)) as node, doubler(node.grpc_address):
        url = node.grpc_address
        code, _, err = await reach("dead", "list", "--url", url)
        assert code == 0 and "no dead letters" in err
        agent = Agent("planner", url=url, drain_timeout=1.0)

        @agent.handler
        async def plan(n: int, ctx: Context) -> int:
            return int((await ctx.request(n, capabilities=["double"])).data)

        async with agent, connect(url) as mesh:
            with pytest.raises(HopLimit):
                await mesh.request(424242, agent_type="planner", timeout=5)
            listed = await reach_json("dead", "list", "--url", url)
            (letter,) = listed["deadLetters"]
            message_id = letter["messageId"]
            assert letter["reason"] == "HOP_LIMIT" and not letter["redriven"] and listed["kept"] == 1
            code, out, _ = await reach("dead", "list", "--url", url)
            assert code == 0 and message_id in out and "HOP_LIMIT" in out and "double" in out
            code, shown, _ = await reach("dead", "show", message_id, "--url", url)
            assert code == 0 and letter["traceId"] in shown and "planner/" in shown
            assert "424242" not in out + shown + json.dumps(listed)
            code, out, err = await reach("dead", "redrive", message_id, "--wait", "10", "--url", url)
            assert code == 0 and "outcome: OK" in out, (out, err)
            new_id = out.split()[4]
            code, _, err = await reach("dead", "redrive", message_id, "--url", url)
            assert code == 1 and "REJECTED" in err and new_id in err
            code, _, err = await reach("dead", "show", "unknown", "--url", url)
            assert code == 1 and "reach dead list" in err
            (letter,) = (await reach_json("dead", "list", "--url", url))["deadLetters"]
            assert letter["redriven"] and letter["redrivenAs"] == new_id
            assert (await mesh.request(424242, capabilities=["double"], timeout=5, message_id=new_id)).data == 848484


async def test_a_redrive_that_fails_ends_with_1_and_says_why() -> None:
    async with running(config(max_hops=1)) as node:
        url = node.grpc_address
        first, second = Agent("first", url=url, drain_timeout=1.0), Agent("second", url=url, drain_timeout=1.0)

        @first.handler
        async def ask(data: str, ctx: Context) -> Any:
            return (await ctx.request(data, agent_type="second")).data

        @second.handler
        async def fail(data: str) -> str:
            raise ValueError(data)

        async with first, second, connect(url) as mesh, mesh.subscribe(TOPIC) as events:
            with pytest.raises(HopLimit):
                await mesh.request("x", agent_type="first", timeout=5)
            message_id = (await reach_json("dead", "list", "--url", url))["deadLetters"][0]["messageId"]
            code, out, err = await reach(
                "dead", "redrive", message_id, "--wait", "10", "--reply-topic", TOPIC, "--url", url
            )
            assert code == 1 and "outcome: AGENT_ERROR" in out and "reach trace" in err
            event = await next_event(events)
            assert event.error is not None and event.error.code == "AGENT_ERROR"
