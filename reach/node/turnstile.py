"""Where the registrations of new links wait for their turn; `reach.core.pace` says when that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentreach.aio.clock import boot_time
from reach.core.pace import WITHIN_S, Pace
from reach.node.newcomers import Registering

_OF_THE_TIME = 0.8  # that a registration has; the rest is for the registry


class Turnstile:
    """`come` from steps, `run` in a task."""

    def __init__(
        self, enter: Callable[[Registering], None], entered: Callable[[], None], register_wait_s: float
    ) -> None:
        """`enter` takes those whose turn it is, which have `register_wait_s` in all; after each `entered` is called."""
        self._enter, self._entered = enter, entered
        self._pace: Pace[Registering] = Pace(min(WITHIN_S, _OF_THE_TIME * register_wait_s))
        self._some_wait = asyncio.Event()

    def come(self, registering: Registering) -> None:
        """Enter at once, or wait: only those who are to be welcomed with agents that are not written yet do."""
        if not registering.welcomes or not registering.left:
            self._enter(registering)
            self._entered()
            return
        agent = registering.left[0].agent
        self._pace.come(registering, boot_time(), agent.tenant if agent is not None else "")
        self._let_in()

    async def run(self) -> None:
        """Let in those who wait, until cancelled."""
        while True:
            self._some_wait.clear()
            if self._pace:
                await asyncio.sleep(max(0.0, self._pace.next_at() - boot_time()))
                self._let_in()
            else:
                await self._some_wait.wait()

    def _let_in(self) -> None:
        for registering in self._pace.due(boot_time()):
            self._enter(registering)
            self._entered()
        if self._pace:
            self._some_wait.set()
