"""Registrations of new links that wait for their turn, by a real clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from agentreach.aio.clock import boot_time
from reach.core.agents import Agent
from reach.core.arrivals import Arrival, Attaching
from reach.core.pace import BURST, PER_S
from reach.node.newcomers import Registering
from reach.node.turnstile import Turnstile

LIMIT_S = 20.0


class Bench:
    """A turnstile, and who has passed it."""

    def __init__(self, register_wait_s: float) -> None:
        self.queue: deque[Registering] = deque()
        self.wakes = 0
        self.passed = asyncio.Event()
        self.turnstile = Turnstile(self.queue.append, self._entered, register_wait_s)

    def _entered(self) -> None:
        assert self.queue, "whoever is woken finds something to do"
        self.wakes += 1
        self.passed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.queue) < count:
                self.passed.clear()
                await self.passed.wait()


@contextlib.asynccontextmanager
async def bench(register_wait_s: float = 10.0) -> AsyncIterator[Bench]:
    made = Bench(register_wait_s)
    duty = asyncio.create_task(made.turnstile.run())
    try:
        yield made
    finally:
        duty.cancel()
        await asyncio.wait([duty])


def registering(name: str, *, welcomes: bool = True, agents: int = 1, tenant: str = "default") -> Registering:
    attaching = [Attaching(f"{name}/{number}", Agent(f"{name}/{number}", tenant=tenant)) for number in range(agents)]
    return Registering.of(Arrival(attaching, with_welcome=welcomes), lambda: None, 0.0, deque(), lambda: True)


async def test_a_crowd_of_links_passes_evenly_in_the_order_of_coming_and_wakes_nobody_for_nothing() -> None:
    async with bench() as at:
        crowd = [registering(f"crowd-{number}") for number in range(BURST + 15)]
        begun = boot_time()
        for each in crowd:
            at.turnstile.come(each)
        assert len(at.queue) == BURST
        await at.until(len(crowd))
        assert boot_time() - begun >= 15 / PER_S - 0.01
        assert list(at.queue) == crowd
        assert at.wakes == len(crowd)


async def test_who_brings_no_agents_or_attaches_to_a_standing_link_does_not_wait_behind_a_crowd() -> None:
    async with bench() as at:
        for number in range(BURST + 50):
            at.turnstile.come(registering(f"crowd-{number}"))
        attach, caller = registering("attach", welcomes=False, agents=100), registering("caller", agents=0)
        at.turnstile.come(attach)
        at.turnstile.come(caller)
        assert list(at.queue)[BURST:] == [attach, caller]


async def test_tenants_take_turns() -> None:
    async with bench() as at:
        for number in range(BURST + 30):
            at.turnstile.come(registering(f"loud-{number}", tenant="loud"))
        quiet = registering("quiet", tenant="quiet")
        at.turnstile.come(quiet)
        async with asyncio.timeout(LIMIT_S):
            while quiet not in at.queue:
                at.passed.clear()
                await at.passed.wait()
        assert list(at.queue).index(quiet) <= BURST + 3


async def test_nobody_waits_until_the_time_of_a_registration_is_over() -> None:
    async with bench(register_wait_s=1.0) as at:
        begun = boot_time()
        for number in range(BURST + 50):
            at.turnstile.come(registering(f"crowd-{number}"))
        await at.until(BURST + 50)
        assert boot_time() - begun < 50 / PER_S


async def test_after_the_crowd_a_single_one_passes_at_once() -> None:
    async with bench(register_wait_s=0.5) as at:
        for number in range(BURST + 5):
            at.turnstile.come(registering(f"crowd-{number}"))
        await at.until(BURST + 5)
        one = registering("one")
        async with asyncio.timeout(LIMIT_S):
            at.turnstile.come(one)
            await at.until(BURST + 6)
        assert at.queue[-1] is one
