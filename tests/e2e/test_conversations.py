"""Sessions, order, once, loops over real links that are cut (groups E, F, G, I, L) and what Python does to us (S)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from agent_sdk import Agent, Context, LoopDetected, Mesh, ReachError, connect
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.envelope_pb2 import Envelope
from tests.support.agents import agent_process, eventually, make, usable
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import call, request
from tools.faultproxy import FaultProxy

BUSY_S = 3.0


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node(lane_max=1000, resume_window_s=5, settle_min_s=2) as node:
        yield node


def unique(agent_type: str) -> str:
    """An agent type that no other test uses."""
    return f"{agent_type}{secrets.token_hex(3)}"


async def code_of(asked: Any) -> str:
    """ "OK" or the error's code."""
    try:
        await asked
    except ReachError as error:
        return str(error.code)
    return "OK"


class TestOrder:
    async def test_a_session_is_handled_in_order_one_at_a_time_over_a_cut_and_others_beside_it(
        self, node: NodeProcess
    ) -> None:
        """E1."""
        rng = random.Random(3)
        kind, count = unique("ordered"), 150
        got: dict[str, list[int]] = {}
        busy: Counter[str] = Counter()
        most_at_once = most_of_one = 0
        async with FaultProxy(node.grpc) as proxy:
            agent = Agent(f"{kind}/1", url=proxy.address, own_link=True, drain_timeout=1)

            @agent.handler
            async def work(data: int, ctx: Context) -> int:
                nonlocal most_at_once, most_of_one
                busy[ctx.session_id] += 1
                most_of_one = max(most_of_one, busy[ctx.session_id])
                most_at_once = max(most_at_once, busy.total())
                got.setdefault(ctx.session_id, []).append(data)
                await asyncio.sleep(rng.random() * 0.01)
                busy[ctx.session_id] -= 1
                return data

            async with agent, connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, agent_type=kind)
                asked = [
                    asyncio.create_task(mesh.request(n, agent_type=kind, session=session, timeout=60))
                    for n in range(count)
                    for session in ("long", f"short{n}")
                ]

                async def midway() -> bool:
                    return len(got.get("long", ())) > count // 3

                await eventually(midway, "it is under way")
                proxy.reset()
                await asyncio.gather(*asked)
        assert got["long"] == list(range(count))
        assert most_of_one == 1 and most_at_once > 5

    async def test_a_subscriber_whose_link_is_cut_misses_and_repeats_nothing(self, node: NodeProcess) -> None:
        """E3."""
        async with (
            FaultProxy(node.grpc) as proxy, connect(node.grpc, own_link=True) as publisher,
            connect(proxy.address, own_link=True) as mesh, mesh.subscribe("cut/news") as events,
        ):  # fmt: skip
            for n in range(100):
                await publisher.publish("cut/news", n, timeout=0.05)
                if n in (30, 60):
                    proxy.reset()
            async with asyncio.timeout(20):
                assert [(await anext(events)).data for _ in range(100)] == list(range(100))

    async def test_a_stream_whose_agent_is_killed_ends_with_its_loss_also_on_the_command_line(
        self, node: NodeProcess
    ) -> None:
        """E4."""
        capability = unique("stream-of-")
        with agent_process(node.grpc, f"{unique('singer')}/1", "--capabilities", capability) as worker:
            async with connect(node.grpc, own_link=True) as mesh:
                await usable(mesh, capabilities=[capability])
                items = []
                with pytest.raises(ReachError) as caught:
                    async with mesh.stream(
                        {"stream": 1000, "pause": 0.05}, capabilities=["stream", capability], timeout=30
                    ) as stream:
                        async for item in stream:
                            items.append(item)
                            if len(items) == 3:
                                command = await self.watch(node, capability)
                                assert command.stdout is not None
                                assert (await asyncio.wait_for(command.stdout.readline(), 10)).strip() == b"0"
                                worker.process.kill()
                assert caught.value.code == "AGENT_LOST" and caught.value.may_have_executed
                _, told = await asyncio.wait_for(command.communicate(), 20)
                assert command.returncode == 1 and b"AGENT_LOST" in told

    @staticmethod
    async def watch(node: NodeProcess, capability: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "reach.cli", "call", '{"stream": 1000, "pause": 0.05}', "--capability",
            "stream", "--capability", capability, "--stream", "--timeout", "30", "--url", node.grpc,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


class TestOnce:
    async def test_fifty_copies_at_once_over_links_that_are_cut_run_once(self, node: NodeProcess) -> None:
        """F1: one message_id, five links and Invoke, streams reset in the midst; the external counter says 1."""
        agent_id = f"{unique('counter')}/1"
        async with contextlib.AsyncExitStack() as all_of_them:
            proxy = await all_of_them.enter_async_context(FaultProxy(node.grpc))
            worker = all_of_them.enter_context(agent_process(proxy.address, agent_id))
            meshes = [
                await all_of_them.enter_async_context(connect(proxy.address, own_link=True, timeout=20))
                for _ in range(5)
            ]
            await usable(meshes[0], agent_id=agent_id)
            for n in range(3):
                data, message_id = {"n": n, "sleep": 0.5}, f"{agent_id}-{n}"
                asked = [
                    asyncio.create_task(mesh.request(data, agent_id=agent_id, timeout=30, message_id=message_id))
                    for mesh in meshes
                    for _ in range(10)
                ]

                async def began(n: int = n) -> bool:
                    return str(n) in worker.runs()

                await eventually(began, "it has begun")
                proxy.reset()
                assert [reply.data for reply in await asyncio.gather(*asked)] == [n] * 50
                late = await meshes[0].request(data, agent_id=agent_id, timeout=30, message_id=message_id)
                assert late.data == n
            assert worker.runs() == ["0", "1", "2"]

    async def test_the_order_of_a_maps_bytes_makes_no_other_message(self, node: NodeProcess) -> None:
        """F7: one id, headers, labels and an object written in two orders: one run; another value: a conflict."""
        ran: list[object] = []
        agent = Agent(f"{unique('mapped')}/1", url=node.grpc, own_link=True, labels={"a": "1", "b": "2"})

        @agent.handler
        async def work(data: object) -> str:
            ran.append(data)
            return "done"

        def message(order: int, value: str = "v") -> Envelope:
            envelope = request(message_id=f"{agent.agent_id}-m")
            for name in ("a", "b")[::order]:
                envelope.headers[name] = name
                envelope.target.labels[name] = {"a": "1", "b": "2"}[name]
                envelope.payload.json.struct_value[name] = value
            return envelope

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            ran.clear()
            for order in (1, -1):
                reply = Envelope.FromString(await call(node.grpc, "MeshService/Invoke", message(order)))
                assert reply.payload.json.string_value == "done" or reply.payload.text == "done"
            assert len(ran) == 1
            with pytest.raises(Exception, match="IDEMPOTENCY_CONFLICT"):
                await call(node.grpc, "MeshService/Invoke", message(1, "other"))

    async def test_whoever_waited_when_worker_and_node_died_together_is_told(self) -> None:
        """G8: nothing stays active for ever, and nothing runs twice."""
        async with start_node() as node:
            with agent_process(node.grpc, "both/1") as worker:
                async with connect(node.grpc, own_link=True) as mesh:
                    await usable(mesh, agent_id="both/1")
                    asked = [
                        asyncio.create_task(code_of(mesh.request({"n": n, "sleep": 60}, agent_id="both/1", timeout=5)))
                        for n in range(5)
                    ]

                    async def began() -> bool:
                        return len(worker.runs()) == 5

                    await eventually(began, "they have begun")
                    worker.process.kill()
                    await node.end(signal.SIGKILL)
                    await node.restart()
                    found = await asyncio.gather(*asked)
                    assert "OK" not in found
                    assert await node.metric("reach_requests_in_flight") == 0
                    assert len(worker.runs()) == 5


class TestSessions:
    async def owner(self, mesh: Mesh, kind: str, session: str, timeout: float = 10) -> str:
        """Who answers in this session."""
        reply = await mesh.request({"who": True}, agent_type=kind, session=session, timeout=timeout)
        return str(reply.data)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
    async def test_the_next_message_of_a_session_is_answered_by_another_soon_after_its_owner_left(
        self, node: NodeProcess, number: signal.Signals
    ) -> None:
        """G1."""
        kind = unique("pinned")
        async with connect(node.grpc, own_link=True) as mesh:
            with agent_process(node.grpc, f"{kind}/1") as one, agent_process(node.grpc, f"{kind}/2") as two:
                for n in (1, 2):
                    await usable(mesh, agent_id=f"{kind}/{n}")
                first = await self.owner(mesh, kind, "talk")
                assert [await self.owner(mesh, kind, "talk") for _ in range(5)] == [first] * 5
                leaving = one if first.endswith("/1") else two
                leaving.process.send_signal(number)
                await leaving.ended()
                began = time.monotonic()
                assert await self.owner(mesh, kind, "talk", timeout=20) != first
                bound_s = 1.0 if number is signal.SIGTERM else 5.0  # at once, or when it can no longer come back
                assert time.monotonic() - began < bound_s + BUSY_S

    async def test_a_further_worker_moves_no_session_and_takes_its_share_of_the_new_ones(
        self, node: NodeProcess
    ) -> None:
        """G2, I5."""
        kind = unique("scaled")
        async with contextlib.AsyncExitStack() as workers, connect(node.grpc, own_link=True) as mesh:

            async def add(n: int) -> Agent:
                agent = await workers.enter_async_context(make(f"{kind}/{n}", node.grpc, own_link=True))
                await usable(mesh, agent_id=agent.agent_id)
                return agent

            async def owners(names: list[str]) -> dict[str, str]:
                found = await asyncio.gather(*(self.owner(mesh, kind, name) for name in names))
                return dict(zip(names, found, strict=True))

            fleet = [await add(n) for n in range(3)]
            names = [f"s{n}" for n in range(90)]
            before = await owners(names)
            assert set(before.values()) == {f"{kind}/{n}" for n in range(3)}
            await add(3)
            assert await owners(names) == before
            fresh = await owners([f"t{n}" for n in range(90)])
            assert Counter(fresh.values())[f"{kind}/3"] >= 5
            await fleet[0].drain()
            after = await owners(names)
            moved = {name for name in names if after[name] != before[name]}
            assert moved == {name for name in names if before[name] == f"{kind}/0"}

    async def test_every_node_maps_sessions_alike_whatever_the_hash_seed_of_its_process(self) -> None:
        """I1: nodes that know nothing of each other, with the same agents."""
        kind, names = unique("mapped"), [f"s{n}" for n in range(300)]

        async def mapped(seed: str) -> list[str]:
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("PYTHONHASHSEED", seed)
                node = start_node()
            async with node, contextlib.AsyncExitStack() as agents, connect(node.grpc, own_link=True) as mesh:
                for n in range(3):
                    await agents.enter_async_context(make(f"{kind}/{n}", node.grpc, own_link=True))
                    await usable(mesh, agent_id=f"{kind}/{n}")
                return await asyncio.gather(*(self.owner(mesh, kind, name, timeout=30) for name in names))

        one, two = await asyncio.gather(mapped("1"), mapped("2"))
        assert one == two
        assert set(one) == {f"{kind}/{n}" for n in range(3)}

    async def test_a_session_is_the_same_one_whichever_way_it_comes_and_ids_are_compared_byte_by_byte(
        self, node: NodeProcess
    ) -> None:
        """I2."""
        kind = unique("named")
        async with contextlib.AsyncExitStack() as workers, connect(node.grpc, own_link=True) as mesh:
            for n in range(3):
                await workers.enter_async_context(make(f"{kind}/{n}", node.grpc, own_link=True))
                await usable(mesh, agent_id=f"{kind}/{n}")
            composed = unicodedata.normalize("NFC", "é")
            for session in ("plain", "ü/ß", composed, unicodedata.normalize("NFD", composed), "A", "a", "a "):
                owner = await self.owner(mesh, kind, session)
                asked = request(target=pb.Target(agent_type=kind), session_id=session)
                asked.payload.json.struct_value.update({"who": True})
                reply = Envelope.FromString(await call(node.grpc, "MeshService/Invoke", asked))
                assert reply.source == owner
                assert reply.session_event == 0, "by Invoke it is the same session, not a new one"
            answered = await mesh.request({"who": True}, agent_type=kind, session="A  ", timeout=10)
            assert answered.session_event == "STARTED"


class TestLoops:
    @pytest.mark.parametrize("length", [1, 2, 3])
    async def test_a_circle_of_agents_that_can_do_one_thing_at_a_time_is_refused_at_once(
        self, node: NodeProcess, length: int
    ) -> None:
        """L1: A→A, A→B→A, A→B→C→A, one session throughout."""
        kinds = [unique("ring") for _ in range(length)]
        async with contextlib.AsyncExitStack() as agents, connect(node.grpc, own_link=True) as mesh:
            for n, kind in enumerate(kinds):
                agent = Agent(f"{kind}/1", url=node.grpc, own_link=True, max_concurrency=1)

                @agent.handler
                async def ask_the_next(data: str, ctx: Context, to: str = kinds[(n + 1) % length]) -> object:
                    if data == "usable?":
                        return data
                    return (await ctx.request(data, agent_type=to, session="same")).data

                await agents.enter_async_context(agent)
                await usable(mesh, agent_type=kind)
            bystander = await agents.enter_async_context(make(f"{unique('by')}/1", node.grpc, own_link=True))
            await usable(mesh, agent_id=bystander.agent_id)
            began = time.monotonic()
            asked = asyncio.create_task(code_of(mesh.request("go", agent_type=kinds[0], session="same", timeout=30)))
            assert (await mesh.request("x", agent_id=bystander.agent_id, timeout=10)).data == "x"
            assert await asked == "WOULD_DEADLOCK"
            assert time.monotonic() - began < 2 + BUSY_S

    async def test_forwarders_in_a_circle_stop_and_their_origin_is_told_with_the_path(self, node: NodeProcess) -> None:
        """L2."""
        kinds = [unique("fwd") for _ in range(3)]
        runs = 0
        loops = await node.metric("reach_loops_total")
        async with contextlib.AsyncExitStack() as agents, connect(node.grpc, own_link=True) as mesh:
            for n, kind in enumerate(kinds):
                agent = Agent(f"{kind}/1", url=node.grpc, own_link=True)

                @agent.handler
                async def forward(data: str, ctx: Context, to: str = kinds[(n + 1) % 3]) -> object:
                    nonlocal runs
                    if data == "usable?":
                        return data
                    runs += 1
                    return (await ctx.request(data, agent_type=to)).data

                await agents.enter_async_context(agent)
                await usable(mesh, agent_type=kind)
            with pytest.raises(LoopDetected) as caught:
                await mesh.request("round and round", agent_type=kinds[0], timeout=30)
            assert runs <= 7 and all(kind in str(caught.value) + str(caught.value.details) for kind in kinds)
        assert await node.metric("reach_loops_total") == loops + 1

    async def test_a_chain_of_the_limit_works_and_one_longer_is_told_the_limit(self, node: NodeProcess) -> None:
        """L3."""
        kind = unique("chain")
        agent = Agent(f"{kind}/1", url=node.grpc, own_link=True)

        @agent.handler
        async def count_down(data: Any, ctx: Context) -> object:
            if data == "usable?" or data == 1:
                return "end"
            return (await ctx.request(data - 1, agent_type=kind, dedup_key=f"step {data}")).data

        async with agent, connect(node.grpc, own_link=True) as mesh:
            await usable(mesh, agent_type=kind)
            assert (await mesh.request(10, agent_type=kind, timeout=20)).data == "end"
            with pytest.raises(ReachError, match="10") as caught:
                await mesh.request(11, agent_type=kind, timeout=20)
            assert caught.value.code == "HOP_LIMIT"
        assert "HOP_LIMIT" in node.log or "hop" in node.log.lower()

    async def test_hops_that_a_sender_claims_are_not_believed(self, node: NodeProcess) -> None:
        async with make(f"{unique('claimed')}/1", node.grpc, own_link=True) as agent, connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            claimed = request(target=pb.Target(agent_id=agent.agent_id), hop_count=2**32 - 1)
            assert await call(node.grpc, "MeshService/Invoke", claimed)


THREADS = """
import asyncio, logging, sys, threading
logging.basicConfig(level=logging.INFO)
from agent_sdk import connect
from agent_sdk.sync import connect as connect_sync
url, agent_id, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
wrong = []
def ask(mesh, number):
    for n in range(rounds):
        data = {"n": number * 1000 + n}
        if mesh.request(data, agent_id=agent_id, timeout=30).data != data["n"]:
            wrong.append(data)
async def also(mesh):
    for n in range(rounds):
        assert (await mesh.request({"n": n}, agent_id=agent_id, timeout=30)).data == n
async def main():
    async with connect(url) as mesh:
        await also(mesh)
with connect_sync(url) as mesh:
    threads = [threading.Thread(target=ask, args=(mesh, number)) for number in range(20)]
    for thread in threads: thread.start()
    asyncio.run(main())
    for thread in threads: thread.join()
assert not wrong
print("fine")
"""


async def test_twenty_threads_and_a_loop_of_ones_own_make_no_noise(node: NodeProcess) -> None:
    """S3: the synchronous face from many threads beside asynchronous use."""
    async with make(f"{unique('noisy')}/1", node.grpc, own_link=True) as agent, connect(node.grpc) as mesh:
        await usable(mesh, agent_id=agent.agent_id)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", THREADS, node.grpc, agent.agent_id, "15"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, told = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0 and out.strip() == b"fine", told.decode()
        for word in (b"BlockingIOError", b"Traceback", b"ERROR"):
            assert word not in told, told.decode()


async def test_collecting_garbage_all_the_time_ends_no_background_work(node: NodeProcess) -> None:
    """S4: heartbeats, redials and handlers of a process that collects at every allocation."""
    agent_id = f"{unique('thrifty')}/1"
    async with FaultProxy(node.grpc) as proxy, connect(node.grpc, own_link=True) as mesh:
        with agent_process(proxy.address, agent_id, "--collect") as worker:
            await usable(mesh, agent_id=agent_id, limit_s=30)
            asked = [
                asyncio.create_task(mesh.request({"n": n, "sleep": 1.5}, agent_id=agent_id, timeout=30))
                for n in range(5)
            ]

            async def all_begun() -> bool:
                return len(worker.runs()) == 5

            await eventually(all_begun, "they have begun")
            proxy.reset()
            assert [reply.data for reply in await asyncio.gather(*asked)] == list(range(5))
            assert "Traceback" not in worker.log and "never retrieved" not in worker.log
