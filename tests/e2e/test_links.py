"""Processes that leave, die, freeze, or find no node (the rest of group A): who waits is told, who lives is back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from agent_sdk import Mesh, ReachError, connect
from agentreach.aio.options import CLIENT_OPTIONS, SERVER_OPTIONS
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Goodbye, Signal
from tests.support.agents import (
    BUSY_S,
    SETTLE_S,
    agent_process,
    eventually,
    make,
    name,
    nothing_in_flight,
    outcome,
    usable,
)
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import raw_link, request, response


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node() as node:
        yield node


async def doubt(mesh: Mesh, data: Any, **how: Any) -> str:
    """The same, and whether it may have run."""
    try:
        await mesh.request(data, **how)
    except ReachError as error:
        return f"{error.code} may have run" if error.may_have_executed else str(error.code)
    return "OK"


class TestAPeerIsGone:
    """Goodbye, half-close and death are three things (A1); who waited is told (A5)."""

    async def test_goodbye_is_voluntary_and_everything_else_is_a_loss(self, node: NodeProcess) -> None:
        held: asyncio.Queue[Envelope] = asyncio.Queue()

        def take(envelope: Envelope) -> Envelope | None:
            if envelope.payload.body == b"hold":
                held.put_nowait(envelope)
                return None
            return response(envelope, "ok") if envelope.type == pb.REQUEST else None

        ids = name("polite"), name("closing")
        killed = name("killed")
        async with (
            connect(node.grpc, own_link=True) as mesh, raw_link(node.grpc, agents=[ids[0]], taker=take) as polite,
            raw_link(node.grpc, agents=[ids[1]], taker=take) as closing,
        ):  # fmt: skip
            with agent_process(node.grpc, killed) as worker:
                for agent_id in (*ids, killed):
                    await usable(mesh, agent_id=agent_id)
                asked = [asyncio.create_task(outcome(mesh, "hold", agent_id=each, timeout=60)) for each in ids]
                asked.append(asyncio.create_task(outcome(mesh, {"n": 1, "sleep": 60}, agent_id=killed, timeout=60)))
                for _ in ids:
                    await asyncio.wait_for(held.get(), 10)

                async def started() -> bool:
                    return worker.runs() == ["1"]

                await eventually(started, "the third has begun")
                began = time.monotonic()
                await polite.signal(Signal(goodbye=Goodbye(code=Goodbye.NORMAL, reason="done")))
                await closing.half_close()
                worker.process.kill()
                assert await asyncio.gather(*asked) == ["AGENT_LOST"] * 3
                assert time.monotonic() - began < SETTLE_S + BUSY_S
        assert "said goodbye (done)" in node.log and "link cut" in node.log
        await nothing_in_flight(node)

    @pytest.mark.parametrize("frozen_first", [False, True])
    async def test_all_who_wait_for_a_killed_worker_are_told(self, node: NodeProcess, frozen_first: bool) -> None:
        agent_id = name("doomed")
        async with connect(node.grpc, own_link=True) as mesh:
            with agent_process(node.grpc, agent_id) as worker:
                await usable(mesh, agent_id=agent_id)
                if frozen_first:
                    worker.process.send_signal(signal.SIGSTOP)
                asked = [
                    asyncio.create_task(outcome(mesh, {"n": n, "sleep": 60}, agent_id=agent_id, timeout=60))
                    for n in range(20)
                ]

                async def delivered() -> bool:
                    if frozen_first:
                        return await node.metric("reach_requests_in_flight") == 20
                    return len(worker.runs()) == 20

                await eventually(delivered, "all are under way")
                began = time.monotonic()
                worker.process.kill()
                found = await asyncio.gather(*asked)
                assert time.monotonic() - began < SETTLE_S + BUSY_S
                assert set(found) == {"AGENT_LOST"}
        await nothing_in_flight(node)


class TestTheNodeIsAway:
    """A6, A8, K7: whatever an agent was doing, it is back by itself, with all it declared, and nothing ran twice."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
    async def test_idle_and_busy_agents_are_back_after_a_restart_of_the_node(self, number: signal.Signals) -> None:
        async with start_node(drain_timeout_s=0.3) as node:
            idle, busy = name("idle"), name("busy")
            with (
                agent_process(node.grpc, idle, "--capabilities", "one,two,three") as idler,
                agent_process(node.grpc, busy) as worker,
            ):
                async with connect(node.grpc, own_link=True) as mesh:
                    await usable(mesh, agent_id=idle)
                    await usable(mesh, agent_id=busy)
                    asked = asyncio.create_task(doubt(mesh, {"n": 1, "sleep": 2}, agent_id=busy, timeout=30))

                    async def started() -> bool:
                        return worker.runs() == ["1"]

                    await eventually(started, "the task has begun")
                    await node.end(number)
                    await node.restart()
                    found = await asyncio.wait_for(asked, 35)
                    told = ("OK", "AGENT_LOST may have run", "NO_ROUTE may have run", "NO_AGENT_AVAILABLE may have run")
                    assert found in told
                    await usable(mesh, agent_id=idle, limit_s=45)
                    await usable(mesh, agent_id=busy, limit_s=45)
                    assert worker.runs() == ["1"], "the task must not run twice"
                    for n, capability in enumerate(("one", "two", "three")):
                        reply = await mesh.request({"n": n}, capabilities=[capability], timeout=10)
                        assert reply.data == n
                    assert idler.runs() == ["0", "1", "2"]

    async def test_an_agent_that_was_started_before_its_node_joins_when_it_is_there(self) -> None:
        node = start_node()
        try:
            with agent_process(node.grpc, "early/1") as early:

                async def knocked() -> bool:
                    return "no node reached" in early.log

                await eventually(knocked, "it has tried")
                node.start()
                await node.ready()
                async with connect(node.grpc, own_link=True, timeout=20) as mesh:
                    await usable(mesh, agent_id="early/1", limit_s=30)
        finally:
            node.close()

    async def test_a_stop_while_redialling_is_prompt_and_a_bad_address_ends_it_at_once(self) -> None:
        with agent_process("127.0.0.1:1", "lonely/1") as lonely, agent_process("not an address", "lost/1") as lost:

            async def knocked() -> bool:
                return "no node reached" in lonely.log

            await eventually(knocked, "it has tried")
            began = time.monotonic()
            lonely.process.send_signal(signal.SIGTERM)
            assert await lonely.ended() == 0
            assert time.monotonic() - began < 1 + BUSY_S
            assert await lost.ended() != 0
            assert "not an address" in lost.log


