"""Processes that are killed and frozen, networks that break: what each request was told is what really happened.

After each scenario an external counter says how often every handler ran, every request was answered once and before its
deadline, the node's gauges are back to 0, and neither a task nor memory is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agent_sdk import Mesh, connect
from agentreach.v1.admin_pb2 import ResetBreakerRequest
from reach.adapters.admin_client import AdminClient
from tests.support.agents import AgentProcess, agent_process, eventually, make, usable
from tests.support.callers import caller_process
from tests.support.chaos import Book, Left, scenario
from tests.support.node import NodeProcess, start_node
from tools.faultproxy import BOTH, DOWN, UP, FaultProxy

pytestmark = pytest.mark.timeout(300)

BACK_S = 60.0  # no promise, but a bound: until whoever was cut, deaf or frozen is found usable again
LONG_ENOUGH_S = 2.5  # a freeze in which links are found dead and what they held is settled

SETTINGS: dict[str, Any] = {"accept_timeout_s": 1.0, "trace_recent_max": 2_000, "trace_kept_max": 1_000}


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node(**SETTINGS) as node:
        yield node


@pytest.fixture(scope="module")
def left(node: NodeProcess) -> Left:
    return asyncio.run(Left.of(node))


@pytest.fixture
async def book(node: NodeProcess, left: Left) -> AsyncIterator[Book]:
    async with scenario(node, left) as book:
        yield book


def unique(agent_type: str) -> str:
    """An agent type that no other test uses."""
    return f"{agent_type}{secrets.token_hex(3)}"


@contextlib.contextmanager
def workers(url: str, kind: str, book: Book, count: int = 2) -> Iterator[list[AgentProcess]]:
    """Agents in processes of their own, writing into the book's ledger."""
    with contextlib.ExitStack() as processes:
        yield [
            processes.enter_context(agent_process(url, f"{kind}/{n}", "--written", str(book.ledger)))
            for n in range(count)
        ]


async def all_usable(mesh: Mesh, kind: str, count: int = 2) -> None:
    """Wait until each of them answers."""
    for n in range(count):
        await usable(mesh, limit_s=BACK_S, agent_id=f"{kind}/{n}")


def ask_both_kinds(book: Book, mesh: Mesh, kind: str, count: int = 15, **how: Any) -> None:
    """Ask what may run twice, and what may not, and for streamed replies."""
    book.begin(mesh, kind, count, idempotent=True, **how)
    book.begin(mesh, kind, count, **how)
    book.begin(mesh, kind, count // 3, stream=10, **how)


async def let_in(node: NodeProcess, kind: str) -> None:
    """What an operator does when the fault is over: the breaker that it opened would stay open for 30 s."""

    async def back() -> bool:
        return await node.metric("reach_agents", agent_type=kind, status="HEALTHY") == 1

    await eventually(back, f"{kind} is back", limit_s=BACK_S)
    async with AdminClient([node.grpc]) as client:
        await client.reset_breaker(ResetBreakerRequest(agent_id=f"{kind}/0"))


async def pause(seconds: float) -> None:
    """Let a fault last: what it does to the others shows only with time."""
    await asyncio.sleep(seconds)


class TestAnAgent:
    async def test_that_is_killed_under_load(self, node: NodeProcess, book: Book) -> None:
        kind = unique("killed")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book) as (one, _):
                await all_usable(mesh, kind)
                ask_both_kinds(book, mesh, kind, sleep=0.5)
                await book.begun(30)
                one.process.kill()
                ask_both_kinds(book, mesh, kind, sleep=0.1)
                await book.answered()
                one.restart()
                await all_usable(mesh, kind)
                ask_both_kinds(book, mesh, kind, sleep=0.1)
                await book.answered()
        assert book.codes()["OK"] >= 70 and book.codes().keys() <= {"OK", "AGENT_LOST", "CONNECT_FAILED"}, book.codes()

    @pytest.mark.soak  # in its short form: test_promises.py, a target frozen in mid call
    async def test_that_is_frozen_until_it_is_given_up_and_thaws(self, node: NodeProcess, book: Book) -> None:
        kind = unique("frozen")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book) as (one, _):
                await all_usable(mesh, kind)
                ask_both_kinds(book, mesh, kind, sleep=0.5)
                await book.begun(30)
                one.process.send_signal(signal.SIGSTOP)
                ask_both_kinds(book, mesh, kind, sleep=0.1)
                await book.answered()
                one.process.send_signal(signal.SIGCONT)
                await all_usable(mesh, kind)
        told = {"OK", "AGENT_LOST", "CONNECT_FAILED", "TIMEOUT"}
        assert book.codes()["OK"] >= 35 and book.codes().keys() <= told, book.codes()

    async def test_that_is_frozen_for_a_moment_loses_nothing(self, node: NodeProcess, book: Book) -> None:
        kind = unique("blinking")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book) as (one, _):
                await all_usable(mesh, kind)
                for _ in range(3):
                    ask_both_kinds(book, mesh, kind, sleep=0.2)
                    await book.begun(10)
                    one.process.send_signal(signal.SIGSTOP)
                    await pause(0.3)
                    one.process.send_signal(signal.SIGCONT)
                    await book.answered()
        assert book.codes().keys() == {"OK"}, book.codes()


