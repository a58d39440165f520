"""Settings that operators give to agents, as a user's agent sees them: `agent.config` and `@agent.on_config`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from agent_sdk import Agent
from agent_sdk.host import Host
from agent_sdk.testing import InProcessMesh
from agentreach.v1.frame_pb2 import ConfigUpdate
from tests.support.agents import eventually

LIMIT_S = 10.0


def configured(heard: asyncio.Queue[dict[str, str]]) -> Agent:
    """An agent that answers with its model, and tells what its handler heard."""
    agent = Agent("extractor")

    @agent.handler
    async def model(data: Any) -> str:
        return agent.config.get("model", "none")

    @agent.on_config
    async def changed(settings: dict[str, str]) -> None:
        heard.put_nowait(settings)

    return agent


async def test_an_agent_follows_what_is_set_for_all_and_for_its_type() -> None:
    heard: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    async with InProcessMesh() as mesh, asyncio.timeout(LIMIT_S):
        agent = await mesh.add(configured(heard))
        assert (await mesh.request({}, agent_type="extractor", timeout=5)).data == "none"
        await mesh.set_config({"model": "large", "depth": "3"})
        assert await heard.get() == {"model": "large", "depth": "3"}
        await mesh.set_config({"model": "small"}, agent_type="extractor")
        assert await heard.get() == {"model": "small", "depth": "3"}
        assert (await mesh.request({}, agent_type="extractor", timeout=5)).data == "small"
        await mesh.set_config({"model": "other"}, agent_type="other")
        await mesh.set_config({}, agent_type="extractor")
        assert await heard.get() == {"model": "large", "depth": "3"}
        assert heard.empty()
        with pytest.raises(TypeError):
            agent.config["model"] = "mine"  # type: ignore[index]


async def test_what_is_set_is_known_when_the_agent_comes_and_after_a_cut() -> None:
    heard: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    async with InProcessMesh() as mesh, asyncio.timeout(LIMIT_S):
        await mesh.set_config({"model": "large"})
        agent = await mesh.add(configured(heard))
        assert await heard.get() == {"model": "large"}
        mesh.cut(agent)
        await mesh.set_config({"model": "huge"})  # while nobody can tell it
        await mesh.back()
        assert await heard.get() == {"model": "huge"}
        assert heard.empty()


async def test_a_handler_at_work_is_told_the_newest_next_and_is_cancelled_when_the_agent_leaves() -> None:
    async with InProcessMesh() as mesh, asyncio.timeout(LIMIT_S):
        agent, heard = Agent("slow"), []
        goes_on, cancelled = asyncio.Event(), asyncio.Event()

        @agent.on_config
        async def changed(settings: dict[str, str]) -> None:
            heard.append(settings["n"])
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        @agent.handler
        async def count(data: Any) -> list[str]:
            return heard

        await mesh.add(agent)
        await mesh.set_config({"n": "1"})
        while not heard:
            await mesh.request({}, agent_type="slow", timeout=5)
        await mesh.set_config({"n": "2"})
        await mesh.set_config({"n": "3"})
        while agent.config["n"] != "3":
            await mesh.request({}, agent_type="slow", timeout=5)
        goes_on.set()
        while len(heard) < 2:
            await mesh.request({}, agent_type="slow", timeout=5)
        goes_on.clear()
        assert heard == ["1", "3"]
        await mesh.set_config({"n": "4"})
        while len(heard) < 3:
            await mesh.request({}, agent_type="slow", timeout=5)
        await mesh.remove(agent)
        await cancelled.wait()


def test_on_config_wants_the_function_itself() -> None:
    with pytest.raises(TypeError, match="without brackets"):
        Agent("extractor").on_config(None)  # type: ignore[type-var]


async def test_settings_of_a_smaller_version_than_before_are_taken_over_once_each() -> None:
    heard: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    async with InProcessMesh() as mesh, asyncio.timeout(LIMIT_S):
        agent = await mesh.add(configured(heard))
        host = agent._host
        assert host is not None and host.configured is not None
        for version, again in ((90, 90), (5, 5), (6, 6)):
            for number in (version, again):
                host.configured(ConfigUpdate(config_version=number, settings={"n": str(version)}))
            assert await heard.get() == {"n": str(version)}
            await eventually(partial(_reports, host, version), f"version {version} is reported")
            host.configured(ConfigUpdate(config_version=version, settings={"n": str(version)}))
        assert heard.empty() and agent.config["n"] == "6"


async def _reports(host: Host, version: int) -> bool:
    return host.record.config_version == version
