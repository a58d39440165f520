"""Whether the store answers: how old what we know may be, and why it cannot be used now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from agentreach.aio.clock import boot_time
from reach.core.store import StoreUnavailable

log = structlog.get_logger("reach.registry")

LOOK_EVERY_S = 3.0  # cluster.md, "Views"
LOOK_AGAIN_S = 0.5  # while it is away


class Contact:
    """Looks at the store every few seconds; says once when it is away, and once when it is back."""

    def __init__(self) -> None:
        self._doubt = asyncio.Event()
        self._heard_at = boot_time()
        self.away = ""
        """Why the store cannot be used now; empty while it answers."""

    @property
    def age_s(self) -> float:
        """Seconds since the store last answered; 0 while it does."""
        return boot_time() - self._heard_at if self.away else 0.0

    def doubted(self) -> None:
        """A call has failed: look at once."""
        self._doubt.set()

    async def keep(self, look: Callable[[], Awaitable[None]]) -> None:
        """Look, until cancelled. A look raises `StoreUnavailable` if the store does not answer."""
        while True:
            asked_at = boot_time()
            try:
                await look()
            except StoreUnavailable as error:
                self._lost(str(error))
            else:
                self._heard(asked_at)
            await self._pause()

    async def _pause(self) -> None:
        if self.away:  # nobody's doubt makes it come back sooner
            await asyncio.sleep(LOOK_AGAIN_S)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._doubt.wait()
        self._doubt.clear()

    def _lost(self, why: str) -> None:
        if not self.away:
            log.warning("the registry is away: known agents are routed on, nothing new is registered", why=why)
        self.away = why

    def _heard(self, asked_at: float) -> None:
        if self.away:
            log.info("the registry is back", away_s=round(self.age_s, 1))
        self._heard_at = asked_at
        self.away = ""
