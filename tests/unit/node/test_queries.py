"""What the node answers about itself is what it would do: explain beside real requests, lists by their filters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.envelope_pb2 import CONSISTENT_HASH, LEAST_ACTIVE, LEAST_LOAD, ROUND_ROBIN, Envelope, Target
from agentreach.v1.registry_pb2 import DRAINING
from reach.core.ports import ANYBODY, Identity, MeshFailure
from reach.node.queries import Queries
from tests.support.core import CoreMesh

STRANGER = Identity(tenant="other", principal="stranger")


@contextmanager
def refused(code: codes.ErrorCode.ValueType) -> Iterator[None]:
    with pytest.raises(MeshFailure) as caught:
        yield
    assert caught.value.error.code == code


def explained(core: CoreMesh, who: Identity = ANYBODY, session_id: str = "", **target: object) -> admin.ExplainReply:
    envelope = Envelope(target=Target(**target), session_id=session_id)  # type: ignore[arg-type]
    return Queries(core.state).explain(envelope, who)


def test_explain_names_the_policy_of_the_message_else_of_the_type_else_least_active() -> None:
    core = CoreMesh(policies={"echo": "LEAST_LOAD"})
    core.agent("echo/1")
    core.agent("other/1")
    assert explained(core, agent_type="echo").policy == LEAST_LOAD
    assert explained(core, agent_type="echo", policy=ROUND_ROBIN).policy == ROUND_ROBIN
    assert explained(core, agent_type="other").policy == LEAST_ACTIVE


def test_the_policy_set_for_a_type_is_the_one_its_requests_are_routed_by() -> None:
    core = CoreMesh(policies={"echo": "ROUND_ROBIN"})
    agents, caller = [core.agent(f"echo/{number}") for number in range(3)], core.caller()
    order: list[str] = []
    for _ in range(12):  # one at a time: all are idle, and LEAST_ACTIVE would draw lots
        message = caller.request()
        agent = next(agent for agent in agents if agent.has(message))
        order.append(agent.name)
        agent.answer(message)
    assert order == order[:3] * 4 and len(set(order)) == 3


def test_a_session_without_an_owner_is_explained_by_the_ring_and_goes_where_explain_said() -> None:
    core = CoreMesh()
    agents = {f"echo/{number}": core.agent(f"echo/{number}", max_concurrency=1) for number in range(5)}
    caller = core.caller()
    for number in range(20):
        session = f"s{number}"
        foretold = explained(core, session_id=session, agent_type="echo")
        assert foretold.policy == CONSISTENT_HASH
        message = caller.request(session_id=session)
        agents[foretold.chosen].answer(message)
        assert explained(core, session_id=session, agent_type="echo").chosen == foretold.chosen


def test_slots_do_not_count_for_the_owner_of_a_new_session() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1", max_concurrency=1), core.caller()
    running = caller.request()
    reply = explained(core, session_id="s", agent_type="echo")
    assert reply.chosen == "echo/1" and not reply.candidates[0].removed_by
    assert explained(core, agent_type="echo").chosen == ""
    agent.answer(running)


async def test_nothing_of_another_tenant_is_shown() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1"), core.caller()
    message = caller.request(session_id="s", trace_id="t1")
    queries = Queries(core.state)
    assert [each.message_id for each in queries.get_trace("t1", ANYBODY).messages] == [message]
    assert not queries.get_trace("t1", STRANGER).messages
    agent.answer(message)
    assert [each.outcome for each in queries.get_trace("t1", ANYBODY).messages] == ["OK"]
    assert not queries.get_trace("t1", STRANGER).messages
    assert not explained(core, STRANGER, agent_type="echo").candidates
    assert not queries.list_sessions(admin.ListSessionsRequest(), STRANGER).sessions
    assert not queries.list_agents(registry.ListAgentsRequest(), STRANGER).agents
    with refused(codes.NO_ROUTE):
        await queries.get_agent(registry.GetAgentRequest(agent_id="echo/1"), STRANGER)


def test_agents_are_listed_page_by_page_without_gap_or_double() -> None:
    core = CoreMesh()
    for number in range(7):
        core.agent(f"echo/{number}")
    queries, token, seen = Queries(core.state), "", []
    for _ in range(4):
        page = queries.list_agents(registry.ListAgentsRequest(page_size=2, page_token=token), ANYBODY)
        seen += [agent.agent_id for agent in page.agents]
        token = page.next_page_token
    assert seen == [f"echo/{number}" for number in range(7)] and not token
    with refused(codes.INVALID_ENVELOPE):
        queries.list_agents(registry.ListAgentsRequest(page_token="not one of ours"), ANYBODY)


def test_sessions_are_listed_by_type_and_by_owner() -> None:
    core = CoreMesh()
    agents, caller = {name: core.agent(name) for name in ("echo/1", "other/1")}, core.caller()
    for name, agent in agents.items():
        agent.answer(caller.request(session_id="s", agent_type=name.partition("/")[0]))
    queries = Queries(core.state)

    def owners(agent_type: str = "", agent_id: str = "") -> list[str]:
        wanted = admin.ListSessionsRequest(agent_type=agent_type, agent_id=agent_id)
        found = queries.list_sessions(wanted, ANYBODY).sessions
        return sorted(session.agent_id for session in found)

    assert owners() == ["echo/1", "other/1"]
    assert owners(agent_type="ECHO") == owners(agent_id="echo/1") == ["echo/1"]


def test_resolve_gives_those_that_can_be_given_work() -> None:
    core = CoreMesh()
    core.agent("echo/1")
    core.agent("echo/2").say(DRAINING)
    reply = Queries(core.state).resolve(registry.ResolveRequest(target=Target(agent_type="echo")), ANYBODY)
    assert [agent.agent_id for agent in reply.agents] == ["echo/1"]
