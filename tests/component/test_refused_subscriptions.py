"""A node that takes no more subscriptions says so to who subscribes: nobody waits for what never comes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agent_sdk import Agent, Overloaded, connect
from tests.support.agents import eventually
from tests.support.node import config, running


async def test_entering_a_subscription_that_the_node_does_not_take_raises() -> None:
    async with (
        running(config(topics_max=1000)) as node,
        connect(node.grpc_address, own_link=True) as mesh,
        connect(node.grpc_address, own_link=True) as other,
    ):
        topics = node.engine._state.topics
        async with mesh.subscribe("first") as events:
            topics.count += 1000  # as if others had taken them all
            with pytest.raises(Overloaded, match="too many topics") as caught:
                async with other.subscribe("second"):
                    pass
            assert caught.value.retryable
            assert (await other.publish("first", "x")).accepted == 1  # the link goes on
            assert (await anext(events)).data == "x"
            topics.count -= 1000
            async with other.subscribe("second") as again:
                await mesh.publish("second", "y")
                assert (await anext(again)).data == "y"


async def test_a_link_that_has_its_number_of_topics_gets_no_more() -> None:
    async with running(config()) as node, connect(node.grpc_address, own_link=True) as mesh:
        for number in range(1000):
            mesh._link().topics.add(("", "production", f"topic/{number}"), lambda envelope: None)
        with pytest.raises(Overloaded):
            async with mesh.subscribe("one/more"):
                pass


async def test_the_topic_of_an_event_handler_is_asked_for_again_until_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_sdk.topics._DECLARE_AGAIN_S", 0.05)
    monkeypatch.setattr("reach.core.events.SUBSCRIBE_RETRY_AFTER_MS", 50)
    caplog.set_level(logging.ERROR, "agent_sdk")
    heard = asyncio.Event()
    async with running(config(topics_max=1000)) as node, connect(node.grpc_address, own_link=True) as mesh:
        topics = node.engine._state.topics
        topics.count += 1000
        agent = Agent("listener", url=node.grpc_address, own_link=True, drain_timeout=1)

        @agent.on_event("news")
        async def take(data: object) -> None:
            heard.set()

        async with agent:
            assert (await mesh.publish("news", 1)).matched == 0
            assert "no events of 'news' come to listener/" in caplog.text
            topics.count -= 1000

            async def taken() -> bool:
                return (await mesh.publish("news", 1)).matched == 1

            await eventually(taken, "the node has taken it")
            await asyncio.wait_for(heard.wait(), 5)


async def test_an_agents_topics_are_taken_while_its_registration_is_under_way() -> None:
    """The second agent of a link attaches on the running stream: its topics come in the same frame."""
    async with running(config()) as node, connect(node.grpc_address, own_link=True) as mesh:
        first, second = (Agent(name, url=node.grpc_address, drain_timeout=1) for name in ("one", "two"))
        heard = asyncio.Event()

        @second.on_event("news")
        async def take(data: object) -> None:
            heard.set()

        async with first, second:
            assert (await mesh.publish("news", 1)).matched == 1
            await asyncio.wait_for(heard.wait(), 5)
