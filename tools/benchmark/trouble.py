"""The workers of the rows with faults: agents that can fail and be killed or frozen, and callers at a steady rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

TIMEOUT_S = 10.0


class Served:
    """How many requests reached the agents of one process."""

    def __init__(self) -> None:
        self.count = 0


async def agents(url: str, names: Sequence[str], fails: bool, stack: AsyncExitStack) -> Served:
    """Agents of these names on one link, which echo or fail every request."""
    from agent_sdk import Agent, AgentError

    served = Served()
    for name in names:
        agent = Agent(name, url=url)

        async def handle(data: bytes) -> bytes:
            served.count += 1
            if fails:
                raise AgentError("fails on purpose", retryable=True)
            return data

        agent.handler(handle)
        await stack.enter_async_context(agent)
    return served


async def steady(mesh: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Requests at a fixed rate, whatever becomes of the earlier ones: when each was due, answered, and how it ended.

    Latency counts from when a request was due, so that a caller that is held up does not hide it.
    """
    targets: list[dict[str, Any]] = command["targets"]
    options: dict[str, Any] = {"timeout": command.get("timeout", TIMEOUT_S), "idempotent": True}
    pause_s = 1.0 / command["rate"]
    found: list[tuple[float, float, str]] = []

    async def one(due: float, target: dict[str, Any]) -> None:
        from agent_sdk import ReachError

        outcome = "OK"
        try:
            await mesh.request(b"x" * 256, **target, **options)
        except ReachError as error:
            outcome = str(error.code)
        found.append((due, time.monotonic(), outcome))

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(command["seconds"] * command["rate"])):
            due = begun + number * pause_s
            await asyncio.sleep(due - time.monotonic())
            group.create_task(one(due, targets[number % len(targets)]))
    return {"begun": begun, "requests": found}