class TestACaller:
    async def test_that_is_killed_has_its_handlers_cancelled(self, node: NodeProcess, book: Book) -> None:
        kind = unique("orphan")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book, 1):
                await all_usable(mesh, kind, 1)
                with caller_process(node.grpc, kind, "--count", "20", "--sleep", "60") as caller:
                    await book.begun(20)
                    caller.process.kill()

                    async def given_up() -> bool:
                        return await node.metric("reach_requests_in_flight") == 0

                    await eventually(given_up, "what it had asked is given up")
                    assert caller.told() == {}
        assert book.runs() == dict.fromkeys(range(20), 1)

    @pytest.mark.parametrize("frozen_s", [0.5, LONG_ENOUGH_S], ids=["for-a-moment", "until-its-link-is-dead"])
    async def test_that_is_frozen_is_told_each_outcome_once_when_it_thaws(
        self, node: NodeProcess, book: Book, frozen_s: float
    ) -> None:
        kind = unique("patient")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book, 1):
                await all_usable(mesh, kind, 1)
                with caller_process(node.grpc, kind, "--count", "20", "--sleep", "0.4") as caller:
                    await book.begun(20)
                    caller.process.send_signal(signal.SIGSTOP)
                    await pause(frozen_s)
                    caller.process.send_signal(signal.SIGCONT)
                    assert await caller.ended() == 0
                    assert caller.told().keys() == set(range(20))
                    if frozen_s < 1:
                        assert set(caller.told().values()) == {"OK"}
        assert book.runs() == dict.fromkeys(range(20), 1)


class TestTheNode:
    async def test_that_is_killed_and_restarted_doubles_nothing(self) -> None:
        """Several replicas, and the node has forgotten who was doing what."""
        kind = unique("restarted")
        async with (
            start_node(**SETTINGS, resume_window_s=5) as node, scenario(node, await Left.of(node)) as book,
            connect(node.grpc, own_link=True) as mesh,
        ):  # fmt: skip
            with workers(node.grpc, kind, book, 3):
                await all_usable(mesh, kind, 3)
                ask_both_kinds(book, mesh, kind, sleep=1.5, timeout=60)
                await book.begun(35)
                await node.end(signal.SIGKILL)
                ask_both_kinds(book, mesh, kind, sleep=0.1, timeout=60)
                await node.restart()
                await book.answered()
                await all_usable(mesh, kind, 3)
                ask_both_kinds(book, mesh, kind, sleep=0.1, timeout=60)
                await book.answered()
                assert all(each.code == "OK" for each in book.outcomes.values() if each.idempotent), book.codes()

    @pytest.mark.parametrize(
        "frozen_s",
        [
            pytest.param(0.5, id="for-a-moment"),
            pytest.param(LONG_ENOUGH_S, id="until-everybody-redials", marks=pytest.mark.soak),
        ],
    )
    async def test_that_is_frozen_and_thaws_loses_and_doubles_nothing(
        self, node: NodeProcess, book: Book, frozen_s: float
    ) -> None:
        kind = unique("still")
        async with connect(node.grpc, own_link=True) as mesh:
            with workers(node.grpc, kind, book):
                await all_usable(mesh, kind)
                ask_both_kinds(book, mesh, kind, sleep=0.4)
                await book.begun(10)
                node.process.send_signal(signal.SIGSTOP)
                ask_both_kinds(book, mesh, kind, sleep=0.1)
                await pause(frozen_s)
                node.process.send_signal(signal.SIGCONT)
                await book.answered()
                await all_usable(mesh, kind)
        if frozen_s < 1:
            assert book.codes().keys() == {"OK"}, book.codes()


FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "delay": lambda proxy: setattr(proxy, "delay_s", 0.2),
    "slow": lambda proxy: setattr(proxy, "bytes_per_s", 20_000),
    "black hole, up": lambda proxy: proxy.blackhole(UP),
    "black hole, down": lambda proxy: proxy.blackhole(DOWN),
    "black hole, both": lambda proxy: proxy.blackhole(BOTH),
    "held, up": lambda proxy: proxy.hold(UP),
    "held, down": lambda proxy: proxy.hold(DOWN),
    "reset": FaultProxy.reset,
    "half-closed, up": lambda proxy: proxy.half_close(UP),
    "half-closed, down": lambda proxy: proxy.half_close(DOWN),
}
LOSES_NOTHING = ("delay", "slow", "reset", "half-closed, up", "half-closed, down")


class TestTheWay:
    """Each fault on a way of its own, all at the same time; what is told of one is not told of another."""

    async def broken(self, node: NodeProcess, book: Book, fault: str, side: str) -> None:
        kind = unique("beyond")
        async with FaultProxy(node.grpc) as proxy:
            agents_way, callers_way = (proxy.address, node.grpc) if side == "agent" else (node.grpc, proxy.address)
            async with (
                make(f"{kind}/0", agents_way, book.ledger, own_link=True),
                connect(callers_way, own_link=True, timeout=20) as mesh,
            ):
                await usable(mesh, agent_type=kind)
                numbers = [
                    *book.begin(mesh, kind, 10, sleep=0.5),
                    *book.begin(mesh, kind, 10, sleep=0.5, idempotent=True),
                ]

                async def begun() -> bool:
                    return book.runs().keys() >= set(numbers)

                await eventually(begun, f"{fault}: all have begun")
                FAULTS[fault](proxy)
                numbers += book.begin(mesh, kind, 10, sleep=0.1)
                await pause(LONG_ENOUGH_S)
                proxy.heal()

                async def told() -> bool:
                    return book.outcomes.keys() >= set(numbers)

                await eventually(told, f"{fault}: all are answered", limit_s=40)
                if side == "agent":
                    await let_in(node, kind)
                await usable(mesh, limit_s=BACK_S, agent_type=kind)
                if fault in LOSES_NOTHING:
                    assert {book.outcomes[number].code for number in numbers[:20]} == {"OK"}, f"{fault}: {book.codes()}"
                    # Its only agent's link is cut: nothing may wait for it but what it has already.
                    later = {book.outcomes[number].code for number in numbers[20:]}
                    assert later <= ({"OK", "NO_AGENT_AVAILABLE"} if side == "agent" else {"OK"}), (fault, later)

    @pytest.mark.parametrize("side", ["agent", "caller"])
    async def test_that_breaks_costs_nothing_or_is_told(self, node: NodeProcess, book: Book, side: str) -> None:
        async with asyncio.TaskGroup() as ways:
            for fault in FAULTS:
                ways.create_task(self.broken(node, book, fault, side), name=fault)
