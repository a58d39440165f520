"""Keeping books while everything breaks: what was asked, what it was told, what really ran, and what is left over.

    async with scenario(node) as book:                      # afterwards nothing is left over in the node, or here
        ... agent_process(node.grpc, "worker/1", "--written", str(book.ledger)) ...
        book.begin(mesh, "worker", count=20, sleep=0.5)
        ...                                                 # the fault
        await book.answered()
    # and each of them ran as often as its outcome said

The ledger is a file to which every handler appends a line before anything else: an external counter of side effects
that outlives processes, and that a frozen one cannot lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sdk import Mesh, ReachError
from agentreach.aio.clock import StallWatch, boot_time
from tests.support.agents import eventually
from tests.support.node import NodeProcess
from tests.support.second_run import Untrue

_LATE = "answered after"
STOOD_MAX_S = 5.0  # so much is forgiven that this process itself did not run
LATE_S = 1.5  # what a loaded machine may add to a deadline that two processes keep
RSS_GROWTH_MAX = 48 << 20  # traces, stored outcomes and buffers of a few thousand messages; a leak would pass it
SETTLED_S = 30.0
GAUGES = ("reach_requests_in_flight", "reach_queue_depth", "reach_queue_oldest_seconds", "reach_outbox_envelopes")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request was told: "OK" or the error's code, and after how long."""

    number: int
    code: str
    may_have_executed: bool
    idempotent: bool
    took_s: float
    timeout_s: float
    told: str
    what: str = "request"
    """Or "stream", or "session", or "named": with an id of its caller's own."""
    stood_s: float = 0.0
    """For how long after its deadline this process did not run: nobody in it could be told anything."""

    def faults(self, runs: int) -> list[str]:
        """What is wrong with it, if its handler ran so often."""
        found = []
        if self.took_s > self.timeout_s + LATE_S + min(self.stood_s, STOOD_MAX_S):
            found.append(f"{_LATE} {self.took_s:.2f} s of {self.timeout_s:g}")
        if runs > 1 and not self.idempotent:
            found.append(f"ran {runs} times")
        if runs == 0 and self.code == "OK":
            found.append("never ran")
        if runs and self.code != "OK" and not self.may_have_executed:
            found.append("ran, though it was told that it did not")
        return [f"{self.number} ({self.code}: {self.told}) {fault}" for fault in found]


def judge(faults: list[str], text: str) -> None:
    """Fail if there are any: `Untrue`, unless somebody was only told late."""
    if any(_LATE not in fault for fault in faults):
        raise Untrue(text)
    assert not faults, text


