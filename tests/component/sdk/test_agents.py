"""What names the agents of a process."""

from __future__ import annotations

from agent_sdk import Agent
from agent_sdk.testing import InProcessMesh


async def test_two_agents_of_one_type_in_one_process_are_two_agents() -> None:
    async with InProcessMesh() as mesh:
        one, two = Agent("twin"), Agent("twin")
        for agent in (one, two):

            @agent.handler
            async def who(data: object, agent: Agent = agent) -> str:
                return agent.agent_id

        assert one.agent_id != two.agent_id and one.agent_id == one.agent_id
        await mesh.add(one)
        await mesh.add(two)
        found = {(await mesh.request(None, agent_id=agent.agent_id, timeout=5)).data for agent in (one, two)}
        assert found == {one.agent_id, two.agent_id}
