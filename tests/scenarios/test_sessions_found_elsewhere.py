"""Messages of sessions that are looked for among nodes, found by killing real ones (tests/e2e/test_nodes_chaos.py)."""

from __future__ import annotations

import pytest

from tests.scenarios.test_once_over_nodes import message_owned_by
from tests.support.cores import Cores


@pytest.mark.parametrize("owner", [0, 1])
def test_a_sessions_message_that_its_owner_has_joins_it_at_the_owners_new_home(owner: int) -> None:
    cores = Cores(3)
    entry, home, first = cores.nodes
    entry.pins = home.pins = first.pins
    agent, caller, talker = first.agent("chat/1"), first.caller(), home.caller("talker")
    name = message_owned_by(cores.nodes[owner], entry)
    session = {"agent_type": "chat", "session_id": "s", "timeout_ms": 9_000}
    caller.request("hi", message_id=name, **session)
    assert agent.has(name)
    cores.kill(first)
    again = home.process("chat-1")
    again.incarnation, again.requests, again.running = agent.incarnation, agent.requests, agent.running
    again.connect(*agent.agents.values())
    cores.advance(0.5)
    talker.request("next", **session)  # its new home knows the session now
    other = entry.caller("other")
    other.request("hi", message_id=name, fresh=False, **session)
    cores.advance(0.5)
    assert [each.message_id for each in again.requests].count(name) == 2
    again.answer(name, "hello")
    assert other.text_of(name) == "hello"
