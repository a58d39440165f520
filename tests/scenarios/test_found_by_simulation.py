"""What the simulator found, played by hand: see tools/sim.py."""

from __future__ import annotations

from agentreach.wire.outbox import Item
from reach.core import health
from tests.support.core import CoreMesh


def test_a_lane_whose_only_message_timed_out_while_its_owner_took_nothing_waits_for_no_slot() -> None:
    core = CoreMesh()
    agent, caller = core.agent("chat/1"), core.caller()
    agent.answer(caller.request("first", agent_type="chat", session_id="s"))
    chat, unacknowledged = core.attachment("chat/1"), Item(b"", 1, core.state.now)
    with core.step() as state:
        health.unacknowledged(state, chat, unacknowledged)
    late = caller.request("waits in vain", agent_type="chat", session_id="s", timeout_ms=2_000)
    assert len(chat.lanes_waiting) == 1
    core.advance(3.0)
    assert "queued" in caller.error_of(late).message
    assert not chat.lanes_waiting
    unacknowledged.accepted = True
    core.advance(10.0)
    core.assert_settled()
    agent.answer(caller.request("goes on", agent_type="chat", session_id="s"))
    core.assert_settled()


def test_an_agent_that_acknowledged_late_and_was_cut_before_that_was_seen_gets_work_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent("echo/1"), core.caller()
    echo, unacknowledged = core.attachment("echo/1"), Item(b"", 1, core.state.now)
    with core.step() as state:
        health.unacknowledged(state, echo, unacknowledged)
    assert echo.agent.saturated
    unacknowledged.accepted = True
    agent.cut()
    core.advance(6.0)
    assert echo.overdue is None
    agent.connect()
    core.advance(1.0)
    message_id = caller.request("hi", agent_type="echo")
    agent.answer(message_id)
    assert caller.text_of(message_id) == "ok"
    core.assert_settled()