async def test_a_stuck_loop_takes_an_agent_out_of_routing_although_its_process_lives() -> None:
    """A15, J2: no side channel keeps it; when it thaws it is back, and nothing ran twice."""
    agent_id = name("stuck")
    settings = {"probe_interval_busy_s": 0.2, "probe_timeout_s": 0.3, "lease_ttl_s": 20, "heartbeat_interval_s": 5}
    async with start_node(**settings, accept_timeout_s=0.5) as node, connect(node.grpc, own_link=True) as mesh:
        with agent_process(node.grpc, agent_id) as worker:
            await usable(mesh, agent_id=agent_id)
            blocked = asyncio.create_task(outcome(mesh, {"n": 1, "block": 4}, agent_id=agent_id, timeout=20))

            async def refused() -> bool:
                return await outcome(mesh, "x", agent_id=agent_id, timeout=0.3) == "NO_AGENT_AVAILABLE"

            await eventually(refused, "it is out of routing", limit_s=4)
            assert worker.process.poll() is None
            assert await blocked == "OK"
            await usable(mesh, agent_id=agent_id)
            assert worker.runs() == ["1"]
            assert "work" in worker.log and "block" in worker.log, "the handler is named"


async def test_300_calls_on_one_connection_do_not_hold_up_health_or_a_single_call(node: NodeProcess) -> None:
    """A12."""
    agent = make(name("patient"), node.grpc, own_link=True)
    async with agent, connect(node.grpc, own_link=True) as mesh:
        await usable(mesh, agent_id=agent.agent_id)
        waiting = request(target=pb.Target(agent_id=agent.agent_id), timeout_ms=60_000)
        waiting.payload.json.struct_value.update({"forever": True})
        async with grpc.aio.insecure_channel(node.grpc, options=[*CLIENT_OPTIONS]) as channel:
            stream = channel.unary_stream("/agentreach.v1.MeshService/InvokeStream")
            calls = [stream(waiting.SerializeToString()) for _ in range(300)]

            async def all_there() -> bool:
                return await node.metric("reach_requests_in_flight") == 300

            await eventually(all_there, "300 are in flight")
            began = time.monotonic()
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            status = health_pb2.HealthCheckResponse.FromString(await check(b"", timeout=10)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            assert (await mesh.request("x", agent_id=agent.agent_id, timeout=10)).data == "x"
            assert time.monotonic() - began < 1 + BUSY_S
            for call in calls:
                call.cancel()
        await nothing_in_flight(node)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_twelve_silent_minutes_with_the_defaults_cut_nothing() -> None:
    """A3: an idle link is neither cut nor resumed; nor is a bare client that pings every 10 s."""
    async with start_node(lease_ttl_s=30, heartbeat_interval_s=10, resume_window_s=10) as node:
        options = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1)]
        async with (
            make("idle/1", node.grpc, own_link=True) as agent, connect(node.grpc, own_link=True) as mesh,
            grpc.aio.insecure_channel(node.grpc, options=options) as bare,
        ):  # fmt: skip
            await usable(mesh, agent_id=agent.agent_id)
            watch = bare.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await watch.read()
            tokens = agent._link().resume_token, mesh._link().resume_token
            await asyncio.sleep(720)  # the silence itself
            assert not watch.done()
            assert (await mesh.request("x", agent_id=agent.agent_id, timeout=10)).data == "x"
            assert (agent._link().resume_token, mesh._link().resume_token) == tokens
            assert await node.metric("reach_link_resumes_total") == 0
            assert "link cut" not in node.log
            watch.cancel()


def test_our_clients_ping_no_more_often_than_our_server_permits() -> None:
    """A3: one matched pair, whatever somebody changes."""
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    for minimum in ("min_recv_ping_interval_without_data_ms", "min_ping_interval_without_data_ms"):
        permitted = server[f"grpc.http2.{minimum}"]
        assert int(permitted) < int(client["grpc.keepalive_time_ms"]) <= 15_000
    for options in (client, server):
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