class Book:
    """The requests of one scenario."""

    def __init__(self, folder: Path) -> None:
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.outcomes: dict[int, Outcome] = {}
        self._next = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._watch: StallWatch | None = None
        self._stalls: list[tuple[float, float]] = []

    def runs(self) -> Counter[int]:
        """How often each request's handler was started, over all processes."""
        return Counter(map(int, self.ledger.read_text().split()))

    def codes(self) -> Counter[str]:
        """How often each outcome was told."""
        return Counter(outcome.code for outcome in self.outcomes.values())

    def begin(self, mesh: Mesh, agent_type: str, count: int = 1, **how: Any) -> range:
        """Ask so often, each beside the others; their numbers."""
        numbers = self.numbers(count)
        if self._watch is None:
            self._watch = StallWatch(asyncio.get_running_loop(), self._stood_still)
        for number in numbers:
            task = asyncio.create_task(self._ask(mesh, number, agent_type, **how), name=f"ask {number}")
            self._asking.add(task)
        return numbers

    def numbers(self, count: int) -> range:
        """Numbers that no other request has."""
        self._next += count
        return range(self._next - count, self._next)

    async def one(self, mesh: Mesh, agent_type: str, **how: Any) -> Outcome:
        """Ask once and wait for what it is told."""
        (number,) = self.begin(mesh, agent_type, **how)
        await asyncio.gather(*(task for task in self._asking if task.get_name() == f"ask {number}"))
        return self.outcomes[number]

    async def _ask(
        self, mesh: Mesh, number: int, agent_type: str, *, timeout: float = 15.0, idempotent: bool = False,
        sleep: float = 0.3, stream: int = 0, **how: Any,
    ) -> None:  # fmt: skip
        began = boot_time()
        code, may, told = "OK", True, ""
        how |= {"agent_type": agent_type, "timeout": timeout}
        try:
            if stream:
                told = await self._stream(mesh, number, stream, sleep, **how)
            else:
                data = {"n": number, "sleep": sleep}
                reply = await mesh.request(data, idempotent=idempotent, **how)
                assert reply.data == number, f"{number} was given the answer {reply.data!r}"
                told = f"[trace {reply.trace_id}]"
        except ReachError as error:
            code, may, told = str(error.code), error.may_have_executed, str(error)
        assert number not in self.outcomes, f"{number} was answered twice"
        took_s, stood_s = boot_time() - began, self.stood_s(began + timeout)
        what = "stream" if stream else "session" if "session" in how else "named" if "message_id" in how else "request"
        self.outcomes[number] = Outcome(number, code, may, idempotent, took_s, timeout, told, what, stood_s)

    async def _stream(self, mesh: Mesh, number: int, count: int, lasting_s: float, **how: Any) -> str:
        data = {"n": number, "stream": count, "pause": lasting_s / count}
        got: list[int] = []
        items = mesh.stream(data, capabilities=["stream"], **how)
        try:
            async with items:
                async for item in items:
                    got.append(item)
        except ReachError as error:
            came = error.details.get("items", "0")
            assert not got or came == str(len(got)), f"{number}: {len(got)} items came, {came} were told: {error}"
            raise
        finally:
            assert got == list(range(len(got))), f"{number}: {got} [trace {items.trace_id}]"
        assert len(got) == count, f"{number} ended after {len(got)} items as if that were all"
        return f"[trace {items.trace_id}]"

    def _stood_still(self, for_s: float) -> None:
        now = boot_time()
        self._stalls.append((now - for_s, now))

    def stood_s(self, since: float) -> float:
        """For how long the event loop of this process has stood still since a time of the boot clock."""
        if self._watch is not None:
            self._watch.look()
        return sum(max(0.0, until - max(began, since)) for began, until in self._stalls)

    async def begun(self, count: int = 1) -> None:
        """Wait until so many runs are written down."""

        async def so_many() -> bool:
            return self.runs().total() >= count

        await eventually(so_many, f"{count} have begun", every_s=0.01)

    async def answered(self) -> None:
        """Wait until everybody has an outcome: the deadlines say how long that can take."""
        asking, self._asking = self._asking, set()
        await asyncio.gather(*asking)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def faults(self) -> list[str]:
        """Everything that was told wrongly, or done twice, or not in time."""
        runs = self.runs()
        return [fault for outcome in self.outcomes.values() for fault in outcome.faults(runs[outcome.number])]


class Left:
    """What a node has when nobody is connected; later it must have that again, and no more."""

    def __init__(self, tasks: Counter[str], rss_bytes: int, open_files: int) -> None:
        self._tasks, self._rss_bytes, self._open_files = tasks, rss_bytes, open_files

    @classmethod
    async def of(cls, node: NodeProcess) -> Left:
        """As it is once the node leads: until then it has a task less."""

        async def leads() -> bool:
            return await node.metric("reach_leader") == 1

        await eventually(leads, "the node leads", SETTLED_S)
        return cls(await node.tasks(), node.rss_bytes(), node.open_files())

    async def nothing_more(self, node: NodeProcess, rss_growth_max: int = RSS_GROWTH_MAX) -> None:
        """Wait until every gauge is 0, and no task and no socket is left over; memory must be flat."""
        found: dict[str, Any] = {}

        async def gone() -> bool:
            found.clear()
            for gauge in (*GAUGES, "reach_agents"):
                if value := await node.metric(gauge):
                    found[gauge] = value
            if more := await node.tasks() - self._tasks:
                found["tasks"] = more
            if (more_files := node.open_files() - self._open_files) > 0:
                found["files"] = more_files
            return not found

        try:
            await eventually(gone, "nothing is left over", limit_s=SETTLED_S, every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"left over: {found}") from error
        growth = node.rss_bytes() - self._rss_bytes
        assert growth < rss_growth_max, f"the node has grown by {growth >> 20} MiB"
        for word in ("Traceback", '"level": "error"', "was never retrieved", "Task was destroyed"):
            assert word not in node.log, node.log[-2_000:]


@contextlib.asynccontextmanager
async def scenario(node: NodeProcess, left: Left) -> AsyncIterator[Book]:
    """One scenario with its book. Everything it starts must be ended inside; afterwards the book is checked."""
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="reach-chaos-") as folder:
        book = Book(Path(folder))
        yield book
        await book.answered()

        async def no_task_here() -> bool:
            left_over = asyncio.all_tasks() - before - {asyncio.current_task()}
            return not left_over

        await left.nothing_more(node)
        await eventually(no_task_here, "no task of ours is left")
        faults = book.faults()
        judge(faults, f"{len(faults)} of {len(book.outcomes)}, of which {book.codes()}: " + "\n".join(faults[:10]))
