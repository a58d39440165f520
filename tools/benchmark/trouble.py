"""The workers of the rows with faults: agents that can fail and be killed or frozen, and callers at a steady rate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

TIMEOUT_S = 10.0
_NUMBER_BYTES = 32  # of a payload: whose request it is, and which


class Fleet:
    """The agents of one process, which echo or fail every request, and how often each request reached them.

    They take the lists of addresses in turn. They share a link for each list, or so many `links`, or have their own.
    """

    def __init__(self, settings: dict[str, Any], stack: AsyncExitStack) -> None:
        self._urls: list[str] = settings.get("urls") or [settings["url"]]
        self._own_link: bool = settings.get("own_link", False)
        self._fails: bool = settings.get("fails", False)
        self._pause_s: float = settings.get("pause_s", 0.0)
        self._transports = self._make_transports(settings.get("links", 0))
        self._stack = stack
        self.runs: Counter[bytes] = Counter()

    def _make_transports(self, count: int) -> list[Any]:
        """Agents of one transport share a link."""
        if not count:
            return [None]
        from agent_sdk.connection import import_grpc

        import_grpc()
        from agentreach.aio.grpc_transport import GrpcTransport

        return [GrpcTransport() for _ in range(count)]

    async def attach(self, names: Sequence[str]) -> dict[str, Any]:
        """Attach agents of these names, all at once: when that began, and when each could be used."""
        begun, attached = time.monotonic(), []

        async def one(place: int, name: str) -> None:
            agent = self._agent(place, name)
            self._stack.push_async_callback(agent.drain)
            await agent.start()
            attached.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for place, name in enumerate(names):
                group.create_task(one(place, name))
        return {"begun": begun, "attached": attached}

    def _agent(self, place: int, name: str) -> Any:
        from agent_sdk import Agent, AgentError

        url = self._urls[place % len(self._urls)]
        transport = self._transports[place % len(self._transports)]
        agent = Agent(name, url=url, own_link=self._own_link, transport=transport)

        async def handle(data: bytes) -> bytes:
            self.runs[data[:_NUMBER_BYTES]] += 1
            if self._fails:
                raise AgentError("fails on purpose", retryable=True)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            return data

        agent.handler(handle)
        return agent

    def count(self) -> dict[str, Any]:
        """How often requests ran here, in all and each."""
        return {"count": self.runs.total(), "runs": {data.decode(): runs for data, runs in self.runs.items()}}


async def steady(mesh: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Requests at a fixed rate, whatever becomes of the earlier ones: when each was due, answered, how it ended, which
    of the targets it was for.

    Latency counts from when a request was due, so that a caller that is held up does not hide it.
    """
    targets: list[dict[str, Any]] = command["targets"]
    options = {"timeout": command.get("timeout", TIMEOUT_S), "idempotent": command.get("idempotent", True)}
    pause_s = 1.0 / command["rate"]
    whose = command.get("whose", "")
    found: list[tuple[float, float, str, int]] = []

    async def one(due: float, number: int) -> None:
        from agent_sdk import ReachError

        outcome, target = "OK", number % len(targets)
        payload = f"{whose} {number}".encode().ljust(256, b"x")
        try:
            await mesh.request(payload, **targets[target], **options)
        except ReachError as error:
            outcome = str(error.code)
        found.append((due, time.monotonic(), outcome, target))

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(command["seconds"] * command["rate"])):
            due = begun + number * pause_s
            await asyncio.sleep(due - time.monotonic())
            group.create_task(one(due, number))
    return {"begun": begun, "requests": found}
